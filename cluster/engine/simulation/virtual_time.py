"""An asyncio event loop whose clock jumps to the next timer: simulated engines, dispatcher and limits run as live,
in no time. Only for code that waits on timers and on itself; the network keeps real time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from heapq import heappop
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` stands still while callbacks run and moves to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self._virtual_s = max(self._virtual_s, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, from 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
