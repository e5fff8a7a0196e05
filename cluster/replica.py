"""A pool's replica under Ray Serve: a Worker, what Serve asks of it, and what the router needs to know of it."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any, ClassVar

import ray
from ray import serve

from cluster.config import ClusterConfig, parse
from cluster.engine.factory import create_engine
from cluster.heap import settle_heap
from cluster.logs import use_serve_log
from cluster.messages import Role
from cluster.node import node_ip
from cluster.wire import LegCall, LegEnd
from cluster.worker import Worker, describe

log = logging.getLogger(__name__)


class PoolReplica:
    """Base of `PrefillWorker` and `DecodeWorker`; `role` tells them apart."""

    role: ClassVar[Role]

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]
        self._config: ClusterConfig = parse(config)
        use_serve_log(self._config.engine.log_level)
        context = serve.get_replica_context()
        labels = ray.get_runtime_context().get_node_labels()
        self._rack = labels.get(self._config.network.rack_label, "")
        host = self._config.network.host or node_ip()
        engine = await create_engine(
            self._config,
            self.role,
            worker_id=context.replica_id.unique_id,
            host=host,
            node=ray.get_runtime_context().get_node_id(),
        )
        self._worker = Worker(engine, lease_s=self._config.lease_backstop_s, stall_s=self._config.engine.stall_s)
        settle_heap()

    async def run(self, call: LegCall) -> LegEnd:
        """One leg; open for as long as the leg holds anything here."""
        return await self._worker.run(call)

    async def check_health(self) -> None:
        await self._worker.check_health()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve hands this to every router together with the replica."""
        return {"worker": {**asdict(self._worker.info), "rack": self._rack}, "pid": os.getpid()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Monotone counters and current load, pushed to Serve's controller."""
        snapshot = self._worker.snapshot()
        counts = {f"{name}_total": float(value) for name, value in self._worker.counts.items()}
        return {
            **counts,
            **self._worker.meter.values(),
            "running": float(snapshot.running),
            "waiting": float(snapshot.waiting),
            "kv_used_blocks": float(snapshot.kv_used_blocks),
            "kv_total_blocks": float(self._worker.info.kv_total_blocks),
            "queued_prefill_tokens": float(snapshot.queued_prefill_tokens),
            "open_leases": float(snapshot.open_leases),
        }

    def status(self) -> dict[str, Any]:
        return {**describe(self._worker), "pid": os.getpid(), "role": self.role.value}

    async def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            # Serve has waited for the open calls; what a broken connection cut off may still give things back.
            left = await worker.drain(self._config.pool(self.role).drain_s)
            if left:
                log.warning("%d requests were still open at the end of the drain", left)
            await worker.shutdown()
