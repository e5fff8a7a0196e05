"""Faults of a simulated engine, from its configuration or switched on while it runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cluster.engine.simulation.settings import FaultSettings

# Sequence number and body.
Batch = tuple[int, bytes]


@dataclass(slots=True)
class Faults:
    """
    Attributes:
        transfer_failure_share: share of this engine's pulls that fail.
        failing_transfers: this many of the next pulls fail.
        slowdown: multiplies every step's time, from the next step on.
        stalled: no step is begun any more; requests are accepted and wait.
        kv_events_lost_share, kv_events_doubled_share, kv_events_late_share: of the KV event batches. The replay
            endpoint has every batch once and in order.
    """

    transfer_failure_share: float = 0.0
    failing_transfers: int = 0
    slowdown: float = 1.0
    stalled: bool = False
    kv_events_lost_share: float = 0.0
    kv_events_doubled_share: float = 0.0
    kv_events_late_share: float = 0.0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def of(cls, settings: FaultSettings, seed: int) -> Faults:
        return cls(
            settings.transfer_failure_share,
            slowdown=settings.slowdown,
            kv_events_lost_share=settings.kv_events_lost_share,
            kv_events_doubled_share=settings.kv_events_doubled_share,
            kv_events_late_share=settings.kv_events_late_share,
            _rng=random.Random(seed),
        )

    def transfer_fails(self) -> bool:
        if self.failing_transfers > 0:
            self.failing_transfers -= 1
            return True
        return self.transfer_failure_share > 0 and self._rng.random() < self.transfer_failure_share

    def events_on_the_wire(self, batch: Batch, held: list[Batch]) -> list[Batch]:
        """What subscribers get instead of `batch`; `held` keeps late batches from one call to the next."""
        before, held[:] = list(held), []
        if self.kv_events_late_share > 0 and self._rng.random() < self.kv_events_late_share:
            held.append(batch)
            return before
        if self.kv_events_lost_share > 0 and self._rng.random() < self.kv_events_lost_share:
            return before
        twice = self.kv_events_doubled_share > 0 and self._rng.random() < self.kv_events_doubled_share
        return [batch, batch, *before] if twice else [batch, *before]
