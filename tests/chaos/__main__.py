"""`make chaos`: every chaos run, one after the other, and what they showed together.

Example: python -m tests.chaos --only vllm

In memory 300 faults in virtual time, then live clusters: 200 faults with simulated engines, routers among the targets,
and 20 with vLLM engines, child processes among the targets. The last line is JSON: sums over the live clusters, and
each run's own summary in `runs`. Exit status 1 if a run missed a bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

RUNS = {
    "memory": ["tests.chaos.memory", "--faults", "300"],
    "simulated": ["tests.chaos.run", "--engine", "simulated", "--faults", "200", "--campaigns", "3", "--gap-s", "1.2"],
    "vllm": ["tests.chaos.run", "--engine", "vllm", "--faults", "20", "--campaigns", "2", "--prefill", "2",
             "--decode", "2", "--routers", "1", "--concurrency", "4", "--gap-s", "4"],
}  # fmt: skip
SUMMED = (
    "faults", "offered", "finished", "connections_cut", "retried", "migrated", "wrong_tokens", "hung", "leases_open",
    "blocks_leaked",
)  # fmt: skip
SHOWN = (
    "faults", "offered", "finished", "finished_share", "failed", "retried", "migrated", "wrong_tokens", "hung",
    "leases_open", "blocks_leaked", "recovery_p50_s", "recovery_max_s",
)  # fmt: skip


def one(command: list[str]) -> tuple[int, dict[str, Any]]:
    """Exit status and summary of one run; its tables and progress go to the terminal while it runs."""
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}


def together(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums over the runs with live clusters; without one, over what there is."""
    live = [summary for name, summary in runs.items() if name != "memory" and summary] or list(runs.values())
    return {
        **{name: sum(summary.get(name, 0) for summary in live) for name in SUMMED},
        "recovery_max_s": max((summary.get("recovery_max_s", 0.0) for summary in live), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=RUNS, action="append", help="one run; may be repeated")
    chosen = parser.parse_args().only or list(RUNS)
    console = Console(stderr=True, highlight=False)
    runs, failed = {}, []
    for name in chosen:
        console.rule(f"chaos: {name}")
        status, runs[name] = one(RUNS[name])
        if status:
            failed.append(name)
    table = Table(title="chaos, all runs", title_justify="left")
    table.add_column("figure")
    for name in chosen:
        table.add_column(name, justify="right")
    for figure in SHOWN:
        table.add_row(figure, *(str(runs[name].get(figure, "-")) for name in chosen))
    console.print(table)
    print(json.dumps({**together(runs), "failed_runs": failed, "runs": runs}))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
