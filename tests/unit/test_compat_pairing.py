"""Engines that report different KV never meet; the rest of the cluster goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Role, WorkerInfo
from kv_transfer.compatibility import check_pair
from router.pairing import Pairing

BASE = {"model": "m", "block_size": 16, "dtype": "bfloat16", "kv_heads": 4, "tp": 1, "pp": 1}


@dataclass
class Load:
    info: WorkerInfo


def worker(name: str, role: Role, incarnation: str = "1", **differs: Any) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        incarnation=incarnation,
        role=role,
        block_size_tokens=16,
        kv_total_blocks=100,
        kv_bytes_per_token=64,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        fingerprint={**BASE, **differs},
    )


def test_equal_engines_are_one_group() -> None:
    pairing = Pairing()
    loads = (
        [Load(worker(f"p{i}", Role.PREFILL)) for i in range(3)],
        [Load(worker(f"d{i}", Role.DECODE)) for i in range(2)],
    )
    for load in (*loads[0], *loads[1]):
        pairing.add(load.info)
    assert pairing.groups(*loads) == [loads]
    assert pairing.refused == 0
    assert pairing.groups([], loads[1]) == pairing.groups(loads[0], []) == []


def test_a_rollout_keeps_old_with_old_and_new_with_new() -> None:
    pairing = Pairing()
    old = Load(worker("p-old", Role.PREFILL)), Load(worker("d-old", Role.DECODE))
    new = Load(worker("p-new", Role.PREFILL, block_size=32)), Load(worker("d-new", Role.DECODE, block_size=32))
    for load in (*old, *new):
        pairing.add(load.info)
    groups = pairing.groups([old[0], new[0]], [old[1], new[1]])
    assert groups == [([old[0]], [old[1]]), ([new[0]], [new[1]])]
    assert str(pairing.refusals("p-old", "d-new")[0]).startswith("block_size: prefill has 16, decode has 32")
    assert pairing.refusals("p-old", "d-old") == []


def test_a_restarted_engine_is_judged_anew_and_a_gone_one_is_forgotten() -> None:
    pairing = Pairing()
    pairing.add(worker("p", Role.PREFILL, dtype="float32"))
    pairing.add(worker("d", Role.DECODE))
    assert pairing.refused == 1
    pairing.add(worker("p", Role.PREFILL, incarnation="2"))
    assert pairing.refused == 0
    pairing.add(worker("p", Role.PREFILL, incarnation="3", dtype="float32"))
    pairing.remove("d")
    assert pairing.refused == 0


def test_untested_tp_pairs_meet_only_where_allowed() -> None:
    for mode, refused in (("tested", 1), ("connector", 0)):
        pairing = Pairing(mode)  # type: ignore[arg-type]
        pairing.add(worker("p", Role.PREFILL, tp=2))
        pairing.add(worker("d", Role.DECODE, tp=1))
        assert pairing.refused == refused


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), max_size=14), st.integers(0, 9))
def test_groups_hold_every_allowed_pair_and_no_other(steps: list[tuple[bool, int, bool]], seed: int) -> None:
    pairing, live = Pairing(), {}
    rng = random.Random(seed)
    for number, (is_prefill, kind, leaves) in enumerate(steps):
        info = worker(f"w{number}", Role.PREFILL if is_prefill else Role.DECODE, block_size=16 * 2**kind)
        pairing.add(info)
        live[info.worker_id] = Load(info)
        if leaves:
            gone = rng.choice(sorted(live))
            pairing.remove(gone)
            del live[gone]
    prefills = [load for load in live.values() if load.info.role is Role.PREFILL]
    decodes = [load for load in live.values() if load.info.role is Role.DECODE]
    offered = [
        (p.info.worker_id, d.info.worker_id) for ps, ds in pairing.groups(prefills, decodes) for p in ps for d in ds
    ]
    allowed = [
        (p.info.worker_id, d.info.worker_id)
        for p in prefills
        for d in decodes
        if not check_pair(p.info.fingerprint, d.info.fingerprint)
    ]
    assert sorted(offered) == sorted(allowed)
