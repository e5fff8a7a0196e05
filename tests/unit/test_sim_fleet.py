"""A simulated cluster: conservation, faults, bandwidth, service times, closed loops, the timeline."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cluster.config import ClusterConfig, parse
from cluster.engine.simulation.settings import engine_spec
from cluster.errors import ConfigError
from cluster.messages import Outcome, Path, RequestRecord, Role, Stage
from cluster.sim.fleet import Fleet, Options
from cluster.sim.run import simulate
from cluster.sim.trace import chrome_trace
from cluster.workload.arrival import Arrival
from cluster.workload.spec import parse as parse_workload


def config(prefill: int = 2, decode: int = 2, **more: Any) -> ClusterConfig:
    simulated = {"kv_blocks": 4000, "max_num_seqs": 32, "max_num_batched_tokens": 2048, **more.pop("simulated", {})}

    def pool(n: int) -> dict[str, Any]:
        return {"replicas": {"min": n, "max": n}}

    return parse(
        {
            "slo": {"ttft_ms": 1000, "tpot_ms": 50},
            "engine": {"kind": "simulated", "simulated": simulated},
            "pools": {"prefill": pool(prefill) if prefill else None, "decode": pool(decode)},
            **more,
        }
    )


def load(requests: int, rate_per_s: float, seed: int = 0) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for number in range(requests):
        at_s += rng.expovariate(rate_per_s)
        prompt = ((rng.randrange(6), 256), (1000 + number, 1 + int(rng.lognormvariate(math.log(800), 0.7))))
        arrivals.append(Arrival(at_s, prompt, 1 + int(rng.lognormvariate(math.log(60), 0.7)), session=number))
    return arrivals


def check(fleet: Fleet, requests: int) -> Counter[Outcome]:
    """Every request ended once, nothing is held anywhere."""
    assert not fleet.runs
    assert sorted(int(r.request_id) for r in fleet.records) == list(range(1, requests + 1))
    assert fleet.placer.reserved == 0
    assert len(fleet.admission) == 0
    for worker in fleet.workers.values():
        scheduler = worker.engine.scheduler
        assert (scheduler.kv.used_blocks, scheduler.queued_prefill_tokens, len(scheduler.leased)) == (0, 0, 0)
    assert fleet.counters.started == fleet.counters.ended == requests
    for record in fleet.records:
        check_record(record)
    return Counter(r.outcome for r in fleet.records)


def check_record(r: RequestRecord) -> None:
    if r.ttft_s is None:
        assert r.outcome is not Outcome.DONE
        return
    assert r.ttft_s > 0
    assert sum(r.stage_s.values()) == pytest.approx(r.ttft_s)
    assert min(r.stage_s.values()) > -1e-9
    assert len(r.itl_s) == r.output_tokens - 1
    if r.path is Path.SPLIT and r.migrations == 0 and r.attempts == 1 and r.transfer_bytes:
        assert set(r.stage_s) == set(Stage)
        assert r.decode_computed_tokens == 1


@pytest.mark.parametrize("prefill", [0, 2])
def test_every_request_ends_once(prefill: int) -> None:
    arrivals = load(300, 12.0)
    result = simulate(config(prefill, 4 - prefill), arrivals)
    assert check(result.fleet, 300) == {Outcome.DONE: 300}
    by_id = {int(r.request_id) - 1: r for r in result.records}
    for number, arrival in enumerate(arrivals):
        assert by_id[number].output_tokens == arrival.output_tokens
        assert by_id[number].arrival_s == arrival.at_s
    paths = Counter(r.path for r in result.records)
    assert set(paths) == {Path.COLOCATED} if not prefill else paths[Path.SPLIT] > 100
    summary = result.summary()
    assert summary["done"] == 300
    assert 0 < summary["pools"]["decode"]["busy"] < 1


def test_the_same_seed_gives_the_same_run() -> None:
    arrivals = load(150, 12.0)
    runs = [simulate(config(), arrivals, Options(seed=3)) for _ in range(2)]
    assert runs[0].records == runs[1].records
    assert runs[0].fleet.log == runs[1].fleet.log


def test_one_event_for_many_iterations_gives_the_same_service() -> None:
    arrivals = load(200, 12.0)
    fast, slow = (simulate(config(), arrivals, Options(max_repeats=n)) for n in (128, 1))
    assert fast.fleet.kernel.events < slow.fleet.kernel.events / 3
    # Placement sees loads at events, so a few equal choices fall otherwise; latencies agree.
    for name in ("ttft_s", "tpot_s"):
        a, b = (np.array([getattr(r, name) for r in run.records]) for run in (fast, slow))
        assert np.percentile(a, 50) == pytest.approx(np.percentile(b, 50), rel=0.05)
        assert np.percentile(a, 99) == pytest.approx(np.percentile(b, 99), rel=0.10)


def test_at_rate_zero_a_request_takes_its_service_time() -> None:
    cluster = config(1, 1, router={"placement": {"conditional": False}})
    arrivals = [Arrival(100.0 * i, ((i, 1000),), 20) for i in range(4)]
    result = simulate(cluster, arrivals)
    spec = next(iter(result.fleet.specs.values()))
    times = spec.times
    moved = 63 * 16 * spec.scheduler.kv_bytes_per_token
    for record in result.records:
        assert record.stage_s == pytest.approx(
            {
                Stage.ROUTER_QUEUE: 0.0,
                Stage.PREFILL_QUEUE: 0.0,
                Stage.PREFILL_COMPUTE: times.step_s(((1000, 0),), 0, 0),
                Stage.KV_TRANSFER: times.transfer_s(moved),
                Stage.DECODE_QUEUE: 0.0,
                Stage.DECODE_STEP: times.step_s((), 1, 999),
            },
            abs=1e-9,
        )
        assert record.transfer_bytes == moved
        assert record.itl_s == pytest.approx(times.decode_run_s(1, 1000, 19), rel=1e-9)


def test_more_bandwidth_never_raises_a_latency() -> None:
    arrivals = load(200, 14.0)
    means = []
    for gb_per_s in (1.0, 4.0, 16.0, 64.0):
        # One engine a pool and no prefix cache: the same places whatever the bandwidth.
        cluster = config(
            1,
            1,
            router={"placement": {"conditional": False}},
            simulated={
                "linear": {"transfer_gb_per_s": gb_per_s, "per_prefill_token_us": 20},
                "prefix_caching": False,
                "max_num_seqs": 256,
            },
        )
        result = simulate(cluster, arrivals)
        ttft = np.array([r.ttft_s for r in sorted(result.records, key=lambda r: int(r.request_id))])
        means.append((ttft.mean(), np.percentile(ttft, 50), np.percentile(ttft, 99)))
    for slower, faster in pairwise(means):
        assert all(b <= a for a, b in zip(slower, faster, strict=True))
    assert means[-1][0] < 0.9 * means[0][0]


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_failed_transfers_cost_time_and_no_request(on_failure: str) -> None:
    cluster = config(kv_transfer={"on_failure": on_failure}, simulated={"faults": {"transfer_failure_share": 0.3}})
    result = simulate(cluster, load(200, 8.0))
    assert check(result.fleet, 200) == {Outcome.DONE: 200}
    retried = sum(r.attempts > 1 for r in result.records)
    assert (retried > 0) == (on_failure == "fail")


def test_deaths_under_load() -> None:
    fleet = Fleet(config(2, 3))
    arrivals = load(300, 12.0)
    for arrival in arrivals:
        fleet.kernel.at(arrival.at_s, fleet.arrive, arrival)
    for at_s, victim in ((3.0, "prefill-0"), (6.0, "decode-1"), (9.0, "decode-0")):
        fleet.kernel.at(at_s, fleet.kill, victim)
    fleet.kernel.run()
    outcomes = check(fleet, 300)
    assert outcomes[Outcome.DONE] >= 295
    assert sum(r.migrations for r in fleet.records) > 0
    migrated = next(r for r in fleet.records if r.migrations and r.outcome is Outcome.DONE)
    assert migrated.output_tokens == arrivals[int(migrated.request_id) - 1].output_tokens


def test_cancels_at_any_time_leave_nothing() -> None:
    fleet, rng = Fleet(config()), random.Random(1)
    for number, arrival in enumerate(load(300, 14.0), 1):
        fleet.kernel.at(arrival.at_s, fleet.arrive, arrival)
        if rng.random() < 0.5:
            fleet.kernel.at(arrival.at_s + rng.expovariate(5.0), fleet.cancel_request, str(number))
    fleet.kernel.run()
    outcomes = check(fleet, 300)
    assert outcomes[Outcome.CANCELLED] > 80
    assert outcomes[Outcome.CANCELLED] + outcomes[Outcome.DONE] == 300


def test_a_drained_worker_finishes_its_work() -> None:
    fleet = Fleet(config(2, 2))
    for arrival in load(200, 10.0):
        fleet.kernel.at(arrival.at_s, fleet.arrive, arrival)
    fleet.kernel.at(5.0, lambda: fleet.drain(fleet.workers["decode-0"]))
    fleet.kernel.at(5.0, lambda: fleet.drain(fleet.workers["prefill-1"]))
    fleet.kernel.run()
    assert check(fleet, 200) == {Outcome.DONE: 200}
    assert set(fleet.workers) == {"prefill-0", "decode-1"}
    late = [r for r in fleet.records if r.arrival_s > 5.0]
    assert {r.decode_worker for r in late} == {"decode-1"}


def test_overload_is_refused_and_counted() -> None:
    cluster = config(1, 1, router={"admission": {"max_queue": 20}}, simulated={"max_num_seqs": 4})
    result = simulate(cluster, load(300, 100.0))
    outcomes = check(result.fleet, 300)
    assert outcomes[Outcome.REJECTED] > 50
    assert result.summary()["attainment"] < 0.9


def test_a_closed_loop_never_has_more_requests_than_users() -> None:
    workload = parse_workload(
        {
            "requests": 120,
            "arrivals": {"process": "closed", "users": 7, "think_s": 0.2},
            "prompts": {"kind": "plain", "prompt_tokens": 300, "output_tokens": 40},
        }
    )
    result = simulate(config(), workload)
    check(result.fleet, 120)
    edges = [(r.arrival_s, 1) for r in result.records] + [(r.end_s, -1) for r in result.records]
    running = highest = 0
    for _, change in sorted(edges):
        running += change
        highest = max(highest, running)
    assert 5 <= highest <= 7


def test_the_timeline_covers_every_iteration() -> None:
    result = simulate(config(), load(60, 10.0), Options(timeline=True))
    events = chrome_trace(result.fleet)["traceEvents"]
    engines = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert sum(e["args"]["iterations"] for e in engines) == sum(
        w.engine.scheduler.counters.steps for w in result.fleet.workers.values()
    )
    assert sum(e["dur"] for e in engines) / 1e6 == pytest.approx(
        sum(w.engine.busy_s for w in result.fleet.workers.values()), rel=1e-4
    )
    rows: dict[tuple[int, int], float] = {}
    for event in sorted(engines, key=lambda e: e["ts"]):
        row = (event["pid"], event["tid"])
        assert event["ts"] >= rows.get(row, 0.0) - 0.01, "iterations of one engine overlap"
        rows[row] = event["ts"] + event["dur"]
    assert len([e for e in events if e["name"].startswith("request ")]) == 60


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"pools\.decode\.layout: .*nothing is left for KV"):
        simulate(config(simulated={"times": "roofline", "model": "llama-3.1-70b", "kv_blocks": None}), [])
    with pytest.raises(ConfigError, match=r"engine\.simulated\.max_num_batched_tokens|max_num_batched_tokens 16"):
        simulate(config(simulated={"max_num_batched_tokens": 16}), [])


def test_one_file_describes_the_live_and_the_simulated_cluster() -> None:
    cluster = parse(
        {
            "engine": {"args": {"max_num_seqs": 48, "block_size": 32}, "simulated": {"max_num_batched_tokens": 4096}},
            "pools": {"decode": {"engine_args": {"max_num_seqs": 96}, "simulated": {"kv_blocks": 77}}},
        }
    )
    prefill, decode = (engine_spec(cluster, role).scheduler for role in (Role.PREFILL, Role.DECODE))
    assert (prefill.max_num_seqs, decode.max_num_seqs) == (48, 96)
    assert (prefill.block_size_tokens, decode.block_size_tokens, decode.kv_blocks) == (32, 32, 77)
    assert prefill.max_num_batched_tokens == 4096


@pytest.mark.parametrize("fault", ["kill", "stall"])
def test_a_fault_in_a_long_step_leaves_what_single_iterations_leave(fault: str) -> None:
    made = []
    for max_repeats in (1, 128):
        fleet = Fleet(config(0, 1), Options(max_repeats=max_repeats))
        engine = fleet.workers["decode-0"].engine
        fleet.kernel.at(0.0, fleet.arrive, Arrival(0.0, ((1, 100),), 400))
        fleet.kernel.at(0.5, getattr(fleet, fault), "decode-0")
        fleet.kernel.run(until_s=2.0)
        made.append((engine.scheduler.counters.generated_tokens, engine.busy_s))
    assert made[0] == pytest.approx(made[1])
    assert 50 < made[0][0] < 110


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 4), (4, 1)])
def test_kv_travels_as_fast_as_the_slower_side(prefill_tp: int, decode_tp: int) -> None:
    """One adapter a rank, on both sides."""

    def pool(tp: int) -> dict[str, Any]:
        return {"layout": {"tp": tp}, "replicas": {"min": 1, "max": 1}}

    cluster = parse(
        {
            "engine": {"kind": "simulated", "simulated": {"times": "roofline", "model": "llama-3.1-8b"}},
            "model": {"max_model_len": 8192},
            "pools": {"prefill": pool(prefill_tp), "decode": pool(decode_tp)},
            "router": {"placement": {"conditional": False}},
        }
    )
    result = simulate(cluster, [Arrival(0.0, ((1, 4000),), 4)])
    (record,) = result.records
    sides_s = {role: spec.times.transfer_s(record.transfer_bytes) for role, spec in result.fleet.specs.items()}
    narrow = Role.PREFILL if prefill_tp < decode_tp else Role.DECODE
    assert record.stage_s[Stage.KV_TRANSFER] == pytest.approx(sides_s[narrow])
    assert sides_s[narrow] == max(sides_s.values()) > 3 * min(sides_s.values())
