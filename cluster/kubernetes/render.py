"""From a ClusterConfig to a kustomize Component that sets, in `k8s/base`, every value the config decides.

The Component holds JSON patches. Each begins with `test` operations, so that a base whose groups or variables
stand elsewhere is refused by kustomize instead of patched in the wrong place.
"""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig
from cluster.kubernetes.groups import ROUTER, Group, deletion_delay_s, environment, groups
from cluster.kubernetes.serve_config import serve_config_text, to_yaml
from cluster.messages import Role

BASE_GROUPS = (ROUTER, Role.PREFILL.value, Role.DECODE.value)
NODE_DRAIN_ENV = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
GPU_RESOURCE = "nvidia.com/gpu"

_HEADER = "# Made by `pdserve k8s render {source}`. Edit that file and render again; a test compares the two.\n"

Operation = dict[str, Any]


def component(config: ClusterConfig, source: str) -> str:
    """The text of `kustomization.yaml`; `source` is the config's path, named in the first line."""
    found = groups(config)
    patches = [_patch({"kind": "RayService"}, _ray_service(config, found))]
    for name in BASE_GROUPS:
        budget = {"kind": "PodDisruptionBudget", "name": f"pdserve-{name}"}
        if name in found:
            patches.append(_patch(budget, [_replace("/spec/minAvailable", found[name].min_available)]))
        else:
            patches.append({"target": budget, "patch": to_yaml(_delete_budget(name))})
    body = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "patches": patches}
    return _HEADER.format(source=source) + to_yaml(body)


def _patch(target: dict[str, str], operations: list[Operation]) -> dict[str, Any]:
    return {"target": target, "patch": to_yaml(operations)}


def _delete_budget(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"pdserve-{name}"},
        "$patch": "delete",
    }


def _ray_service(config: ClusterConfig, found: dict[str, Group]) -> list[Operation]:
    operations = [
        _add("/spec/serveConfigV2", serve_config_text(config)),
        _replace("/spec/rayClusterDeletionDelaySeconds", deletion_delay_s(config)),
        *_environment("/spec/rayClusterConfig/headGroupSpec", config),
    ]
    for index, name in enumerate(BASE_GROUPS):
        at = f"/spec/rayClusterConfig/workerGroupSpecs/{index}"
        operations.append({"op": "test", "path": f"{at}/groupName", "value": name})
        if name in found:
            operations += _group(at, found[name], config)
    # Removed last, and from the end, so that the positions above hold.
    for index, name in reversed(list(enumerate(BASE_GROUPS))):
        if name not in found:
            operations.append({"op": "remove", "path": f"/spec/rayClusterConfig/workerGroupSpecs/{index}"})
    return operations


def _group(at: str, group: Group, config: ClusterConfig) -> list[Operation]:
    env = f"{at}/template/spec/containers/0/env"
    operations = [
        _replace(f"{at}/replicas", group.pods_min),
        _replace(f"{at}/minReplicas", group.pods_min),
        _replace(f"{at}/maxReplicas", group.pods_max),
        _replace(f"{at}/resources", dict(group.resources)),
        _replace(f"{at}/template/spec/terminationGracePeriodSeconds", group.grace_s),
        {"op": "test", "path": f"{env}/0/name", "value": NODE_DRAIN_ENV},
        _replace(f"{env}/0/value", str(group.node_drain_s)),
        *_environment(at, config),
    ]
    if group.gpus:
        limits = f"{at}/template/spec/containers/0/resources/limits"
        operations.append(_add(f"{limits}/{GPU_RESOURCE.replace('/', '~1')}", str(group.gpus)))
    return operations


def _environment(at: str, config: ClusterConfig) -> list[Operation]:
    env = f"{at}/template/spec/containers/0/env"
    return [_add(f"{env}/-", {"name": name, "value": value}) for name, value in environment(config).items()]


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _replace(path: str, value: Any) -> Operation:
    return {"op": "replace", "path": path, "value": value}
