"""NetworkPolicies: evaluated for the connections that the cluster needs, and for those that nobody should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config import KvTransferConfig
from cluster.kubernetes.manifests import Finding, Manifest, Pod, of_kind, pods, selects, where

# Ports that Ray pods open to each other: fixed ones, and one out of each range that processes choose from.
INTERNAL_PORTS = {
    "Ray's control store": 6379,
    "Ray's workers": 10002,
    "the proxies": 8000,
    "NIXL's side channels and KV events": KvTransferConfig().port_min,
    "UCX's data connections": 40000,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another end of a connection: labels of its namespace, of its pod, or an address outside."""

    namespace: Mapping[str, str]
    pod: Mapping[str, str]
    own_namespace: bool = False


CLIENT = Peer({"kubernetes.io/metadata.name": "gateway", "pdserve.io/client": "true"}, {})
STRANGER = Peer({"kubernetes.io/metadata.name": "someone-else"}, {"app": "anything"})
PROMETHEUS = Peer({"kubernetes.io/metadata.name": "monitoring"}, {"app.kubernetes.io/name": "prometheus"})
OPERATOR = Peer({"kubernetes.io/metadata.name": "kuberay"}, {"app.kubernetes.io/name": "kuberay-operator"})
DNS = Peer({"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"})


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    ray = [pod for pod in pods(manifests) if pod.group is not None]
    yield from _services(manifests)
    if not ray:
        return
    policies = of_kind(manifests, "NetworkPolicy")
    every = pods(manifests)
    for policy in policies:
        if not any(selects(policy["spec"].get("podSelector"), pod.labels) for pod in every):
            yield Finding(where(policy), "selects no pod")
    for pod in ray:
        for direction in ("Ingress", "Egress"):
            if not _selecting(policies, pod, direction):
                yield Finding(pod.where, f"no NetworkPolicy restricts its {direction.lower()}")
        serve = pod.ports().get("serve", 0)
        yield from _internal(policies, ray, pod)
        if pod.group != "head" and not _allowed(policies, pod, CLIENT, serve):
            yield Finding(pod.where, f"clients (namespaces with pdserve.io/client=true) cannot reach port {serve}")
        if not _allowed(policies, pod, PROMETHEUS, pod.ports().get("metrics", 0)):
            yield Finding(
                pod.where, f"Prometheus (namespace monitoring) cannot reach port {pod.ports().get('metrics')}"
            )
        if pod.group == "head" and not _allowed(policies, pod, OPERATOR, 8265):
            yield Finding(pod.where, "the KubeRay operator cannot reach port 8265, where it deploys the Serve config")
        for port in sorted({*pod.ports().values(), *INTERNAL_PORTS.values()}):
            if _selecting(policies, pod, "Ingress") and _allowed(policies, pod, STRANGER, port):
                yield Finding(pod.where, f"any pod of any namespace can reach port {port}")
        if not _allowed(policies, pod, DNS, 53, direction="Egress"):
            yield Finding(pod.where, "cannot reach DNS (kube-system, port 53)")


def _services(manifests: list[Manifest]) -> Iterator[Finding]:
    every = pods(manifests)
    for service in of_kind(manifests, "Service"):
        selector = service["spec"].get("selector")
        if selector is None:
            continue
        matched = [pod for pod in every if selects({"matchLabels": selector}, pod.labels)]
        if not matched:
            yield Finding(where(service), "selects no pod")
        for port in service["spec"].get("ports", []):
            target = port.get("targetPort", port["port"])
            for pod in matched:
                known = pod.ports()
                if target not in known.values() and target not in known:
                    yield Finding(where(service), f"targetPort {target} is no port of {pod.where}")


def _internal(policies: list[Manifest], ray: list[Pod], pod: Pod) -> Iterator[Finding]:
    for other in ray:
        peer = Peer({}, other.labels, own_namespace=True)
        for what, port in INTERNAL_PORTS.items():
            if not _allowed(policies, pod, peer, port):
                yield Finding(pod.where, f"{other.group} pods cannot reach it on port {port} ({what})")
                return
            if not _allowed(policies, pod, peer, port, direction="Egress"):
                yield Finding(pod.where, f"cannot reach {other.group} pods on port {port} ({what})")
                return


def _selecting(policies: list[Manifest], pod: Pod, direction: str) -> list[Manifest]:
    return [
        policy
        for policy in policies
        if direction in policy["spec"].get("policyTypes", ["Ingress"])
        and selects(policy["spec"].get("podSelector"), pod.labels)
    ]


def _allowed(policies: list[Manifest], pod: Pod, peer: Peer, port: int, direction: str = "Ingress") -> bool:
    """Kubernetes' own rule: without a policy everything, else what any of them allows."""
    chosen = _selecting(policies, pod, direction)
    if not chosen:
        return True
    side = "from" if direction == "Ingress" else "to"
    return any(
        _peer_matches(rule.get(side), peer) and _port_matches(rule.get("ports"), port, pod)
        for policy in chosen
        for rule in policy["spec"].get(direction.lower()) or []
    )


def _peer_matches(peers: list[dict[str, Any]] | None, peer: Peer) -> bool:
    if not peers:
        return True
    for entry in peers:
        if "ipBlock" in entry:
            continue
        if "namespaceSelector" in entry:
            if not selects(entry["namespaceSelector"], peer.namespace) or peer.own_namespace:
                continue
        elif not peer.own_namespace:
            continue
        if "podSelector" not in entry or selects(entry["podSelector"], peer.pod):
            return True
    return False


def _port_matches(ports: list[dict[str, Any]] | None, port: int, pod: Pod) -> bool:
    if not ports:
        return True
    for entry in ports:
        first = entry.get("port", port)
        number = pod.ports().get(first, 0) if isinstance(first, str) else first
        if number <= port <= entry.get("endPort", number):
            return True
    return False
