"""Disruption budgets: a form that the eviction API can compute, for every Ray pod, and never a whole pool at once."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.kubernetes.manifests import Finding, Manifest, of_kind, pods, selects, where
from cluster.kubernetes.rules.agreement import budgets


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    ray = [pod for pod in pods(manifests) if pod.group is not None]
    expected = budgets(manifests)
    covered: dict[str, str] = {}
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        spec, at = budget.get("spec") or {}, where(budget)
        if "maxUnavailable" in spec:
            yield Finding(
                at, "maxUnavailable needs an owner with a scale subresource, which Ray pods lack: use minAvailable"
            )
            continue
        least = spec.get("minAvailable")
        if not isinstance(least, int) or isinstance(least, bool):
            yield Finding(
                at, f"minAvailable {least!r} must be a whole number: Ray pods have no scale to take a share of"
            )
            continue
        matched = [pod for pod in ray if selects(spec.get("selector"), pod.labels)]
        if not matched:
            yield Finding(at, "selects no pod")
        for pod in matched:
            name = str(pod.group)
            if name in covered:
                yield Finding(
                    at, f"selects {name} pods as {covered[name]} does; eviction refuses a pod with two budgets"
                )
            covered[name] = at
            if name in expected and least != expected[name]:
                yield Finding(at, f"minAvailable {least} is not {expected[name]}: one pod at a time, never the last")
    for pod in ray:
        if pod.group not in covered:
            yield Finding(pod.where, "no PodDisruptionBudget selects its pods: a node drain could take all at once")
