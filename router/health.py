"""Which workers and pairs a router trusts. Alive means forward progress, not "answers".

Sign                                                      Consequence
--------------------------------------------------------  ----------------------------------------------------------
a leg failed: worker lost, engine dead, limit passed      not used for a while that doubles with each failure in a row
two transfers of a pair failed in a row                   the pair is not used for a while; then one request tries it
no message for `silent_s` while one is due                lost: its requests go elsewhere; used again once it speaks,
                                                          and tried by one request after a while that doubles
no first message for three times as long                  the same
no engine step for `stall_s` while it owes output         lost: its requests go elsewhere; tried again after a while
a new incarnation                                         nothing of its predecessor counts

Workers send a message every heartbeat, so silence means a stopped process, a cut network or a blocked loop. After a cut
somebody must ask: a worker makes its link when a call comes. A router that was itself stopped learns so from its own
clock, and blames nobody for that time.
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
    silent: bool = False  # lost by its silence, and has not spoken since
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
        self._silences = Breaker(failures=1)
        self.pairs = pairs or Breaker(failures=2)
        self._breakers = (self._worker_breaker, self._silences, self.pairs)
        self._workers: dict[str, _Worker] = {}
        self._looked_s: float | None = None

    def up(self, worker_id: str, incarnation: str) -> None:
        """The worker is a member of its pool."""
        for breaker in self._breakers:
            if breaker.seen(worker_id, incarnation):
                self._workers.pop(worker_id, None)
        self._workers.setdefault(worker_id, _Worker())

    def down(self, worker_id: str) -> None:
        """The worker left its pool; what still runs on it ends by itself."""
        self._workers.pop(worker_id, None)
        for breaker in self._breakers:
            breaker.gone(worker_id)

    def asked(self, worker_id: str, now: float) -> Change | None:
        """A leg was sent there: from now on messages are due. It alone tries a worker that was lost by its silence."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.heard_s is not None:
            return None
        worker.heard_s = worker.stepped_s = now
        if not worker.silent or worker.trust is not Trust.USED:
            return None
        worker.trust = Trust.AVOIDED
        return Change(worker_id, Trust.AVOIDED, "one request tries it")

    def heard(self, worker_id: str, steps: int | None, now: float) -> None:
        """Any message; `steps` is the engine's step counter where the message has it."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        worker.heard_s, worker.spoke = now, True
        if worker.silent:
            # What failed there meanwhile failed for its silence.
            worker.silent = False
            for breaker in (self._silences, self._worker_breaker):
                breaker.forget((worker_id,))
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

    def unlinked(self, worker_id: str, now: float) -> Change | None:
        """Its link broke: it says nothing more until a call makes another one."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.heard_s, worker.spoke = None, False
        return self.suspect(worker_id, "the link broke", None, now)

    def take_back(self, worker_id: str) -> Change | None:
        """Nobody else is left: one that failed, or says nothing, is used again, until the next look at least.

        Not one that a request tries already, nor one that answers and makes no step.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.trust is Trust.USED or (worker.trust is Trust.LOST and not worker.silent):
            return None
        if worker.silent:
            if worker.trust is Trust.AVOIDED and worker.heard_s is not None:
                return None
            worker.heard_s = None
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
        key = (worker_id,)
        if worker.heard_s is not None and now - worker.heard_s >= self._silent_s * (1 if worker.spoke else FIRST_WORD):
            if worker.trust is not Trust.LOST or not worker.silent:
                worker.silent = True
                self._silences.failed(key, now)
            if self._silences.state(key, now) is BreakerState.OPEN:
                return Trust.LOST, f"silent for {now - worker.heard_s:.1f} s"
            # It may be well and have no link to say so: from now on the next request is its chance.
            worker.heard_s = None
        if worker.heard_s is None:
            worker.stepped_s = now
        elif worker.silent:
            return Trust.AVOIDED, "one request tries it"
        if not owes(worker_id):
            worker.stepped_s = now
        elif now - worker.stepped_s >= self._stall_s:
            # Its requests leave, so no step will show that it is well again: it is tried after a while.
            self._worker_breaker.failed(key, now, fatal=True)
            return Trust.LOST, f"no engine step for {now - worker.stepped_s:.1f} s"
        if self._worker_breaker.state(key, now) is BreakerState.OPEN:
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
