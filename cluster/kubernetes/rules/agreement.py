"""The RayService against the ClusterConfig inside its own `serveConfigV2`: nothing may say two things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import yaml

from cluster.config import ClusterConfig, parse
from cluster.errors import ConfigError
from cluster.kubernetes.groups import MARGIN_S, Group, deletion_delay_s, environment, groups
from cluster.kubernetes.manifests import Finding, Manifest, Pod, of_kind, quantity, ray_pods, where
from cluster.kubernetes.render import GPU_RESOURCE, NODE_DRAIN_ENV
from cluster.kubernetes.rules.monitoring import TARGET_RECORD, expressions
from cluster.kubernetes.serve_config import serve_config


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    for service in of_kind(manifests, "RayService"):
        at = f"{where(service)} serveConfigV2"
        try:
            serve = _serve(service)
            config = parse(serve["applications"][0]["args"]["config"])
            expected = groups(config)
        except (KeyError, IndexError, TypeError):
            yield Finding(at, "holds no applications[0].args.config; make it with `pdserve k8s render`")
            continue
        except yaml.YAMLError:
            yield Finding(at, "is not valid YAML; make it with `pdserve k8s render`")
            continue
        except ConfigError as e:
            yield Finding(at, str(e))
            continue
        head, *workers = ray_pods(service)
        yield from _serve_keys(at, serve, serve_config(config))
        yield from _proxies(serve, [head, *workers])
        yield from _groups(service, expected, workers)
        yield from _deletion(service, config)
        for pod in [head, *workers]:
            yield from _environment(pod, environment(config))
        for pod in workers:
            if pod.group in expected:
                group = expected[pod.group]
                yield from _shutdown(pod, group)
                yield from _hardware(pod, group)
        yield from _keys_file(config, workers)
        yield from _target(manifests, config)


def budgets(manifests: list[Manifest]) -> dict[str, int]:
    """`minAvailable` that each group's disruption budget must have; empty where no config can be read."""
    for service in of_kind(manifests, "RayService"):
        try:
            config = parse(_serve(service)["applications"][0]["args"]["config"])
            return {name: group.min_available for name, group in groups(config).items()}
        except (KeyError, IndexError, TypeError, yaml.YAMLError, ConfigError):
            return {}
    return {}


