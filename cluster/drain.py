"""Taking a worker out of service without losing a request: which one (`victims`), and when it may end (`Drain`).

Scale-down, rolling update, `serve.delete` and SIGTERM all stop a replica the same way. Serve takes it out of every
router's list and waits for its open calls; the worker then drains what is left and ends (`cluster/worker.py`).

State     Event                                            Next
--------  -----------------------------------------------  --------
SERVING   start                                            DRAINING   new work is refused with a retryable error
DRAINING  nothing open for `settle_s`                      DRAINED    the process may end
DRAINING  `limit_s` has passed                             EXPIRED    the process ends; `left` requests are lost here
DRAINING  start                                            DRAINING   the first limit stays

Open work is every leg: a running or waiting request, and a lease, since KV that a decode engine has not pulled yet
keeps a prefill worker alive. `settle_s` covers requests that a router sent before it knew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

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


class DrainState(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    EXPIRED = "expired"


class Drain:
    """Drain of one worker.

    Args:
        limit_s: how long accepted work may take to finish.
        settle_s: how long nothing must be open before the worker counts as empty.
    """

    def __init__(self, limit_s: float, settle_s: float = 0.5) -> None:
        self._limit_s = limit_s
        self._settle_s = settle_s
        self._until_s: float | None = None
        self._empty_since_s: float | None = None
        self.state = DrainState.SERVING
        self.left = 0

    @property
    def accepts(self) -> bool:
        """Whether new work is taken in."""
        return self.state is DrainState.SERVING

    def start(self, now: float) -> None:
        if self.state is DrainState.SERVING:
            self.state = DrainState.DRAINING
            self._until_s = now + self._limit_s

    def observe(self, open_work: int, now: float) -> DrainState:
        """Tell how many requests and leases are open; to be called on every change and at `next_look_s`."""
        if self.state is not DrainState.DRAINING or self._until_s is None:
            return self.state
        self.left = open_work
        if open_work:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now
        if self._empty_since_s is not None and now - self._empty_since_s >= self._settle_s:
            self.state = DrainState.DRAINED
        elif now >= self._until_s:
            self.state = DrainState.EXPIRED if open_work else DrainState.DRAINED
        return self.state

    def next_look_s(self) -> float | None:
        """When the state may change without an event; None if it cannot."""
        if self.state is not DrainState.DRAINING or self._until_s is None:
            return None
        if self._empty_since_s is None:
            return self._until_s
        return min(self._until_s, self._empty_since_s + self._settle_s)
