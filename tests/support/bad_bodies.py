"""Requests that are a client's mistake, for the gateway's unit test and for the test against the real server.

Kinds (of faults this field has had): one out-of-range number kills the engine; empty prompt; malformed bodies give
500; context-limit arithmetic; the prefill leg contradicts itself; caller-chosen request id; tenant isolation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
VOCAB = 2048


@dataclass(frozen=True)
class Bad:
    """One request.

    Attributes:
        status: what the answer must be; 0 = any 4xx.
        param: the field that the error names, where one is to blame.
        by: who must notice: the gateway, or vLLM's layer behind it.
    """

    name: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    by: str = "gateway"
    method: str = "POST"

    def __str__(self) -> str:
        return self.name


TABLE: list[Bad] = []


def raw(name: str, body: bytes, status: int = 400, param: str | None = None, path: str = CHAT, **more: Any) -> None:
    headers = {"content-type": "application/json"} | more.pop("headers", {})
    headers = {key: value for key, value in headers.items() if value is not None}
    TABLE.append(Bad(name, path, body, status, param, headers, **more))


def chat(name: str, param: str | None, /, _status: int = 400, _by: str = "gateway", **fields: Any) -> None:
    body = {"model": "MODEL", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields
    raw(f"chat: {name}", json.dumps(body).encode(), _status, param, CHAT, by=_by)


def completion(name: str, param: str | None, /, _status: int = 400, _by: str = "gateway", **fields: Any) -> None:
    body = {"model": "MODEL", "prompt": "hi", "max_tokens": 4} | fields
    raw(f"completion: {name}", json.dumps(body).encode(), _status, param, COMPLETION, by=_by)


def responses(name: str, param: str | None, /, _status: int = 400, _by: str = "gateway", **fields: Any) -> None:
    body = {"model": "MODEL", "input": "hi", "max_output_tokens": 16} | fields
    raw(f"responses: {name}", json.dumps(body).encode(), _status, param, RESPONSES, by=_by)


# Not JSON, or not an object
for name, body in {
    "empty": b"",
    "spaces": b"  \n ",
    "array": b"[]",
    "null": b"null",
    "number": b"123",
    "float": b"1.5",
    "string": b'"x"',
    "true": b"true",
    "open brace": b"{",
    "trailing comma": b'{"model": "m",}',
    "single quotes": b"{'model': 'm'}",
    "comment": b'{"model": "m" /* x */}',
    "two objects": b"{}{}",
    "garbage behind": b"{} x",
    "NaN": b'{"model": "m", "temperature": NaN}',
    "Infinity": b'{"model": "m", "temperature": Infinity}',
    "-Infinity": b'{"model": "m", "temperature": -Infinity}',
    "1e999": b'{"model": "m", "temperature": 1e999}',
    "5,000 digits": b'{"model": "m", "seed": ' + b"9" * 5000 + b"}",
    "leading zero": b'{"model": "m", "n": 01}',
    "hex": b'{"model": "m", "n": 0x1}',
    "invalid UTF-8": b'{"model": "m\xff"}',
    "cut UTF-8": b'{"model": "m\xf0\x9f\xab',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"model": "m"}',
    "control character": b'{"model": "m\x01"}',
    "lone surrogate": b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "lone low surrogate": b'{"model": "m", "messages": [{"role": "user", "content": "x\\udc00y"}]}',
    "lone surrogate in a key": b'{"model": "m", "\\ud800": 1}',
    "unknown escape": b'{"model": "\\x41"}',
    "70 levels": b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
    "100,000 levels": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "100,000 open objects": b'{"a":' * 100_000,
    "form data": b"model=m&prompt=hi",
}.items():
    raw(f"body: {name}", body)
raw("body: a key twice", b'{"model": "m", "n": 1, "n": 2}', 400, "n")
raw("body: a key twice, deep", b'{"model": "m", "messages": [{"role": "user", "role": "system"}]}', 400, "role")

# Headers
GOOD = json.dumps({"model": "MODEL", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
raw("header: no content type", GOOD, 415, "content-type", headers={"content-type": None})
for kind in (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/jsonx",
    "",
):
    raw(f"header: content type {kind!r}", GOOD, 415, "content-type", headers={"content-type": kind})
raw("header: gzip", GOOD, 415, "content-encoding", headers={"content-encoding": "gzip"})
raw("header: 40 KB", GOOD, 431, headers={"x-filler": "x" * 40_000})
raw("header: 150 of them", GOOD, 431, headers={f"x-h{i}": "1" for i in range(150)})
raw("header: request id of 5,000 characters", GOOD, 400, "x-request-id", headers={"x-request-id": "r" * 5000})
raw("header: request id with a tab", GOOD, 400, "x-request-id", headers={"x-request-id": "a\tb"})
for value in ("0", "-5", "abc", "inf", "nan", "1e99", "1_000", "5 ms"):
    raw(f"header: ttft slo {value}", GOOD, 400, "x-slo-ttft-ms", headers={"x-slo-ttft-ms": value})
raw("header: tpot slo 0", GOOD, 400, "x-slo-tpot-ms", headers={"x-slo-tpot-ms": "0"})

# Paths and methods that are not there
for path in (
    "/v1/chat/completions/",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/v1/load_lora_adapter",
    "/scale_elastic_ep",
    "/collective_rpc",
    "/sleep",
    "/reset_prefix_cache",
    "/start_profile",
    "/invocations",
    "/docs",
    "/v1/../sleep",
):
    raw(f"path: {path}", b"{}", 404, path=path)
for method in ("GET", "PUT", "DELETE", "PATCH"):
    raw(f"method: {method}", GOOD if method in ("PUT", "PATCH") else b"", 405, method=method)

# Token ids
for name, ids in {
    "2,000,000,000": [2_000_000_000],
    "-1": [-1],
    "the vocabulary's size": [VOCAB],
    "beyond 64 bits": [2**70],
    "a float": [1.5],
    "a string": ["5"],
    "true": [True],
    "null": [None],
    "a list": [[1]],
    "not a list": 5,
    "2,000 of them": list(range(2000)),
}.items():
    completion(f"stop_token_ids {name}", "stop_token_ids", min_tokens=4, stop_token_ids=ids)
for name, bias in {
    "2,000,000,000": {"2000000000": 5},
    "-1": {"-1": 5},
    "the vocabulary's size": {str(VOCAB): 1},
    "abc": {"abc": 1},
    "1.5": {"1.5": 1},
    "a superscript": {"²": 1},
    "empty key": {"": 1},
    "value 101": {"5": 101},
    "value text": {"5": "1"},
    "value null": {"5": None},
    "a list": [5],
}.items():
    chat(f"logit_bias {name}", "logit_bias", logit_bias=bias)
chat("allowed_token_ids beyond", "allowed_token_ids", allowed_token_ids=[VOCAB])
chat("allowed_token_ids empty", "allowed_token_ids", allowed_token_ids=[])
chat("logprob_token_ids beyond", "logprob_token_ids", logprobs=True, logprob_token_ids=[VOCAB])

# Prompts
for name, prompt in {
    "[]": [],
    "[[]]": [[]],
    "[-1]": [-1],
    "[0, 2000000000]": [0, 2_000_000_000],
    "[[0], [2048]]": [[0], [VOCAB]],
    "[1.5]": [1.5],
    "[true]": [True],
    "[null]": [None],
    "mixed kinds": ["a", [1]],
    "mixed kinds, ids first": [1, "a"],
    "a number": 5,
    "an object": {"text": "hi"},
    "null": None,
    "129 prompts": ["a"] * 129,
    "three levels": [[[1]]],
}.items():
    completion(f"prompt {name}", "prompt", prompt=prompt)
completion("prompt empty", None, _status=0, _by="vllm", prompt="")
completion("prompt a and empty", None, _status=0, _by="vllm", prompt=["a", ""])
completion("100 prompts, n = 2", "n", prompt=["a"] * 100, n=2, temperature=1.0)
raw("completion: prompt missing", b'{"model": "MODEL"}', 400, "prompt", COMPLETION)
raw("chat: messages missing", b'{"model": "MODEL"}', 400, "messages")
raw("responses: input missing", b'{"model": "MODEL"}', 400, "input", RESPONSES)
for name, messages in {
    "a string": "hi",
    "empty": [],
    "null": None,
    "an object": {"role": "user", "content": "hi"},
    "list of strings": ["hi"],
    "list of null": [None],
    "no role": [{"content": "hi"}],
    "role a number": [{"role": 5, "content": "hi"}],
}.items():
    chat(f"messages {name}", "messages", messages=messages)
for name, messages in {
    "role unknown": [{"role": "nobody-at-all", "content": [{"type": "no-such-part"}]}],
    "content a number": [{"role": "user", "content": 5}],
    "part without type": [{"role": "user", "content": [{"text": "hi"}]}],
    "image for a text model": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x:/y"}}]}],
}.items():
    chat(f"messages {name}", None, _status=0, _by="vllm", messages=messages)

# Counts and lengths
for name, value in {"0": 0, "-1": -1, "1e12": 10**12, "1.5": 1.5, "text": "5", "true": True, "2**80": 2**80}.items():
    chat(f"max_tokens {name}", "max_tokens", max_tokens=value)
    chat(f"max_completion_tokens {name}", "max_completion_tokens", max_completion_tokens=value)
completion("max_tokens 0 without echo", "max_tokens", max_tokens=0)
completion("max_tokens beyond the context", None, _by="vllm", max_tokens=5000)
completion("prompt beyond the context", None, _by="vllm", prompt=[5] * 3000)
for name, value in {"0": 0, "33": 33, "-1": -1, "1.5": 1.5, "text": "2", "true": True, "a list": [2]}.items():
    chat(f"n {name}", "n", n=value, temperature=1.0)
completion("best_of 1000", "best_of", best_of=1000)
chat("top_logprobs 21", "top_logprobs", logprobs=True, top_logprobs=21)
chat("top_logprobs -1", "top_logprobs", logprobs=True, top_logprobs=-1)
chat("logprobs a number", "logprobs", logprobs=5)
chat("top_logprobs without logprobs", None, _status=0, _by="vllm", top_logprobs=3)
completion("logprobs 21", "logprobs", logprobs=21)
completion("logprobs -1", "logprobs", logprobs=-1)
completion("logprobs true", "logprobs", logprobs=True)
completion("prompt_logprobs 1000", "prompt_logprobs", prompt_logprobs=1000)
for name, stop in {
    "17 strings": ["x"] * 17,
    "257 characters": "x" * 257,
    "257 characters in a list": ["x" * 257],
    "empty": "",
    "empty in a list": [""],
    "a number": 5,
    "a number in a list": ["a", 5],
    "null in a list": [None],
    "an object": {"a": 1},
}.items():
    chat(f"stop {name}", "stop", stop=stop)
chat("bad_words empty string", "bad_words", bad_words=[""])
chat("bad_words 200 of them", "bad_words", bad_words=["x"] * 200)
chat("min_tokens -1", "min_tokens", min_tokens=-1)
chat("min_tokens above max_tokens", "min_tokens", max_tokens=5, min_tokens=6)
chat("min_tokens above max_completion_tokens", "min_tokens", max_completion_tokens=5, max_tokens=None, min_tokens=6)

# Sampling
for name, value in {"-1": -1, "2.1": 2.1, "text": "hot", "true": True, "a list": [1]}.items():
    chat(f"temperature {name}", "temperature", temperature=value)
for name, value in {"-0.1": -0.1, "1.1": 1.1, "text": "1"}.items():
    chat(f"top_p {name}", "top_p", top_p=value)
chat("top_p 0", None, _status=0, _by="vllm", top_p=0)
chat("top_k -2", "top_k", top_k=-2)
chat("top_k 1.5", "top_k", top_k=1.5)
chat("min_p 2", "min_p", min_p=2)
chat("presence_penalty 3", "presence_penalty", presence_penalty=3)
chat("frequency_penalty -3", "frequency_penalty", frequency_penalty=-3)
chat("repetition_penalty -1", "repetition_penalty", repetition_penalty=-1)
chat("repetition_penalty 0", None, _status=0, _by="vllm", repetition_penalty=0)
chat("seed 2**64", "seed", seed=2**64)
chat("seed 1.5", "seed", seed=1.5)
chat("seed text", "seed", seed="7")

# Streams, formats, tools
for name, value in {"yes": "yes", "1": 1, "a list": []}.items():
    chat(f"stream {name}", "stream", stream=value)
chat("stream_options without stream", "stream_options", stream_options={"include_usage": True})
chat("stream_options a list", "stream_options", stream=True, stream_options=[])
chat("response_format a string", "response_format", response_format="json")
chat("response_format unknown", None, _status=0, _by="vllm", response_format={"type": "xml"})
chat("response_format misnested", None, _status=0, _by="vllm", response_format={"type": "json_schema", "schema": {}})
chat(
    "response_format with an impossible schema",
    None,
    _status=0,
    _by="vllm",
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no-such-type"}}},
)
chat("structured_outputs bad regex", None, _status=0, _by="vllm", structured_outputs={"regex": "(["})
chat("structured_outputs two kinds", None, _status=0, _by="vllm", structured_outputs={"regex": "a", "choice": ["a"]})
chat("tools an object", "tools", tools={})
chat("tools of nothing", None, _status=0, _by="vllm", tools=[{}])
chat("tool_choice unknown", None, _status=0, _by="vllm", tool_choice={"type": "function", "function": {"name": "f"}})

# Not for clients
chat("chat_template", "chat_template", chat_template="{{ 7 * 7 }}")
chat("chat_template within kwargs", "chat_template_kwargs", chat_template_kwargs={"chat_template": "{{ 7 }}"})
chat("chat_template_kwargs a list", "chat_template_kwargs", chat_template_kwargs=[])
completion("prompt_embeds", "prompt_embeds", prompt_embeds="gASVAAAA")
completion("transfer parameters by the back door", "vllm_xargs", vllm_xargs={"kv_transfer_params": "x"})
for name, value in {"empty": "", "null": None, "a number": 5, "a list": ["a"], "600 characters": "s" * 600}.items():
    chat(f"cache_salt {name}", "cache_salt", cache_salt=value)
    completion(f"cache_salt {name}", "cache_salt", cache_salt=value)
for name, value in {
    "empty": "",
    "newline": "a\nb",
    "null byte": "a\x00b",
    "1 MB": "r" * 1_000_000,
    "number": 5,
}.items():
    chat(f"request_id {name}", "request_id", request_id=value)
chat("model a number", "model", model=5)
chat("model empty", "model", model="")
chat("model unknown", None, _status=404, _by="vllm", model="no-such-model")
chat("priority 2**70", "priority", priority=2**70)
chat("stream_interval 10**30", "stream_interval", stream_interval=10**30)
chat("a nested 2**70", "repetition_detection", repetition_detection={"max_pattern_size": 2**70, "min_count": 3})
chat("the second choice's seed beyond 64 bits", "seed", seed=2**63 - 1, n=2)
completion("the second choice's seed beyond 64 bits", "seed", seed=2**63 - 1, n=2)
responses("max_output_tokens 0", "max_output_tokens", max_output_tokens=0)
responses("temperature 3", "temperature", temperature=3)
responses("top_logprobs 50", "top_logprobs", top_logprobs=50)
responses("input null", "input", input=None)
responses("stream yes", "stream", stream="yes")
responses("cache_salt empty", "cache_salt", cache_salt="")
raw("tokenize: prompt a number", b'{"model": "MODEL", "prompt": 5}', 400, "prompt", "/tokenize")
raw(
    "tokenize: chat_template",
    b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "chat_template": "x"}',
    400,
    "chat_template",
    "/tokenize",
)
raw("detokenize: token beyond", b'{"model": "MODEL", "tokens": [2048]}', 400, "tokens", "/detokenize")
raw("detokenize: token -1", b'{"model": "MODEL", "tokens": [-1]}', 400, "tokens", "/detokenize")
raw("detokenize: tokens missing", b'{"model": "MODEL"}', 400, "tokens", "/detokenize")
