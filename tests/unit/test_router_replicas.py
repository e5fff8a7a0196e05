"""Several routers over the same engines."""

import random
from collections import Counter

import pytest

from cluster.config import PlacementConfig
from cluster.messages import Placement, Request, Role, Slo, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import LinearTimes
from router.block_keys import block_keys
from router.placement import Placer
from router.prefix_index import PrefixIndex
from router.replicas import PlacerReplicas

TIMES = LinearTimes()
WORKERS = 4


def routers(count: int) -> PlacerReplicas:
    index = PrefixIndex()
    together = PlacerReplicas(
        [Placer(PlacementConfig(conditional=False), lambda _: TIMES, index, visible_after_s=0.0) for _ in range(count)]
    )
    for role in Role:
        for i in range(WORKERS):
            info = WorkerInfo(f"{role.value}-{i}", "1", role, 16, 20_000, 131_072, 256, 8192, 32_768)
            together.add_worker(info, 0.0)
            together.set_index_exact(info.worker_id, True)
    return together


def burst(count: int, seed: int, requests: int = 64) -> Counter:
    """Requests of one instant: no snapshot comes in between, so a router sees its own reservations alone."""
    together, rng = routers(count), random.Random(seed)
    used: Counter[str] = Counter()
    for i in range(requests):
        keys = block_keys([rng.randrange(10**5) for _ in range(1000)], 16)
        place = together.place(Request(f"r{i}", 0.0, 1000, 100, Slo(2.0, 0.05), keys), 0.0, rng)
        assert isinstance(place, Placement)
        used[place.prefill] += 1
    return used


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_burst_stays_spread_even_between_routers_that_do_not_see_each_other(count):
    for seed in range(5):
        used = burst(count, seed)
        assert max(used.values()) / (64 / WORKERS) <= (1.01 if count == 1 else 1.5)


@pytest.mark.parametrize("count", [2, 4])
def test_snapshots_tell_a_router_what_the_others_did(count):
    together, rng = routers(count), random.Random(1)
    for placer in together.placers:
        placer.on_snapshot(WorkerSnapshot("prefill-0", "1", WorkerState.READY, queued_prefill_tokens=50_000), 0.0)
    for i in range(2 * count):
        keys = block_keys([rng.randrange(10**5) for _ in range(1000)], 16)
        place = together.place(Request(f"r{i}", 0.0, 1000, 100, Slo(2.0, 0.05), keys), 0.0, rng)
        assert place.prefill != "prefill-0"


def test_each_request_belongs_to_one_router_and_leaves_nothing_behind():
    together, rng = routers(3), random.Random(2)
    requests = [Request(f"r{i}", 0.0, 1000, 100, Slo(2.0, 0.05)) for i in range(30)]
    for r in requests:
        together.place(r, 0.0, rng)
    assert [p.reserved for p in together.placers] == [10, 10, 10]
    together.place(requests[0], 0.1, rng, exclude=frozenset({"prefill-0"}))  # a retry stays with its router
    assert [p.reserved for p in together.placers] == [10, 10, 10]
    for r in requests:
        together.on_prefilled(r.request_id, 1.0, 0)
        together.on_first_token(r.request_id, 1.1)
        together.on_end(r.request_id, 2.0)
        together.on_end(r.request_id, 2.0)
    assert [p.reserved for p in together.placers] == [0, 0, 0]
    together.remove_worker("prefill-0", 3.0)
    assert all(p.find("prefill-0") is None for p in together.placers)
