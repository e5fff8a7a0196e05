"""Engines of one host slow each other while they compute at the same time, by as much as the work overlaps."""

from __future__ import annotations

import random

import pytest

from cluster.engine.scheduler.config import SchedulerConfig
from cluster.engine.scheduler.sequence import Sequence
from cluster.engine.scheduler.step import Output
from cluster.perf.profile import HostSlowdown
from cluster.perf.times import LinearTimes
from cluster.sim.engine import SimEngine
from cluster.sim.host import Host
from cluster.sim.kernel import Kernel

# A prompt of n tokens takes n ms, reading a token of KV 10 us.
TIMES = LinearTimes(fixed_s=0.0, per_sequence_s=1e-5, nominal_context_tokens=1, per_prefill_token_s=1e-3)
# A decode step takes more than 50 ms: the other engine begins and ends work in the middle of it.
SLOW = LinearTimes(fixed_s=0.05, per_sequence_s=1e-5, nominal_context_tokens=1, per_prefill_token_s=1e-3)


class Bench:
    """Two engines on one host; `ends` holds when each request's prompt was computed."""

    def __init__(self, slowdown: HostSlowdown, max_repeats: int = 128, times: LinearTimes = TIMES) -> None:
        self.kernel, self.ends, self.times = Kernel(), {}, times
        host = Host()
        self.engines = [self._engine(host, slowdown, max_repeats) for _ in range(2)]

    def _engine(self, host: Host, slowdown: HostSlowdown, max_repeats: int) -> SimEngine:
        config = SchedulerConfig(kv_blocks=1000, max_num_batched_tokens=4096)
        engine = SimEngine(self.kernel, config, self.times, random.Random(0), self._on_output, max_repeats=max_repeats)
        engine.host, engine.host_slowdown = host, slowdown
        return engine

    def _on_output(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finished:
                self.ends[output.sequence.seq_id] = self.kernel.now

    def submit(self, at_s: float, engine: int, name: str, prompt: int, output: int = 1) -> None:
        sequence = Sequence(name, prompt, output)
        self.kernel.at(at_s, self.engines[engine].submit, sequence)

    def run(self) -> dict[str, float]:
        self.kernel.run()
        return self.ends


def test_alone_nothing_is_slower() -> None:
    bench = Bench(HostSlowdown(0.5, 0.5))
    bench.submit(0.0, 0, "a", 100)
    bench.submit(0.2, 1, "b", 100)
    assert bench.run() == {"a": pytest.approx(0.1), "b": pytest.approx(0.3)}


def test_work_is_slower_by_what_overlaps_and_only_by_that() -> None:
    bench = Bench(HostSlowdown(0.5, 0.5))
    bench.submit(0.0, 0, "a", 100)
    bench.submit(0.04, 1, "b", 100)
    # After 40 ms a has 60 ms left, which take 90; b has done 90 / 1.5 = 60 ms of its 100 by then.
    assert bench.run() == {"a": pytest.approx(0.13), "b": pytest.approx(0.17)}


def test_an_engine_that_stops_slows_nobody_any_more() -> None:
    bench = Bench(HostSlowdown(1.0, 1.0))
    bench.submit(0.0, 0, "a", 100)
    bench.submit(0.0, 1, "b", 100)
    bench.kernel.at(0.1, bench.engines[1].stop)
    # Half of a is done at 0.1 s.
    assert bench.run() == {"a": pytest.approx(0.15)}


def test_prompts_and_decode_steps_have_slowdowns_of_their_own() -> None:
    bench = Bench(HostSlowdown(prefill=0.5, decode=1.0))
    bench.submit(0.0, 1, "b", 10, 2)  # 10 ms of prompt, then a decode step of 0.1 ms, here 0.2
    bench.submit(0.01, 0, "a", 100)
    ends = bench.run()
    assert ends["b"] == pytest.approx(0.0102)
    # The prompt is slower only while that one step runs, and loses a third of that time.
    assert ends["a"] == pytest.approx(0.11 + 2e-4 / 3)


@pytest.mark.parametrize("slowdown", [HostSlowdown(0.3, 0.6), HostSlowdown(1.0, 0.0)])
def test_one_event_for_many_iterations_changes_nothing(slowdown: HostSlowdown) -> None:
    ends = []
    for max_repeats in (1, 128):
        rng, bench = random.Random(3), Bench(slowdown, max_repeats)
        for number in range(60):
            bench.submit(rng.random() * 20, number % 2, str(number), rng.randrange(1, 300), rng.randrange(1, 60))
        ends.append(bench.run())
    assert len(ends[0]) == 60
    assert ends[0] == {name: pytest.approx(end_s) for name, end_s in ends[1].items()}


@pytest.mark.parametrize("slowdown", [HostSlowdown(0.3, 0.6), HostSlowdown(1.0, 0.4)])
def test_being_looked_at_changes_no_end(slowdown: HostSlowdown) -> None:
    ends = []
    for looks in (0, 5000):
        rng, bench = random.Random(5), Bench(slowdown, times=SLOW)
        for number in range(60):
            bench.submit(rng.random() * 60, number % 2, str(number), rng.randrange(1, 200), rng.randrange(1, 60))
        for _ in range(looks):
            bench.kernel.at(rng.random() * 65, _look, bench.engines[rng.randrange(2)])
        ends.append(bench.run())
    assert len(ends[0]) == 60
    assert ends[0] == {name: pytest.approx(end_s) for name, end_s in ends[1].items()}


def _look(engine: SimEngine) -> None:
    # With a sequence waiting, a look would let it into the iteration that runs.
    if not engine.scheduler.waiting_count:
        engine.sync()
