"""Which workers a smaller pool does without. How a chosen one leaves: `cluster/drain.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.messages import WorkerSnapshot, WorkerState


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that could be removed.

    Attributes:
        hot_tokens: tokens of its prefix cache that recent requests have hit and no other worker of the pool holds;
            they would have to be computed again.
    """

    snapshot: WorkerSnapshot
    hot_tokens: int = 0


def victims(candidates: Iterable[Candidate], count: int, *, request_tokens: int = 512) -> list[str]:
    """The `count` workers whose removal loses least: dead ones, those that still start, then the least loss first.

    Loss is in tokens that have to be waited for or computed again: prompt tokens accepted and not computed,
    `request_tokens` (a typical request's) for each running or waiting request and each open lease, and hot prefix
    tokens. Workers that drain already are not chosen again. Equal losses are decided by the id.
    """
    order = {WorkerState.DEAD: 0, WorkerState.STARTING: 1, WorkerState.READY: 2}

    def loss(candidate: Candidate) -> tuple[int, int, str]:
        s = candidate.snapshot
        if s.state is not WorkerState.READY:
            return order[s.state], 0, s.worker_id
        tokens = s.queued_prefill_tokens + (s.running + s.waiting + s.open_leases) * request_tokens
        return order[s.state], tokens + candidate.hot_tokens, s.worker_id

    free = [c for c in candidates if c.snapshot.state is not WorkerState.DRAINING]
    return [c.snapshot.worker_id for c in sorted(free, key=loss)[: max(0, count)]]
