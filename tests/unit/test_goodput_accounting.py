"""What is good, which stage is charged, and counters that survive merging, restarts and odd input."""

from __future__ import annotations

import math
import random

import pytest

from cluster.goodput.accounting import (
    GoodputCounters,
    Totals,
    is_excused,
    is_good,
    is_missed,
    is_refused,
    miss_stage,
    within_promise,
)
from cluster.goodput.stats import RequestStats
from cluster.messages import Outcome, Path, RequestRecord, Role, Slo, Stage

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def record(outcome: Outcome = Outcome.DONE, **fields) -> RequestRecord:
    base = {"ttft_s": 0.2, "tpot_s": 0.02, "output_tokens": 10, "path": Path.SPLIT, "prompt_tokens": 100}
    base.update(fields)
    base.setdefault("stage_s", {Stage.PREFILL_COMPUTE: base["ttft_s"]} if base["ttft_s"] is not None else {})
    base.setdefault("slo", SLO)
    return RequestRecord("r", outcome, arrival_s=0.0, end_s=base.pop("end_s", 1.0), **base)


def hundred_offered() -> list[RequestRecord]:
    """40 good, 20 late first token (by stage below), 10 late tokens, 20 refused, 10 cut."""
    late = {
        Stage.ROUTER_QUEUE: 3,
        Stage.PREFILL_QUEUE: 8,
        Stage.PREFILL_COMPUTE: 2,
        Stage.KV_TRANSFER: 3,
        Stage.DECODE_QUEUE: 4,
    }
    records = [record() for _ in range(40)]
    for stage, n in late.items():
        stages = {Stage.PREFILL_COMPUTE: 0.1, Stage.DECODE_STEP: 0.05}
        stages[stage] = stages.get(stage, 0.0) + 2.0
        records += [record(ttft_s=sum(stages.values()), stage_s=stages) for _ in range(n)]
    records += [record(tpot_s=0.2) for _ in range(10)]
    refused = {"ttft_s": None, "tpot_s": None, "output_tokens": 0, "path": None, "end_s": 0.001}
    records += [record(Outcome.REJECTED, **refused) for _ in range(20)]
    records += [record(Outcome.FAILED, error="cut", output_tokens=4) for _ in range(10)]
    return records


INJECTED = {
    Stage.ROUTER_QUEUE: 3 + 20,
    Stage.PREFILL_QUEUE: 8,
    Stage.PREFILL_COMPUTE: 2,
    Stage.KV_TRANSFER: 3,
    Stage.DECODE_QUEUE: 4,
    Stage.DECODE_STEP: 10 + 10,
}


def test_the_accounting_table():
    stats = RequestStats(SLO)
    for r in hundred_offered():
        stats.observe(r)
    assert stats.counters.started == 100
    assert stats.counters.attainment == 0.40
    assert stats.counters.missed_by_stage() == INJECTED
    summary = stats.summary(duration_s=10, accelerators=4)
    assert summary["goodput_per_s"] == 4.0
    assert summary["goodput_per_s_per_accelerator"] == 1.0
    assert summary["throughput_per_s"] == 7.0
    assert summary["error_rate"] == 0.30
    assert summary["ttft_adjusted_s"]["p95"] == math.inf
    assert summary["ttft_s"]["p95"] < math.inf
    assert stats.ttft_s.count == 70, "latency percentiles leave out the 30 that did not finish"


def test_merged_over_four_routers_equals_pooled():
    records = hundred_offered()
    random.Random(3).shuffle(records)
    pooled, merged = RequestStats(SLO), RequestStats(SLO)
    routers = [RequestStats(SLO) for _ in range(4)]
    for i, r in enumerate(records):
        pooled.observe(r)
        routers[i % 4].observe(r)
    for router in routers:
        merged.merge(router)
    assert merged.counters == pooled.counters
    assert merged.ttft_s.counts == pooled.ttft_s.counts
    for q in (0.5, 0.9, 0.99):
        assert merged.ttft_s.quantile(q) == pooled.ttft_s.quantile(q)


def test_all_failed_means_no_throughput():
    stats = RequestStats(SLO)
    for _ in range(166):
        stats.observe(record(Outcome.FAILED, ttft_s=None, tpot_s=None))
    summary = stats.summary(1.0)
    assert (summary["throughput_per_s"], summary["goodput_per_s"], summary["attainment"]) == (0, 0, 0)
    assert summary["ttft_s"]["p50"] is None


