"""Which fields of which endpoint are checked before vLLM sees the body.

The rule for what is here: a value that could become an index, a size, a count or code; a value whose lax reading
would change its meaning; and a list whose length costs. Everything else is vLLM's to judge. Unknown fields pass.
"""

from __future__ import annotations

from typing import Any

from router.gateway.asgi import HttpError
from router.gateway.fields import (
    INT32,
    INT64,
    MAX_BAD_WORDS,
    MAX_IDS,
    BodyLimits,
    Check,
    array,
    boolean,
    chat_template,
    chat_template_kwargs,
    integer,
    logit_bias,
    mapping,
    messages,
    number,
    printable,
    prompt,
    refused,
    shown,
    stop,
    strings,
    text,
    token_ids,
)

SALT_CHARS = 512
# The transfer between the pools is the router's own business; what a client sends of it is dropped.
DROPPED = ("kv_transfer_params", "ec_transfer_params")
# vLLM's layer reads these headers too: a priority that no check of the body has seen, and a choice that is placement's.
DROPPED_HEADERS = frozenset({b"x-vllm-priority", b"x-data-parallel-rank"})

_COMMON: dict[str, Check] = {
    "model": text(256, 1),
    "user": text(256),
    "request_id": printable(128),
    "session_id": printable(128),
    "cache_salt": text(SALT_CHARS, 1),
    "priority": integer(-INT64 - 1, INT64),
    "stream": boolean,
    "chat_template": chat_template,
    "chat_template_kwargs": chat_template_kwargs,
    "prompt_embeds": refused("is not accepted: prompts are text or token ids"),
    "vllm_xargs": mapping,
    "add_special_tokens": boolean,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "truncate_prompt_tokens": integer(-1, INT64),
}

_SAMPLING: dict[str, Check] = {
    "stream_options": mapping,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(-1, INT32),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0),
    "length_penalty": number(),
    "seed": integer(-INT64 - 1, INT64),
    "n": integer(1, "max_n"),
    "best_of": integer(1, "max_n"),
    "max_tokens": integer(1, INT32),
    "min_tokens": integer(0, INT32),
    "prompt_logprobs": integer(0, "max_logprobs"),
    "stop": stop,
    "stop_token_ids": token_ids(MAX_IDS),
    "allowed_token_ids": token_ids(None, 1),
    "logprob_token_ids": token_ids(MAX_IDS),
    "bad_words": strings(MAX_BAD_WORDS, 256),
    "logit_bias": logit_bias,
    "ignore_eos": boolean,
    "echo": boolean,
    "use_beam_search": boolean,
    "skip_special_tokens": boolean,
    "spaces_between_special_tokens": boolean,
    "include_stop_str_in_output": boolean,
    "return_token_ids": boolean,
    "return_tokens_as_token_ids": boolean,
    "response_format": mapping,
    "structured_outputs": mapping,
}

_CHAT: dict[str, Check] = {
    "messages": messages,
    "logprobs": boolean,
    "top_logprobs": integer(0, "max_logprobs"),
    "max_completion_tokens": integer(1, INT32),
    "tools": array,
    "parallel_tool_calls": boolean,
}

FIELDS: dict[str, dict[str, Check]] = {
    "/v1/chat/completions": _COMMON | _SAMPLING | _CHAT,
    "/v1/completions": _COMMON
    | _SAMPLING
    | {
        "prompt": prompt,
        "logprobs": integer(0, "max_logprobs"),
        "max_tokens": integer(0, INT32),
        "suffix": text(INT32),
    },
    "/v1/responses": _COMMON
    | _SAMPLING
    | {
        "top_logprobs": integer(0, "max_logprobs"),
        "max_output_tokens": integer(1, INT32),
        "max_tool_calls": integer(1, INT32),
        "tools": array,
        "background": boolean,
        "store": boolean,
    },
    "/v1/messages": _COMMON
    | {
        "messages": messages,
        "max_tokens": integer(1, INT32),
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "top_k": integer(-1, INT32),
        "stop_sequences": stop,
        "tools": array,
    },
    "/v1/messages/count_tokens": _COMMON | {"messages": messages, "tools": array},
    "/tokenize": _COMMON | {"messages": messages, "tools": array, "prompt": text(INT32)},
    "/detokenize": _COMMON | {"tokens": token_ids(None)},
}

