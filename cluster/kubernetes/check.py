"""All rules over a set of manifests: what a server accepts and operators, kubelets or clients then reject.

Schemas are checked elsewhere (`kubectl apply --dry-run=server`, and the project's own tests); these rules know what
pdserve, Ray and KubeRay make of the fields.
"""

from __future__ import annotations

from cluster.kubernetes.manifests import Finding, Manifest
from cluster.kubernetes.rules import agreement, availability, monitoring, names, network, podspec, rayservice

RULES = (names, podspec, rayservice, agreement, availability, network, monitoring)


def check(manifests: list[Manifest]) -> list[Finding]:
    """Every mistake found, in a stable order; empty when there is none."""
    found: list[Finding] = []
    for rule in RULES:
        try:
            found.extend(rule.check(manifests))
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            # A list where a number belongs, or the like: the server's schema says it better than we could.
            name = rule.__name__.rpartition(".")[2]
            found.append(Finding(f"rules about {name}", f"met a shape that no API server accepts ({e!r})"))
    return found