def test_identity_holds_at_any_scrape():
    rng = random.Random(5)
    outcomes = [Outcome.DONE] * 10 + [Outcome.CANCELLED] * 5 + [Outcome.REJECTED] * 3 + [Outcome.FAILED] * 2
    steps = ["start"] * len(outcomes)
    counters, running = GoodputCounters(), 0
    rng.shuffle(outcomes)
    while steps or outcomes:
        if steps and (running == 0 or rng.random() < 0.5):
            steps.pop()
            counters.start()
            running += 1
        else:
            counters.finish(record(outcomes.pop()))
            running -= 1
        assert counters.running == running
        assert counters.started == counters.good + counters.missed + counters.excused + running
    assert {o: int(counters.get("outcome", o)) for o in Outcome} == {
        Outcome.DONE: 10,
        Outcome.CANCELLED: 5,
        Outcome.REJECTED: 3,
        Outcome.FAILED: 2,
    }


@pytest.mark.parametrize(
    ("fields", "good", "stage"),
    [
        ({}, True, None),
        ({"ttft_s": 0.5, "tpot_s": 0.05}, True, None),
        ({"tpot_s": None, "output_tokens": 1}, True, None),
        ({"tpot_s": 0.0500001}, False, Stage.DECODE_STEP),
        ({"ttft_s": 0.6, "tpot_s": 0.2, "stage_s": {Stage.PREFILL_QUEUE: 0.6}}, False, Stage.PREFILL_QUEUE),
        ({"ttft_s": math.nan, "stage_s": {}}, False, Stage.ROUTER_QUEUE),
        ({"tpot_s": math.nan}, False, Stage.DECODE_STEP),
        ({"slo": Slo(0.5, 0.05, 0.1), "itl_s": [0.02] * 98 + [0.3] * 2}, False, Stage.DECODE_STEP),
        ({"slo": Slo(0.5, 0.05, 0.1), "itl_s": [0.02] * 99 + [0.3]}, True, None),
        ({"slo": Slo(0.5, 0.05, 0.1), "itl_s": []}, True, None),
    ],
)
def test_done_requests(fields, good, stage):
    r = record(**fields)
    assert is_good(r) is good
    assert miss_stage(r) is stage


def test_a_wait_is_charged_when_the_service_alone_would_have_met_the_limit():
    stages = {Stage.PREFILL_QUEUE: 0.05, Stage.PREFILL_COMPUTE: 0.3, Stage.KV_TRANSFER: 0.02, Stage.DECODE_QUEUE: 0.25}
    assert miss_stage(record(ttft_s=0.62, stage_s=stages)) is Stage.DECODE_QUEUE


def test_service_is_charged_when_it_alone_breaks_the_limit():
    stages = {Stage.PREFILL_QUEUE: 2.0, Stage.PREFILL_COMPUTE: 0.6}
    assert miss_stage(record(ttft_s=2.6, stage_s=stages)) is Stage.PREFILL_COMPUTE


def test_time_that_no_stage_owns_is_the_routers():
    r = record(ttft_s=2.0, stage_s={Stage.PREFILL_COMPUTE: 0.3, Stage.PREFILL_QUEUE: 0.4})
    assert miss_stage(r) is Stage.ROUTER_QUEUE


def test_ended_before_the_first_token_is_charged_where_it_stood():
    stages = {Stage.ROUTER_QUEUE: 5.0, Stage.PREFILL_COMPUTE: 0.1, Stage.KV_TRANSFER: 0.01}
    assert miss_stage(record(Outcome.FAILED, ttft_s=None, stage_s=stages)) is Stage.KV_TRANSFER
    assert miss_stage(record(Outcome.FAILED, ttft_s=None, stage_s={})) is Stage.ROUTER_QUEUE


def test_a_clients_own_cancel_is_a_miss_only_after_a_deadline():
    early = record(Outcome.CANCELLED, ttft_s=None, tpot_s=None, end_s=0.3)
    waited_too_long = record(Outcome.CANCELLED, ttft_s=None, tpot_s=None, end_s=0.6)
    flagged = record(Outcome.CANCELLED, deadline_passed=True)
    mid_stream = record(Outcome.CANCELLED)
    assert [is_excused(r) for r in (early, waited_too_long, flagged, mid_stream)] == [True, False, False, True]
    assert not any(is_good(r) for r in (early, waited_too_long, flagged, mid_stream))
    counters = GoodputCounters()
    for r in (early, mid_stream, record()):
        counters.count(r)
    assert counters.attainment == 1.0
    assert counters.started == 3


