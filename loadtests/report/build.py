"""A finished load test as one result document, and the files made of it."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.report.page import render
from loadtests.results import by_group, cdf, closed_loop_note, over_time, pooled, summarize, validity
from loadtests.runner import Run
from loadtests.sample import Sample
from loadtests.scenario import Scenario

FORMAT = 1


def build(scenario: Scenario, run: Run, **context: Any) -> dict[str, Any]:
    """The result document.

    Args:
        context: url, model, tokenizer, processes, command, started_at, planned (number of scheduled requests).
    """
    slo = scenario.slo.to_slo()
    samples = run.samples
    done = [s for s in samples if s.e2e_s is not None]
    closed = scenario.workload.closed
    notes = []
    if closed:
        notes.append("closed loop: the rate follows the server, so goodput against a rate cannot be read from this run")
        if (slower := closed_loop_note(samples)) is not None:
            notes.append(slower)
    if any(s.counted == "chunks" for s in done):
        notes.append("the server gave no token count with each chunk: ITL is per chunk, TPOT uses its total")
    return {
        "kind": "pdserve loadtest",
        "format": FORMAT,
        "scenario": scenario.model_dump(mode="json", by_alias=True, exclude_none=True),
        "seed": scenario.workload.seed,
        "slo": scenario.slo.model_dump(mode="json"),
        "length_s": run.length_s,
        "versions": versions(),
        "notes": notes,
        "validity": validity(
            samples, run.loop_late_s, scenario.validity, closed=closed, planned=context.pop("planned", None)
        ),
        "summary": summarize(samples, slo, run.length_s),
        "by_tenant": by_group(samples, "tenant", slo, run.length_s),
        "by_stream": by_group(samples, "stream", slo, run.length_s),
        "over_time": over_time(samples, slo, run.length_s),
        "cdf": {
            "ttft_s": cdf([s.ttft_s for s in done if s.ttft_s is not None]),
            "tpot_s": cdf([s.tpot_s for s in done if s.tpot_s is not None]),
            "itl_s": cdf(pooled(s.times.itl_s for s in done)),
            "e2e_s": cdf([s.e2e_s for s in done if s.e2e_s is not None]),
        },
    } | context


def versions() -> dict[str, str]:
    """Of everything that takes part in the measurement on this side."""
    found = {"python": platform.python_version()}
    for name in ("pdserve", "uvloop", "httptools", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(result: Mapping[str, Any], samples: Sequence[Sample], folder: Path) -> list[Path]:
    """results.json, requests.csv, timeline.csv, sweep.csv (where there was one) and report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "results.json"]
    written[0].write_text(json.dumps(strict(result), ensure_ascii=False, indent=1), encoding="utf-8")
    written.append(_csv(folder / "requests.csv", [_row(s) for s in samples]))
    written.append(_csv(folder / "timeline.csv", result["over_time"]))
    if result.get("sweep"):
        written.append(_csv(folder / "sweep.csv", result["sweep"]["steps"]))
    page = folder / "report.html"
    page.write_text(render(result), encoding="utf-8")
    return [*written, page]


def _row(s: Sample) -> dict[str, Any]:
    return {
        "index": s.index,
        "request_id": s.request_id,
        "stream": s.stream,
        "tenant": s.tenant,
        "session": s.session,
        "scheduled_s": s.scheduled_s,
        "sent_s": s.sent_s,
        "end_s": s.end_s,
        "outcome": s.outcome.value if s.outcome else "unfinished",
        "status": s.status,
        "finish_reason": s.finish_reason,
        "ttft_s": s.ttft_s,
        "tpot_s": s.tpot_s,
        "e2e_s": s.e2e_s,
        "itl_max_s": max(s.times.itl_s, default=None),
        "asked_prompt_tokens": s.asked_prompt_tokens,
        "prompt_tokens": s.prompt_tokens,
        "cached_tokens": s.cached_tokens,
        "asked_output_tokens": s.asked_output_tokens,
        "output_tokens": s.times.tokens,
        "error": s.error,
    }


def _csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["index"])
        writer.writeheader()
        writer.writerows(rows)
    return path


def strict(value: Any) -> Any:
    """Plain JSON: an infinite quantile (it lies beyond the served requests) becomes the string "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return value
