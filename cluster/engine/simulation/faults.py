"""Faults of a simulated engine, from its configuration or switched on while it runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cluster.engine.simulation.settings import FaultSettings


@dataclass(slots=True)
class Faults:
    """
    Attributes:
        transfer_failure_share: share of this engine's pulls that fail.
        failing_transfers: this many of the next pulls fail.
        slowdown: multiplies every step's time, from the next step on.
        stalled: no step is begun any more; requests are accepted and wait.
    """

    transfer_failure_share: float = 0.0
    failing_transfers: int = 0
    slowdown: float = 1.0
    stalled: bool = False
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def of(cls, settings: FaultSettings, seed: int) -> Faults:
        return cls(settings.transfer_failure_share, 0, settings.slowdown, _rng=random.Random(seed))

    def transfer_fails(self) -> bool:
        if self.failing_transfers > 0:
            self.failing_transfers -= 1
            return True
        return self.transfer_failure_share > 0 and self._rng.random() < self.transfer_failure_share