REQUIRED: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages",),
    "/detokenize": ("tokens",),
}


def check_body(path: str, body: dict[str, Any], limits: BodyLimits) -> None:
    """Check the fields of one endpoint's body; null means absent, as in OpenAI's API.

    Raises:
        HttpError: 400 that names the field, its value and its bound.
    """
    for name in REQUIRED.get(path, ()):
        if body.get(name) is None:
            raise HttpError(400, f"{name} is {'null' if name in body else 'missing'}", param=name)
    checks = FIELDS.get(path, _COMMON)
    for name, value in body.items():
        check = checks.get(name)
        # An explicit null salt is no salt that was left out: a client that sends one meant to be separate.
        if check is None or (value is None and name != "cache_salt"):
            continue
        problem = check(value, limits)
        if problem is not None:
            raise HttpError(400, f"{name}{'' if problem[0] in '[.' else ' '}{problem}", param=name)
    _check_together(path, body, limits)


def _check_together(path: str, body: dict[str, Any], limits: BodyLimits) -> None:
    """What two fields say of each other; each was checked alone where its endpoint has it."""
    for name in DROPPED:
        if name in (body.get("vllm_xargs") or {}):
            raise HttpError(400, f"vllm_xargs.{name} is not accepted", param="vllm_xargs")
    if path == "/v1/completions":
        _check_completion(body, limits)
        most = body.get("max_tokens")
    elif path == "/v1/chat/completions":
        most = body.get("max_completion_tokens") or body.get("max_tokens")
    else:
        return
    seed, n = body.get("seed"), body.get("n") or 1
    if seed is not None and seed > INT64 - n + 1:
        # Every choice has a seed of its own, one above the last.
        raise HttpError(400, f"seed is {shown(seed)}: with n = {n} at most {INT64 - n + 1}", param="seed")
    least = body.get("min_tokens")
    if least is not None and most is not None and least > most:
        raise HttpError(400, f"min_tokens is {shown(least)}, above max_tokens {shown(most)}", param="min_tokens")
    if body.get("stream_options") is not None and body.get("stream") is not True:
        raise HttpError(400, "stream_options needs stream: true", param="stream_options")


def clamp_priority(body: dict[str, Any], least: int) -> bool:
    """Keep a client from stepping before all other tenants: classes of priority are strict. True if it had to."""
    given = body.get("priority")
    if given is None or given >= least:
        return False
    body["priority"] = least
    return True


def check_integers(body: dict[str, Any]) -> None:
    """Fields that are vLLM's to judge may become numbers of an engine, which has 64 bits for each.

    Raises:
        HttpError: 400 for an integer beyond them, anywhere.
    """
    for name, given in body.items():
        left = [given]
        while left:
            value = left.pop()
            if isinstance(value, int) and abs(value) > INT64 + 1:
                raise HttpError(400, f"{name} holds {shown(value)}, beyond 64 bits", param=name[:100])
            if isinstance(value, dict | list):
                left += value.values() if isinstance(value, dict) else value


def _check_completion(body: dict[str, Any], limits: BodyLimits) -> None:
    if body.get("max_tokens") == 0 and body.get("echo") is not True:
        raise HttpError(400, "max_tokens is 0, which needs echo: true", param="max_tokens")
    given, n = body["prompt"], body.get("n") or 1
    prompts = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    most = max(limits.max_prompts, limits.max_n)
    if prompts * n > most:
        raise HttpError(400, f"n is {n}: {prompts} prompts make {prompts * n} answers, more than {most}", param="n")
