"""Names, labels, images and objects that may not be there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cluster.kubernetes.manifests import Finding, Manifest, name_of, pods, where

RAY_SERVICE_NAME_MAX = 47  # KubeRay appends 6 characters for the cluster and 10 for its Service; a name ends at 63
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    seen: set[tuple[str, str, str]] = set()
    for manifest in manifests:
        yield from _name(manifest)
        yield from _labels(where(manifest), (manifest.get("metadata") or {}).get("labels") or {})
        namespace = str((manifest.get("metadata") or {}).get("namespace", ""))
        key = (str(manifest.get("kind")), namespace, name_of(manifest))
        if key in seen:
            yield Finding(where(manifest), "appears twice in one namespace; the later one would replace the earlier")
        seen.add(key)
        if manifest.get("kind") == "HorizontalPodAutoscaler":
            yield from _autoscaler(manifest)
    for pod in pods(manifests):
        yield from _labels(pod.where, pod.labels)
        yield from _labels(f"{pod.where} Ray labels", (pod.group_spec or {}).get("labels") or {})


def _name(manifest: Manifest) -> Iterator[Finding]:
    name, at = name_of(manifest), where(manifest)
    if not name:
        yield Finding(at, "metadata.name is missing")
    elif manifest.get("kind") == "RayService":
        if len(name) > RAY_SERVICE_NAME_MAX:
            yield Finding(at, f"name has {len(name)} characters, at most {RAY_SERVICE_NAME_MAX}; KubeRay appends to it")
        if not _DNS_LABEL.fullmatch(name):
            yield Finding(at, f"name {name!r} must start with a letter and hold only a-z, 0-9 and -")
    elif len(name) > 253 or not _DNS_NAME.fullmatch(name):
        yield Finding(at, f"name {name!r} must hold only a-z, 0-9, - and ., at most 253 characters")


def _labels(at: str, labels: Mapping[str, object]) -> Iterator[Finding]:
    for key, value in labels.items():
        prefix, _, bare = key.rpartition("/")
        if (prefix and not _DNS_NAME.fullmatch(prefix)) or not _LABEL_NAME.fullmatch(bare) or len(bare) > 63:
            yield Finding(at, f"label key {key!r} is not valid")
        if not isinstance(value, str):
            yield Finding(at, f"label {key} is {value!r}; quote it, labels are text")
        elif value and (len(value) > 63 or not _LABEL_NAME.fullmatch(value)):
            yield Finding(at, f"label {key} has the value {value!r}: at most 63 of A-Z, a-z, 0-9, -, _ and .")


def _autoscaler(manifest: Manifest) -> Iterator[Finding]:
    target = (manifest.get("spec") or {}).get("scaleTargetRef") or {}
    if str(target.get("apiVersion", "")).startswith("ray.io/") or str(target.get("kind", "")).startswith("Ray"):
        yield Finding(
            where(manifest),
            f"scales {target.get('kind')}; Ray's own autoscaler sizes worker groups and the two would fight: delete it",
        )
