"""Figures of a report from samples: percentiles, misses, validity, sweeps, merging; the page draws what there is."""

from __future__ import annotations

import json
import math
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.config import parse as parse_config
from cluster.diagnosis.evidence import gather
from cluster.errors import ConfigError
from cluster.goodput.timing import token_times
from cluster.messages import Outcome, Path, RequestRecord, Role, Slo, Stage, WorkerInfo
from loadtests import scenario as scenarios
from loadtests.bench.cpu import kind_of, spent
from loadtests.bench.fronts import key_figures, median, show
from loadtests.curves import CURVES, users_at
from loadtests.endpoint import Endpoint, RequestWriter, split_url
from loadtests.report.build import build, strict
from loadtests.report.page import render
from loadtests.report.svg import Chart, Mark, Series, draw
from loadtests.results import (
    adjusted_quantiles,
    cdf,
    closed_loop_note,
    highest_rate,
    over_time,
    quantiles,
    summarize,
    validity,
)
from loadtests.runner import Run
from loadtests.sample import UNFINISHED, Sample
from loadtests.scenario import Validity
from loadtests.server_side import engine_numbers, join, joined
from loadtests.session import _between
from loadtests.sources import read_folder
from loadtests.tally import Tally, merged
from router.status import _pool

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def sample(i: int, at_s: float, ttft: float = 0.1, gap: float = 0.01, tokens: int = 5, **changes: Any) -> Sample:
    s = Sample(i, at_s, sent_s=at_s, status=200, outcome=Outcome.DONE, counted="usage", request_id=f"r-{i}")
    s.times = token_times(at_s, [(at_s + ttft + k * gap, 1) for k in range(tokens)])
    s.end_s = at_s + ttft + (tokens - 1) * gap
    s.prompt_tokens = 100
    for name, value in changes.items():
        setattr(s, name, value)
    return s


def refused(i: int, at_s: float) -> Sample:
    return Sample(i, at_s, sent_s=at_s, status=503, outcome=Outcome.REJECTED, error="HTTP 503", end_s=at_s + 0.001)


def test_percentiles_are_numpys_and_nothing_is_not_zero() -> None:
    values = [Random(1).random() for _ in range(501)]
    found = quantiles(values)
    assert found["p99"] == pytest.approx(np.percentile(values, 99))
    assert quantiles([]) == dict.fromkeys(["p50", "p90", "p95", "p99", "mean", "max"])


def test_adjusted_percentiles_put_the_unserved_last() -> None:
    served = [0.1] * 90
    assert adjusted_quantiles(served, 10) == {"p50": 0.1, "p90": 0.1, "p95": math.inf, "p99": math.inf}
    assert adjusted_quantiles([], 3)["p50"] == math.inf
    assert adjusted_quantiles([], 0)["p50"] is None


def test_every_miss_has_one_reason_and_they_add_up() -> None:
    cancelled = sample(5, 5, outcome=Outcome.FAILED, error=UNFINISHED)
    samples = [
        sample(0, 0),
        sample(1, 1, ttft=0.9),
        sample(2, 2, gap=0.2),
        refused(3, 3),
        sample(4, 4, outcome=Outcome.FAILED, error="cut: no [DONE]"),
        cancelled,
    ]
    s = summarize(samples, SLO, 10.0)
    assert s["misses"] == {"ttft": 1, "tpot": 1, "rejected": 1, "failed": 1, "unfinished": 1}
    assert s["good"] + sum(s["misses"].values()) == s["offered"] == 6
    assert (s["done"], s["rejected"], s["failed"], s["unfinished"]) == (3, 1, 1, 1)
    assert s["error_rate"] == 0.5
    assert s["goodput_per_s"] == 0.1
    itl = summarize([sample(0, 0, tokens=200), sample(1, 1)], Slo(1, 1, itl_p99_s=0.005), 5.0)
    assert itl["misses"] == {"itl": 2}


