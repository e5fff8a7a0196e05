"""`python -m cluster.autoscale_report`: the goodput policy against queue length, mean latency, static and oracle.

Every run is kept in `--out` as soon as it is done, and `--reuse` takes those that are there already. With `--minutes` a
call stops after that time (exit status 3); the next one with `--reuse` goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.autoscale_report.compare import OutOfTime, Store, compare, key_figures
from cluster.autoscale_report.scenarios import scenarios

POLICIES = ("goodput", "queue length", "mean latency", "static", "oracle", "oracle, start-up")
STOPPED = 3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="autoscale-report", description=__doc__)
    parser.add_argument(
        "--traces", type=Path, help="folder with the Mooncake and Azure traces; without it they are left out"
    )
    parser.add_argument("--quick", action="store_true", help="25 minutes of each trace instead of the hour")
    parser.add_argument("--only", help="comma-separated names of workloads")
    parser.add_argument("--out", type=Path, default=Path("out/autoscale-report"))
    parser.add_argument("--reuse", action="store_true", help="take rows that an earlier run left in --out")
    parser.add_argument("--minutes", type=float, help="start no run after so long")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    traces = args.traces if args.traces is not None and args.traces.is_dir() else None
    if traces is None:
        print("no folder of traces: the recorded workloads are left out", file=sys.stderr)
    names = [s.name for s in scenarios(traces, quick=args.quick)]
    wanted = args.only.split(",") if args.only else names
    if unknown := [name for name in wanted if name not in names]:
        print(f"--only: no workload {unknown[0]!r}; there are {', '.join(names)}", file=sys.stderr)
        raise SystemExit(2)
    args.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, Any]] = {}
    until_s = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    work = partial(
        _one, reuse=args.reuse, traces=traces, quick=args.quick, seed=args.seed, out=args.out, until_s=until_s
    )
    with ProcessPoolExecutor(max(1, min(args.jobs, len(wanted)))) as pool:
        futures = {pool.submit(work, name): name for name in wanted}
        for future in as_completed(futures):
            rows_of = future.result()
            if rows_of is not None:
                done[futures[future]] = rows_of
                print(f"{futures[future]}: done ({len(done)} of {len(wanted)})", file=sys.stderr, flush=True)
    if len(done) < len(wanted):
        print(f"stopped after {args.minutes:g} minutes; run again with --reuse to go on", file=sys.stderr)
        raise SystemExit(STOPPED)
    rows = {name: done[name] for name in wanted}
    show(rows)
    print(json.dumps(key_figures(rows)))


def _one(
    name: str, *, reuse: bool, traces: Path | None, quick: bool, seed: int, out: Path, until_s: float | None
) -> dict[str, Any] | None:
    """The rows of one workload; None where time ran out."""
    scenario = next(s for s in scenarios(traces, quick=quick) if s.name == name)
    store = Store(out / f"{name}{'-quick' if quick else ''}-{seed}.json", reuse=reuse, until_s=until_s)
    try:
        return compare(scenario, seed, lambda what: print(what, file=sys.stderr, flush=True), store)
    except OutOfTime:
        return None


def show(rows_by_scenario: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Autoscaling policies in simulation (70B-class replicas, 60 s start-up, SLO attainment 0.95)")
    for column in ("workload", "policy", "sizes", "attainment", "replica-h", "of oracle", "good/replica-h"):
        table.add_column(column, justify="left" if column in ("workload", "policy", "sizes") else "right")
    for column in ("reversals/h", "recovery s", "tuned"):
        table.add_column(column, justify="left" if column == "tuned" else "right")
    for name, rows in rows_by_scenario.items():
        for policy in POLICIES:
            row = rows[policy]
            table.add_row(
                name if policy == POLICIES[0] else "",
                policy,
                row["sizes"],
                f"{row['attainment']:.3f}",
                f"{row['replica_h']:.2f}",
                f"{row['replica_h'] / rows['oracle']['replica_h']:.2f}",
                f"{row['goodput_per_replica_h']:.0f}",
                f"{row['reversals_per_h']:.1f}",
                "" if row["recover_s"] is None else str(row["recover_s"]),
                row.get("tuned", ""),
            )
        table.add_section()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
