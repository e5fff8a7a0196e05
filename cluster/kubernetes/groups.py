"""What a ClusterConfig means on Kubernetes: one worker group per deployment, one pod per replica.

Shutdown has four timers, and each must outlast the one before:

    a replica's accepted work   drain_s                       Serve waits for it (graceful_shutdown_timeout_s)
    a node's drain              drain_s + start_timeout_s     Ray, after SIGTERM: Serve first starts a replacement
    the pod's grace period      preStop + node drain + margin Kubernetes sends SIGKILL after it
    the old cluster's life      longest drain_s + margin      KubeRay, after traffic moved to an upgraded cluster

They are upper bounds: a pod without work ends at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.config import ClusterConfig, PoolConfig
from cluster.errors import ConfigError
from cluster.messages import Role

ROUTER = "router"
PRE_STOP_S = 5
MARGIN_S = 30
NODE_GPUS_MAX = 8


@dataclass(frozen=True, slots=True)
class Group:
    """One worker group, named like its deployment.

    Attributes:
        pods_min, pods_max: bounds of the group; the autoscaler keeps to them.
        cpus, gpus: Ray resources of one pod: what one replica (or one pipeline stage of it) asks for.
        replica_cpus: Ray CPUs that one replica asks for.
        drain_s: how long accepted work may take.
        accelerator: GPU type that the pods must be on, None for any.
    """

    name: str
    pods_min: int
    pods_max: int
    cpus: int
    gpus: int
    replica_cpus: float
    drain_s: float
    start_s: float
    accelerator: str | None = None

    @property
    def node_drain_s(self) -> int:
        return math.ceil(self.drain_s + self.start_s)

    @property
    def grace_s(self) -> int:
        return PRE_STOP_S + self.node_drain_s + MARGIN_S

    @property
    def min_available(self) -> int:
        """Of the disruption budget: one pod at a time, and never the last."""
        return max(1, self.pods_min - 1)

    @property
    def resources(self) -> dict[str, str]:
        """Ray resources of a pod, so that the autoscaler knows an empty group too."""
        found = {"CPU": str(self.cpus)}
        if self.gpus:
            found["GPU"] = str(self.gpus)
            if self.accelerator is not None:
                found[f"accelerator_type:{self.accelerator}"] = "1"
        return found


def groups(config: ClusterConfig) -> dict[str, Group]:
    """The worker groups of a cluster by name: router, prefill (unless colocated), decode.

    Raises:
        ConfigError: the config leaves open what a manifest must say, or cannot be placed on pods.
    """
    if config.engine.kind == "vllm" and config.engine.device == "auto":
        raise ConfigError("engine.device", "auto: a manifest must ask for its hardware", "set cpu or gpu")
    if config.router.http.host != "0.0.0.0":
        raise ConfigError(
            "router.http.host", f"{config.router.http.host} cannot be reached from other pods", "set 0.0.0.0"
        )
    router = config.router
    found = {
        ROUTER: Group(
            name=ROUTER,
            pods_min=router.replicas,
            pods_max=router.replicas,
            cpus=max(1, math.ceil(router.num_cpus)),
            gpus=0,
            replica_cpus=router.num_cpus,
            drain_s=router.drain_s,
            start_s=MARGIN_S,
        )
    }
    for role in Role:
        pool = config.pools.prefill if role is Role.PREFILL else config.pools.decode
        if pool is not None:
            found[role.value] = _pool_group(config, role, pool)
    return found


def deletion_delay_s(config: ClusterConfig) -> int:
    """How long an old cluster outlives an upgrade: until the last stream that it accepted must have ended."""
    return math.ceil(max(group.drain_s for group in groups(config).values())) + MARGIN_S


def _pool_group(config: ClusterConfig, role: Role, pool: PoolConfig) -> Group:
    layout, gpus, pods = pool.layout, 0, 1
    if config.engine.kind == "vllm" and config.engine.device == "gpu":
        gpus = layout.tp * layout.pp * layout.dp
        if gpus > NODE_GPUS_MAX:
            gpus, pods = layout.tp * layout.dp, layout.pp
        if gpus > NODE_GPUS_MAX:
            raise ConfigError(
                f"pools.{role.value}.layout",
                f"tp {layout.tp} x dp {layout.dp} needs {gpus} GPUs in one pod, a node has at most {NODE_GPUS_MAX}",
                "lower tp or dp, or split the layers with pp",
            )
    return Group(
        name=role.value,
        pods_min=pool.replicas.min * pods,
        pods_max=pool.replicas.max * pods,
        cpus=max(1, math.ceil(pool.num_cpus)),
        gpus=gpus,
        replica_cpus=pool.num_cpus,
        drain_s=pool.drain_s,
        start_s=config.engine.start_timeout_s,
        accelerator=pool.accelerator,
    )
