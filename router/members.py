"""The workers that a router knows: who is there, how loaded, and whom placement may use. `Health` decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.config import LimitsConfig
from cluster.messages import Role, WorkerInfo, WorkerSnapshot
from router.health import Change, Health, Trust
from router.seams import Placing

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class Members:
    """
    Args:
        owing: the workers that must step (`Health.look`).
        lost: called with a worker from which nothing will come any more.
        clock: seconds, the router's.

    Attributes:
        loads: the newest snapshot of each worker that has sent one.
        last_failure: by worker, also of those that are gone.
        listeners: called with (worker, whether it came or went).
    """

    def __init__(
        self,
        placer: Placing,
        limits: LimitsConfig,
        owing: Callable[[], set[str]],
        lost: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        self.loads: dict[str, WorkerSnapshot] = {}
        self.last_failure: dict[str, str] = {}
        self.listeners: list[Callable[[WorkerInfo, bool], None]] = []
        self.health = Health(limits.silent_s, limits.stall_s, look_every_s=LOOK_EVERY_S)
        self._placer, self._owing, self._lost, self._clock = placer, owing, lost, clock
        self._look_timer: asyncio.TimerHandle | None = None
        self._no_decoder: bool | None = None  # None: to be found out

    def up(self, info: WorkerInfo) -> None:
        """A worker came, or came back as another incarnation."""
        old = self.workers.get(info.worker_id)
        if old is not None and old.incarnation != info.incarnation:
            self.down(info.worker_id)
        self.workers[info.worker_id] = info
        self.health.up(info.worker_id, info.incarnation)
        self._no_decoder = None
        self._placer.add_worker(info, self._clock())
        if self._look_timer is None:
            self._look()
        for listener in self.listeners:
            listener(info, True)

    def down(self, worker_id: str) -> None:
        """A worker left. Legs on it end by themselves: a drained replica finishes its work, a dead one's calls fail."""
        info = self.workers.pop(worker_id, None)
        if info is None:
            return
        self.loads.pop(worker_id, None)
        self.health.down(worker_id)
        self._no_decoder = None
        self._placer.remove_worker(worker_id, self._clock())
        for listener in self.listeners:
            listener(info, False)

    def loaded(self, snapshot: WorkerSnapshot) -> bool:
        """A worker told its load; False where the worker is unknown or was another incarnation."""
        info = self.workers.get(snapshot.worker_id)
        if info is None or info.incarnation != snapshot.incarnation:
            return False
        self.loads[snapshot.worker_id] = snapshot
        self.health.heard(snapshot.worker_id, snapshot.steps, self._clock())
        self._placer.on_snapshot(snapshot, self._clock())
        return True

    def asked(self, worker_id: str) -> None:
        """A leg goes there."""
        change = self.health.asked(worker_id, self._clock())
        if change is not None:
            self._apply(change)

    def suspect(self, worker_id: str, reason: str, peer: str | None) -> None:
        """A request failed there, or between there and `peer`."""
        self.last_failure[worker_id] = reason
        change = self.health.suspect(worker_id, reason, peer, self._clock())
        if change is not None or peer is not None:
            between = f" with {peer}" if peer else ""
            log.warning("worker %s%s failed a request: %s", worker_id, between, reason)
        if change is not None:
            self._apply(change)

    def link_lost(self, worker_id: str) -> None:
        """Its legs have ended. Most likely it is dead, and no request need find that out."""
        change = self.health.unlinked(worker_id, self._clock())
        if change is not None:
            self.last_failure[worker_id] = change.reason
            self._apply(change)

    def lose(self, worker_id: str, reason: str) -> None:
        """Nothing comes from there any more."""
        log.warning("worker %s is lost: %s", worker_id, reason)
        self.last_failure[worker_id] = reason
        self._lost(worker_id)

    def take_back(self) -> None:
        """Use decode workers before their time of distrust is over: there is no other, and the client would get a 503.

        Only for what comes new. What has failed there already waits: each try would cost one of its attempts.
        """
        if self._no_decoder is False:
            return
        pool = [worker_id for worker_id, info in self.workers.items() if info.role is Role.DECODE]
        self._no_decoder = not any(self.health.trust(worker_id) is Trust.USED for worker_id in pool)
        if self._no_decoder:
            for change in filter(None, map(self.health.take_back, pool)):
                self._apply(change)

    def close(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()

    def _look(self) -> None:
        """Judge the workers by what they have said and done since."""
        self._look_timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
        for change in self.health.look(self._owing().__contains__, self._clock()):
            self._apply(change)

    def _apply(self, change: Change) -> None:
        self._no_decoder = None
        info = self.workers.get(change.worker_id)
        if info is None:
            return
        if change.trust is Trust.USED:
            self._placer.add_worker(info, self._clock())
            return
        self._placer.pause_worker(change.worker_id, self._clock())
        if change.trust is Trust.LOST:
            self.lose(change.worker_id, change.reason)
