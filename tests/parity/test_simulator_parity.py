"""Golden scenarios through the live dispatcher with simulated engines, and through the simulator: the same decisions,
at the same time, for the same request, and the same service."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from virtual_pools import VirtualPools

from cluster.config import ClusterConfig, parse
from cluster.engine.simulation.virtual_time import run_virtual
from cluster.goodput.accounting import is_excused, miss_stage
from cluster.messages import Outcome, Path, RequestRecord, Stage
from cluster.sim.fleet import Decision, Fleet, Options
from cluster.sim.run import simulate
from cluster.workload.arrival import Arrival


def config(prefill: int, decode: int, router: Any = None, **simulated: Any) -> ClusterConfig:
    def pool(n: int) -> dict[str, Any]:
        return {"replicas": {"min": n, "max": n}}

    settings = {"kv_blocks": 20_000, "max_num_seqs": 64, "max_num_batched_tokens": 2048, **simulated}
    return parse(
        {
            "slo": {"ttft_ms": 600, "tpot_ms": 40},
            "engine": {"kind": "simulated", "simulated": settings},
            "pools": {"prefill": pool(prefill) if prefill else None, "decode": pool(decode)},
            # In these pools nobody sends heartbeats.
            "router": {"limits": {"silent_s": 3600, "stall_s": 3600}, **(router or {})},
        }
    )


def requests(
    number: int, rate_per_s: float, prompt: float, output: float, shared: int = 0, groups: int = 4
) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(11), 0.0, []
    for i in range(number):
        at_s += rng.expovariate(rate_per_s)
        head = ((rng.randrange(groups), shared),) if shared else ()
        tail = ((1000 + i, 1 + int(rng.lognormvariate(math.log(prompt), 0.6))),)
        arrivals.append(Arrival(at_s, head + tail, 1 + int(rng.lognormvariate(math.log(output), 0.6))))
    return arrivals


SCENARIOS = {
    "split": (config(2, 2, {"placement": {"conditional": False}}), requests(120, 8, 700, 40)),
    "conditional": (config(2, 2), requests(120, 10, 400, 40)),
    "shared prefixes": (config(2, 3), requests(120, 12, 200, 40, shared=1024)),
    "colocated": (config(0, 3), requests(120, 10, 500, 40, shared=512)),
    "overload": (config(1, 2), requests(120, 40, 900, 30)),
    "round robin": (config(2, 2, {"placement": {"policy": "round_robin"}}), requests(80, 8, 500, 30)),
    "slow network": (
        config(2, 2, {"placement": {"conditional": False}}, linear={"transfer_gb_per_s": 1.0}),
        requests(100, 8, 600, 40),
    ),
    "roofline": (
        config(2, 2, None, times="roofline", hardware="H100", model="llama-3.1-8b"),
        requests(100, 30, 3000, 60, shared=1024),
    ),
}

QUEUEING = ("overload", "roofline")


async def live(cluster: ClusterConfig, arrivals: list[Arrival]) -> VirtualPools:
    pools = VirtualPools(cluster)
    await pools.start()
    await pools.run(arrivals)
    for engine in pools.engines.values():
        assert engine.scheduler.kv.used_blocks == 0
        assert engine.scheduler.queued_prefill_tokens == 0
        await engine.shutdown()
    return pools


@pytest.mark.parametrize("name", SCENARIOS)
def test_live_and_simulated_decide_alike(name: str) -> None:
    cluster, arrivals = SCENARIOS[name]
    pools = run_virtual(live(cluster, arrivals))
    result = simulate(cluster, arrivals, Options(max_repeats=1))
    theirs = [(d.at_s, d.request_id, d.attempt, d.path, d.prefill, d.decode) for d in result.fleet.log.decisions]
    ours = pools.placer.decided
    assert len(ours) == len(theirs)
    for live_one, simulated_one in zip(ours, theirs, strict=True):
        assert live_one[1:] == simulated_one[1:]
        assert live_one[0] == pytest.approx(simulated_one[0], abs=1e-6)
    _same_service(pools.records, result.records)


def _same_service(live_records: list[RequestRecord], simulated: list[RequestRecord]) -> None:
    a, b = ({r.request_id: r for r in records} for records in (live_records, simulated))
    assert a.keys() == b.keys()
    for request_id, r in a.items():
        s = b[request_id]
        assert (r.outcome, r.path, r.output_tokens) == (s.outcome, s.path, s.output_tokens)
        assert (r.cached_tokens, r.transfer_bytes) == (s.cached_tokens, s.transfer_bytes)
        if r.ttft_s is None:
            continue
        assert r.ttft_s == pytest.approx(s.ttft_s, abs=1e-6)
        assert r.tpot_s == pytest.approx(s.tpot_s, abs=1e-6)
        assert r.itl_s == pytest.approx(s.itl_s, abs=1e-6)
        assert r.stage_s == pytest.approx(s.stage_s, abs=1e-6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_event_for_many_iterations_decides_alike(name: str) -> None:
    cluster, arrivals = SCENARIOS[name]
    fast, slow = (simulate(cluster, arrivals, Options(max_repeats=n)) for n in (128, 1))
    assert fast.fleet.kernel.events < slow.fleet.kernel.events
    if name not in QUEUEING:
        assert [_place(d) for d in fast.fleet.log.decisions] == [_place(d) for d in slow.fleet.log.decisions]
        _same_service(slow.records, fast.records)
        return
    # What a long step has done is seen at other moments than the end of each iteration: other looks, same service.
    for q in (50, 99):
        a, b = (np.percentile([r.ttft_s for r in run.records if r.ttft_s], q) for run in (fast, slow))
        assert a == pytest.approx(b, rel=0.05)


def _place(d: Decision) -> tuple[Any, ...]:
    return round(d.at_s, 6), d.request_id, d.attempt, d.path, d.prefill, d.decode


def test_the_scenarios_cover_every_path() -> None:
    seen: Counter[Path | None] = Counter()
    outcomes: Counter[Outcome] = Counter()
    for cluster, arrivals in SCENARIOS.values():
        for record in simulate(cluster, arrivals).records:
            seen[record.path] += 1
            outcomes[record.outcome] += 1
    assert {Path.SPLIT, Path.LOCAL_SHORT, Path.LOCAL_CACHED, Path.COLOCATED} <= set(seen)
    assert outcomes[Outcome.DONE] > 700


LEAVES_AFTER_S = 10.0


async def leaving(cluster: ClusterConfig, arrivals: list[Arrival]) -> list[RequestRecord]:
    pools = VirtualPools(cluster)
    await pools.start()
    loop = asyncio.get_running_loop()
    for number, arrival in enumerate(arrivals, 1):
        loop.call_at(arrival.at_s + LEAVES_AFTER_S, pools.dispatcher.client_left, str(number))
    await pools.run(arrivals)
    for engine in pools.engines.values():
        await engine.shutdown()
    return pools.records


@pytest.mark.parametrize(("tpot_ms", "excused"), [(5, 0), (200, 20)])
def test_clients_that_leave_are_judged_alike(tpot_ms: int, excused: int) -> None:
    """A token takes 50 ms or more: with a limit of 5 ms they have left a stall, with 200 ms an answer in time."""
    slow = config(2, 2, linear={"fixed_ms": 50})
    limits = slow.slo.model_copy(update={"ttft_ms": 5000.0, "tpot_ms": float(tpot_ms)})
    cluster = slow.model_copy(update={"slo": limits})
    arrivals = requests(20, 2, 100, 4000)
    fleet = Fleet(cluster, Options(max_repeats=128))
    for number, arrival in enumerate(arrivals, 1):
        fleet.kernel.at(arrival.at_s, fleet.arrive, arrival)
        fleet.kernel.at(arrival.at_s + LEAVES_AFTER_S, fleet.cancel_request, str(number))
    fleet.kernel.run()
    for records in (run_virtual(leaving(cluster, arrivals)), fleet.records):
        assert {r.outcome for r in records} == {Outcome.CANCELLED}
        assert sum(map(is_excused, records)) == excused
        assert {miss_stage(r) for r in records} == ({None} if excused else {Stage.DECODE_STEP})
        assert {r.deadline_passed for r in records} == {not excused}