def test_a_client_that_leaves_slow_tokens_is_not_excused():
    slow = record(Outcome.CANCELLED, tpot_s=0.06)
    gaps = record(Outcome.CANCELLED, slo=Slo(0.5, 0.05, 0.1), itl_s=[0.02] * 8 + [0.3])
    assert [is_excused(r) for r in (slow, gaps)] == [False, False]
    assert [miss_stage(r) for r in (slow, gaps)] == [Stage.DECODE_STEP] * 2


REFUSED = {"ttft_s": None, "tpot_s": None, "output_tokens": 0, "path": None, "end_s": 0.001}


@pytest.mark.parametrize(
    ("status", "more", "refused"),
    [
        (429, {}, True),
        (400, {}, True),
        (503, {}, False),
        (None, {}, False),
        # It was served: whatever it lacks, it was demand.
        (400, {"ttft_s": 0.2, "output_tokens": 3, "tpot_s": 0.02}, False),
    ],
)
def test_what_no_replica_can_mend_is_no_miss(status, more, refused):
    r = record(Outcome.REJECTED, status=status, **REFUSED | more)
    assert is_refused(r) is refused
    assert is_missed(r) != refused
    assert (miss_stage(r) is None) is refused
    counters = GoodputCounters()
    counters.count(record())
    counters.count(r)
    assert counters.attainment == (1.0 if refused else 0.5)
    assert counters.refused == refused
    assert (counters.started, counters.running) == (2, 0), "it arrived and has ended all the same"
    assert counters.to_serve == (1 if refused else 2)
    assert counters.prompt_tokens_to_serve == (100 if refused else 200)
    assert counters.labels("tenant_refused") == ({"default": 1} if refused else {})


def test_a_refusal_whose_arrival_was_counted_before_the_window_takes_nothing_from_it():
    counters = GoodputCounters()
    counters.start(prompt_tokens=100)
    before = counters.copy()
    counters.finish(record(Outcome.REJECTED, status=400, **REFUSED))
    window = counters.since(before)
    assert (window.to_serve, window.prompt_tokens_to_serve) == (0, 0)


def test_limits_of_a_clients_own_are_judged_by_the_clusters():
    strict = record(slo=Slo(ttft_s=0.1, tpot_s=0.001))
    assert miss_stage(strict) is Stage.PREFILL_COMPUTE
    assert is_good(within_promise(strict, SLO))
    late = {Stage.PREFILL_COMPUTE: 0.2, Stage.PREFILL_QUEUE: 0.9}
    late_anyway = record(slo=Slo(ttft_s=0.1, tpot_s=0.001), ttft_s=1.1, stage_s=late)
    assert miss_stage(within_promise(late_anyway, SLO)) is Stage.PREFILL_QUEUE
    patient = record(slo=Slo(ttft_s=9.0, tpot_s=0.9), ttft_s=1.1)
    assert within_promise(patient, SLO) is patient
    left = record(Outcome.CANCELLED, slo=Slo(0.5, 0.001), deadline_passed=True)
    assert is_missed(left)
    assert is_excused(within_promise(left, SLO))
    smooth = record(slo=Slo(0.5, 0.05, 0.01), itl_s=[0.02] * 9)
    assert is_missed(smooth)
    assert is_good(within_promise(smooth, Slo(0.5, 0.05, 0.1)))
    assert is_good(within_promise(smooth, SLO)), "the cluster promises nothing of single gaps"


def test_every_record_has_one_verdict_and_a_stage_exactly_when_missed():
    rng = random.Random(11)
    for _ in range(2000):
        stages = {s: rng.expovariate(5) for s in Stage if rng.random() < 0.6}
        r = record(
            rng.choice(list(Outcome)),
            ttft_s=rng.choice([None, sum(stages.values()), rng.expovariate(2)]),
            tpot_s=rng.choice([None, 0.0, rng.expovariate(20)]),
            stage_s=stages,
            deadline_passed=rng.random() < 0.3,
            itl_s=[rng.expovariate(10) for _ in range(rng.randrange(5))],
            slo=Slo(0.5, 0.05, rng.choice([None, 0.1])),
            end_s=rng.expovariate(1),
            status=rng.choice([None, 400, 429, 499, 503]),
        )
        assert is_good(r) + is_excused(r) + is_refused(r) + is_missed(r) == 1
        assert (miss_stage(r) in set(Stage)) == is_missed(r)


