"""A run as a timeline in the Chrome trace format: open it in Perfetto or in chrome://tracing.

One row an engine with its iterations, one row an engine with the KV that it pulls, and one row for every request slot
with the stages of the requests that used it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from cluster.messages import RequestRecord
from cluster.sim.fleet import Fleet

_ENGINES, _TRANSFERS, _REQUESTS = 1, 2, 3


def chrome_trace(fleet: Fleet) -> dict[str, Any]:
    """The whole run; the fleet must have been made with `Options(timeline=True)`."""
    workers = sorted({*fleet.workers, *(w.worker_id for w in fleet.gone)})
    row = {worker_id: number for number, worker_id in enumerate(workers, 1)}
    events: list[dict[str, Any]] = []
    for process, name in ((_ENGINES, "engines"), (_TRANSFERS, "KV pulled by"), (_REQUESTS, "requests")):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
    for process in (_ENGINES, _TRANSFERS):
        for worker_id, thread in row.items():
            named: dict[str, Any] = {"ph": "M", "name": "thread_name", "pid": process, "tid": thread}
            named["args"] = {"name": worker_id}
            events.append(named)
    for span in fleet.log.spans:
        name = "mixed" if span.prompt_tokens and span.decodes else "prefill" if span.prompt_tokens else "decode"
        args: dict[str, Any] = {
            "iterations": span.iterations,
            "prompt_tokens": span.prompt_tokens,
            "decodes": span.decodes,
        }
        events.append(_complete(_ENGINES, row[span.worker], name, span.start_s, span.end_s, args))
    for t in fleet.log.transfers:
        args = {"from": t.source, "bytes": t.bytes}
        events.append(_complete(_TRANSFERS, row[t.target], f"from {t.source}", t.start_s, t.end_s, args))
    events.extend(_requests(fleet.records))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(fleet: Fleet, path: str | Path) -> None:
    Path(path).write_text(json.dumps(chrome_trace(fleet)), encoding="utf-8")


def _requests(records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
    """Stages of every request, on the lowest row that is free from its arrival to its end."""
    events: list[dict[str, Any]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows = 0

    for record in sorted(records, key=lambda r: r.arrival_s):
        while busy and busy[0][0] <= record.arrival_s:
            heappush(free, heappop(busy)[1])
        if free:
            thread = heappop(free)
        else:
            rows += 1
            thread = rows
        heappush(busy, (record.end_s, thread))
        args = {
            "outcome": record.outcome.value,
            "path": record.path.value if record.path else None,
            "prefill": record.prefill_worker,
            "decode": record.decode_worker,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
        }
        events.append(
            _complete(_REQUESTS, thread, f"request {record.request_id}", record.arrival_s, record.end_s, args)
        )
        at_s = record.arrival_s
        for stage, spent_s in record.stage_s.items():
            if spent_s > 0:
                events.append(_complete(_REQUESTS, thread, stage.value, at_s, at_s + spent_s, {}))
            at_s += spent_s
        if record.ttft_s is not None and record.end_s > record.arrival_s + record.ttft_s:
            start_s = record.arrival_s + record.ttft_s
            events.append(_complete(_REQUESTS, thread, "tokens", start_s, record.end_s, {}))
    return events


def _complete(
    process: int, thread: int, name: str, start_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "pid": process, "tid": thread, "name": name}
    event["ts"], event["dur"] = round(start_s * 1e6, 3), round((end_s - start_s) * 1e6, 3)
    if args:
        event["args"] = args
    return event
