"""`python -m cluster.autoscale_report`: the goodput policy against queue length, mean latency, static and oracle.

Every workload's rows are written to `--out` when it is done; `--reuse` takes those that are there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.autoscale_report.compare import compare, key_figures
from cluster.autoscale_report.scenarios import scenarios

POLICIES = ("goodput", "queue length", "mean latency", "static", "oracle")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="autoscale-report", description=__doc__)
    parser.add_argument(
        "--traces", type=Path, help="folder with the Mooncake and Azure traces; without it they are left out"
    )
    parser.add_argument("--quick", action="store_true", help="25 minutes of each trace instead of the hour")
    parser.add_argument("--only", help="comma-separated names of workloads")
    parser.add_argument("--out", type=Path, default=Path("out/autoscale-report"))
    parser.add_argument("--reuse", action="store_true", help="take rows that an earlier run left in --out")
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
    missing = list(wanted)
    work = partial(_one, reuse=args.reuse, traces=traces, quick=args.quick, seed=args.seed, out=args.out)
    with ProcessPoolExecutor(max(1, min(args.jobs, len(missing) or 1))) as pool:
        futures = {pool.submit(work, name): name for name in missing}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            print(f"{futures[future]}: done ({len(done)} of {len(wanted)})", file=sys.stderr, flush=True)
    rows = {name: done[name] for name in wanted}
    show(rows)
    print(json.dumps(key_figures(rows)))


def _one(name: str, *, reuse: bool, traces: Path | None, quick: bool, seed: int, out: Path) -> dict[str, Any]:
    scenario = next(s for s in scenarios(traces, quick=quick) if s.name == name)
    file = out / f"{name}.json"
    known = json.loads(file.read_text()) if reuse and file.is_file() else None
    rows = compare(scenario, seed, lambda what: print(what, file=sys.stderr, flush=True), known)
    file.write_text(json.dumps(rows, indent=1))
    return rows


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
