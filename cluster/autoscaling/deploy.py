"""Deploys the application with its application-level policy: only Serve's config schema can carry one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import PdserveError

IMPORT_PATH = "cluster.app:build"


def deploy_with_policy(config: ClusterConfig, policy: dict[str, Any], timeout_s: float) -> None:
    """Blocks until the application runs. Serve must have been started.

    Args:
        policy: from `serve_policy.application_policy`.

    Raises:
        PdserveError: the deployment failed or took longer than `timeout_s`; the message is Serve's.
    """
    deploy(config, policy)
    wait_until_running(config.name, timeout_s)


def deploy(config: ClusterConfig, policy: dict[str, Any] | None = None, sizes: Mapping[str, int] | None = None) -> None:
    """Tell Serve what is wanted; it goes there by itself.

    With the same `config`, other `sizes` only start or stop replicas; another `config` replaces every one of them.

    Args:
        sizes: replicas by deployment, instead of what `config` says.

    Raises:
        PdserveError: Serve is not running.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application: dict[str, Any] = {
        "name": config.name,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": config.model_dump(mode="json")},
    }
    if policy is not None:
        application["autoscaling_policy"] = policy
    if sizes:
        application["deployments"] = [{"name": name, "num_replicas": count} for name, count in sizes.items()]
    client = _get_global_client()
    if client is None:
        raise PdserveError("Serve is not running")
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def wait_until_running(name: str, timeout_s: float) -> None:
    """Until Serve calls the application running: every replica new, none draining.

    Raises:
        PdserveError: the deployment failed or took longer than `timeout_s`; the message is Serve's.
    """
    from ray import serve

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = serve.status().applications.get(name)
        state = "" if status is None else str(status.status)
        if state.endswith("RUNNING"):
            return
        if state.endswith(("FAILED", "UNHEALTHY")) and status is not None:
            raise PdserveError(status.message or state)
        time.sleep(0.2)
    raise PdserveError(f"the application was not running after {timeout_s:g} s")