def test_validity_names_every_reason_with_its_bound() -> None:
    late = [sample(i, i * 0.1, sent_s=i * 0.13) for i in range(50)]
    verdict = validity(late, [0.2] * 100, Validity(), closed=False)
    assert not verdict["valid"]
    assert len(verdict["reasons"]) == 3
    assert all(any(c.isdigit() for c in reason) for reason in verdict["reasons"])
    fine = validity([sample(i, i * 0.1) for i in range(50)], [0.001] * 100, Validity(), closed=False)
    assert fine["valid"]
    assert fine["achieved_rate_per_s"] == pytest.approx(10)
    assert validity(late, [], Validity(schedule_lag_p99_ms=10_000), closed=True)["reasons"] == []


def test_a_closed_loop_that_slowed_down_is_told_and_a_steady_one_is_not() -> None:
    slower = [sample(i, t) for i, t in enumerate([*np.arange(0, 5, 0.1), *np.arange(5, 10, 1.0)])]
    assert "fell from" in (closed_loop_note(slower) or "")
    assert closed_loop_note([sample(i, i * 0.1) for i in range(100)]) is None


def test_over_time_bins_hold_every_request_and_token_once() -> None:
    samples = [sample(i, i * 0.25, ttft=0.1 + 0.2 * (i % 3)) for i in range(80)]
    rows = over_time(samples, SLO, 21.0)
    width = rows[0]["end_s"] - rows[0]["start_s"]
    assert sum((r["offered_per_s"] or 0) * width for r in rows) == pytest.approx(80)
    assert sum(r["output_tokens_per_s"] * width for r in rows) == pytest.approx(400)
    assert rows[-1]["in_flight"] == 0
    assert over_time([], SLO, 1.0) == []


def test_cdf_has_both_ends_and_rises() -> None:
    points = cdf([3.0, 1.0, 2.0])
    assert points == [(1.0, 1 / 3), (2.0, 2 / 3), (3.0, 1.0)]
    many = cdf(list(range(10_000)))
    assert len(many) <= 200
    assert many[0][0] == 0
    assert many[-1] == (9999.0, 1.0)


def step(rate: float, attainment: float | None, *, valid: bool = True) -> dict[str, Any]:
    return {"factor": rate, "rate_per_s": rate, "attainment": attainment, "valid": valid}


def test_the_highest_rate_has_only_rates_that_held_below_it() -> None:
    steps = [step(4, 0.93), step(1, 1.0), step(2, 0.97), step(8, 0.5), step(16, 0.99)]
    assert highest_rate(steps, 0.9) == 4
    assert highest_rate(steps, 0.95) == 2
    assert highest_rate([step(1, 0.2)], 0.9) is None
    assert highest_rate([step(1, 1.0), step(2, 1.0, valid=False)], 0.9) == 1
    assert _between(steps, 0.9) == 6
    assert _between([step(1, 1.0), step(2, 1.0)], 0.9) is None


def test_tallies_of_parts_merge_to_the_tally_of_the_whole() -> None:
    rng = Random(2)
    samples = [sample(i, i * 0.01, ttft=rng.random(), gap=0.08 * rng.random()) for i in range(300)]
    samples += [refused(1000 + i, i * 0.1) for i in range(7)]
    whole, parts = Tally(SLO), [Tally(SLO) for _ in range(4)]
    for i, s in enumerate(samples):
        good = whole.add("a" if i % 2 else "b", s)
        assert parts[i % 4].add("a" if i % 2 else "b", s) == good
    travelled = [Tally.from_wire(SLO, json.loads(json.dumps(p.to_wire()))) for p in parts]
    mine, other = merged(SLO, travelled).summary(), whole.summary()
    assert json.dumps(strict(mine), sort_keys=True)[:200]
    for key in ("offered", "good", "attainment", "rejected", "errors", "length_s", "ttft_s", "itl_s", "e2e_s"):
        assert mine[key] == pytest.approx(other[key]), key
    assert mine["by_name"].keys() == {"a", "b"}


