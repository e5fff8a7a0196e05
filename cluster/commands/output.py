"""What all subcommands share: one JSON object on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)


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
