"""Virtual time: a heap of calls. Ties run in the order in which they were made, so a run is repeatable."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timer:
    """A call to come. `cancel` is free: the entry is skipped when its time comes."""

    __slots__ = ("_args", "_call", "at_s")

    def __init__(self, at_s: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.at_s, self._call, self._args = at_s, call, args

    def cancel(self) -> None:
        self._call, self._args = _nothing, ()


def _nothing() -> None:
    pass


class Kernel:
    """The clock and the only loop of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._made = 0

    def at(self, at_s: float, call: Callable[..., None], *args: Any) -> Timer:
        """Run `call(*args)` at a time that is not past."""
        timer = Timer(max(at_s, self.now), call, args)
        self._made += 1
        heappush(self._heap, (timer.at_s, self._made, timer))
        return timer

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        return self.at(self.now + delay_s, call, *args)

    def run(self, until_s: float = math.inf) -> None:
        """Run what is due up to `until_s`, or everything."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            at_s, _, timer = heappop(heap)
            if timer._call is _nothing:
                continue
            self.now = at_s
            self.events += 1
            timer._call(*timer._args)
        if until_s < math.inf:
            self.now = max(self.now, until_s)
