"""Deploys the application with its application-level policy: only Serve's config schema can carry one."""

from __future__ import annotations

import time
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
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": config.name,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": {"config": config.model_dump(mode="json")},
        "autoscaling_policy": policy,
    }
    client = _get_global_client()
    if client is None:
        raise PdserveError("Serve is not running")
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = serve.status().applications.get(config.name)
        state = "" if status is None else str(status.status)
        if state.endswith("RUNNING"):
            return
        if state.endswith(("FAILED", "UNHEALTHY")) and status is not None:
            raise PdserveError(status.message or state)
        time.sleep(0.2)
    raise PdserveError(f"the application was not running after {timeout_s:g} s")
