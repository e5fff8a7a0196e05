"""`make router-report`: a recorded trace replayed against simulated engines, once per routing policy, in one table.

The engines, the trace, the seed and every part of the router but the policy are the same. Beside the policies: the cost
policy without conditional disaggregation, with an index guessed from placements instead of KV events, and with 2 and 4
router replicas that see each other's requests only through the engines' load.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from cluster.config import ClusterConfig, parse
from cluster.errors import UserError
from cluster.messages import Outcome, RequestRecord
from cluster.sim.fleet import Fleet, Options
from cluster.workload.arrival import Arrival
from cluster.workload.traces import Replay
from router.admission import Admission
from router.placement import Placer
from router.policies import BASELINES
from router.prefix_index import PrefixIndex
from router.replicas import PlacerReplicas

SAMPLE = Path(__file__).parent / "traces" / "mooncake_conversation_300s.jsonl.gz"
SLO = {"ttft_ms": 3000, "tpot_ms": 40, "attainment": 0.9}
CALL_S = 0.002
"""One way between router and engine: measured for an actor call here."""
LABELS = {
    "round_robin": "round robin",
    "least_loaded": "least loaded",
    "power_of_two": "power of two",
    "approximate": "approximate affinity",
    "cost": "exact + load-aware",
}

err = Console(stderr=True, highlight=False, markup=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    policy: str
    speed: float
    requests: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    attainment: float
    goodput_per_worker: float
    predicted_hits: float
    local_share: float


def configure(policy: str, prefill: int, decode: int, conditional: bool, kv_blocks: int) -> ClusterConfig:
    return parse(
        {
            "model": {"max_model_len": 131_072},
            "slo": SLO,
            "engine": {
                "kind": "simulated",
                "simulated": {
                    "times": "roofline",
                    "hardware": "H100",
                    "model": "llama-3.1-8b",
                    "kv_blocks": kv_blocks,
                },
            },
            "pools": {
                "prefill": {"replicas": {"min": prefill, "max": prefill}},
                "decode": {"replicas": {"min": decode, "max": decode}},
            },
            "router": {"placement": {"policy": policy, "conditional": conditional}},
        }
    )


def guess(fleet: Fleet) -> None:
    """Take the events away: the placer keeps its own index and is told that it is not exact."""
    fleet.index = PrefixIndex()
    for worker_id in fleet.workers:
        fleet.placer.set_index_exact(worker_id, False)


def replicate(count: int) -> Callable[[Fleet], None]:
    """Put `count` placers in the place of one."""

    def prepare(fleet: Fleet) -> None:
        placers = [
            Placer(fleet.config.router.placement, lambda info: fleet.specs[info.role].times, fleet.index)
            for _ in range(count)
        ]
        together = PlacerReplicas(placers)
        for worker in fleet.workers.values():
            together.add_worker(worker.info, 0.0)
            together.set_index_exact(worker.worker_id, True)
        fleet.placer = cast(Placer, together)
        fleet.admission = Admission(fleet.config.router.admission, together, fleet.config.slo.to_slo().ttft_s)

    return prepare


def play(config: ClusterConfig, arrivals: list[Arrival], seed: int, prepare: Callable[[Fleet], None] | None) -> Fleet:
    fleet = Fleet(config, Options(seed=seed, keep_itl=False, call_s=CALL_S, reply_s=CALL_S))
    if prepare is not None:
        prepare(fleet)
    for arrival in arrivals:
        fleet.kernel.at(arrival.at_s, arrive, fleet, arrival)
    fleet.kernel.run()
    return fleet


def arrive(fleet: Fleet, arrival: Arrival) -> None:
    fleet.arrive(arrival)


def measure(policy: str, speed: float, fleet: Fleet, arrivals: list[Arrival]) -> Row:
    records = fleet.records
    done = [r for r in records if r.outcome is Outcome.DONE]
    good = sum(is_good(r) for r in records)
    # Per second of arrivals: a tail that drags on after the last arrival is in TTFT and attainment already.
    duration_s = max(a.at_s for a in arrivals)
    prompt = sum(r.prompt_tokens for r in done)
    cached = sum(r.cached_tokens for r in done)
    predicted = sum(r.predicted_cached_tokens for r in done)
    return Row(
        policy=policy,
        speed=speed,
        requests=len(records),
        hit_rate=cached / prompt,
        ttft_p50_s=quantile([r.ttft_s for r in done if r.ttft_s is not None], 0.5),
        ttft_p99_s=quantile([r.ttft_s for r in done if r.ttft_s is not None], 0.99),
        tpot_p99_s=quantile([r.tpot_s for r in done if r.tpot_s is not None], 0.99),
        attainment=good / len(records),
        goodput_per_worker=good / duration_s / len(fleet.workers),
        predicted_hits=predicted / cached if cached else 1.0,
        local_share=sum(r.prefill_worker is None for r in done) / len(done),
    )


def is_good(r: RequestRecord) -> bool:
    if r.outcome is not Outcome.DONE or r.ttft_s is None or r.tpot_s is None:
        return False
    return r.ttft_s <= r.slo.ttft_s and r.tpot_s <= r.slo.tpot_s


def quantile(values: list[float], q: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(q * 1000) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="router-report", description=__doc__)
    parser.add_argument("--trace", default=str(SAMPLE), help="Mooncake's format; default: the sample in the package")
    parser.add_argument("--seconds", type=float, default=None, help="only the first so many seconds of the trace")
    parser.add_argument("--speed", default="2,3", help="replay speeds, e.g. 2,3")
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--kv-blocks", type=int, default=60_000, help="KV blocks of 16 tokens per engine")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        report(args)
    except (UserError, ValueError) as e:
        print(f"router-report: {e}", file=sys.stderr)
        sys.exit(2)


def report(args: argparse.Namespace) -> None:
    runs: list[tuple[str, str, bool, Callable[[Fleet], None] | None]] = [
        (LABELS[name], name, True, None) for name in BASELINES
    ]
    ours = LABELS["cost"]
    runs += [
        (ours, "cost", True, None),
        (f"{ours}, always split", "cost", False, None),
        (f"{ours}, guessed index", "cost", True, guess),
        (f"{ours}, 2 routers", "cost", True, replicate(2)),
        (f"{ours}, 4 routers", "cost", True, replicate(4)),
    ]
    rows: list[Row] = []
    for speed in [float(s) for s in args.speed.split(",")]:
        replay = Replay(path=args.trace, format="mooncake", length_s=args.seconds, spread_s=3.0, speed=speed)
        arrivals = list(replay.arrivals(random.Random(args.seed), replay.load()))
        for label, policy, conditional, prepare in runs:
            config = configure(policy, args.prefill, args.decode, conditional, args.kv_blocks)
            err.print(f"speed {speed:g}: {label} ({len(arrivals):,} requests)")
            rows.append(measure(label, speed, play(config, arrivals, args.seed, prepare), arrivals))
    show(rows, args)


def show(rows: list[Row], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.prefill} prefill + {args.decode} decode engines, TTFT <= 3 s, TPOT <= 40 ms")
    columns = ("speed", "policy", "hit rate", "TTFT p50 s", "p99 s", "TPOT p99 ms", "attainment", "goodput/worker/s")
    for name in (*columns, "hits predicted", "local"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(
            f"{row.speed:g}",
            row.policy,
            f"{row.hit_rate:.1%}",
            f"{row.ttft_p50_s:.2f}",
            f"{row.ttft_p99_s:.2f}",
            f"{row.tpot_p99_s * 1e3:.1f}",
            f"{row.attainment:.1%}",
            f"{row.goodput_per_worker:.3f}",
            f"{row.predicted_hits:.1%}",
            f"{row.local_share:.0%}",
        )
    Console(stderr=True, width=150).print(table)
    print(json.dumps(figures(rows)))


def figures(rows: list[Row]) -> dict[str, Any]:
    ours = LABELS["cost"]
    by_speed: dict[float, dict[str, Row]] = {}
    for row in rows:
        by_speed.setdefault(row.speed, {})[row.policy] = row
    last = by_speed[max(by_speed)]
    rivals = [LABELS[name] for name in BASELINES]
    one = last[ours].goodput_per_worker
    return {
        "ahead": all(
            policies[ours].goodput_per_worker >= policies[rival].goodput_per_worker
            for policies in by_speed.values()
            for rival in rivals
        ),
        "goodput_over_best_other": one / max(last[rival].goodput_per_worker for rival in rivals),
        "loss_2_routers": 1 - last[f"{ours}, 2 routers"].goodput_per_worker / one,
        "loss_4_routers": 1 - last[f"{ours}, 4 routers"].goodput_per_worker / one,
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
