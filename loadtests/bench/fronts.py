"""`make bench`: what our layer costs. The same engines, model and client behind three fronts, at three concurrencies.

Prompts are random token ids that share nothing; outputs have exactly the length asked for. A closed loop keeps the
concurrency; latencies are from sending. Each figure is the median over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console

from cluster.errors import UserError
from cluster.messages import Outcome
from cluster.runtime.urgent import urgent
from cluster.workload.structures import Ids
from cluster.workload.text import TextWriter
from loadtests.bench.cpu import cpu_by_process, spent
from loadtests.bench.servers import MODES, Front, start
from loadtests.bench.two_call import TwoCallClient, clock_from_now
from loadtests.client import Client
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.results import pooled, quantiles
from loadtests.sample import Sample
from loadtests.tokenizer import find_tokenizer

PER_WORKER = {1: 16, 8: 8, 32: 4}
"""Requests per unit of concurrency in one repeat: about as long at each."""

err = Console(stderr=True, highlight=False, markup=False)


async def closed_loop(
    front: Front, writer: RequestWriter, ids: Ids, concurrency: int, requests: int, tokens: tuple[int, int]
) -> tuple[list[Sample], float]:
    """`concurrency` workers send `requests` requests; the samples and the seconds that took."""
    clock = clock_from_now()
    endpoint = writer.endpoint
    two = TwoCallClient(_at(endpoint, front.prefill_url), endpoint, writer, clock) if front.prefill_url else None
    client = Client(endpoint, clock)
    bodies = [writer.body(((ids.new(), tokens[0]),), tokens[1]) for _ in range(requests)]
    numbers = iter(range(requests))
    samples: list[Sample] = []

    async def worker() -> None:
        for i in numbers:
            sample = Sample(i, clock(), request_id=f"bench-{time.monotonic_ns()}")
            samples.append(sample)
            if two is not None:
                await two.send(sample, bodies[i])
            else:
                await client.send(sample, writer.request(bodies[i], request_id=sample.request_id))

    try:
        await asyncio.gather(*(worker() for _ in range(concurrency)))
    finally:
        await client.close()
        if two is not None:
            await two.close()
    return samples, max(s.end_s or 0.0 for s in samples)


def _at(endpoint: Endpoint, url: str | None) -> Endpoint:
    assert url is not None
    return Endpoint(url, endpoint.model, api=endpoint.api, tenant_header=None)


def figures(samples: Sequence[Sample], seconds: float, cpu: dict[str, float]) -> dict[str, Any]:
    """Of one repeat."""
    done = [s for s in samples if s.outcome is Outcome.DONE]
    if len(done) < len(samples):
        error = next(s.error for s in samples if s.outcome is not Outcome.DONE)
        raise UserError(f"{len(samples) - len(done)} of {len(samples)} requests failed: {error}")
    tokens = sum(s.times.tokens for s in done)
    ttft = quantiles([s.ttft_s for s in done if s.ttft_s is not None])
    itl = quantiles(pooled(s.times.itl_s for s in done))
    tpot = quantiles([s.tpot_s for s in done if s.tpot_s is not None])
    return {
        "ttft_p50_s": ttft["p50"],
        "ttft_p99_s": ttft["p99"],
        "itl_p50_s": itl["p50"],
        "itl_p99_s": itl["p99"],
        "tpot_p50_s": tpot["p50"],
        "tokens_per_s": tokens / seconds,
        "cpu_s_per_1000_tokens": {kind: 1e3 * used / tokens for kind, used in cpu.items()},
    }


def by_stage(front: Front, requests: int) -> dict[str, float]:
    """Of pdserve's latest requests: the share that took the split path, and the median time per stage before TTFT."""
    records = httpx.get(f"{front.url}/pdserve/records", timeout=30).json()[-requests:]
    stages = sorted({stage for r in records for stage in r["stage_s"]})
    medians = {f"{stage}_s": statistics.median(r["stage_s"].get(stage, 0.0) for r in records) for stage in stages}
    return {"split_share": sum(r["path"] == "split" for r in records) / len(records), **medians}