def test_the_share_from_the_cache_is_the_one_of_the_report() -> None:
    told = [sample(i, i * 0.01, cached_tokens=30 if i % 2 else 0) for i in range(40)]
    cut = sample(90, 1, outcome=Outcome.FAILED, error="cut", cached_tokens=100)
    for samples in ([*told, cut, refused(99, 1)], [sample(i, i * 0.01) for i in range(5)], []):
        parts = [Tally(SLO) for _ in range(3)]
        for i, s in enumerate(samples):
            parts[i % 3].add("a", s)
        found = merged(SLO, [Tally.from_wire(SLO, json.loads(json.dumps(p.to_wire()))) for p in parts]).summary()
        assert found["cached_share"] == summarize(samples, SLO, 2.0)["cached_share"]
    assert summarize(told, SLO, 2.0)["cached_share"] == 0.15


def test_curves_stay_between_one_and_the_peak_and_end() -> None:
    for name in CURVES:
        users = [users_at(name, t, 100, 40) for t in range(100)]
        assert all(u is not None and 1 <= u <= 40 for u in users), name
        assert max(u for u in users if u) >= 39, name
        assert users_at(name, 100, 100, 40) is None


@pytest.mark.parametrize("name", scenarios.names())
def test_every_scenario_loads_and_gives_requests(name: str) -> None:
    s = scenarios.load(scenarios.find(name))
    assert s.name == name
    assert s.description
    assert not s.workload.closed
    first = next(iter(s.workload.arrivals()))
    assert first.prompt_tokens > 0


def test_a_wrong_scenario_is_one_line() -> None:
    with pytest.raises(ConfigError, match="scenarios: agent"):
        scenarios.find("nope")
    with pytest.raises(ConfigError, match="workload"):
        scenarios.parse({"name": "x"})
    with pytest.raises(ConfigError, match="unknown key"):
        scenarios.parse({"name": "x", "wrkload": {}})


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://h:1", ("http", "h", 1, "")),
        ("h:8000", ("http", "h", 8000, "")),
        ("https://h/v1", ("https", "h", 443, "")),
        ("http://h/base/", ("http", "h", 80, "/base")),
    ],
)
def test_addresses(url: str, parts: tuple[Any, ...]) -> None:
    assert split_url(url) == parts


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999"])
def test_wrong_addresses_are_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        split_url(url)


class Plain:
    def messages(self, prompt: Any, *, alternate: bool) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(alternate)}]

    def text(self, prompt: Any) -> str:
        return "text"

    def token_ids(self, prompt: Any) -> list[int]:
        return [1, 2, 3]


