"""Runs in AIConfigurator's interpreter: a grid of its predicted latencies, JSON in and JSON out.

In:  {"model", "system", "backend", "tp", "prefill": [[new, cached], ...], "decode": [[batch, context], ...]}
Out: {"prefill_s": [...], "decode_s": [...]}, null where it has no answer, or {"error": "..."}.
It imports nothing of pdserve, so that it can be run by file name in another environment.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    task = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _sample(task)
    json.dump(answer, sys.stdout)


def _sample(task: dict[str, Any]) -> dict[str, Any]:
    from aiconfigurator_core.sdk.engine import EngineHandle

    try:
        engine = EngineHandle.compile(task["model"], task["system"], task["backend"], tp_size=task["tp"])
    except Exception as e:  # whatever it raises becomes one line for the caller
        return {"error": f"{type(e).__name__}: {e}"}

    def seconds(predict: Callable[..., float], *args: int) -> float | None:
        try:
            return predict(*args) / 1e3
        except Exception:
            return None

    return {
        # Its `isl` counts the cached prefix too, and a decode call answers for the step at `isl` tokens of context.
        "prefill_s": [seconds(engine.predict_prefill_latency, 1, n + c, c) for n, c in task["prefill"]],
        "decode_s": [seconds(engine.predict_decode_latency, b, c, 2) for b, c in task["decode"]],
    }


if __name__ == "__main__":
    main()
