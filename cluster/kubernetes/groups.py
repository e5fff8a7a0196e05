"""What a ClusterConfig means on Kubernetes: one worker group per deployment, one pod per replica.

A pod offers Ray exactly what one replica asks for (or, where pipeline stages span machines, one stage of it), so that
the group's size is the pool's size and the autoscaler knows an empty group too.

Shutdown has four timers, and each must outlast the one before:

    a replica's accepted work   drain_s                       Serve waits for it (graceful_shutdown_timeout_s)
    a node's drain              drain_s + start_timeout_s     Ray, after SIGTERM: Serve first starts a replacement
    the pod's grace period      preStop + node drain + margin Kubernetes sends SIGKILL after it
    the old cluster's life      longest drain_s + margin      KubeRay, after traffic moved to an upgraded cluster

They are upper bounds: a pod without work ends at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.autoscaling.messages import check_autoscaling
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.layout import RAY_ACCELERATOR_TYPES, replica_layout
from cluster.messages import Role
from cluster.runtime.environment import ray_environment

ROUTER = "router"
PRE_STOP_S = 5
MARGIN_S = 30
NODE_GPUS_MAX = 8


@dataclass(frozen=True, slots=True)
class Group:
    """One worker group, named like its deployment.

    Attributes:
        pods_min, pods_max: bounds of the group; the autoscaler keeps to them. The upper one leaves room for the
            replicas that an update starts beside the old ones.
        resources: Ray resources of one pod, as KubeRay wants them: text.
        gpus: GPUs of one pod.
        drain_s: how long accepted work may take.
        start_s: how long a replacement may take to start.
        accelerator: GPU type that the pods must be on, None for any.
    """

    name: str
    pods_min: int
    pods_max: int
    resources: Mapping[str, str]
    gpus: int
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


def groups(config: ClusterConfig) -> dict[str, Group]:
    """The worker groups of a cluster by name: router, prefill (unless colocated), decode.

    Raises:
        ConfigError: the config leaves open what a manifest must say, or cannot be placed on pods.
    """
    http, router = config.router.http, config.router
    if config.engine.kind == "vllm" and config.engine.device == "auto":
        raise ConfigError("engine.device", "auto: a manifest must ask for its hardware", "set cpu or gpu")
    if http.host != "0.0.0.0":
        raise ConfigError("router.http.host", f"{http.host} cannot be reached from other pods", "set 0.0.0.0")
    if http.ingress not in ("auto", "proxy"):
        raise ConfigError(
            "router.http.ingress", f"{http.ingress}: on Kubernetes clients come through Serve's proxies", "set proxy"
        )
    if router.node_resource is None:
        raise ConfigError(
            "router.node_resource", "null: a router could take the place of an engine in its pod", "set router-pod"
        )
    found = {
        ROUTER: Group(
            name=ROUTER,
            pods_min=router.replicas,
            pods_max=_with_surge(router.replicas, router.surge_percent),
            resources=_resources({"CPU": router.num_cpus, router.node_resource: 1}),
            gpus=0,
            drain_s=router.drain_s,
            start_s=MARGIN_S,
        )
    }
    for role in Role:
        if role is Role.DECODE or not config.colocated:
            found[role.value] = _pool_group(config, role)
    check_autoscaling(config)
    return found


def environment(config: ClusterConfig) -> dict[str, str]:
    """Environment of every Ray container: the same that `pdserve serve` gives to Ray, with Serve's proxies."""
    http = config.router.http.model_copy(update={"ingress": "proxy"})
    router = config.router.model_copy(update={"http": http})
    return ray_environment(config.model_copy(update={"router": router}))


def deletion_delay_s(config: ClusterConfig) -> int:
    """How long an old cluster outlives an upgrade: until the last stream that it accepted must have ended."""
    return math.ceil(max(group.drain_s for group in groups(config).values())) + MARGIN_S


def _pool_group(config: ClusterConfig, role: Role) -> Group:
    pool = config.pool(role)
    on_cpu = config.engine.kind == "simulated" or config.engine.device == "cpu"
    layout = replica_layout(config, role, on_cpu=on_cpu)
    if layout.gpus == 0 and pool.accelerator is None:
        raise ConfigError(
            f"pools.{role.value}.accelerator",
            "null: without GPUs nothing keeps one replica to one pod of its own group",
            f"name a resource, e.g. {role.value}-pod",
        )
    asked: dict[str, float] = {}
    for bundle in layout.bundles:
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount
    pods = 1
    if layout.gpus > NODE_GPUS_MAX:
        pods = pool.layout.pp
        # All CPUs belong to the bundle of the replica's own process, which may land on any of the pods.
        asked = {name: amount if name == "CPU" else amount / pods for name, amount in asked.items()}
    gpus = math.ceil(asked.get("GPU", 0))
    if gpus > NODE_GPUS_MAX:
        raise ConfigError(
            f"pools.{role.value}.layout",
            f"tp {pool.layout.tp} x dp {pool.layout.dp} needs {gpus} GPUs in one pod, at most {NODE_GPUS_MAX}",
            "lower tp or dp, or split the layers with pp",
        )
    return Group(
        name=role.value,
        pods_min=pool.replicas.min * pods,
        pods_max=_with_surge(pool.replicas.max, pool.surge_percent) * pods,
        resources=_resources(asked),
        gpus=gpus,
        drain_s=pool.drain_s,
        start_s=config.engine.start_timeout_s,
        accelerator=pool.accelerator if gpus and pool.accelerator in RAY_ACCELERATOR_TYPES else None,
    )


def _resources(asked: Mapping[str, float]) -> dict[str, str]:
    """Whole units, at least one: Ray's autoscaler counts only those."""
    return {name: str(max(1, math.ceil(amount))) for name, amount in asked.items()}


def _with_surge(replicas: int, percent: int) -> int:
    """Serve rounds the surge up to whole replicas."""
    return replicas + (replicas * percent + 99) // 100
