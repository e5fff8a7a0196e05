"""One simulated engine against theory and against its own slow way."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cluster.engine.scheduler.config import Policy, Preemption, SchedulerConfig
from cluster.engine.scheduler.sequence import Sequence
from cluster.messages import Outcome, RequestRecord, Slo
from cluster.perf.times import LinearTimes, StepTimes
from cluster.sim.engine import SimEngine
from cluster.sim.kernel import Kernel
from cluster.sim.single import EngineRun, run_engine
from cluster.workload.arrival import Arrival

SLO = Slo(1.0, 0.05)


def load(requests: int, rate_per_s: float, seed: int = 0, prompt: float = 300, output: float = 80) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for number in range(requests):
        at_s += rng.expovariate(rate_per_s)
        prompt_tokens = min(3000, int(rng.lognormvariate(math.log(prompt), 0.8)) + 1)
        output_tokens = min(800, int(rng.lognormvariate(math.log(output), 0.8)) + 1)
        segments = ((rng.randrange(4), 64), (1000 + number, prompt_tokens))
        arrivals.append(Arrival(at_s, segments, output_tokens))
    return arrivals


def run(arrivals: list[Arrival], times: StepTimes | None = None, max_repeats: int = 128, **config: Any) -> EngineRun:
    config = {"kv_blocks": 20_000, "max_num_seqs": 32, "max_num_batched_tokens": 512, **config}
    return run_engine(arrivals, SchedulerConfig(**config), times or LinearTimes(), SLO, max_repeats=max_repeats)


def by_id(records: list[RequestRecord]) -> dict[str, RequestRecord]:
    return {record.request_id: record for record in records}


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("blocks", [250, 20_000])
@pytest.mark.parametrize("preemption", Preemption)
def test_one_event_for_many_iterations_changes_nothing(policy: Policy, blocks: int, preemption: Preemption) -> None:
    arrivals = load(120, 12.0)
    more: dict[str, Any] = {"policy": policy, "kv_blocks": blocks, "preemption": preemption}
    fast, slow = run(arrivals, **more), run(arrivals, max_repeats=1, **more)
    assert fast.events < slow.events / 2
    a, b = by_id(fast.records), by_id(slow.records)
    assert a.keys() == b.keys()
    for request_id, record in a.items():
        other = b[request_id]
        assert record.ttft_s == pytest.approx(other.ttft_s, abs=1e-9)
        assert record.end_s == pytest.approx(other.end_s, abs=1e-9)
        assert record.itl_s == pytest.approx(other.itl_s, abs=1e-9)
    assert fast.engine.scheduler.counters == slow.engine.scheduler.counters
    assert fast.engine.busy_s == pytest.approx(slow.engine.busy_s)


@pytest.mark.parametrize("max_repeats", [1, 128])
@pytest.mark.parametrize(("leaves_s", "generated"), [(10.6, 9), (20.0, 18), (50.0, 48)])
def test_who_comes_in_the_middle_of_an_iteration_is_in_the_next_whoever_leaves_it(
    max_repeats: int, leaves_s: float, generated: int
) -> None:
    kernel = Kernel()
    times = LinearTimes(fixed_s=1.0, per_sequence_s=0.0, per_prefill_token_s=0.0)
    config = SchedulerConfig(1000, max_num_seqs=8, max_num_batched_tokens=512, prefix_caching=False)
    engine = SimEngine(kernel, config, times, random.Random(0), lambda outputs: None, max_repeats=max_repeats)
    stays, leaves, comes = Sequence("stays", 4, 50), Sequence("leaves", 4, 50), Sequence("comes", 4, 5)
    engine.submit(stays)
    engine.submit(leaves)
    kernel.at(10.5, engine.submit, comes)
    kernel.at(leaves_s, engine.abort, "leaves")
    kernel.run()
    assert comes.scheduled_s == 11.0
    assert [at_s for at_s, _ in engine.token_times(comes)] == [12.0, 13.0, 14.0, 15.0, 16.0]
    assert [at_s for at_s, _ in engine.token_times(stays)] == [float(at_s) for at_s in range(1, 51)]
    assert leaves.generated == generated
    assert engine.scheduler.kv.used_blocks == 0 and engine.busy_s == pytest.approx(50.0)


@pytest.mark.parametrize("max_repeats", [1, 128])
@pytest.mark.parametrize(("fault", "generated"), [("stop", 10), ("stall", 11)])
def test_a_fault_takes_back_no_iteration(max_repeats: int, fault: str, generated: int) -> None:
    """Who dies loses the iteration that runs; who stalls still ends it."""
    kernel = Kernel()
    times = LinearTimes(fixed_s=1.0, per_sequence_s=0.0, per_prefill_token_s=0.0)
    engine = SimEngine(
        kernel, SchedulerConfig(1000), times, random.Random(0), lambda outputs: None, max_repeats=max_repeats
    )
    sequence = Sequence("a", 4, 50)
    engine.submit(sequence)
    kernel.at(10.5, getattr(engine, fault))
    kernel.run()
    assert sequence.generated == generated and engine.busy_s == pytest.approx(generated)
    assert [at_s for at_s, _ in engine.token_times(sequence)] == [float(i + 1) for i in range(generated)]


def test_every_request_ends_once_with_all_its_tokens() -> None:
    arrivals = load(200, 20.0)
    result = run(arrivals, kv_blocks=300)
    assert sorted(int(r.request_id) for r in result.records) == list(range(200))
    for record in result.records:
        arrival = arrivals[int(record.request_id)]
        assert record.outcome is Outcome.DONE
        assert record.output_tokens == arrival.output_tokens
        assert len(record.itl_s) == arrival.output_tokens - 1
        assert record.ttft_s is not None and record.tpot_s is not None
        assert sum(record.stage_s.values()) == pytest.approx(record.ttft_s)
        assert sum(record.itl_s) == pytest.approx(record.tpot_s * (arrival.output_tokens - 1))
    kv = result.engine.scheduler.kv
    assert kv.used_blocks == 0
    counters = result.engine.scheduler.counters
    assert counters.computed_prompt_tokens + counters.cached_prompt_tokens >= sum(a.prompt_tokens for a in arrivals)
    assert counters.generated_tokens == sum(a.output_tokens for a in arrivals)


def test_a_request_that_cannot_run_is_rejected() -> None:
    result = run([Arrival(0.0, ((1, 5000),), 10), Arrival(0.0, ((2, 50),), 10)], kv_blocks=100)
    assert {r.request_id: r.outcome for r in result.records} == {"0": Outcome.REJECTED, "1": Outcome.DONE}


def test_at_rate_zero_a_request_takes_its_service_time() -> None:
    times = LinearTimes()
    arrivals = [Arrival(1000.0 * i, ((i, 700),), 30) for i in range(5)]
    for record in run(arrivals, prefix_caching=False).records:
        prefill_s = times.step_s(((512, 0),), 0, 0) + times.step_s(((188, 512),), 0, 0)
        assert record.ttft_s == pytest.approx(prefill_s, rel=1e-9)
        assert record.itl_s == pytest.approx(times.decode_run_s(1, 700, 29), rel=1e-9)


@pytest.mark.parametrize("load_factor", [0.3, 0.6])
def test_m_d_1(load_factor: float) -> None:
    """Poisson arrivals, one server, constant service: mean wait = rho * service / (2 * (1 - rho))."""
    service_s, requests = 0.02, 12_000
    times = LinearTimes(fixed_s=service_s, per_sequence_s=0.0, per_prefill_token_s=0.0)
    rng, at_s, arrivals = random.Random(5), 0.0, []
    for number in range(requests):
        at_s += rng.expovariate(load_factor / service_s)
        arrivals.append(Arrival(at_s, ((number, 1),), 1))
    result = run(arrivals, times, max_num_seqs=1, prefix_caching=False)
    waits = np.array([r.ttft_s - service_s for r in result.records if r.ttft_s is not None])
    expected = load_factor * service_s / (2 * (1 - load_factor))
    assert waits.mean() == pytest.approx(expected, rel=0.05)
    assert result.engine.busy_s / result.end_s == pytest.approx(load_factor, rel=0.02)


def test_block_seconds_balance() -> None:
    """Blocks held over time, as memory counts them, are those that the requests held while they ran."""
    arrivals = [Arrival(a.at_s, a.prompt[1:], a.output_tokens) for a in load(80, 10.0)]
    config = SchedulerConfig(20_000, max_num_seqs=16, max_num_batched_tokens=512, prefix_caching=False)
    used_s = 0.0
    samples: list[tuple[float, int]] = []
    held: dict[str, list[tuple[float, int]]] = {}

    from cluster.engine.scheduler.scheduler import Scheduler

    s = Scheduler(config, LinearTimes(), random.Random(0))
    waiting: list[Arrival] = list(arrivals)
    now = 0.0
    alive: dict[str, Sequence] = {}
    while waiting or s.busy:
        while waiting and waiting[0].at_s <= now:
            a = waiting.pop(0)
            sequence = Sequence(str(len(held)), a.prompt_tokens, a.output_tokens)
            held[sequence.seq_id] = []
            alive[sequence.seq_id] = sequence
            s.add(sequence, now)
        step = s.schedule(now)
        if step is None:
            now = waiting[0].at_s
            continue
        samples.append((step.durations_s[0], s.kv.used_blocks))
        for name, sequence in alive.items():
            held[name].append((step.durations_s[0], len(sequence.table)))
        now += step.durations_s[0]
        for output in s.complete(step):
            if output.finished:
                del alive[output.sequence.seq_id]
    used_s = sum(duration * blocks for duration, blocks in samples)
    requests_s = sum(duration * blocks for spans in held.values() for duration, blocks in spans)
    assert used_s == pytest.approx(requests_s, rel=1e-9)
    assert used_s > 0


def test_a_faster_engine_is_never_later() -> None:
    arrivals = load(150, 12.0)
    ends = []
    for factor in (2.0, 1.0, 0.5):
        base = LinearTimes()
        times = LinearTimes(
            base.fixed_s * factor, base.per_sequence_s * factor, 2000, base.per_prefill_token_s * factor
        )
        records = by_id(run(arrivals, times, prefix_caching=False).records)
        ends.append([records[str(i)].end_s for i in range(len(arrivals))])
    for slower, faster in pairwise(ends):
        assert np.mean(faster) < np.mean(slower)
        assert max(faster) <= max(slower)


def test_abort_and_load_in_the_middle_of_a_long_step() -> None:
    from cluster.engine.scheduler.sequence import Sequence
    from cluster.engine.scheduler.step import Load, Output
    from cluster.sim.engine import SimEngine

    ends: dict[str, float] = {}
    loads: list[Load] = []
    kernel = Kernel()

    def on_output(outputs: Items[Output]) -> None:
        ends.update({o.sequence.seq_id: kernel.now for o in outputs if o.finished})

    config = SchedulerConfig(1000, max_num_seqs=4)
    engine = SimEngine(kernel, config, LinearTimes(), random.Random(0), on_output, loads.append)
    for name in ("a", "b"):
        engine.submit(Sequence(name, 20, 100))
    pulled = Sequence("c", 33, 5, remote=True)
    kernel.at(0.2013, engine.submit, pulled)
    kernel.at(0.3017, lambda: engine.loaded(loads[0].sequence.seq_id))
    kernel.at(0.4019, engine.abort, "a")
    kernel.run()
    assert set(ends) == {"b", "c"}
    assert 0.3017 < ends["c"] < 0.3017 + 7 * 5.2e-3
    first, *_ = engine.token_times(pulled)
    assert first[0] - 0.3017 < 2 * 5.2e-3, "a pulled request joins the batch at the next iteration"
    assert engine.scheduler.kv.used_blocks == 0
