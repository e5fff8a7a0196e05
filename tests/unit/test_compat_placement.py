"""Placement never pairs engines that may not exchange KV, whatever the policy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.config import PlacementConfig
from cluster.messages import Path, Placement, Rejection, Request, Role, Slo, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import LinearTimes
from router.placement import Placer
from router.prefix_index import PrefixIndex

POLICIES = ("cost", "round_robin", "least_loaded", "power_of_two", "approximate")
OLD, NEW = {"block_size": 16}, {"block_size": 32}


def placer(policy: str, workers: dict[str, tuple[Role, dict[str, Any]]], **config: Any) -> Placer:
    made = Placer(
        PlacementConfig(policy=policy, conditional=False, **config),  # type: ignore[arg-type]
        lambda _: LinearTimes(),
        PrefixIndex(1000),
    )
    for name, (role, fingerprint) in workers.items():
        info = WorkerInfo(name, "1", role, 16, 10_000, 2048, 256, 2048, 8192, fingerprint=fingerprint)
        made.add_worker(info, 0.0)
        made.on_snapshot(WorkerSnapshot(name, "1", WorkerState.READY), 0.0)
    return made


def place(made: Placer, count: int) -> list[Placement | Rejection]:
    rng = random.Random(7)
    slo = Slo(10.0, 10.0)
    return [made.place(Request(f"r{i}", 0.0, 500, 20, slo, (i,)), 0.0, rng) for i in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_old_and_new_engines_are_never_paired(policy: str) -> None:
    workers = {f"p-{kind}{i}": (Role.PREFILL, f) for kind, f in (("old", OLD), ("new", NEW)) for i in range(2)}
    workers |= {f"d-{kind}{i}": (Role.DECODE, f) for kind, f in (("old", OLD), ("new", NEW)) for i in range(3)}
    placed = place(placer(policy, workers), 60)
    kinds = set()
    for placement in placed:
        assert isinstance(placement, Placement)
        assert placement.path is Path.SPLIT
        assert placement.prefill is not None
        assert placement.prefill[2:5] == placement.decode[2:5]
        kinds.add(placement.decode[2:5])
    assert kinds == {"old", "new"}, "both groups serve"


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_partner_the_decode_engine_prefills_or_the_client_is_told(policy: str) -> None:
    workers = {"p-old": (Role.PREFILL, OLD), "d-new": (Role.DECODE, NEW)}
    for placement in place(placer(policy, workers), 3):
        assert isinstance(placement, Placement)
        assert (placement.path, placement.prefill) == (Path.LOCAL_NO_PREFILL, None)
    for rejection in place(placer(policy, workers, no_prefill_worker="fail"), 3):
        assert isinstance(rejection, Rejection)
        assert rejection.status == 503


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_old_engine_leaves_and_all_is_one_group_again(policy: str) -> None:
    workers = {"p-old": (Role.PREFILL, OLD), "p-new": (Role.PREFILL, NEW), "d-new": (Role.DECODE, NEW)}
    made = placer(policy, workers)
    made.remove_worker("p-old", 1.0)
    assert made.pairing.refused == 0
    assert all(isinstance(p, Placement) and p.prefill == "p-new" for p in place(made, 5))
