"""Steps that vary from second to second: by as much as was measured, decode steps only."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

import pytest

from cluster.config import parse
from cluster.engine.scheduler.config import SchedulerConfig
from cluster.engine.scheduler.sequence import Sequence
from cluster.perf.times import LinearTimes
from cluster.sim.engine import SimEngine
from cluster.sim.fleet import Fleet, Options
from cluster.sim.kernel import Kernel
from cluster.sim.variation import PERIOD_S, StepVariation
from cluster.workload.arrival import Arrival
from loadtests.fidelity.plan import load

PLAN = load("simulated")
TIMES = LinearTimes(fixed_s=0.01, per_sequence_s=0.0, nominal_context_tokens=1, per_prefill_token_s=1e-3)


def test_a_factor_holds_for_its_period_and_stays_within_what_was_measured() -> None:
    variation = StepVariation((0.8, 1.0, 1.6), random.Random(3))
    drawn = []
    for period in range(2000):
        at_s = period * PERIOD_S
        factor = variation.factor(at_s)
        assert variation.factor(at_s + 0.99 * PERIOD_S) == factor
        drawn.append(factor)
    assert 0.8 <= min(drawn) < 0.82 and 1.55 < max(drawn) <= 1.6
    # Half of the draws lie in either part of the straight lines between the quantiles.
    assert fmean(drawn) == pytest.approx((0.9 + 1.3) / 2, rel=0.02)
    assert sum(f < 1.0 for f in drawn) == pytest.approx(1000, rel=0.1)


def test_one_quantile_is_a_constant() -> None:
    variation = StepVariation((1.2,), random.Random(1))
    assert {variation.factor(float(t)) for t in range(50)} == {1.2}


def test_the_result_is_that_of_one_event_an_iteration() -> None:
    def ends(max_repeats: int) -> list[float]:
        kernel = Kernel()
        config = SchedulerConfig(kv_blocks=1000, max_num_batched_tokens=4096)
        engine = SimEngine(kernel, config, TIMES, random.Random(0), lambda outputs: None, max_repeats=max_repeats)
        engine.variation = StepVariation((0.5, 1.0, 2.0), random.Random(0))
        kernel.at(0.0, engine.submit, Sequence("a", 100, 900))
        for at_s in (0.97, 1.55, 4.01):
            kernel.at(at_s, engine.sync)
        kernel.run()
        return list(engine.step_ends_s)

    assert ends(128) == ends(1)
    assert len({round(b - a, 6) for a, b in pairwise(ends(1))}) > 5


@pytest.mark.parametrize("max_repeats", [1, 128])
def test_only_decode_steps_vary(max_repeats: int) -> None:
    kernel, ends = Kernel(), []
    config = SchedulerConfig(kv_blocks=1000, max_num_batched_tokens=4096)
    engine = SimEngine(kernel, config, TIMES, random.Random(0), lambda outputs: None, max_repeats=max_repeats)
    engine.variation = StepVariation((1.5,), random.Random(0))
    sequence = Sequence("a", 100, 11)
    kernel.at(0.0, engine.submit, sequence)
    kernel.run()
    ends = list(engine.step_ends_s)
    assert ends[0] == pytest.approx(0.11)
    assert ends[-1] == pytest.approx(0.11 + 10 * 0.015)


def test_a_fleet_takes_it_from_its_settings() -> None:
    def tpot_s(variation: tuple[float, ...] | None) -> float:
        engine = {**PLAN.cluster["engine"]}
        engine["simulated"] = {**engine["simulated"], "step_variation": variation}
        fleet = Fleet(parse({**PLAN.cluster, "engine": engine}), Options(seed=1))
        first: Arrival = next(iter(PLAN.workload_of(1).arrivals()))
        fleet.arrive(first)
        fleet.kernel.run()
        found = fleet.records[0].tpot_s
        assert found is not None
        return found

    assert tpot_s((1.5,)) == pytest.approx(1.5 * tpot_s(None))
