"""The Prometheus exposition agrees with the catalogue, adds up, and never raises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.goodput.catalogue import CATALOGUE, Kind
from cluster.goodput.metrics import Metrics
from cluster.messages import Outcome, Path, RequestRecord, Slo, Stage

SLO = Slo(ttft_s=0.3, tpot_s=0.05)


def record(outcome=Outcome.DONE, **fields) -> RequestRecord:
    base = {
        "ttft_s": 0.2,
        "tpot_s": 0.02,
        "output_tokens": 3,
        "itl_s": [0.02, 0.02],
        "path": Path.SPLIT,
        "prefill_worker": "p0",
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "decode_computed_tokens": 1,
        "transfer_bytes": 1000,
        "stage_s": {Stage.PREFILL_COMPUTE: 0.15, Stage.KV_TRANSFER: 0.05},
    }
    return RequestRecord("r", outcome, SLO, 0.0, 1.0, **(base | fields))


def scrape(metrics: Metrics) -> dict[tuple, float]:
    text = metrics.render().decode()
    return {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def served() -> Metrics:
    metrics = Metrics(SLO)
    for _ in range(4):
        metrics.start(prompt_tokens=100)
    metrics.observe(record())
    metrics.observe(record(ttft_s=0.9, stage_s={Stage.PREFILL_QUEUE: 0.8, Stage.PREFILL_COMPUTE: 0.1}))
    metrics.observe(record(Outcome.REJECTED, ttft_s=None, tpot_s=None, itl_s=[], stage_s={}, path=None))
    return metrics


def test_what_a_scrape_shows():
    got = scrape(served())
    assert got["pdserve_requests_started_total",] == 4
    assert got["pdserve_requests_total", "done"] == 2
    assert got["pdserve_requests_running",] == 1
    assert got["pdserve_requests_good_total",] == 1
    assert got["pdserve_requests_missed_total", "prefill_queue"] == 1
    assert got["pdserve_requests_missed_total", "router_queue"] == 1
    assert got["pdserve_attainment",] == pytest.approx(1 / 3)
    assert got["pdserve_ttft_seconds_bucket", "0.3"] == 1
    assert got["pdserve_ttft_seconds_bucket", "+Inf"] == got["pdserve_ttft_seconds_count",] == 2
    assert got["pdserve_itl_seconds_count",] == 4
    assert got["pdserve_transfer_seconds_count",] == 1
    assert got["pdserve_decisions_total", "split"] == 2
    assert got["pdserve_cached_tokens_total", "prefill"] == 192
    assert got["pdserve_computed_tokens_total", "prefill"] == 72
    assert got["pdserve_tenant_requests_total", "default", "good"] == 1


def test_refused_requests_add_up_and_lower_no_attainment():
    metrics = served()
    for _ in range(6):
        metrics.start(prompt_tokens=100)
        refused = {"ttft_s": None, "tpot_s": None, "itl_s": [], "stage_s": {}, "path": None}
        metrics.observe(record(Outcome.REJECTED, status=429, **refused))
    got = scrape(metrics)
    ended = sum(v for k, v in got.items() if k[0] == "pdserve_requests_total")
    assert got["pdserve_requests_started_total",] == ended + got["pdserve_requests_running",] == 10
    assert got["pdserve_requests_refused_total",] == 6
    assert got["pdserve_requests_missed_total", "router_queue"] == 1
    assert got["pdserve_attainment",] == pytest.approx(1 / 3)
    assert got["pdserve_tenant_requests_total", "default", "refused"] == 6


def test_what_the_autoscaler_is_told_knows_no_limit_below_the_clusters():
    metrics = Metrics(SLO)
    for i in range(100):
        metrics.start(prompt_tokens=100)
        own = Slo(ttft_s=0.001, tpot_s=0.001) if i < 4 else SLO
        metrics.observe(replace(record(), slo=own))
    assert (metrics.stats.counters.good, metrics.stats.counters.missed) == (96, 4)
    told = metrics.promised
    assert (told.good, told.missed, told.started, told.running) == (100, 0, 100, 0)
    assert told.used_quantile("tpot", 0.97) == 0.5
    assert told.used_quantile("ttft", 1.0) == 0.75


def test_stage_seconds_add_up_to_ttft():
    got = scrape(served())
    stages = sum(v for k, v in got.items() if k[0] == "pdserve_stage_seconds_sum")
    assert stages == pytest.approx(got["pdserve_ttft_seconds_sum",])


def test_every_series_is_in_the_catalogue_and_every_family_has_its_help():
    metrics = served()
    metrics.set_gauges(
        {
            name: ({tuple("x" for _ in spec.labels): 1.0} if spec.labels else 1.0)
            for name, spec in CATALOGUE.items()
            if spec.kind is not Kind.HISTOGRAM
        }
    )
    known = {series for spec in CATALOGUE.values() for series in spec.series}
    seen = {k[0] for k in scrape(metrics)}
    assert seen == known
    assert metrics.errors == 0


def test_names_follow_the_rules():
    for spec in CATALOGUE.values():
        assert spec.name.startswith("pdserve_")
        assert (spec.kind is Kind.COUNTER) == spec.name.endswith("_total")
        assert spec.help
        assert not {"le", "quantile"} & set(spec.labels)


def test_values_from_other_parts():
    metrics = Metrics(SLO)
    metrics.set_gauges(
        {
            "pdserve_leases_open": 3,
            "pdserve_leases_total": {"granted": 9, "expired": 1},
            "pdserve_pool_replicas": {("decode", "ready"): 2},
        }
    )
    got = scrape(metrics)
    assert got["pdserve_leases_total", "granted"] == 9
    assert got["pdserve_pool_replicas", "decode", "ready"] == 2
    assert ("pdserve_requests_started_total",) not in got, "a worker has no requests of its own"
    metrics.set_gauges({"pdserve_pool_replicas": {("decode", "draining"): 1}})
    assert ("pdserve_pool_replicas", "decode", "ready") not in scrape(metrics)


def test_errors_in_telemetry_are_counted_and_swallowed():
    metrics = served()
    metrics.observe(record(ttft_s=math.nan))
    metrics.observe("no record")
    metrics.set_gauges({"pdserve_no_such_metric": 1, "pdserve_leases_open": {"a": 1}, "pdserve_leases_total": 3})
    metrics.set_gauges({"pdserve_pool_replicas": {"only one label": 1}})
    got = scrape(metrics)
    assert got["pdserve_telemetry_errors_total",] >= 5
    assert metrics.errors >= 6
    assert got["pdserve_requests_total", "done"] == 3, "the outcome is counted although its latency was none"
    assert got["pdserve_requests_running",] == 0


def test_attainment_is_of_the_last_minute_and_absent_without_requests():
    now = [0.0]
    metrics = Metrics(SLO, clock=lambda: now[0])
    metrics.start()
    metrics.observe(record(tpot_s=9.0))
    assert scrape(metrics)["pdserve_attainment",] == 0.0
    now[0] = 30.0
    metrics.start()
    metrics.observe(record())
    assert scrape(metrics)["pdserve_attainment",] == 0.5
    now[0] = 200.0
    assert ("pdserve_attainment",) not in scrape(metrics)
    assert scrape(metrics)["pdserve_goodput",] == 0.0


def test_tenants_are_bounded():
    metrics = Metrics(SLO)
    for i in range(300):
        metrics.start(tenant=f"t{i:03d}")
        metrics.observe(record(tenant=f"t{i:03d}"))
    rows = {k[1]: v for k, v in scrape(metrics).items() if k[0] == "pdserve_tenant_requests_total"}
    assert len(rows) == 201
    assert rows["(other)"] == 100
    assert sum(rows.values()) == 300


def test_two_exporters_in_one_process():
    a, b = served(), Metrics(SLO)
    b.start()
    assert scrape(a)["pdserve_requests_started_total",] == 4
    assert scrape(b)["pdserve_requests_started_total",] == 1
