"""Which replicas Serve stops when a pool shrinks: those whose end loses least (`cluster/drain.py`).

Serve itself takes the newest replica of the emptiest node, whatever it is doing, and offers no setting for it. The
policy runs in the same process, the controller, so it can put its own choice there. A Serve that looks different is
left alone, with one line in the log: then the newest goes, and drains like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.drain import Candidate, victims
from cluster.messages import WorkerSnapshot, WorkerState

log = logging.getLogger("ray.serve")

_CHOOSE = "_get_replicas_to_stop"


class LeastLoss:
    """The latest load of every replica, and the choice made from it. One object serves all of an application."""

    def __init__(self) -> None:
        self._loads: dict[Any, dict[str, WorkerSnapshot]] = {}

    def note(self, deployment: Any, rows: Mapping[str, Mapping[str, float]]) -> None:
        """
        Args:
            deployment: Serve's id of the pool.
            rows: the newest figures of each replica by its unique id (`PoolReplica.record_autoscaling_stats`).
        """
        self._loads[deployment] = {name: _snapshot(name, row) for name, row in rows.items()}

    def choose(self, deployment: Any, running: Iterable[Any], count: int) -> list[Any]:
        """`count` of the running replicas; of those that tell nothing the newest first, before any other.

        Args:
            running: Serve's replica ids, oldest first.
        """
        loads = self._loads[deployment]
        newest_first = list(running)[::-1]
        unknown = [r for r in newest_first if r.unique_id not in loads]
        known = {r.unique_id: r for r in newest_first if r.unique_id in loads}
        order = victims([Candidate(loads[name]) for name in known], len(known))
        return [*unknown, *(known[name] for name in order)][:count]

    def install(self, scheduler: type[Any]) -> None:
        """Take over from the scheduler's class; again and again is once."""
        original = getattr(scheduler, _CHOOSE, None)
        if original is None:
            log.warning("autoscaling: Serve has no %s here; it chooses which replicas stop", _CHOOSE)
            return
        if getattr(original, "least_loss", None) is not None:
            original.least_loss.append(self)
            return
        interested = [self]

        def choose(this: Any, deployment_id: Any, max_num_to_stop: int, *args: Any, **kwargs: Any) -> set[Any]:
            theirs: set[Any] = original(this, deployment_id, max_num_to_stop, *args, **kwargs)
            try:
                running = list(this._running_replicas[deployment_id])
                mine = next((one for one in reversed(interested) if deployment_id in one._loads), None)
                # Those that still start cost nothing and go first; Serve has that right. Gangs are its own affair.
                stopping = theirs & set(running)
                if mine is None or not stopping or kwargs.get("gang_id_by_replica") is not None:
                    return theirs
                return (theirs - stopping) | set(mine.choose(deployment_id, running, len(stopping)))
            except Exception:
                log.exception("autoscaling: Serve chooses which replicas stop")
                return theirs

        choose.least_loss = interested  # type: ignore[attr-defined]
        setattr(scheduler, _CHOOSE, choose)


def _snapshot(name: str, row: Mapping[str, float]) -> WorkerSnapshot:
    return WorkerSnapshot(
        name,
        "",
        WorkerState.READY,
        running=int(row.get("running", 0)),
        waiting=int(row.get("waiting", 0)),
        queued_prefill_tokens=int(row.get("queued_prefill_tokens", 0)),
        open_leases=int(row.get("open_leases", 0)),
    )
