"""Which engine stands behind a worker: the one place that knows the kinds."""

from __future__ import annotations

import uuid

from cluster.config import ClusterConfig
from cluster.engine.base import Engine
from cluster.messages import Role


async def create_engine(config: ClusterConfig, role: Role, *, worker_id: str, host: str, node: str) -> Engine:
    """Start the engine of one replica.

    Args:
        worker_id: the Serve replica's unique id.
        host: address of this node that other nodes reach.
        node: name of this node, for placement close to it.
    """
    incarnation = uuid.uuid4().hex[:12]
    if config.engine.kind == "simulated":
        from cluster.engine.simulated import create

        return await create(config, role, worker_id=worker_id, incarnation=incarnation, host=host, node=node)
    from cluster.engine.vllm.engine import VllmEngine
    from cluster.engine.vllm.environment import prepare

    settings = prepare(config, role, host=host)
    return await VllmEngine.create(config, role, settings, worker_id, incarnation, node)
