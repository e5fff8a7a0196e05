"""What a router tells others about itself: gauges for `/metrics`, counters and load for the autoscaling policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cluster.config import ClusterConfig
from cluster.goodput import decisions
from cluster.goodput.feed import router_stats
from cluster.goodput.metrics import Metrics
from cluster.messages import Role, WorkerSnapshot
from router.dispatcher import Dispatcher

# An engine with work whose step counter stands still for longer than this makes no progress.
STALL_S = 10.0
# What a controller said this long ago about replicas is history; the router sees who is there now.
OLD_S = 60.0


class Telemetry:
    """Reads the dispatcher and the placer; owns nothing but the memory of step counters.

    Args:
        clock: the dispatcher's clock, in seconds.
        more: further values for `Metrics.set_gauges`, asked for at every scrape.
    """

    def __init__(
        self,
        config: ClusterConfig,
        metrics: Metrics,
        dispatcher: Dispatcher,
        placer: Any,
        clock: Callable[[], float],
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._config, self._metrics, self._dispatcher, self._placer = config, metrics, dispatcher, placer
        self._clock, self._more = clock, more
        self._progress: dict[str, tuple[int, float]] = {}
        self.decision: dict[str, Any] | None = None

    async def render(self) -> bytes:
        """The exposition of this moment. Errors inside are counted, never raised."""
        try:
            await self.refresh_decision()
            self._metrics.set_gauges(self.gauges())
        except Exception:
            self._metrics.errors += 1
        return self._metrics.render()

    async def refresh_decision(self) -> None:
        """Fetch the autoscaler's latest decision; the round trip to Ray runs off the event loop."""
        if self._config.autoscaling.policy != "off":
            try:
                self.decision = await asyncio.to_thread(decisions.latest, self._config.name)
            except Exception:
                # The last one stays, and its age shows.
                self._metrics.errors += 1

    def autoscaling_stats(self) -> dict[str, float]:
        """For Serve's `record_autoscaling_stats` hook: counters of arrivals and ends, and the queue now."""
        depth, oldest_s = self.queue()
        return router_stats(
            self._metrics.promised.values,
            queue_depth=depth,
            oldest_wait_s=oldest_s,
            draining={role: len(self.draining(role)) for role in Role},
        )

    def queue(self) -> tuple[int, float]:
        """Requests that have no place yet, and the longest wait among them."""
        now = self._clock()
        waits = [now - run.request.arrival_s for run in self._dispatcher.runs() if run.placement is None]
        return len(waits), max(waits, default=0.0)

    def draining(self, role: Role) -> set[str]:
        """Workers that left their pool and still run legs of this router."""
        return {
            worker_id
            for worker_id, prefill in self._dispatcher.leg_workers()
            if worker_id not in self._dispatcher.workers and prefill == (role is Role.PREFILL)
        }

    def gauges(self) -> dict[str, Any]:
        dispatcher = self._dispatcher
        # A pool without an engine says so with a zero: a series that is not there sets off no alert.
        pools = [Role.DECODE] if self._config.colocated else list(Role)
        replicas: dict[tuple[str, str], float] = {(role.value, "ready"): 0.0 for role in pools}
        accelerators: dict[str, float] = {}
        running: dict[tuple[str, str], float] = {}
        waiting, kv, queued, stalled, steps = ({}, {}, {}, {}, {})
        for info in dispatcher.workers.values():
            pool, key = info.role.value, (info.role.value, info.worker_id)
            replicas[pool, "ready"] = replicas.get((pool, "ready"), 0) + 1
            accelerators[pool] = accelerators.get(pool, 0) + info.accelerators
            load = dispatcher.loads.get(info.worker_id)
            if load is None:
                continue
            running[key], waiting[key] = float(load.running), float(load.waiting)
            kv[key] = load.kv_used_blocks / max(1, info.kv_total_blocks)
            queued[key], steps[key] = float(load.queued_prefill_tokens), float(load.steps)
            stalled[key] = float(self._stalled(load))
        for role in Role:
            if left := len(self.draining(role)):
                replicas[role.value, "draining"] = left
        self._progress = {w: seen for w, seen in self._progress.items() if w in dispatcher.workers}
        depth, oldest_s = self.queue()
        leases = dispatcher.leases.counters()
        values: dict[str, Any] = {
            "pdserve_pool_replicas": replicas,
            "pdserve_pool_accelerators": accelerators,
            "pdserve_worker_running": running,
            "pdserve_worker_waiting": waiting,
            "pdserve_worker_kv_used_ratio": kv,
            "pdserve_worker_queued_prefill_tokens": queued,
            "pdserve_worker_steps_total": steps,
            "pdserve_worker_no_progress": stalled,
            "pdserve_leases_open": float(sum(load.open_leases for load in dispatcher.loads.values())),
            "pdserve_leases_total": {
                "granted": float(leases.granted),
                "pulled": float(leases.pulled),
                "released": float(leases.released),
                "expired": float(leases.expired),
                "outlived": float(leases.outlived),
            },
            "pdserve_router_queue_depth": float(depth),
            "pdserve_router_queue_oldest_wait_seconds": oldest_s,
        }
        if self._config.autoscaling.accelerators_max is not None:
            values["pdserve_accelerators_max"] = float(self._config.autoscaling.accelerators_max)
        shadow = getattr(getattr(self._placer, "watch", None), "shadow", None)
        if shadow is not None:
            values["pdserve_regret_seconds_total"] = shadow.scores["running"].regret_s
        decided = decisions.gauges(self.decision, time.time())
        if decided and decided["pdserve_autoscaling_data_age_seconds"] < OLD_S:
            # The controller also knows replicas that start.
            replicas |= decided["pdserve_pool_replicas"]
        return values | self._more() | decided | {"pdserve_pool_replicas": replicas}

    def _stalled(self, load: WorkerSnapshot) -> bool:
        now = self._clock()
        steps, since_s = self._progress.get(load.worker_id, (-1, now))
        if load.steps != steps or load.running + load.waiting == 0:
            self._progress[load.worker_id] = (load.steps, now)
            return False
        return now - since_s > STALL_S
