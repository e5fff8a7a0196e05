"""Kubernetes objects as plain mappings, and the few questions that every rule asks of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from cluster.errors import UserError

Manifest = dict[str, Any]

_SUFFIXES = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: where it is, and what is wrong with it, bound and remedy included."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template and the object that it belongs to. `group` is the Ray group's name ('head' for the head)."""

    where: str
    owner: Manifest
    template: Manifest
    group: str | None = None
    group_spec: Manifest | None = None

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.template.get("metadata") or {}).get("labels") or {})

    @property
    def spec(self) -> Manifest:
        return dict(self.template.get("spec") or {})

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", []), *self.spec.get("containers", [])]

    @property
    def ray(self) -> Manifest:
        """Ray's container: always the first."""
        containers = self.spec.get("containers") or [{}]
        return dict(containers[0])

    def ports(self) -> dict[str, int]:
        """Container ports by name; unnamed ones by their number as text."""
        return {
            str(port.get("name", port["containerPort"])): int(port["containerPort"])
            for container in self.containers
            for port in container.get("ports", [])
        }


def load(text: str, source: str = "manifests") -> list[Manifest]:
    """Objects of a YAML stream, Lists unpacked.

    Raises:
        UserError: not YAML, or a document that is no Kubernetes object.
    """
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as e:
        raise UserError(f"{source}: not valid YAML ({str(e).splitlines()[0]})") from e
    found: list[Manifest] = []
    for document in documents:
        if not isinstance(document, dict) or "kind" not in document or "apiVersion" not in document:
            raise UserError(f"{source}: holds a document without apiVersion and kind")
        found += document["items"] if document["kind"] == "List" else [document]
    return found


def name_of(manifest: Manifest) -> str:
    return str((manifest.get("metadata") or {}).get("name", ""))


def where(manifest: Manifest) -> str:
    return f"{manifest.get('kind', '?')}/{name_of(manifest)}"


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [m for m in manifests if m.get("kind") in kinds]


def ray_pods(service: Manifest) -> Iterator[Pod]:
    """Head and worker templates of one RayService."""
    cluster = (service.get("spec") or {}).get("rayClusterConfig") or {}
    head = cluster.get("headGroupSpec") or {}
    yield Pod(f"{where(service)} head", service, head.get("template") or {}, "head", head)
    for group in cluster.get("workerGroupSpecs") or []:
        name = str(group.get("groupName"))
        yield Pod(f"{where(service)} group {name}", service, group.get("template") or {}, name, group)


def pods(manifests: list[Manifest]) -> list[Pod]:
    """Every pod template of every object."""
    found: list[Pod] = []
    for manifest in manifests:
        if manifest.get("kind") == "RayService":
            found += ray_pods(manifest)
        elif "template" in (manifest.get("spec") or {}):
            found.append(Pod(where(manifest), manifest, manifest["spec"]["template"]))
    return found


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector matches. An absent one matches nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for wanted in selector.get("matchExpressions") or []:
        key, values = wanted["key"], wanted.get("values") or []
        held = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }
        if not held[wanted["operator"]]:
            return False
    return True


def quantity(value: Any) -> float:
    """A Kubernetes quantity as a number. Raises ValueError for what is none."""
    text = str(value)
    try:
        if text.endswith("i"):
            return float(Decimal(text[:-2])) * 1024.0 ** _SUFFIXES[text[-2]]
        if text.endswith("m"):
            return float(Decimal(text[:-1])) / 1e3
        if text and text[-1] in _SUFFIXES:
            return float(Decimal(text[:-1])) * 1000.0 ** _SUFFIXES[text[-1]]
        number = float(Decimal(text))
    except (ArithmeticError, KeyError, IndexError) as e:
        raise ValueError(f"{text!r} is no quantity") from e
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is no quantity")
    return number
