"""Sizes of pools: the queueing formula against a simulated queue, and what a backlog of late requests is worth."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from cluster.autoscaling.capacity import MOST_BUSY, servers_for_wait
from cluster.autoscaling.demand import Demand, History, measure
from cluster.autoscaling.messages import PoolLoad, PoolSettings, Settings, StepCost
from cluster.autoscaling.sizing import Queue, decode_need, prefill_need
from cluster.messages import Slo

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
SETTINGS = Settings(slo=SLO, prefill=PoolSettings(1, 20), decode=PoolSettings(1, 20, max_num_seqs=128))
IN_ORDER = replace(SETTINGS, late_last=False)
# 4,000 prompt tokens a second; 20 ms a step and 0.25 ms a sequence.
PREFILL, DECODE = StepCost(0.0, 0.0, 1 / 4000), StepCost(0.02, 0.00025, 0.0)


def demand(arrivals_per_s: float, uncertainty: float = 0.0, **changes) -> Demand:
    base = Demand(
        arrivals_per_s=arrivals_per_s,
        prefill_tokens_per_s=arrivals_per_s * 1500,
        decode_prompt_tokens_per_s=0.0,
        output_tokens_per_s=arrivals_per_s * 250,
        output_tokens=250,
        leg_tokens=1500,
        leg_cv2=0.43,
        dispersion=1.0,
        uncertainty=uncertainty,
    )
    return replace(base, **changes)


def late_share(servers: int, rate_per_s: float, limit_s: float, *, late_last: bool, seed: int) -> float:
    """A queue with one line, lognormal work of 0.375 s on average; late ones only where nobody in time waits."""
    rng = random.Random(seed)
    at_s, arrivals = 0.0, []
    while at_s < 2000.0:
        at_s += rng.expovariate(rate_per_s)
        arrivals.append((at_s, 0.375 * rng.lognormvariate(-0.18, 0.6)))
    free, waiting, late, i = [0.0] * servers, [], [], 0
    missed = 0
    while i < len(arrivals) or waiting or late:
        now = heapq.heappop(free)
        while i < len(arrivals) and arrivals[i][0] <= now:
            waiting.append(arrivals[i])
            i += 1
        while late_last and waiting and now + waiting[0][1] - waiting[0][0] > limit_s:
            late.append(waiting.pop(0))
        line = waiting or late
        if not line:
            if i == len(arrivals):
                break
            heapq.heappush(free, arrivals[i][0])
            continue
        came_s, work_s = line.pop(0)
        missed += now + work_s - came_s > limit_s
        heapq.heappush(free, now + work_s)
    return missed / len(arrivals)


@pytest.mark.parametrize("late_last", [True, False])
@pytest.mark.parametrize("rate_per_s", [1.2, 4.0, 10.0, 24.0])
def test_the_formula_gives_enough_servers_and_not_many_too_many(rate_per_s, late_last):
    load = rate_per_s * 0.375
    allowed = 0.0125 if late_last else 0.025
    servers = servers_for_wait(load, 0.375, (1 + 0.43) / 2, 2.0 - 0.375, allowed, late_last=late_last)
    whole = max(1, round(servers + 0.49))
    missed = sum(late_share(whole, rate_per_s, 2.0, late_last=late_last, seed=s) for s in range(2)) / 2
    assert missed <= 0.05
    if whole in (3, 4, 5, 6):
        fewer = sum(late_share(whole - 2, rate_per_s, 2.0, late_last=late_last, seed=s) for s in range(2)) / 2
        assert fewer > 0.05, "two servers fewer would have done"


def test_where_the_late_go_last_a_pool_may_run_fuller_but_not_full():
    for load in (1.0, 3.7, 9.0, 40.0):
        in_order = servers_for_wait(load, 0.375, 0.7, 1.6, 0.0125)
        late_last = servers_for_wait(load, 0.375, 0.7, 1.6, 0.0125, late_last=True)
        assert min(in_order, load / MOST_BUSY) - 1e-9 <= late_last <= in_order


def test_late_requests_are_no_reason_for_replicas_but_those_in_time_are():
    load, backlog = PoolLoad(4, queued_prompt_tokens=0.0), Queue(depth=300, oldest_wait_s=60.0, shrinks=True)
    calm = prefill_need(SETTINGS, demand(10), load, PREFILL, Queue(), 60.0)
    with_backlog = prefill_need(SETTINGS, demand(10), load, PREFILL, backlog, 60.0)
    in_order = prefill_need(IN_ORDER, demand(10), load, PREFILL, backlog, 60.0)
    assert with_backlog.replicas == pytest.approx(calm.replicas, abs=0.1)
    assert in_order.replicas > 7
    # Nobody works it off: the pool is too small, whatever the rate of arrivals says.
    stuck = prefill_need(SETTINGS, demand(10), load, PREFILL, replace(backlog, shrinks=False), 60.0)
    assert stuck.replicas == 5
    assert stuck.urgent


def test_a_jump_asks_at_once_for_what_the_rate_may_well_be():
    alone = PoolLoad(1, queued_prompt_tokens=3000.0)
    need = prefill_need(SETTINGS, demand(10, uncertainty=0.2), alone, PREFILL, Queue(20, 2.0), 60.0)
    sure = prefill_need(SETTINGS, demand(10), alone, PREFILL, Queue(20, 2.0), 60.0)
    assert need.urgent
    assert need.reason == "queue"
    assert need.replicas > sure.replicas > 3.75


def test_sequences_that_the_rate_explains_are_not_expected_to_grow():
    known = demand(10)
    explained = decode_need(SETTINGS, known, PoolLoad(2, running=110), DECODE, Queue(), growth=2.5)
    assert explained.reason == "demand"
    longer = decode_need(SETTINGS, known, PoolLoad(2, running=170), DECODE, Queue(), growth=2.5)
    assert longer.reason == "concurrency"
    assert longer.replicas > explained.replicas


def test_one_jump_is_not_dispersion():
    history, came = History(), 0.0
    for tick in range(60):
        came += 5.0 if tick < 30 else 50.0
        history = history.add(5.0 * tick, {"started": came}, 300.0)
    assert history.dispersion() == 1.0
    rng = random.Random(1)
    for tick in range(60):
        came += rng.choice([0.0, 40.0])
        history = history.add(300 + 5.0 * tick, {"started": came}, 300.0)
    assert history.dispersion() > 4


def test_few_arrivals_are_a_rate_that_may_be_wrong():
    def after(ticks: int, each: float) -> Demand:
        history = History()
        for tick in range(ticks):
            history = history.add(5.0 * tick, {"started": each * tick}, 300.0)
        return measure(history, SETTINGS)

    assert after(6, 1.0).uncertainty == pytest.approx(5**-0.5)
    assert after(60, 50.0).uncertainty < 0.02
    assert after(6, 0.0).uncertainty == 0.0
