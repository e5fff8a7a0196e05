"""Scrapes, alert rules and dashboards: that they point at something, and at metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cluster.goodput.catalogue import CATALOGUE
from cluster.kubernetes.manifests import Finding, Manifest, Pod, of_kind, pods, selects, where

_METRIC = re.compile(r"\bpdserve_[a-z0-9_]+")
TARGET_RECORD = "pdserve:attainment:target"
_SEVERITIES = ("page", "ticket")


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    ray = [pod for pod in pods(manifests) if pod.group is not None]
    for monitor in of_kind(manifests, "PodMonitor"):
        if ray:
            yield from _pod_monitor(monitor, ray)
    for rule in of_kind(manifests, "PrometheusRule"):
        yield from _rules(rule)
    for config_map in of_kind(manifests, "ConfigMap"):
        for name, text in (config_map.get("data") or {}).items():
            if name.endswith(".json"):
                yield from dashboard(f"{where(config_map)} {name}", text)


def metrics_of(expression: str) -> set[str]:
    """Series of pdserve that a PromQL expression names; recorded ones (`pdserve:...`) are not among them."""
    return set(_METRIC.findall(expression))


def unknown_metrics(expression: str) -> list[str]:
    known = {series for spec in CATALOGUE.values() for series in spec.series}
    return sorted(metrics_of(expression) - known)


def expressions(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(name, PromQL) of every rule of a PrometheusRule."""
    for group in manifest["spec"].get("groups", []):
        for rule in group.get("rules", []):
            yield str(rule.get("alert", rule.get("record"))), str(rule["expr"])


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board.get("panels", []):
        yield panel
        yield from panels(panel)


def _pod_monitor(monitor: Manifest, ray: list[Pod]) -> Iterator[Finding]:
    spec, at = monitor["spec"], where(monitor)
    matched = [pod for pod in ray if selects(spec.get("selector"), pod.labels)]
    if not matched:
        yield Finding(at, "selects no pod")
    for endpoint in spec.get("podMetricsEndpoints", []):
        for pod in matched:
            if endpoint.get("port") not in pod.ports():
                yield Finding(at, f"scrapes port {endpoint.get('port')}, which {pod.where} does not have")


def _rules(manifest: Manifest) -> Iterator[Finding]:
    at, seen = where(manifest), set()
    for group in manifest["spec"].get("groups", []):
        for rule in group.get("rules", []):
            name = str(rule.get("alert", rule.get("record")))
            for metric in unknown_metrics(str(rule["expr"])):
                yield Finding(at, f"{name} uses {metric}, which pdserve does not export")
            if "alert" not in rule:
                continue
            if name in seen:
                yield Finding(at, f"alert {name} is defined twice")
            seen.add(name)
            if "for" not in rule:
                yield Finding(at, f"alert {name} has no `for`: one bad scrape would page")
            severity = (rule.get("labels") or {}).get("severity")
            if severity not in _SEVERITIES:
                yield Finding(at, f"alert {name} has severity {severity!r}; one of {', '.join(_SEVERITIES)}")
            for key in ("summary", "runbook"):
                if not (rule.get("annotations") or {}).get(key):
                    yield Finding(at, f"alert {name} has no annotation {key}")


def dashboard(at: str, text: str) -> Iterator[Finding]:
    """Mistakes of a Grafana dashboard."""
    try:
        board = json.loads(text)
    except ValueError as e:
        yield Finding(at, f"is not JSON ({e})")
        return
    ids: set[int] = set()
    for panel in panels(board):
        if panel["id"] in ids:
            yield Finding(at, f"panel id {panel['id']} is used twice")
        ids.add(panel["id"])
        for target in panel.get("targets", []):
            for metric in unknown_metrics(target["expr"]):
                yield Finding(at, f"panel {panel['title']!r} uses {metric}, which pdserve does not export")
        if panel["type"] != "row" and not panel.get("targets"):
            yield Finding(at, f"panel {panel['title']!r} shows nothing: it has no query")
