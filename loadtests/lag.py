"""Whether the generator kept up: how late its own event loop is, apart from anything a server does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

PERIOD_S = 0.01


def missed(late_s: float, period_s: float) -> Iterator[float]:
    """Seconds late of a timer, and of every timer that would have fired every `period_s` while the loop stood still.

    One sample for a stall of any length would make long stalls look rare: the fault that open loops are there to avoid.
    """
    yield max(0.0, late_s)
    while (late_s := late_s - period_s) > 0:
        yield late_s


@dataclass(slots=True)
class LoopLag:
    """Wakes every 10 ms and notes how much later than that it woke."""

    clock: Callable[[], float]
    late_s: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(PERIOD_S)
            self.late_s.extend(missed(self.clock() - before - PERIOD_S, PERIOD_S))
