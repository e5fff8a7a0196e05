"""Everything that would be said of a set of manifests between `kubectl apply` and the first request."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

from cluster.kubernetes.check import check
from cluster.kubernetes.manifests import where

OLDEST, NEWEST = "1.30", "1.37"


def server_mistakes(manifest: dict[str, Any], crds: dict[Any, Any]) -> list[str]:
    """The API servers' view of one object: strict schemas of the oldest and newest version, or its CRD's."""
    custom = crds.get((manifest["apiVersion"], manifest["kind"]))
    if custom is not None:
        return [f"{where(manifest)}: {line}" for line in custom.mistakes(manifest)]
    found = []
    for version in (OLDEST, NEWEST):
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as e:
            path = ".".join(str(part) for part in e.path)
            found.append(f"{where(manifest)}: Kubernetes {version}: {path}: {e.message[:300]}")
        except kubernetes_validate.SchemaNotFoundError as e:
            found.append(f"{where(manifest)}: Kubernetes {version}: unknown kind: {e.message}")
    return found


def mistakes(manifests: list[dict[str, Any]], crds: dict[Any, Any], only: dict[str, Any] | None = None) -> list[str]:
    """Server and rules. With `only`, the server sees that one object: the others are known to be right."""
    seen = manifests if only is None else [only]
    found = [line for manifest in seen for line in server_mistakes(manifest, crds)]
    return found + [str(finding) for finding in check(manifests)]


def patch(value: Any, operations: list[dict[str, Any]]) -> Any:
    """JSON patch (add, replace, remove). A list's place is its number, `-`, or `key=value` of the entry meant."""
    for operation in operations:
        *steps, last = [step.replace("~1", "/") for step in operation["path"].split("/")[1:]]
        parent = value
        for step in steps:
            parent = parent[_place(parent, step)]
        place = _place(parent, last)
        if operation["op"] == "remove":
            del parent[place]
        elif operation["op"] == "add" and isinstance(parent, list):
            parent.insert(len(parent) if last == "-" else place, operation["value"])
        else:
            assert operation["op"] == "add" or isinstance(parent, list) or place in parent, operation
            parent[place] = operation["value"]
    return value


def _place(parent: Any, step: str) -> Any:
    if not isinstance(parent, list):
        return step
    if step == "-" or step.isdigit():
        return len(parent) if step == "-" else int(step)
    key, _, wanted = step.partition("=")
    (index,) = (i for i, entry in enumerate(parent) if str(entry.get(key)) == wanted)
    return index
