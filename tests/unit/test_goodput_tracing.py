"""Spans of a request: one trace with the client's, stages laid end to end, legs that carry the context on."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.config import TracingConfig
from cluster.goodput.tracing import Tracing, _with_path, create
from cluster.messages import Outcome, Path, Request, RequestRecord, Slo, Stage

SLO = Slo(1.0, 0.1)
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Tracing(provider, wall_ns=lambda: 10**18), exporter
    provider.shutdown()


def request(request_id="r1") -> Request:
    return Request(request_id, 5.0, 100, 10, SLO)


def record(request_id="r1", outcome=Outcome.DONE, **fields) -> RequestRecord:
    base = {
        "path": Path.SPLIT,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "ttft_s": 0.4,
        "tpot_s": 0.05,
        "output_tokens": 4,
        "stage_s": {Stage.ROUTER_QUEUE: 0.1, Stage.PREFILL_COMPUTE: 0.2, Stage.KV_TRANSFER: 0.1},
    }
    return RequestRecord(request_id, outcome, SLO, 5.0, 5.6, **(base | fields))


def test_a_request_is_one_trace_with_its_client_and_its_legs(traced):
    tracing, exporter = traced
    legs = tracing.start(request(), {"Traceparent": CLIENT})
    tracing.finish(record())
    spans = {s.name: s for s in exporter.get_finished_spans()}
    root = spans["request"]
    assert format(root.context.trace_id, "032x") == CLIENT.split("-")[1]
    assert format(root.parent.span_id, "016x") == CLIENT.split("-")[2]
    _, trace, parent, _ = legs["traceparent"].split("-")
    assert (trace, parent) == (CLIENT.split("-")[1], format(root.context.span_id, "016x"))
    assert {s.parent.span_id for name, s in spans.items() if name != "request"} == {root.context.span_id}


def test_stages_lie_end_to_end_and_decode_follows(traced):
    tracing, exporter = traced
    tracing.start(request(), None)
    tracing.finish(record())
    spans = {s.name: s for s in exporter.get_finished_spans()}
    seconds = {name: ((s.start_time - 10**18) / 1e9, (s.end_time - 10**18) / 1e9) for name, s in spans.items()}
    assert seconds["router_queue"] == pytest.approx((0.0, 0.1))
    assert seconds["prefill_compute"] == pytest.approx((0.1, 0.3))
    assert seconds["kv_transfer"] == pytest.approx((0.3, 0.4))
    assert seconds["decode"] == pytest.approx((0.4, 0.6))
    assert seconds["request"] == pytest.approx((0.0, 0.6))
    assert spans["prefill_compute"].attributes["pdserve.worker"] == "p0"
    assert spans["decode"].attributes["pdserve.worker"] == "d0"
    assert spans["request"].attributes["pdserve.good"] is True
    assert "pdserve.missed_stage" not in spans["request"].attributes


def test_a_failure_without_a_token(traced):
    tracing, exporter = traced
    tracing.start(request(), {"traceparent": "garbage"})
    tracing.finish(record(outcome=Outcome.FAILED, ttft_s=None, stage_s={Stage.ROUTER_QUEUE: 0.6}, error="no worker"))
    root = next(s for s in exporter.get_finished_spans() if s.name == "request")
    assert root.parent is None
    assert root.status.description == "no worker"
    assert root.attributes["pdserve.missed_stage"] == "router_queue"
    assert not any(s.name == "decode" for s in exporter.get_finished_spans())


def test_nothing_is_kept_and_nothing_raises(traced):
    tracing, _ = traced
    tracing.finish(record("unknown"))
    tracing.start(request("r2"), None)
    tracing.finish(record("r2", stage_s={Stage.ROUTER_QUEUE: "x"}))
    assert tracing.errors == 1
    assert tracing._open == {}


def test_off_by_default_and_the_endpoints_path():
    assert create(TracingConfig(), "pdserve") is None
    assert _with_path("http://collector:4318") == "http://collector:4318/v1/traces"
    assert _with_path("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert _with_path("https://x/y/traces") == "https://x/y/traces"
