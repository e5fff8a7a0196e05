"""Whether the generator kept up: how late its own event loop is, apart from anything a server does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

PERIOD_S = 0.01


@dataclass(slots=True)
class LoopLag:
    """Wakes every 10 ms and notes how much later than that it woke."""

    clock: Callable[[], float]
    late_s: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(PERIOD_S)
            self.late_s.append(max(0.0, self.clock() - before - PERIOD_S))
