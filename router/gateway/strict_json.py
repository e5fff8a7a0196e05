"""JSON as the standard has it, and nothing that two parsers could read differently."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from router.gateway.asgi import HttpError

MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89aAbBcCdDeEfF]")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as an object.

    Raises:
        HttpError: 400 if it is not UTF-8, not JSON (NaN and Infinity are not), not an object, holds a key twice,
            a number or a text that cannot be represented, or nests deeper than MAX_DEPTH.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise HttpError(400, f"the body is not UTF-8: byte {e.start} is {raw[e.start]:#04x}") from None
    if not text.strip():
        raise HttpError(400, "the body is empty; send a JSON object")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as e:
        raise HttpError(400, f"the body is not JSON: {e.msg} at line {e.lineno}, column {e.colno}") from None
    except RecursionError:
        raise HttpError(400, f"the body nests deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise HttpError(400, "the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body is {_name(value)}; send a JSON object")
    _check_depth(value)
    if _SURROGATE.search(raw):
        _check_text(value)
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HttpError(400, f"the key {twice[:100]!r} is given twice", param=twice[:100])
    return found


def _no_constant(name: str) -> NoReturn:
    raise HttpError(400, f"the body is not JSON: {name} is not a number that JSON knows")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise HttpError(400, f"the number {digits[:40]} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise HttpError(400, f"the body nests deeper than {MAX_DEPTH} levels")
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]


def _check_text(value: Any) -> None:
    # Half of a surrogate pair is valid in JSON's grammar and in no text; a tokenizer would fail on it.
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise HttpError(400, "the body holds half of a surrogate pair, which is not text") from None


def _name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return names[type(value)]
