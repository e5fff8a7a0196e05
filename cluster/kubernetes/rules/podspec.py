"""Pod templates: what the API server accepts and the kubelet, an admission policy or an engine then refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cluster.kubernetes.manifests import Finding, Manifest, Pod, name_of, pods, quantity

_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    for pod in pods(manifests):
        if not pod.spec.get("containers"):
            yield Finding(pod.where, "has no container")
            continue
        yield from _volumes(pod)
        yield from _pod_security(pod)
        for container in pod.containers:
            at = f"{pod.where} container {container.get('name')}"
            yield from _image(at, container)
            yield from _ports(at, container)
            yield from _probes(at, container)
            yield from _env(at, container)
            yield from _security(at, pod, container)
            yield from _resources(at, container)
        if pod.group is not None:
            yield from _shared_memory(pod)


def _volumes(pod: Pod) -> Iterator[Finding]:
    claimed = [name_of(claim) for claim in (pod.owner.get("spec") or {}).get("volumeClaimTemplates", [])]
    volumes = [*(str(volume["name"]) for volume in pod.spec.get("volumes", [])), *claimed]
    for name in {name for name in volumes if volumes.count(name) > 1}:
        yield Finding(pod.where, f"volume {name} is declared twice")
    mounted = set()
    for container in pod.containers:
        paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        for path in {path for path in paths if paths.count(path) > 1}:
            yield Finding(pod.where, f"container {container.get('name')} mounts two volumes at {path}")
        for mount in container.get("volumeMounts", []):
            mounted.add(mount["name"])
            if mount["name"] not in volumes:
                yield Finding(pod.where, f"mount {mount['mountPath']} names volume {mount['name']}, which is not there")
    for name in volumes:
        if name not in mounted:
            yield Finding(pod.where, f"volume {name} is mounted nowhere")
    for volume in pod.spec.get("volumes", []):
        if "hostPath" in volume:
            yield Finding(pod.where, f"volume {volume['name']} is a hostPath: the pod could read the machine's files")


def _pod_security(pod: Pod) -> Iterator[Finding]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(key):
            yield Finding(pod.where, f"{key} is on; the pod shares it with the machine: remove it")


def _image(at: str, container: Manifest) -> Iterator[Finding]:
    image = str(container.get("image", ""))
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" in image:
        return
    if not tag:
        yield Finding(at, f"image {image!r} has no tag; pin one")
    elif tag == "latest":
        yield Finding(at, f"image {image} is `latest`: two pods may run different code; pin a version")


def _ports(at: str, container: Manifest) -> Iterator[Finding]:
    names: set[str] = set()
    numbers: set[tuple[int, str]] = set()
    for port in container.get("ports", []):
        number, name, protocol = port["containerPort"], port.get("name"), port.get("protocol", "TCP")
        if not isinstance(number, int) or not 1 <= number <= 65535:
            yield Finding(at, f"containerPort {number!r} is outside 1..65535")
        if (number, protocol) in numbers:
            yield Finding(at, f"containerPort {number} is declared twice")
        numbers.add((number, protocol))
        if name is not None:
            if not _PORT_NAME.fullmatch(name) or "--" in name:
                yield Finding(at, f"port name {name!r}: at most 15 of a-z, 0-9 and -, with a letter")
            if name in names:
                yield Finding(at, f"port name {name} is used twice")
            names.add(name)


def _probes(at: str, container: Manifest) -> Iterator[Finding]:
    names = {port.get("name") for port in container.get("ports", [])}
    numbers = {port["containerPort"] for port in container.get("ports", [])}
    handlers: list[tuple[str, dict[str, Any]]] = [(kind, container[kind]) for kind in _PROBES if kind in container]
    for kind, probe in handlers:
        action = probe.get("httpGet") or probe.get("tcpSocket")
        if action is not None and action.get("port") not in names | numbers:
            yield Finding(at, f"{kind} asks port {action.get('port')}, which the container does not declare")
        if probe.get("timeoutSeconds", 1) > 2 * probe.get("periodSeconds", 10):
            yield Finding(at, f"{kind}: timeoutSeconds {probe['timeoutSeconds']} is above twice its period")
        if kind == "livenessProbe" and probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10) < 60:
            yield Finding(at, f"{kind} kills after less than 60 s: a busy engine would be restarted with its KV")


def _env(at: str, container: Manifest) -> Iterator[Finding]:
    names = [variable["name"] for variable in container.get("env", [])]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding(at, f"env {name} is set twice; the last one would win")
    for variable in container.get("env", []):
        if "value" in variable and not isinstance(variable["value"], str):
            yield Finding(at, f"env {variable['name']} is {variable['value']!r}; quote it, values are text")
        secret = re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", str(variable["name"]))
        if secret and variable.get("value"):
            yield Finding(at, f"env {variable['name']} holds a secret in the manifest; use secretKeyRef")


def _security(at: str, pod: Pod, container: Manifest) -> Iterator[Finding]:
    yield from container_security(at, pod.spec.get("securityContext") or {}, container.get("securityContext") or {})


def container_security(at: str, pod: Manifest, own: Manifest) -> Iterator[Finding]:
    """The parts of the `restricted` Pod Security Standard, as one line each."""
    if own.get("privileged"):
        yield Finding(at, "is privileged: remove securityContext.privileged")
    if own.get("allowPrivilegeEscalation") is not False:
        yield Finding(at, "securityContext.allowPrivilegeEscalation must be false")
    if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield Finding(at, "securityContext.runAsNonRoot must be true")
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield Finding(at, "securityContext.runAsUser is 0, which is root")
    if "ALL" not in (own.get("capabilities") or {}).get("drop", []):
        yield Finding(at, "securityContext.capabilities.drop must hold ALL")
    added = (own.get("capabilities") or {}).get("add") or []
    if added:
        yield Finding(at, f"securityContext.capabilities.add {added} is not allowed in a restricted namespace")


def _resources(at: str, container: Manifest) -> Iterator[Finding]:
    resources = container.get("resources") or {}
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for name in ("cpu", "memory"):
        if name not in requests:
            yield Finding(at, f"resources.requests.{name} is missing")
    if "memory" not in limits:
        yield Finding(at, "resources.limits.memory is missing: one pod could take the machine's")
    for name in sorted(requests.keys() & limits.keys()):
        if quantity(requests[name]) > quantity(limits[name]):
            yield Finding(at, f"requests {name} {requests[name]} is above its limit {limits[name]}")
    for name in limits:
        if "/" in name and name in requests and quantity(requests[name]) != quantity(limits[name]):
            yield Finding(at, f"{name}: request {requests[name]} and limit {limits[name]} must be equal")


def _shared_memory(pod: Pod) -> Iterator[Finding]:
    mounts = {m["mountPath"]: m["name"] for m in pod.ray.get("volumeMounts", [])}
    name = mounts.get("/dev/shm")
    volume = next((v for v in pod.spec.get("volumes", []) if v["name"] == name), None)
    empty = (volume or {}).get("emptyDir") or {}
    if empty.get("medium") != "Memory" or "sizeLimit" not in empty:
        yield Finding(pod.where, "/dev/shm needs an emptyDir with medium Memory and a sizeLimit; the default is 64 MiB")
        return
    size = quantity(empty["sizeLimit"])
    limit = ((pod.ray.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is not None and size >= quantity(limit):
        yield Finding(pod.where, f"/dev/shm of {empty['sizeLimit']} counts as memory and the limit is {limit}")
    store = ((pod.group_spec or {}).get("rayStartParams") or {}).get("object-store-memory")
    if store is None:
        yield Finding(pod.where, "rayStartParams.object-store-memory is missing: Ray would take 30% of the memory")
    elif quantity(store) > size:
        yield Finding(pod.where, f"object-store-memory {store} does not fit /dev/shm of {empty['sizeLimit']}")
