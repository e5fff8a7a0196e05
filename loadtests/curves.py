"""How many users there are at a time, for Locust's shapes. In an open loop users are units of arrival rate."""

from __future__ import annotations

import math
from collections.abc import Callable

Curve = Callable[[float], float]
"""Share of the run that has passed (0 to 1) -> share of the peak (0 to 1)."""


def diurnal(at: float) -> float:
    """One day from its valley: a tenth of the peak at both ends, the peak in the middle."""
    return 0.55 - 0.45 * math.cos(2 * math.pi * at)


def burst(at: float) -> float:
    """A fifth of the peak, the peak for a sixth of the run, a fifth again."""
    return 1.0 if 1 / 3 <= at < 1 / 2 else 0.2


def ramp(at: float) -> float:
    """Evenly up: where goodput stops following is the capacity."""
    return at


def steps(at: float) -> float:
    """Five equal plateaus up to the peak, each long enough to settle."""
    return min(5, math.floor(at * 5) + 1) / 5


CURVES: dict[str, Curve] = {"diurnal": diurnal, "burst": burst, "ramp": ramp, "steps": steps}


def users_at(curve: str, elapsed_s: float, length_s: float, peak: int) -> int | None:
    """Users now; None when the run is over. At least one while it lasts."""
    if elapsed_s >= length_s:
        return None
    return max(1, round(peak * CURVES[curve](elapsed_s / length_s)))