def test_by_tenant_and_priority():
    counters = GoodputCounters()
    for _ in range(3):
        counters.count(record(tenant="a", priority=1))
    counters.count(record(tenant="b", tpot_s=9))
    assert counters.attainment_of("tenant", "a") == 1.0
    assert counters.attainment_of("tenant", "b") == 0.0
    assert counters.attainment_of("tenant", "c") is None
    assert counters.attainment_of("priority", 1) == 1.0
    assert counters.labels("tenant_started") == {"a": 3, "b": 1}


def test_difference_of_a_window_and_of_a_restart():
    counters = GoodputCounters()
    counters.count(record())
    before = counters.copy()
    counters.count(record(tpot_s=9))
    window = counters.since(before)
    assert (window.started, window.good, window.missed) == (1, 0, 1)
    fresh = GoodputCounters()
    fresh.count(record())
    assert fresh.since(counters).started == 1
    assert GoodputCounters().since(GoodputCounters()).attainment is None


def test_totals_keep_gone_and_restarted_replicas_and_never_fall():
    totals = Totals()
    totals.update("a", {"started": 10, "good": 8})
    totals.update("b", {"started": 5, "good": 5})
    assert totals.sum().started == 15
    totals.keep_only(["b"])
    assert totals.sum().started == 15
    totals.update("b", {"started": 1})
    assert totals.sum().started == 16
    assert totals.sum().good == 13
    totals.update("c", {"started": 2})
    assert totals.sum().started == 18


def test_a_negative_or_missing_amount_never_lowers_a_counter():
    counters = GoodputCounters()
    counters.count(record(prompt_tokens=-5, output_tokens=-1, cached_tokens=3, attempts=0))
    assert counters.get("prompt_tokens") == 0
    assert counters.get("retries") == 0
    assert counters.get("cached_tokens", Role.DECODE) == 3


def test_cached_and_computed_tokens_by_leg():
    counters = GoodputCounters()
    split = {"prefill_worker": "p0", "prompt_tokens": 100, "cached_tokens": 96, "decode_computed_tokens": 1}
    counters.count(record(**split))
    counters.count(record(path=Path.LOCAL_SHORT, decode_worker="d0", prompt_tokens=50, cached_tokens=16))
    counters.count(record(Outcome.FAILED, **split | {"ttft_s": None, "cached_tokens": 0, "decode_computed_tokens": 0}))
    assert counters.labels("cached_tokens") == {"prefill": 96, "decode": 16}
    assert counters.labels("computed_tokens") == {"prefill": 4, "decode": 35}


def test_how_much_of_the_limit_was_used():
    counters = GoodputCounters()
    for i in range(100):
        wait_s = 0.3 if i < 4 else 0.01
        stages = {Stage.PREFILL_QUEUE: wait_s, Stage.PREFILL_COMPUTE: 0.1}
        counters.count(record(ttft_s=wait_s + 0.1, stage_s=stages, tpot_s=0.04))
    assert counters.used_quantile("prefill_queue", 0.95) == 0.1
    assert counters.used_quantile("prefill_queue", 0.99) == 0.75
    assert counters.used_quantile("ttft", 0.95) == 0.25
    assert counters.used_quantile("tpot", 0.5) == 0.9
    assert GoodputCounters().used_quantile("tpot", 0.5) is None


def test_a_local_miss_is_marked_as_the_decode_pools():
    counters = GoodputCounters()
    late = {"ttft_s": 2.0, "stage_s": {Stage.PREFILL_QUEUE: 1.9, Stage.PREFILL_COMPUTE: 0.1}, "decode_worker": "d0"}
    counters.count(record(path=Path.LOCAL_SHORT, **late))
    counters.count(record(prefill_worker="p0", **late))
    counters.count(record(Outcome.REJECTED, ttft_s=None, path=None))
    assert counters.missed_by_stage() == {Stage.PREFILL_QUEUE: 2, Stage.ROUTER_QUEUE: 1}
    assert counters.labels("missed_local") == {"prefill_queue": 1}


def test_priorities_that_clients_make_up_do_not_grow_the_table() -> None:
    counters = GoodputCounters()
    for number in range(-5000, 5000):
        counters.start(priority=number)
        counters.finish(record(priority=number))
    kept = [key for key in counters.values if key.startswith("priority_")]
    assert len(kept) <= 2 * 200
    assert counters.get("priority_started", "(other)") == 10_000 - 199