def measure(
    mode: str,
    concurrencies: Sequence[int],
    repeats: int,
    tokens: tuple[int, int],
    folder: Path,
    seed: int,
    changes: dict[str, Any] | None = None,
) -> dict[int, dict[str, Any]]:
    """Every concurrency on one front, `repeats` times; medians."""
    err.print(f"{mode}: starting")
    with (
        start(mode, folder, changes) as front,
        urgent(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
    ):
        endpoint = Endpoint(front.url, "embedded", api="tokens", tenant_header=None)
        writer = RequestWriter(endpoint, TextWriter(find_tokenizer("embedded", "embedded")))
        ids = Ids(seed, MODES.index(mode))
        loop.run(closed_loop(front, writer, ids, 4, 12, tokens))  # first requests compile and connect
        out = {}
        for c in concurrencies:
            runs = []
            for _ in range(repeats):
                before = cpu_by_process(front.roots)
                samples, seconds = loop.run(closed_loop(front, writer, ids, c, c * PER_WORKER.get(c, 4), tokens))
                runs.append(figures(samples, seconds, spent(before, cpu_by_process(front.roots))))
                if mode == "pdserve":
                    runs[-1]["stages"] = by_stage(front, len(samples))
            out[c] = median(runs)
            err.print(
                f"{mode} at {c}: {out[c]['tokens_per_s']:.0f} tokens/s, TTFT p50 {1e3 * out[c]['ttft_p50_s']:.0f} ms"
            )
        return out


def median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure."""
    out: dict[str, Any] = {}
    for key, value in runs[0].items():
        if isinstance(value, dict):
            kinds = sorted({kind for run in runs for kind in run[key]})
            out[key] = {kind: statistics.median(run[key].get(kind, 0.0) for run in runs) for kind in kinds}
        else:
            out[key] = statistics.median(run[key] for run in runs)
    return out


def show(results: dict[str, dict[int, dict[str, Any]]], tokens: tuple[int, int]) -> str:
    """The tables, as Markdown, so that they can stand in a document as they are."""
    lines = [
        f"| {tokens[0]} in, {tokens[1]} out | c | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | TPOT p50 | tokens/s "
        "| of direct |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in sorted({c for rows in results.values() for c in rows}):
        base = results.get("direct", {}).get(c)
        for mode, rows in results.items():
            r = rows[c]
            times = (r[k] for k in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "tpot_p50_s"))
            share = f"{r['tokens_per_s'] / base['tokens_per_s']:.2f}" if base else "-"
            cells = " | ".join(f"{1e3 * t:.1f} ms" for t in times)
            lines.append(f"| {mode} | {c} | {cells} | {r['tokens_per_s']:.0f} | {share} |")
    lines += ["", "| CPU s per 1,000 tokens | c | total | by process |", "|---|---|---|---|"]
    for c in sorted({c for rows in results.values() for c in rows}):
        for mode, rows in results.items():
            cpu = rows[c]["cpu_s_per_1000_tokens"]
            parts = ", ".join(f"{k} {v:.2f}" for k, v in sorted(cpu.items(), key=lambda kv: -kv[1]) if v >= 0.005)
            lines.append(f"| {mode} | {c} | {sum(cpu.values()):.2f} | {parts} |")
    if any("stages" in row for row in results.get("pdserve", {}).values()):
        lines += ["", "| pdserve | c | split path | median before the first token |", "|---|---|---|---|"]
        for c, row in sorted(results["pdserve"].items()):
            stages = dict(row["stages"])
            share = stages.pop("split_share")
            parts = ", ".join(
                f"{name.removesuffix('_s').replace('_', ' ')} {1e3 * t:.0f} ms" for name, t in stages.items()
            )
            lines.append(f"| stages | {c} | {share:.0%} | {parts} |")
    return "\n".join(lines)


def key_figures(results: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """pdserve against the direct two-call split, per concurrency; and against one colocated engine where measured."""
    out: dict[str, Any] = {}
    ours, direct = results.get("pdserve", {}), results.get("direct", {})
    for c in sorted(set(ours) & set(direct)):
        a, b = ours[c], direct[c]
        row = {
            "ttft_p50_ratio": a["ttft_p50_s"] / b["ttft_p50_s"],
            "ttft_p99_ratio": a["ttft_p99_s"] / b["ttft_p99_s"],
            "itl_p99_ratio": a["itl_p99_s"] / b["itl_p99_s"],
            "tokens_per_s_ratio": a["tokens_per_s"] / b["tokens_per_s"],
            "ttft_p50_added_ms": 1e3 * (a["ttft_p50_s"] - b["ttft_p50_s"]),
            "itl_p99_ms": 1e3 * a["itl_p99_s"],
        }
        if c in results.get("colocated", {}):
            row["tokens_per_s_of_colocated"] = a["tokens_per_s"] / results["colocated"][c]["tokens_per_s"]
        out[str(c)] = {k: round(v, 4) for k, v in row.items()}
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.fronts", description=__doc__)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--concurrency", nargs="+", type=int, default=sorted(PER_WORKER))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--always-split", action="store_true", help="the decode engine never prefills")
    parser.add_argument("--out", type=Path, help="folder for logs and results.json; default: a temporary one")
    o = parser.parse_args(argv)
    folder = o.out or Path(tempfile.mkdtemp(prefix="pdserve-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    tokens = (o.prompt_tokens, o.output_tokens)
    try:
        changes = {"router": {"placement": {"conditional": False}}} if o.always_split else None
        results = {m: measure(m, o.concurrency, o.repeats, tokens, folder, o.seed, changes) for m in o.modes}
    except UserError as mistake:
        print(f"bench: {mistake}; logs in {folder}", file=sys.stderr)
        return 2
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    table = show(results, tokens)
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    print(json.dumps(key_figures(results)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
