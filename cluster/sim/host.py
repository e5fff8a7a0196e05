"""Engines that share one host's cores or memory bandwidth slow each other down. GPUs do not; engines on CPU do."""

from __future__ import annotations

from collections.abc import Callable


class Host:
    """Which of a host's engines compute now.

    A step of an engine beside k computing others takes `1 + slowdown * k` times as long; where others begin or end
    during a step, what is left of it is stretched or shrunk from then on.

    Args:
        slowdown: per other computing engine. `pdserve fit --beside` measures it.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._computing: dict[object, Callable[[float], None]] = {}

    def begin(self, engine: object, stretch: Callable[[float], None]) -> float:
        """An engine begins a step. Returns by how much longer it takes than alone, as things are.

        Args:
            stretch: multiplies what is left of that step.
        """
        before = len(self._computing)
        self._stretch_all(before, before + 1)
        self._computing[engine] = stretch
        return 1.0 + self._slowdown * before

    def end(self, engine: object) -> None:
        """That engine's step is over, or will never be."""
        if self._computing.pop(engine, None) is not None:
            before = len(self._computing) + 1
            self._stretch_all(before, before - 1)

    def _stretch_all(self, before: int, after: int) -> None:
        """The computing engines were part of `before` of them and are of `after`."""
        if not self._computing:
            return
        factor = (1.0 + self._slowdown * (after - 1)) / (1.0 + self._slowdown * (before - 1))
        for stretch in list(self._computing.values()):
            stretch(factor)
