"""The RayService: what the CRD's schema lets through and KubeRay, Ray or the first request then refuses."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from cluster.kubernetes.manifests import Finding, Manifest, Pod, of_kind, ray_pods, where
from cluster.kubernetes.rules.podspec import container_security

UPGRADE_TYPES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
_REDIS_ENV = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")
_STANDARD_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    for service in of_kind(manifests, "RayService"):
        spec: dict[str, Any] = service.get("spec") or {}
        cluster: dict[str, Any] = spec.get("rayClusterConfig") or {}
        head, *workers = ray_pods(service)
        yield from _upgrade(where(service), spec)
        yield from _versions(service, cluster, [head, *workers])
        yield from _head(head, cluster)
        yield from _autoscaler(where(service), cluster)
        yield from _fault_tolerance(service, cluster, head)
        names = [pod.group for pod in workers]
        for name in sorted({str(n) for n in names if names.count(n) > 1}):
            yield Finding(where(service), f"two worker groups are named {name}")
        for pod in [head, *workers]:
            yield from _start_params(pod)
            if (pod.spec.get("restartPolicy") or "Never") != "Never":
                yield Finding(pod.where, f"restartPolicy {pod.spec['restartPolicy']}: autoscaler v2 needs Never")
        for pod in workers:
            yield from _sizes(pod)


def _upgrade(at: str, spec: dict[str, Any]) -> Iterator[Finding]:
    kind = (spec.get("upgradeStrategy") or {}).get("type")
    if kind is None:
        yield Finding(at, "upgradeStrategy.type is missing; write NewCluster or None, so that the choice is seen")
    elif kind not in UPGRADE_TYPES:
        yield Finding(at, f"upgradeStrategy.type {kind!r} is refused by KubeRay; one of {', '.join(UPGRADE_TYPES)}")
    if "upgradeStrategy" in (spec.get("rayClusterConfig") or {}):
        yield Finding(at, "rayClusterConfig.upgradeStrategy is refused inside a RayService; use spec.upgradeStrategy")
    if not spec.get("excludeHeadPodFromServeSvc"):
        yield Finding(
            at, "excludeHeadPodFromServeSvc must be true: client traffic would share the head with Ray's control"
        )


def _versions(service: Manifest, cluster: dict[str, Any], found: list[Pod]) -> Iterator[Finding]:
    version = str(cluster.get("rayVersion", ""))
    installed = importlib.metadata.version("ray")
    if version != installed:
        yield Finding(
            where(service), f"rayVersion {version or '(missing)'} is not the Ray that pdserve pins: {installed}"
        )
    for pod in found:
        tag = str(pod.ray.get("image", "")).rpartition("/")[2].partition(":")[2]
        if f"ray{version}" not in tag.split("-"):
            yield Finding(pod.where, f"image tag {tag!r} does not name rayVersion: expected ...-ray{version}-...")
    tags = {str(pod.ray.get("image")) for pod in found}
    if len(tags) > 1:
        yield Finding(where(service), f"pods run different images ({', '.join(sorted(tags))}); Ray needs one")


def _head(head: Pod, cluster: dict[str, Any]) -> Iterator[Finding]:
    params = (head.group_spec or {}).get("rayStartParams") or {}
    if str(params.get("num-cpus")) != "0":
        yield Finding(
            head.where, f"num-cpus is {params.get('num-cpus', 'missing')}; it must be 0, or replicas land here"
        )
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        yield Finding(head.where, "authOptions.mode must be token: without it whoever reaches the dashboard runs code")
    for name, number in (("gcs-server", 6379), ("dashboard", 8265), ("serve", None), ("metrics", 8080)):
        port = head.ports().get(name)
        if port is None:
            yield Finding(head.where, f"declares no port named {name}; KubeRay builds its Services from these names")
        elif number is not None and port != number:
            yield Finding(head.where, f"port {name} is {port}; Ray listens on {number}")


def _autoscaler(at: str, cluster: dict[str, Any]) -> Iterator[Finding]:
    options = cluster.get("autoscalerOptions") or {}
    if not cluster.get("enableInTreeAutoscaling"):
        yield Finding(at, "enableInTreeAutoscaling must be true: pools could not get pods")
    if options.get("version") != "v2":
        yield Finding(at, f"autoscalerOptions.version is {options.get('version')}; per-group idle timeouts need v2")
    if "securityContext" not in options:
        yield Finding(at, "autoscalerOptions.securityContext is missing: a restricted namespace refuses the head pod")
    else:
        yield from container_security(f"{at} autoscalerOptions", {}, options["securityContext"])


def _fault_tolerance(service: Manifest, cluster: dict[str, Any], head: Pod) -> Iterator[Finding]:
    annotations = (service.get("metadata") or {}).get("annotations") or {}
    options = cluster.get("gcsFaultToleranceOptions")
    env = {variable["name"] for variable in head.ray.get("env", [])}
    for name in _REDIS_ENV:
        if name in env:
            yield Finding(head.where, f"env {name} is refused by KubeRay; use gcsFaultToleranceOptions")
    if options is None:
        return
    if annotations.get("ray.io/ft-enabled"):
        yield Finding(where(service), "annotation ray.io/ft-enabled and gcsFaultToleranceOptions exclude each other")
    if options.get("backend", "redis") == "redis" and not options.get("redisAddress"):
        yield Finding(where(service), "gcsFaultToleranceOptions.redisAddress is missing")
    if "value" in (options.get("redisPassword") or {}):
        yield Finding(where(service), "gcsFaultToleranceOptions.redisPassword.value holds a secret; use valueFrom")


def _start_params(pod: Pod) -> Iterator[Finding]:
    group = pod.group_spec or {}
    params = group.get("rayStartParams") or {}
    for key, value in params.items():
        if not isinstance(value, str):
            yield Finding(pod.where, f"rayStartParams.{key} is {value!r}; quote it, values are text")
    if "labels" in params:
        yield Finding(pod.where, "rayStartParams.labels is refused by KubeRay; use the group's labels")
    if group.get("resources") and any(key in params for key in _STANDARD_PARAMS):
        yield Finding(pod.where, "resources stand in the group and in rayStartParams; KubeRay accepts only one place")
    exported, metrics = params.get("metrics-export-port"), pod.ports().get("metrics")
    if str(exported) != str(metrics):
        yield Finding(pod.where, f"metrics-export-port {exported} is not the port named metrics ({metrics})")
    agent, declared = params.get("dashboard-agent-listen-port", "52365"), pod.ports().get("agent")
    if declared is not None and str(agent) != str(declared):
        yield Finding(pod.where, f"dashboard-agent-listen-port {agent} is not the port named agent ({declared})")


def _sizes(pod: Pod) -> Iterator[Finding]:
    group = pod.group_spec or {}
    least, most, now = group.get("minReplicas"), group.get("maxReplicas"), group.get("replicas")
    if not isinstance(least, int) or not isinstance(most, int):
        yield Finding(pod.where, "minReplicas and maxReplicas must both be set")
        return
    if least < 0:
        yield Finding(pod.where, f"minReplicas {least} is below 0")
    if least > most:
        yield Finding(pod.where, f"minReplicas {least} is above maxReplicas {most}")
    if now is not None and not least <= now <= most:
        yield Finding(pod.where, f"replicas {now} is outside [{least}, {most}]")
    if group.get("suspend"):
        yield Finding(pod.where, "suspend is refused by KubeRay while the autoscaler is on")
    idle = group.get("idleTimeoutSeconds")
    if idle is None or idle < 60:
        yield Finding(pod.where, f"idleTimeoutSeconds is {idle}; below 60 s pods flap between two bursts")
