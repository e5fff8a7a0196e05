"""3 prefill replicas of tp 2 and 5 decode replicas of tp 4 on a Ray cluster with two types of (fake) GPUs.

The engines are simulated; Ray, Serve, placement groups, router and HTTP are real.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from cluster.config import ClusterConfig, parse
from cluster.messages import Role
from cluster.runtime.local import LocalCluster, free_port, start

# Ray warns about its own use of pydantic.
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TYPES = {Role.PREFILL: "H100", Role.DECODE: "A100"}
REPLICAS = {Role.PREFILL: 3, Role.DECODE: 5}
TP = {Role.PREFILL: 2, Role.DECODE: 4}


@pytest.fixture(scope="module")
def nodes() -> Iterator[str]:
    """Address of a Ray cluster: a head without GPUs, a node of each type with exactly the GPUs that are needed."""
    from ray.cluster_utils import Cluster

    ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False})
    try:
        for role, kind in TYPES.items():
            ray.add_node(
                num_cpus=4,
                num_gpus=TP[role] * REPLICAS[role],
                resources={f"accelerator_type:{kind}": 1},
                labels={"pdserve.io/rack": f"rack-of-{kind}"},
            )
        yield ray.address
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes: str) -> Iterator[tuple[LocalCluster, ClusterConfig]]:
    config = parse(
        {
            "engine": {"kind": "simulated", "simulated": {"max_model_len": 2048}},
            "network": {"host": "127.0.0.1"},
            "router": {"http": {"port": free_port("127.0.0.1")}, "placement": {"conditional": False}},
            "pools": {
                role.value: {
                    "layout": {"tp": TP[role]},
                    "replicas": {"min": REPLICAS[role], "max": REPLICAS[role]},
                    "accelerator": TYPES[role],
                }
                for role in Role
            },
        }
    )
    running = start(config, address=nodes, progress=lambda what, seconds: print(f"{seconds:5.0f} s  {what}"))
    try:
        yield running, config
    finally:
        running.stop()


def placed() -> Counter[tuple[str, int]]:
    """(GPU type of the node, GPUs of the bundle) of every bundle of every placement group that exists."""
    import ray
    from ray.util import placement_group_table

    kinds = {
        node["NodeID"]: name.removeprefix("accelerator_type:")
        for node in ray.nodes()
        for name in node["Resources"]
        if name.startswith("accelerator_type:")
    }
    found: Counter[tuple[str, int]] = Counter()
    for group in placement_group_table().values():
        if group["state"] != "CREATED":
            continue
        assert len(set(group["bundles_to_node_id"].values())) == 1, "the ranks of a replica share a node"
        for index, bundle in group["bundles"].items():
            found[kinds[group["bundles_to_node_id"][index]], int(bundle["GPU"])] += 1
    return found


WANTED = Counter({(TYPES[role], TP[role]): REPLICAS[role] for role in Role})


def replicas(running: LocalCluster, role: Role) -> dict[str, dict[str, Any]]:
    return {replica["id"]: replica for replica in running.router_status()["pools"][role]["replicas"]}


def ours(role: Role) -> list[psutil.Process]:
    """Replica processes of the nodes that this test started."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.is_running() and any(f"ServeReplica:pdserve:{role}" in part for part in process.cmdline())
    ]


def ask(running: LocalCluster, config: ClusterConfig) -> httpx.Response:
    body = {"model": config.model.id, "prompt": list(range(300, 400)), "max_tokens": 4}
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)


def test_bundles_land_on_the_right_types(cluster: tuple[LocalCluster, ClusterConfig]) -> None:
    running, config = cluster
    assert placed() == WANTED
    status = running.router_status()
    for role in Role:
        found = replicas(running, role).values()
        assert len(found) == REPLICAS[role]
        assert {replica["tp"] for replica in found} == {TP[role]}
        assert {replica["rack"] for replica in found} == {f"rack-of-{TYPES[role]}"}
    assert len(status["pairs"]) == 15
    assert {pair["state"] for pair in status["pairs"]} == {"ready"}
    assert {pair["distance"] for pair in status["pairs"]} == {"far"}
    answer = ask(running, config)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_dead_replica_is_replaced_on_its_type(cluster: tuple[LocalCluster, ClusterConfig]) -> None:
    running, config = cluster
    before = set(replicas(running, Role.DECODE))
    ours(Role.DECODE)[0].kill()
    deadline = time.monotonic() + 90
    answered = 0
    while time.monotonic() < deadline:
        assert ask(running, config).status_code == 200, "a dead replica must not be seen by clients"
        answered += 1
        now = set(replicas(running, Role.DECODE))
        if len(now) == REPLICAS[Role.DECODE] and len(before - now) == 1:
            break
        time.sleep(0.2)
    else:
        pytest.fail(f"no replacement: {before} -> {now}")
    assert placed() == WANTED
    assert answered > 0
