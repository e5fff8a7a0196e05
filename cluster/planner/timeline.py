"""One run as a Chrome trace (chrome://tracing, Perfetto): a process a worker, a lane a request, a box a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from cluster.messages import Outcome, Path, RequestRecord, Stage

BEFORE_FIRST = (
    Stage.ROUTER_QUEUE,
    Stage.PREFILL_QUEUE,
    Stage.PREFILL_COMPUTE,
    Stage.KV_TRANSFER,
    Stage.DECODE_QUEUE,
    Stage.DECODE_STEP,
)


class Span(NamedTuple):
    worker: str
    name: str
    begin_s: float
    end_s: float
    request_id: str


def spans(record: RequestRecord) -> Iterator[Span]:
    """A request's stages one after the other, on the worker that they happened on, then its decoding."""
    at = record.arrival_s
    local = record.path is not Path.SPLIT
    for stage in BEFORE_FIRST:
        spent = record.stage_s.get(stage, 0.0)
        if spent <= 0:
            continue
        if stage is Stage.ROUTER_QUEUE:
            worker = "router"
        elif stage in (Stage.PREFILL_QUEUE, Stage.PREFILL_COMPUTE) and not local:
            worker = record.prefill_worker or "router"
        else:
            worker = record.decode_worker or "router"
        yield Span(worker, stage.value, at, at + spent, record.request_id)
        at += spent
    if record.ttft_s is not None and record.end_s > record.arrival_s + record.ttft_s:
        first = record.arrival_s + record.ttft_s
        yield Span(record.decode_worker or "router", "decode", first, record.end_s, record.request_id)


def lanes(items: list[Span]) -> list[tuple[Span, int]]:
    """The lowest free lane of its worker for every span, so that boxes of one lane never overlap."""
    free: dict[str, list[float]] = {}
    placed = []
    for span in sorted(items, key=lambda s: (s.begin_s, s.end_s)):
        ends = free.setdefault(span.worker, [])
        lane = next((i for i, end in enumerate(ends) if end <= span.begin_s + 1e-9), len(ends))
        if lane == len(ends):
            ends.append(span.end_s)
        else:
            ends[lane] = span.end_s
        placed.append((span, lane))
    return placed


def chrome_trace(records: list[RequestRecord]) -> dict[str, Any]:
    """The trace-event format: complete events in microseconds, workers as named processes."""
    placed = lanes([s for r in records if r.outcome is not Outcome.REJECTED for s in spans(r)])
    workers = sorted({span.worker for span, _ in placed}, key=lambda w: (w != "router", not w.startswith("prefill"), w))
    number = {worker: i + 1 for i, worker in enumerate(workers)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number[w], "args": {"name": w}} for w in workers
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": "stage",
            "pid": number[span.worker],
            "tid": lane,
            "ts": round(span.begin_s * 1e6, 1),
            "dur": round((span.end_s - span.begin_s) * 1e6, 1),
            "args": {"request": span.request_id},
        }
        for span, lane in placed
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
