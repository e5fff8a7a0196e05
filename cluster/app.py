"""Builds the Serve application of a cluster: the only place where deployments are made."""

from __future__ import annotations

import warnings
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from cluster.autoscaling.serve_policy import deployment_autoscaling
from cluster.config import ClusterConfig, parse
from cluster.engine.vllm.environment import runs_on_cpu
from cluster.layout import replica_layout
from cluster.messages import Role
from decode_pool.worker import DecodeWorker
from prefill_pool.worker import PrefillWorker
from router.app import DEPLOYMENTS, ROUTER, Router
from router.pinning import PinnedRequestRouter

WORKERS = {Role.PREFILL: PrefillWorker, Role.DECODE: DecodeWorker}

# Serve's own limit must never be what queues a request: placement and admission decide.
MAX_ONGOING = 100_000


def build(args: dict[str, Any]) -> Application:
    """The application of a cluster.

    Args:
        args: {"config": a ClusterConfig as a mapping}; also the form in which `serve deploy` passes it.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    config = parse(args.get("config", {}))
    raw = config.model_dump(mode="json")
    pools = {
        role: _pool(config, role).bind(raw)
        for role in ([Role.DECODE] if config.colocated else [Role.PREFILL, Role.DECODE])
    }
    router = serve.deployment(
        name=ROUTER,
        **_size(config, None, config.router.replicas),
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=_router_options(config),
        max_surge_percent=config.router.surge_percent,
        graceful_shutdown_timeout_s=config.router.drain_s,
        health_check_period_s=5,
        health_check_timeout_s=30,
    )(Router)
    return router.bind(raw, pools[Role.DECODE], pools.get(Role.PREFILL))


def _router_options(config: ClusterConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": config.router.num_cpus}
    if config.router.node_resource is not None:
        options["resources"] = {config.router.node_resource: 1}
    return options


def _pool(config: ClusterConfig, role: Role) -> Any:
    pool = config.pool(role)
    options: dict[str, Any] = {
        "name": DEPLOYMENTS[role],
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": pool.drain_s,
        "max_surge_percent": pool.surge_percent,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 2,
        "health_check_timeout_s": 30,
        "request_router_config": RequestRouterConfig(request_router_class=PinnedRequestRouter),  # type: ignore[arg-type]
        **_size(config, role, pool.replicas.start),
        **ray_options(config, role),
    }
    return serve.deployment(**options)(WORKERS[role])


def _size(config: ClusterConfig, role: Role | None, replicas: int) -> dict[str, Any]:
    """A fixed number of replicas, or bounds within which the application's policy decides."""
    scaling = deployment_autoscaling(config, role)
    if scaling is None:
        return {"num_replicas": replicas}
    with warnings.catch_warnings():
        # `metrics_interval_s` is announced to go, but so far nothing else sets how often replicas push.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {"autoscaling_config": AutoscalingConfig(**scaling)}


def ray_options(config: ClusterConfig, role: Role) -> dict[str, Any]:
    """What one replica asks of Ray, as options of its deployment (see cluster/layout.py)."""
    on_cpu = config.engine.kind == "simulated" or runs_on_cpu(config)
    layout = replica_layout(config, role, on_cpu=on_cpu)
    asked = dict(layout.actor_resources)
    actor: dict[str, Any] = {"num_cpus": asked.pop("CPU", 0.0)}
    if gpus := asked.pop("GPU", 0.0):
        actor["num_gpus"] = gpus
    if asked:
        actor["resources"] = asked
    options: dict[str, Any] = {"ray_actor_options": actor}
    if layout.accelerators > 1:
        options["placement_group_bundles"] = [dict(bundle) for bundle in layout.bundles]
        options["placement_group_strategy"] = layout.strategy
    return options
