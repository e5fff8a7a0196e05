"""What a router tells `pdserve status`."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.vllm.arguments import served_name
from cluster.goodput.metrics import Metrics
from cluster.messages import Role
from router.choice import distance
from router.dispatcher import Dispatcher
from router.placement import Placer
from router.warmup import Warmup


def router_status(
    router_id: str,
    config: ClusterConfig,
    dispatcher: Dispatcher,
    placer: Placer,
    warmup: Warmup,
    metrics: Metrics,
    started_s: float,
) -> dict[str, Any]:
    roles = [Role.DECODE] if config.colocated else [Role.PREFILL, Role.DECODE]
    return {
        "name": config.name,
        "model": served_name(config),
        "engine": config.engine.kind,
        "router": {
            "id": router_id,
            "pid": os.getpid(),
            "running_requests": dispatcher.running,
            "open_legs": dispatcher.open_legs,
            "retries": dispatcher.retries,
            "migrations": dispatcher.migrations,
            "policy": config.router.placement.policy,
        },
        "pools": {role.value: _pool(role, config, dispatcher) for role in roles},
        "pairs": [
            {"prefill": prefill, "decode": decode, "state": state, "distance": _distance(placer, prefill, decode)}
            for (prefill, decode), state in warmup.state.items()
        ],
        # Measured over modelled transfer time, by how far the KV goes; placement multiplies by it.
        "transfer_factors": {
            distance.value: {"factor": mean.value, "transfers": mean.samples}
            for distance, mean in placer.model.distance_factor.items()
        },
        "prediction": {
            "predicted_cached_tokens": placer.predicted_cached_tokens,
            "actual_cached_tokens": placer.actual_cached_tokens,
            # How predictions came true, and (with `placement.shadow`) every policy's mean regret on these requests.
            **(finite(placer.watch.summary()) if placer.watch is not None else {}),
        },
        "paths": {path.value: count for path, count in placer.paths.items()},
        "waiting_requests": 0 if dispatcher.room is None else len(dispatcher.room),
        "goodput": finite(metrics.stats.summary(max(1e-9, time.monotonic() - started_s))),
    }


def _distance(placer: Placer, prefill: str, decode: str) -> str | None:
    """node, rack or far; None while one of the two is not placed on."""
    p, d = placer.find(prefill), placer.find(decode)
    return None if p is None or d is None else distance(p, d).value


def _pool(role: Role, config: ClusterConfig, dispatcher: Dispatcher) -> dict[str, Any]:
    pool = config.pool(role)
    replicas = []
    for info in dispatcher.workers.values():
        if info.role is not role:
            continue
        load = dispatcher.loads.get(info.worker_id)
        replicas.append(
            {
                "id": info.worker_id,
                "incarnation": info.incarnation,
                "state": load.state.value if load else "ready",
                "running": load.running if load else 0,
                "waiting": load.waiting if load else 0,
                "queued_prefill_tokens": load.queued_prefill_tokens if load else 0,
                "kv_used_blocks": load.kv_used_blocks if load else 0,
                "kv_total_blocks": info.kv_total_blocks,
                "block_size_tokens": info.block_size_tokens,
                "kv_bytes_per_token": info.kv_bytes_per_token,
                "max_num_seqs": info.max_num_seqs,
                "max_num_batched_tokens": info.max_num_batched_tokens,
                "max_model_len": info.max_model_len,
                "open_leases": load.open_leases if load else 0,
                "node": info.node,
                "pid": info.pid,
                "rack": info.rack,
                "tp": info.tp,
                "pp": info.pp,
                "accelerator": info.accelerator_type,
                "last_failure": dispatcher.members.last_failure.get(info.worker_id),
            }
        )
    return {
        "layout": pool.layout.model_dump(),
        "accelerator": pool.accelerator,
        "replicas_min": pool.replicas.min,
        "replicas_max": pool.replicas.max,
        "replicas": replicas,
        "open_leases": sum(r["open_leases"] for r in replicas),
    }


def finite(value: Any) -> Any:
    """For JSON: a number that it cannot hold (no sample yet, or only failures) becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value
