"""The Serve config of a cluster: what `serve deploy` reads and what a RayService holds as `serveConfigV2`.

The application builds its deployments from the ClusterConfig in `args`, so this file repeats none of its values.
"""

from __future__ import annotations

from typing import Any

import yaml

from cluster.autoscaling.serve_policy import application_policy
from cluster.config import ClusterConfig

IMPORT_PATH = "cluster.app:build"


def serve_config(config: ClusterConfig) -> dict[str, Any]:
    """A mapping for Ray's `ServeDeploySchema`."""
    application: dict[str, Any] = {
        "name": config.name,
        "import_path": IMPORT_PATH,
        "route_prefix": "/",
        "args": {"config": config.model_dump(mode="json", exclude_unset=True)},
    }
    policy = application_policy(config)
    if policy is not None:
        application["autoscaling_policy"] = policy
    return {
        # KubeRay sends clients to every ready worker pod, so every one of them needs a proxy.
        "proxy_location": "EveryNode",
        "http_options": {"host": config.router.http.host, "port": config.router.http.port},
        "logging_config": {"encoding": "JSON", "log_level": "INFO"},
        "applications": [application],
    }


def serve_config_text(config: ClusterConfig) -> str:
    return to_yaml(serve_config(config))


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, lists indented like the hand-written files."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def to_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