def test_requests_carry_what_the_endpoint_wants() -> None:
    e = Endpoint("https://h:1/v1", "m", api="tokens", tenant_keys={"a": "k1"}, api_key="k2")
    writer = RequestWriter(e, Plain())  # type: ignore[arg-type]
    body = writer.body(((1, 3),), 7)
    head, _, sent = writer.request(body, request_id="x", tenant="a").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1")
    assert b"authorization: Bearer k1" in head
    assert b"x-tenant-id: a" in head
    assert f"content-length: {len(sent)}".encode() in head
    asked = json.loads(sent)
    assert asked["prompt"] == [1, 2, 3]
    assert asked["max_tokens"] == asked["min_tokens"] == 7
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    plain = RequestWriter(Endpoint("h", "m", exact_output=False, counts=False, tenant_header=None), Plain())  # type: ignore[arg-type]
    asked = json.loads(plain.body(((1, 3),), 7))
    assert "ignore_eos" not in asked
    assert asked["max_completion_tokens"] == 7
    assert asked["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in asked
    salted = RequestWriter(Endpoint("h", "m", cache_salt="run-1"), Plain())  # type: ignore[arg-type]
    assert json.loads(salted.body(((1, 3),), 7))["cache_salt"] == "run-1"
    assert b"authorization" not in plain.request(b"{}", request_id="x")


def result(samples: list[Sample]) -> dict[str, Any]:
    s = scenarios.load(scenarios.find("smoke"))
    run = Run(samples, [0.001] * 50, max((x.end_s or 0 for x in samples), default=0.0))
    context = {"url": "http://h", "model": "<m>", "tokenizer": "words", "processes": 1, "command": "c"}
    return build(s, run, **context, started_at="now", run_id="r")


def test_the_page_escapes_what_it_is_given_and_draws_every_chart() -> None:
    done = result([sample(i, i * 0.1, tenant="<b>" if i % 2 else "a", error="") for i in range(60)])
    page = render(done)
    assert "&lt;m&gt;" in page
    assert "<m>" not in page
    assert "&lt;b&gt;" in page
    assert page.count("<figure") == 10
    assert "no data" not in page
    assert "NaN" not in page
    json.dumps(strict(done), allow_nan=False)


def test_the_page_of_a_run_in_which_nothing_worked_still_opens() -> None:
    page = render(result([refused(i, i * 0.1) for i in range(30)]))
    assert "no data" in page
    assert "HTTP 503" in page
    assert render(result([]))


def test_charts_survive_single_points_zeros_and_gaps() -> None:
    for series in (
        Series("a", [1.0], [2.0]),
        Series("a", [1.0, 2.0], [0.0, 0.0]),
        Series("a", [1.0, 2.0, 3.0], [1.0, None, math.inf]),
    ):
        for log in (False, True):
            svg = draw(Chart("t", "x", "y", [series], [Mark(1.0, "m"), Mark(2.0, "n", "x")], log_x=log))
            assert 'data-points="' in svg
            assert "nan" not in svg.lower().replace("nan=", "")


def record_of(s: Sample, **stages: float) -> dict[str, Any]:
    return {
        "request_id": f"minted-{s.index}",
        "client_request_id": s.request_id,
        "outcome": "done",
        "slo": {"ttft_s": 9.0, "tpot_s": 9.0, "itl_p99_s": None},
        "arrival_s": 1e6,
        "end_s": 1e6 + 1,
        "path": "split",
        "decode_worker": "d",
        "ttft_s": 0.4,
        "prompt_tokens": 100,
        "cached_tokens": 48,
        "itl_s": None,
        "stage_s": stages,
    }


def test_the_servers_stages_meet_the_clients_times() -> None:
    s = scenarios.load(scenarios.find("smoke"))
    samples = [sample(i, i * 0.1, ttft=1.5) for i in range(30)]
    raw = [record_of(x, prefill_queue=1.2, prefill_compute=0.2) for x in samples[:25]]
    matched = join(samples, raw, s)
    assert len(matched) == 25
    one = matched["r-3"]
    assert (one.ttft_s, one.slo.ttft_s, one.cached_tokens) == (pytest.approx(1.5), 1.0, 48)
    out = joined(samples, raw, s, {})
    assert out["misses_by_stage"]["joined"] == 25
    assert out["misses_by_stage"]["stages"]["prefill_queue"] == 25
    assert out["evidence"]["late_by_prefill_queue"] > 0.8
    alone = joined(samples, [], s, {})
    assert "misses_by_stage" not in alone
    assert "cached_share" not in alone["evidence"], "a server that says nothing of its cache has not said zero"


def test_the_evidence_of_a_total_outage_is_kept() -> None:
    s = scenarios.load(scenarios.find("smoke"))
    out = joined([refused(i, i * 0.1) for i in range(30)], [], s, {"batch_slots": 64.0, "kv_capacity_tokens": 1e5})
    assert out["evidence"]["unserved_share"] == 1
    assert "batch_used_share" not in out["evidence"]


def test_requests_that_the_server_keeps_no_record_of_are_not_the_routers() -> None:
    s = scenarios.load(scenarios.find("smoke"))
    samples = [sample(i, i * 0.1, ttft=1.5) for i in range(400)]
    raw = [record_of(x, router_queue=0.01, prefill_queue=1.2, prefill_compute=0.09) for x in samples]
    whole = joined(samples, raw, s, {})["evidence"]
    assert whole["late_by_prefill_queue"] == 1
    latest = joined(samples, raw[-100:], s, {})["evidence"]  # a server keeps its latest
    for name in ("late_by_prefill_queue", "late_by_router_queue", "split_share", "cached_share", "router_queue_p50_s"):
        assert latest[name] == pytest.approx(whole[name]), name
    assert latest["prefill_utilization"] == pytest.approx(whole["prefill_utilization"], abs=0.1)
    assert (latest["requests"], latest["ttft_missed_share"]) == (400, 1)
    one_of_two = joined(samples, raw[::2], s, {})["evidence"]  # one router's records
    assert one_of_two["late_by_prefill_queue"] == 1
    assert one_of_two["split_share"] == 1
    assert "prefill_utilization" not in one_of_two, "half of the work is not half of the time"
    few = joined(samples, raw[-5:], s, {})["evidence"]
    assert "split_share" not in few


def test_reports_and_experiments_are_read(tmp_path: Any) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"scenario": {"name": "chat"}, "evidence": {"requests": 30, "x": None}}))
    assert [(s.name, s.evidence) for s in read_folder(tmp_path)] == [("chat", {"requests": 30.0})]
    file.write_text(json.dumps({"runs": [{"name": "a", "evidence": {"requests": 1}}, {"impossible": "x"}]}))
    assert [s.name for s in read_folder(tmp_path)] == ["a"]
    for text in ("{}", "not json", "[]"):
        file.write_text(text)
        with pytest.raises(Exception, match="SOURCE"):
            read_folder(tmp_path)


