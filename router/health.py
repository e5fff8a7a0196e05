"""Which workers and pairs a router trusts. Alive means forward progress, not "answers".

Sign                                                      Consequence
--------------------------------------------------------  ----------------------------------------------------------
a leg failed: worker lost, engine dead, limit passed      not used for a while that doubles with each failure in a row
two transfers of a pair failed in a row                   the pair is not used for a while; then one request tries it
no message for `silent_s` while one is due                lost: its requests go elsewhere; used again once it speaks
no first message for three times as long                  the same
no engine step for `stall_s` while it owes output         lost: its requests go elsewhere; tried again after a while
a new incarnation                                         nothing of its predecessor counts

Workers send a message every heartbeat, so silence means a stopped process, a cut network or a blocked loop. A router
that was itself stopped learns so from its own clock, and blames nobody for that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from router.breaker import Breaker, BreakerState

# A worker's first message waits for a connection that Serve and then the worker must make.
FIRST_WORD = 3


class Trust(StrEnum):
    """What becomes of a worker: `LOST` ends its requests here, `AVOIDED` sends no new ones, `USED` takes it back."""

    USED = "used"
    AVOIDED = "avoided"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Change:
    worker_id: str
    trust: Trust
    reason: str


@dataclass(slots=True)
class _Worker:
    trust: Trust = Trust.USED
    heard_s: float | None = None  # also the moment from which a message is due
    spoke: bool = False
    steps: int = -1
    stepped_s: float = 0.0


class Health:
    """All workers of one router replica.

    Args:
        silent_s: a worker that says nothing for so long is lost.
        stall_s: an engine that owes output and makes no step for so long is lost.
        look_every_s: how often `look` is called; a much longer gap was this router's own pause.
    """

    def __init__(
        self,
        silent_s: float,
        stall_s: float,
        *,
        look_every_s: float = 0.5,
        workers: Breaker | None = None,
        pairs: Breaker | None = None,
    ) -> None:
        self._silent_s = silent_s
        self._stall_s = stall_s
        self._look_every_s = look_every_s
        self._worker_breaker = workers or Breaker(failures=1)
        self.pairs = pairs or Breaker(failures=2)
        self._workers: dict[str, _Worker] = {}
        self._looked_s: float | None = None

    def up(self, worker_id: str, incarnation: str) -> None:
        """The worker is a member of its pool."""
        for breaker in (self._worker_breaker, self.pairs):
            if breaker.seen(worker_id, incarnation):
                self._workers.pop(worker_id, None)
        self._workers.setdefault(worker_id, _Worker())

    def down(self, worker_id: str) -> None:
        """The worker left its pool; what still runs on it ends by itself."""
        self._workers.pop(worker_id, None)
        for breaker in (self._worker_breaker, self.pairs):
            breaker.gone(worker_id)

    def asked(self, worker_id: str, now: float) -> None:
        """A leg was sent there: from now on messages are due."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.heard_s is None:
            worker.heard_s = worker.stepped_s = now

    def heard(self, worker_id: str, steps: int | None, now: float) -> None:
        """Any message; `steps` is the engine's step counter where the message has it."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.heard_s, worker.spoke = now, True
        if steps is not None and steps != worker.steps:
            worker.steps, worker.stepped_s = steps, now

    def suspect(self, worker_id: str, reason: str, peer: str | None, now: float) -> Change | None:
        """A request failed there, or between there and `peer`."""
        if peer is not None:
            self.pairs.failed((worker_id, peer), now)
            return None
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        self._worker_breaker.failed((worker_id,), now, fatal=True)
        if worker.trust is not Trust.USED:
            return None
        worker.trust = Trust.AVOIDED
        return Change(worker_id, Trust.AVOIDED, reason)

    def take_back(self, worker_id: str) -> Change | None:
        """Nobody else is left: one that is only avoided is used again, until the next look at least."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.trust is not Trust.AVOIDED:
            return None
        worker.trust = Trust.USED
        return Change(worker_id, Trust.USED, "nobody else is left")

    def served(self, worker_id: str, peer: str | None, now: float) -> None:
        """A request got output from there, with KV that came from `peer`."""
        self._worker_breaker.succeeded((worker_id,), now)
        if peer is not None:
            self.pairs.succeeded((peer, worker_id), now)

    def look(self, owes: Callable[[str], bool], now: float) -> list[Change]:
        """What has changed by time alone.

        Args:
            owes: whether a worker has a prefill without a ticket or a stream that has begun, so that it must step.
        """
        if self._looked_s is not None and now - self._looked_s > 4 * self._look_every_s:
            self._forgive(now - self._looked_s)
        self._looked_s = now
        changes = []
        for worker_id, worker in self._workers.items():
            trust, reason = self._judge(worker_id, worker, owes, now)
            if trust is not worker.trust:
                worker.trust = trust
                changes.append(Change(worker_id, trust, reason))
        return changes

    def _judge(self, worker_id: str, worker: _Worker, owes: Callable[[str], bool], now: float) -> tuple[Trust, str]:
        if worker.heard_s is None:
            worker.stepped_s = now
        elif now - worker.heard_s >= self._silent_s * (1 if worker.spoke else FIRST_WORD):
            return Trust.LOST, f"silent for {now - worker.heard_s:.1f} s"
        if not owes(worker_id):
            worker.stepped_s = now
        elif now - worker.stepped_s >= self._stall_s:
            # Its requests leave, so no step will show that it is well again: it is tried after a while.
            self._worker_breaker.failed((worker_id,), now, fatal=True)
            return Trust.LOST, f"no engine step for {now - worker.stepped_s:.1f} s"
        if self._worker_breaker.state((worker_id,), now) is BreakerState.OPEN:
            return Trust.AVOIDED, "failed"
        return Trust.USED, "answers"

    def _forgive(self, pause_s: float) -> None:
        for worker in self._workers.values():
            if worker.heard_s is not None:
                worker.heard_s += pause_s
            worker.stepped_s += pause_s

    def trust(self, worker_id: str) -> Trust | None:
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.trust
