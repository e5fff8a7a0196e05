"""What one field of a body may be: small functions that name the problem, or return None.

Types are strict where a lax reading would change the meaning: `true` is not 1, "5" is not 5, 1.5 is no count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import HttpConfig

INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_IDS = 1024
MAX_BAD_WORDS = 128


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The operator's caps and the model's bounds. Token ids are below `vocab_size`, the width of its output."""

    vocab_size: int
    max_n: int
    max_logprobs: int
    max_stop: int
    max_stop_chars: int
    max_prompts: int
    allow_chat_template: bool

    @classmethod
    def from_config(cls, http: HttpConfig, vocab_size: int) -> BodyLimits:
        return cls(
            vocab_size,
            http.max_n,
            http.max_logprobs,
            http.max_stop,
            http.max_stop_chars,
            http.max_prompts,
            http.allow_chat_template,
        )


Check = Callable[[Any, BodyLimits], str | None]


def integer(low: int, high: int | str) -> Check:
    """An integer within bounds; `high` may name a limit."""

    def check(value: Any, limits: BodyLimits) -> str | None:
        top = getattr(limits, high) if isinstance(high, str) else high
        if type(value) is not int:
            return f"is {shown(value)}, not an integer"
        return None if low <= value <= top else f"is {shown(value)}, outside {low} to {top}"

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    def check(value: Any, _: BodyLimits) -> str | None:
        if type(value) not in (int, float):
            return f"is {shown(value)}, not a number"
        return None if low <= value <= high else f"is {shown(value)}, outside {low:g} to {high:g}"

    return check


def boolean(value: Any, _: BodyLimits) -> str | None:
    return None if type(value) is bool else f"is {shown(value)}, not true or false"


def mapping(value: Any, _: BodyLimits) -> str | None:
    return None if isinstance(value, dict) else f"is {shown(value)}, not an object"


def array(value: Any, _: BodyLimits) -> str | None:
    return None if isinstance(value, list) else f"is {shown(value)}, not an array"


def text(max_chars: int, min_chars: int = 0) -> Check:
    def check(value: Any, _: BodyLimits) -> str | None:
        if not isinstance(value, str):
            return f"is {shown(value)}, not a string"
        if min_chars <= len(value) <= max_chars:
            return None
        return f"has {len(value)} characters, outside {min_chars} to {max_chars}"

    return check


def printable(max_chars: int) -> Check:
    """An id that is safe in a header and in a log line."""

    def check(value: Any, _: BodyLimits) -> str | None:
        if not isinstance(value, str):
            return f"is {shown(value)}, not a string"
        if not 1 <= len(value) <= max_chars:
            return f"has {len(value)} characters, outside 1 to {max_chars}"
        return None if value.isascii() and value.isprintable() else "holds characters that are not printable ASCII"

    return check


def stop(value: Any, limits: BodyLimits) -> str | None:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        return f"is {shown(value)}, not a string or an array of strings"
    if len(strings) > limits.max_stop:
        return f"has {len(strings)} strings, more than {limits.max_stop}"
    for index, string in enumerate(strings):
        if not isinstance(string, str):
            return f"[{index}] is {shown(string)}, not a string"
        if not 1 <= len(string) <= limits.max_stop_chars:
            return f"[{index}] has {len(string)} characters, outside 1 to {limits.max_stop_chars}"
    return None


def strings(max_count: int, max_chars: int) -> Check:
    def check(value: Any, _: BodyLimits) -> str | None:
        if not isinstance(value, list):
            return f"is {shown(value)}, not an array of strings"
        if len(value) > max_count:
            return f"has {len(value)} strings, more than {max_count}"
        for index, string in enumerate(value):
            if not isinstance(string, str):
                return f"[{index}] is {shown(string)}, not a string"
            if not 1 <= len(string) <= max_chars:
                return f"[{index}] has {len(string)} characters, outside 1 to {max_chars}"
        return None

    return check


def token_ids(max_count: int | None, min_count: int = 0) -> Check:
    def check(value: Any, limits: BodyLimits) -> str | None:
        if not isinstance(value, list):
            return f"is {shown(value)}, not an array of token ids"
        if max_count is not None and len(value) > max_count:
            return f"has {len(value)} token ids, more than {max_count}"
        if len(value) < min_count:
            return "is empty"
        return outside_vocabulary(value, limits)

    return check


def outside_vocabulary(ids: list[Any], limits: BodyLimits) -> str | None:
    """The first entry that is not the id of a token. Fast for long prompts: two passes in C when all is well."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limits.vocab_size):
        return None
    for index, token in enumerate(ids):
        if type(token) is not int:
            return f"[{index}] is {shown(token)}, not a token id"
        if not 0 <= token < limits.vocab_size:
            return f"[{index}] is {shown(token)}, outside the vocabulary's 0 to {limits.vocab_size - 1}"
    return None


def logit_bias(value: Any, limits: BodyLimits) -> str | None:
    if not isinstance(value, dict):
        return f"is {shown(value)}, not an object"
    if len(value) > MAX_IDS:
        return f"has {len(value)} entries, more than {MAX_IDS}"
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < limits.vocab_size):
            return f"has the key {key[:40]!r}, not a token id from 0 to {limits.vocab_size - 1}"
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            return f"[{key!r}] is {shown(bias)}, not a number from -100 to 100"
    return None


def prompt(value: Any, limits: BodyLimits) -> str | None:
    """A string, token ids, or several of either."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list):
        return f"is {shown(value)}, not a string, an array of strings or an array of token ids"
    if not value:
        return "is empty"
    if isinstance(value[0], str | list):
        if len(value) > limits.max_prompts:
            return f"has {len(value)} prompts, more than {limits.max_prompts}"
        kind = type(value[0])
        for index, one in enumerate(value):
            if type(one) is not kind:
                return f"[{index}] is {shown(one)}, not {'a string' if kind is str else 'an array'} like the first"
            if isinstance(one, list):
                problem = "is empty" if not one else outside_vocabulary(one, limits)
                if problem is not None:
                    return f"[{index}]{'' if problem.startswith('[') else ' '}{problem}"
        return None
    return outside_vocabulary(value, limits)


def messages(value: Any, _: BodyLimits) -> str | None:
    if not isinstance(value, list):
        return f"is {shown(value)}, not an array"
    if not value:
        return "is empty"
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            return f"[{index}] is {shown(message)}, not an object"
        if not isinstance(message.get("role"), str):
            return f"[{index}].role is {shown(message.get('role'))}, not a string"
    return None


def chat_template(value: Any, limits: BodyLimits) -> str | None:
    if limits.allow_chat_template:
        return None if isinstance(value, str) else f"is {shown(value)}, not a string"
    return "is not allowed in requests here; the operator can allow it (router.http.allow_chat_template)"


def chat_template_kwargs(value: Any, limits: BodyLimits) -> str | None:
    if not isinstance(value, dict):
        return f"is {shown(value)}, not an object"
    return ".chat_template " + problem if (problem := _inner_template(value, limits)) else None


def _inner_template(value: dict[str, Any], limits: BodyLimits) -> str | None:
    return chat_template(value["chat_template"], limits) if "chat_template" in value else None


def refused(why: str) -> Check:
    def check(_value: Any, _limits: BodyLimits) -> str | None:
        return why

    return check


def shown(value: Any) -> str:
    """A value in an error message, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) > INT64:
        return "an integer beyond 64 bits"
    written = repr(value)
    return written if len(written) <= 60 else written[:57] + "..."
