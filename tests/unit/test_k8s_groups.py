"""Worker groups hold the replicas they are made for: every bundle finds a pod that offers what it asks."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig, parse
from cluster.kubernetes.groups import Group, groups
from cluster.layout import replica_layout
from cluster.messages import Role


def config(layout: dict[str, int], num_cpus: float) -> ClusterConfig:
    pool = {"layout": layout, "num_cpus": num_cpus, "accelerator": "H100"}
    raw: dict[str, Any] = {
        "engine": {"device": "gpu"},
        "pools": {"prefill": None, "decode": pool},
        "router": {"node_resource": "router-pod", "http": {"host": "0.0.0.0"}},
    }
    return parse(raw)


def fits(bundles: tuple[Any, ...], group: Group) -> bool:
    """Whether one replica's bundles go on the pods of a group of one replica, the largest first."""
    pods = [{name: float(amount) for name, amount in group.resources.items()} for _ in range(group.pods_min)]
    for bundle in sorted(bundles, key=len, reverse=True):
        pod = next((p for p in pods if all(p.get(name, 0.0) >= asked for name, asked in bundle.items())), None)
        if pod is None:
            return False
        for name, asked in bundle.items():
            pod[name] -= asked
    return True


@pytest.mark.parametrize(
    ("layout", "pods", "gpus"),
    [({"tp": 8}, 1, 8), ({"tp": 4, "pp": 2}, 1, 8), ({"tp": 8, "pp": 2}, 2, 8), ({"tp": 4, "pp": 4}, 4, 4)],
)
@pytest.mark.parametrize("num_cpus", [0.1, 4.0])
def test_the_pods_of_a_replica_hold_its_bundles(layout: dict[str, int], pods: int, gpus: int, num_cpus: float) -> None:
    resolved = config(layout, num_cpus)
    group = groups(resolved)["decode"]
    assert (group.pods_min, group.gpus) == (pods, gpus)
    assert fits(replica_layout(resolved, Role.DECODE, on_cpu=False).bundles, group)
