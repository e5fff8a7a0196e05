"""Carries out a placement inside Ray Serve: a call that names a replica goes to that replica or nowhere.

Serve makes one request router per handle and process and hands it every change of the replica set. Both directions
are used: `choose_replicas` obeys the name in the call, `update_replicas` tells `ReplicaWatch` who is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

log = logging.getLogger(__name__)

# Serve builds the router object itself, from a class and plain keyword arguments, so the two sides of one process
# can only meet by name. The key carries application and deployment: pools never share state.
_WATCHES: dict[tuple[str, str], ReplicaWatch] = {}


class ReplicaWatch:
    """The live replicas of one deployment, as this process knows them."""

    def __init__(
        self,
        application: str,
        deployment: str,
        on_up: Callable[[str, dict[str, Any]], None],
        on_down: Callable[[str], None],
        on_missed: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._key = (application, deployment)
        self._on_up, self._on_down, self.missed = on_up, on_down, on_missed
        self.replicas: set[str] = set()
        self._died: set[str] = set()
        _WATCHES[self._key] = self

    def close(self) -> None:
        if _WATCHES.get(self._key) is self:
            del _WATCHES[self._key]

    def update(self, replicas: dict[str, dict[str, Any]]) -> None:
        """The whole replica set: unique id -> metadata."""
        self._died &= replicas.keys()
        for gone in self.replicas - replicas.keys():
            self._drop(gone)
        for replica_id, metadata in replicas.items():
            if replica_id not in self.replicas and replica_id not in self._died and metadata:
                self.replicas.add(replica_id)
                self._on_up(replica_id, metadata)

    def died(self, replica_id: str) -> None:
        """Its process is gone. Serve may go on listing it until its controller has noticed."""
        self._died.add(replica_id)
        self._drop(replica_id)

    def _drop(self, replica_id: str) -> None:
        if replica_id in self.replicas:
            self.replicas.discard(replica_id)
            self._on_down(replica_id)


class PinnedRequestRouter(RequestRouter):
    """Sends a call to the replica named by its `worker_id` attribute (first argument) and matches calls exactly."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Serve asks again at once where this is false, in a loop without a pause: nothing else would run any more.
            pending_request.routing_context.should_backoff = True
        wanted = _wanted(pending_request)
        if wanted is None:
            return [candidate_replicas]
        chosen = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        if not chosen:
            self._tell_missed()
        return [chosen]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        if (watch := self._watch()) is not None:
            watch.update({r.replica_id.unique_id: r.replica_metadata for r in replicas})
            self._tell_missed()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if (watch := self._watch()) is not None:
            watch.died(replica_id.unique_id)
            self._tell_missed()

    def _tell_missed(self) -> None:
        """Calls whose replica left before it got them. Serve would hold them for ever; their owner must hear of it."""
        watch = self._watch()
        if watch is None:
            return
        for pending in list(self._pending_requests_by_id.values()):
            wanted = _wanted(pending)
            if wanted is not None and wanted not in watch.replicas and not pending.future.done():
                watch.missed(pending.args[0])

    def _watch(self) -> ReplicaWatch | None:
        # Serve ships this class by value, with a copy of this module's globals: only an import finds the real ones.
        from router import pinning

        return pinning._WATCHES.get((self._deployment_id.app_name, self._deployment_id.name))


def _wanted(pending: PendingRequest | None) -> str | None:
    if pending is None or not pending.args:
        return None
    return getattr(pending.args[0], "worker_id", None)