def _serve(service: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return found


def _serve_keys(at: str, found: Any, expected: Any, path: str = "") -> Iterator[Finding]:
    """Ray reads past a key that it does not know, so a slip there is silent: compare with what render makes."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in found.keys() - expected.keys():
            yield Finding(at, f"{path}{key} is not a key that pdserve writes; Ray would ignore a misspelt one silently")
        for key in expected:
            if key not in found:
                yield Finding(at, f"{path}{key} is missing; make it with `pdserve k8s render`")
            else:
                yield from _serve_keys(at, found[key], expected[key], f"{path}{key}.")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield Finding(at, f"{path[:-1]} has {len(found)} entries, expected {len(expected)}")
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _serve_keys(at, one, other, f"{path[:-1]}[{index}].")
    elif found != expected:
        yield Finding(at, f"{path[:-1]} is {found!r}, expected {expected!r}")


def _proxies(serve: dict[str, Any], found: list[Pod]) -> Iterator[Finding]:
    port = (serve.get("http_options") or {}).get("port")
    for pod in found:
        declared = pod.ports().get("serve")
        if declared is not None and declared != port:
            yield Finding(pod.where, f"port serve is {declared}, the proxies listen on {port} (http_options.port)")
        if pod.group == "head":
            continue
        probe = (pod.ray.get("readinessProbe") or {}).get("httpGet") or {}
        asked = pod.ports().get(str(probe.get("port")), probe.get("port"))
        if asked != port or probe.get("path") != "/-/healthz":
            yield Finding(
                pod.where,
                f"readinessProbe must ask the proxy (/-/healthz on {port}): clients are sent to every ready worker",
            )
        if pod.ray.get("livenessProbe", {}).get("httpGet", {}).get("path") == "/-/healthz":
            yield Finding(pod.where, "livenessProbe asks the proxy: a pod without a replica would be killed for ever")


def _groups(service: Manifest, expected: dict[str, Group], workers: list[Pod]) -> Iterator[Finding]:
    present = {str(pod.group) for pod in workers}
    for name in expected.keys() - present:
        yield Finding(where(service), f"has no worker group {name}; its replicas would be pending for ever")
    for name in sorted(present - expected.keys()):
        yield Finding(where(service), f"worker group {name} belongs to no deployment of the config")
    for pod in workers:
        group, spec = expected.get(str(pod.group)), pod.group_spec or {}
        if group is None:
            continue
        for key, value in (("minReplicas", group.pods_min), ("maxReplicas", group.pods_max)):
            if spec.get(key) != value:
                yield Finding(pod.where, f"{key} {spec.get(key)} is not the {value} that the config asks for")
        if (spec.get("resources") or {}) != dict(group.resources):
            yield Finding(pod.where, f"resources {spec.get('resources')} are not the config's {dict(group.resources)}")
        if pod.labels.get("pdserve.io/role") != group.name:
            yield Finding(pod.where, f"label pdserve.io/role is {pod.labels.get('pdserve.io/role')}, not {group.name}")


def _deletion(service: Manifest, config: ClusterConfig) -> Iterator[Finding]:
    delay = service["spec"].get("rayClusterDeletionDelaySeconds", 60)
    if delay < deletion_delay_s(config):
        yield Finding(
            where(service),
            f"rayClusterDeletionDelaySeconds {delay} is below {deletion_delay_s(config)}: an upgrade would cut streams",
        )


def _environment(pod: Pod, expected: dict[str, str]) -> Iterator[Finding]:
    found = {variable["name"]: variable.get("value") for variable in pod.ray.get("env", [])}
    for name, value in expected.items():
        if found.get(name) != value:
            yield Finding(pod.where, f"env {name} is {found.get(name)}, expected {value}; render again")


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shutdown(pod: Pod, group: Group) -> Iterator[Finding]:
    hook = ((pod.ray.get("lifecycle") or {}).get("preStop") or {}).get("sleep") or {}
    pre_stop = hook.get("seconds")
    if pre_stop is None:
        yield Finding(pod.where, "lifecycle.preStop.sleep is missing: new requests would reach a closing pod")
        pre_stop = 0
    drain = next((v.get("value") for v in pod.ray.get("env", []) if v["name"] == NODE_DRAIN_ENV), None)
    node_drain = _number(drain)
    if node_drain is None:
        yield Finding(
            pod.where, f"env {NODE_DRAIN_ENV} is missing: Ray would drain for 30 s, work may take {group.drain_s:g}"
        )
        return
    if node_drain < group.node_drain_s:
        yield Finding(
            pod.where,
            f"env {NODE_DRAIN_ENV} {node_drain:g} is below drain_s {group.drain_s:g} + start {group.start_s:g}:"
            " a replica would stop before its replacement serves",
        )
    grace = pod.spec.get("terminationGracePeriodSeconds", 30)
    if grace < pre_stop + node_drain + MARGIN_S:
        yield Finding(
            pod.where,
            f"terminationGracePeriodSeconds {grace} is below preStop {pre_stop} + node drain {node_drain:g}"
            f" + margin {MARGIN_S}: Kubernetes would cut streams",
        )


def _hardware(pod: Pod, group: Group) -> Iterator[Finding]:
    limits = (pod.ray.get("resources") or {}).get("limits") or {}
    gpus = int(quantity(limits.get(GPU_RESOURCE, 0)))
    if gpus != group.gpus:
        yield Finding(pod.where, f"limits {GPU_RESOURCE} is {gpus}, the config's layout needs {group.gpus} in one pod")
    chosen = " ".join(str(v) for v in (pod.spec.get("nodeSelector") or {}).values())
    if group.gpus and group.accelerator is not None and group.accelerator not in chosen:
        yield Finding(
            pod.where,
            f"nodeSelector ({chosen or 'none'}) does not choose {group.accelerator}, the pool's accelerator",
        )
    tolerated = {t.get("key") for t in pod.spec.get("tolerations", [])}
    if group.gpus and GPU_RESOURCE not in tolerated:
        yield Finding(pod.where, f"does not tolerate {GPU_RESOURCE}: GPU machines are usually tainted with it")


def _keys_file(config: ClusterConfig, workers: list[Pod]) -> Iterator[Finding]:
    path = config.router.tenants.api_keys_file
    if path is None:
        return
    for pod in workers:
        if pod.group == "router":
            mounts = [PurePosixPath(m["mountPath"]) for m in pod.ray.get("volumeMounts", [])]
            if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
                yield Finding(pod.where, f"router.tenants.api_keys_file {path} is in no mounted volume")


def _target(manifests: list[Manifest], config: ClusterConfig) -> Iterator[Finding]:
    for rules in of_kind(manifests, "PrometheusRule"):
        for name, expression in expressions(rules):
            if name == TARGET_RECORD and expression != f"vector({config.slo.attainment:g})":
                yield Finding(
                    where(rules), f"{name} is {expression}, the config's slo.attainment is {config.slo.attainment:g}"
                )