def test_bench_figures_are_ratios_to_the_direct_split() -> None:
    def row(ttft: float, speed: float) -> dict[str, Any]:
        times = dict.fromkeys(("ttft_p99_s", "itl_p50_s", "itl_p99_s", "tpot_p50_s"), ttft)
        return {"ttft_p50_s": ttft, **times, "tokens_per_s": speed, "cpu_s_per_1000_tokens": {"router": 0.5}}

    results = {"direct": {8: row(0.1, 100)}, "pdserve": {8: median([row(0.12, 90), row(0.5, 1), row(0.11, 95)])}}
    found = key_figures(results)["8"]
    assert found["ttft_p50_ratio"] == pytest.approx(1.2)
    assert found["tokens_per_s_ratio"] == pytest.approx(0.9)
    assert found["ttft_p50_added_ms"] == pytest.approx(20)
    assert "| pdserve | 8 |" in show(results, (512, 64))
    assert kind_of("ray::ServeReplica:pdserve:router") == "router"
    assert kind_of("VLLM::EngineCore") == "engine core"
    assert spent({(1, "router"): 1.0}, {(1, "router"): 3.0, (2, "ray"): 0.5}) == {"router": 2.0, "ray": 0.5}


def test_capacities_are_read_from_a_router_s_own_status() -> None:
    infos = [
        WorkerInfo(name, "i", Role.DECODE, block_size_tokens=16, kv_total_blocks=blocks, kv_bytes_per_token=64,
                   max_num_seqs=8, max_num_batched_tokens=512, max_model_len=2048)
        for name, blocks in (("d0", 100), ("d1", 300))
    ]  # fmt: skip
    dispatcher: Any = SimpleNamespace(
        workers={i.worker_id: i for i in infos}, loads={}, members=SimpleNamespace(last_failure={})
    )
    status = {"pools": {"decode": _pool(Role.DECODE, parse_config({}), dispatcher)}}
    assert engine_numbers(status) == {"batch_slots": 16.0, "kv_capacity_tokens": 6400.0, "kv_used_share_now": 0.0}


def test_a_request_that_never_had_an_engine_is_no_engine() -> None:
    slo = Slo(1.0, 0.1)
    times = {"ttft_s": 0.1, "output_tokens": 2, "stage_s": {Stage.PREFILL_COMPUTE: 0.095}}
    served = [
        RequestRecord(f"{i}", Outcome.DONE, slo, i * 0.1, i * 0.1 + 0.2, path=Path.SPLIT, prefill_worker="p", **times)
        for i in range(40)
    ]
    nowhere = RequestRecord("x", Outcome.REJECTED, slo, 2.0, 2.0)
    busy = gather(served, slo)["prefill_utilization"]
    assert busy == pytest.approx(0.95, abs=0.03)
    assert gather([*served, nowhere], slo)["prefill_utilization"] == pytest.approx(busy)
