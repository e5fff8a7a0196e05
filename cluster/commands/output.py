"""What all subcommands share: one JSON object on stdout, everything else on stderr.

The consoles print text as it is. Names, paths and errors come from users and engines, and what stands in brackets there
is no style; `styled` is how a style gets into a line.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

err = Console(stderr=True, highlight=False, markup=False)
out = Console(highlight=False, markup=False)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line of plain strings and (text, style) pairs."""
    return Text.assemble(*parts)


def command_line(api_key: str | None) -> str:
    """This call as one can type it again, without its key: results are files that people share."""
    words = []
    for word in sys.argv[1:]:
        if api_key and word in (api_key, f"--api-key={api_key}"):
            word = word.replace(api_key, "KEY")
        words.append(word)
    return shlex.join(["pdserve", *words])


def complain(line: str) -> None:
    """One line on stderr: what is wrong and how to fix it."""
    print(f"pdserve: {line}".replace("\n", " "), file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON object on stdout and nothing else. Numbers that JSON cannot hold become null."""
    print(json.dumps(_strict(value), ensure_ascii=False), flush=True)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value
