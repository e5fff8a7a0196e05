"""Engines that share one host's cores or memory bandwidth slow each other down. GPUs do not; engines on CPU do."""

from __future__ import annotations

from collections.abc import Callable


class Host:
    """Which of a host's engines compute now.

    A step of an engine beside k computing others takes `1 + slowdown * k` times as long; where others begin or end
    during a step, what is left of it is stretched or shrunk from then on.
    """

    def __init__(self) -> None:
        self._computing: dict[object, tuple[float, Callable[[float], None]]] = {}

    def begin(self, engine: object, slowdown: float, stretch: Callable[[float], None]) -> float:
        """An engine begins a step. Returns by how much longer it takes than alone, as things are.

        Args:
            slowdown: of this step, per other computing engine.
            stretch: multiplies what is left of that step.
        """
        others = len(self._computing)
        self._others_change(others - 1, others)
        self._computing[engine] = (slowdown, stretch)
        return 1.0 + slowdown * others

    def end(self, engine: object) -> None:
        """That engine's step is over, or will never be."""
        if self._computing.pop(engine, None) is not None:
            others = len(self._computing)
            self._others_change(others, others - 1)

    def _others_change(self, before: int, after: int) -> None:
        """Every computing engine had `before` others beside it and has `after`."""
        for slowdown, stretch in list(self._computing.values()):
            stretch((1.0 + slowdown * after) / (1.0 + slowdown * before))
