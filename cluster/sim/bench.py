"""How fast the simulator is: an hour of a Mooncake trace on 64 engines, and how time grows from 8 to 512.

    python -m cluster.sim.bench [TRACE] [--block-size 16]

One process, one core. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from cluster.config import ClusterConfig, parse
from cluster.sim.fleet import Options
from cluster.sim.run import Result, simulate
from cluster.workload.arrival import Arrival
from cluster.workload.traces import Replay

SHARED = Path("../shared/traces/mooncake_conversation.jsonl.gz")
PACKAGED = Path(__file__).parents[2] / "loadtests/traces/mooncake_conversation_300s.jsonl.gz"
SPREAD_S = 3.0
GROWTH_S = 300.0


def cluster(engines: int, block_size_tokens: int) -> ClusterConfig:
    """H100s with an 8B model, half of them in each pool."""
    half = {"replicas": {"min": engines // 2, "max": engines // 2}}
    simulated = {
        "times": "roofline",
        "hardware": "H100",
        "model": "llama-3.1-8b",
        "block_size_tokens": block_size_tokens,
    }
    return parse(
        {
            "slo": {"ttft_ms": 2000, "tpot_ms": 50},
            "engine": {"kind": "simulated", "simulated": simulated},
            "pools": {"prefill": half, "decode": half},
        }
    )


def measure(arrivals: list[Arrival], engines: int, block_size_tokens: int) -> tuple[Result, float]:
    """The run and its CPU seconds."""
    cpu_s = time.process_time()
    result = simulate(cluster(engines, block_size_tokens), arrivals, Options(keep_itl=False))
    return result, time.process_time() - cpu_s


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    parser = argparse.ArgumentParser(prog="python -m cluster.sim.bench", description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block")
    args = parser.parse_args()
    path = args.trace or (SHARED if SHARED.exists() else PACKAGED)
    replay = Replay(path=str(path), spread_s=SPREAD_S)
    recorded = replay.load()
    arrivals = list(replay.arrivals(random.Random(1), recorded))
    if path == PACKAGED:
        err.print(f"no {SHARED}: the packaged five minutes are played twelve times over")
        arrivals = _repeat(arrivals, 12)
    first = [a for a in arrivals if a.at_s < GROWTH_S]

    table = Table("engines", "requests", "trace, s", "wall, s", "CPU, s", "requests/s", "events/s", "attainment")
    rows: dict[str, tuple[Result, float]] = {}
    for label, engines, what in (("64", 64, arrivals), ("8", 8, first), ("512", 512, first)):
        with err.status(f"{engines} engines, {len(what)} requests"):
            result, cpu_s = rows[label] = measure(what, engines, args.block_size)
        events = result.fleet.kernel.events
        table.add_row(
            str(engines),
            str(len(what)),
            f"{what[-1].at_s:.0f}",
            f"{result.wall_s:.1f}",
            f"{cpu_s:.1f}",
            f"{len(what) / result.wall_s:.0f}",
            f"{events / result.wall_s:.0f}",
            f"{result.stats.counters.attainment or 0:.3f}",
        )
    out.print(table)
    tokens = sum(w.engine.scheduler.counters.generated_tokens for w in rows["64"][0].fleet.workers.values())
    steps = sum(w.engine.scheduler.counters.steps for w in rows["64"][0].fleet.workers.values())
    wall_s, events = rows["64"][0].wall_s, rows["64"][0].fleet.kernel.events
    out.print(
        f"{path.name}, blocks of {args.block_size} tokens; an event covers {steps / events:.0f} iterations on "
        f"average; {tokens / wall_s:.0f} simulated tokens/s"
    )
    figures = {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(rows["64"][1], 2),
        "requests_per_s": round(len(arrivals) / wall_s, 1),
        "events_per_s": round(events / wall_s, 1),
        "iterations_per_s": round(steps / wall_s, 1),
        "growth_8_to_512": round(rows["512"][1] / rows["8"][1], 2),
        "requests": len(arrivals),
        "block_size_tokens": args.block_size,
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print(json.dumps(figures))


def _repeat(arrivals: list[Arrival], times: int) -> list[Arrival]:
    """Play a slice again and again, every round with prompts of its own."""
    span_s, repeated = arrivals[-1].at_s, []
    for turn in range(times):
        for a in arrivals:
            prompt = tuple((content + turn * 10**9, tokens) for content, tokens in a.prompt)
            repeated.append(Arrival(a.at_s + turn * span_s, prompt, a.output_tokens))
    return repeated


if __name__ == "__main__":
    main()
