"""A machine is not equally fast every second; a fitted profile says by how much its engine's steps vary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

PERIOD_S = 1.0


class StepVariation:
    """How many times as long as the cost model says an engine's decode steps take now.

    Drawn anew for every period of a second: about as long as the sequences on which it was measured, so that a
    request's TPOT varies as theirs did.

    Args:
        quantiles: of the measured factors, evenly spaced from the smallest to the largest; at least one.
    """

    def __init__(self, quantiles: Sequence[float], rng: random.Random) -> None:
        self._quantiles, self._rng = quantiles, rng
        self._period = -1
        self._factor = 1.0

    def factor(self, now: float) -> float:
        """Called with times that never go back by more than a step."""
        period = math.floor(now / PERIOD_S)
        if period > self._period:
            self._period, self._factor = period, self._draw()
        return self._factor

    def _draw(self) -> float:
        place = self._rng.random() * (len(self._quantiles) - 1)
        below = int(place)
        above = min(below + 1, len(self._quantiles) - 1)
        return self._quantiles[below] + (place - below) * (self._quantiles[above] - self._quantiles[below])
