"""`make fidelity`: the simulator's error against live clusters, at three loads each.

    python -m loadtests.fidelity                             # valid runs in out/fidelity are not measured again
    python -m loadtests.fidelity --part simulated --again    # one part, measured again

`simulated`: simulated engines in real time under Ray. `real`: vLLM engines on CPU, whose step times are measured as
`pdserve fit --url` does, on the same cluster, between the loads. Prints the tables as Markdown and, last, one line of
JSON with the largest errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.messages import RequestRecord
from cluster.perf.profile import Profile, write_profile
from loadtests.fidelity import fits, live, simulator
from loadtests.fidelity.compare import Agreement, Figures, agreement, errors, figures, largest, weighted
from loadtests.fidelity.model import write_model
from loadtests.fidelity.plan import PARTS, Plan, load, twin

SEEDS = 5
"""The router draws among equal engines; the simulator's figures are means over so many draws."""

TRIES = 3
"""Sessions at most, until every load has a valid run."""

err = Console(stderr=True, highlight=False, markup=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One rate: both sides and the simulator's errors."""

    rate_per_s: float
    live: Figures
    simulated: Figures
    errors: dict[str, float]
    agreement: Agreement
    overheads: tuple[simulator.Overheads, ...]
    valid: bool


def measured(plan: Plan, folder: Path, again: bool) -> list[dict[str, Any]]:
    """Every load's live session: from their file, as far as it is of this plan and its runs are valid."""
    path = folder / "sessions.json"
    sessions: list[dict[str, Any]] = []
    if path.exists() and not again:
        kept = json.loads(path.read_text(encoding="utf-8"))
        sessions = [s for s in kept if s["plan"] == plan.key()]
        if len(sessions) < len(kept):
            err.print(f"{path}: runs of another plan are not used")
    for _ in range(TRIES):
        missing = [load for load in plan.loads if not any(_valid_run(s, load) for s in sessions)]
        if missing:
            sessions = _one_session(plan, missing, sessions, folder, path)
    return [next((s for s in sessions if _valid_run(s, load)), sessions[-1]) for load in plan.loads]


def _one_session(
    plan: Plan, loads: Sequence[int], before: list[dict[str, Any]], folder: Path, path: Path
) -> list[dict[str, Any]]:
    """Measures some loads; returns all sessions, which are in the file after every load."""
    latest: list[dict[str, Any]] = []

    def keep(session: dict[str, Any]) -> None:
        latest[:] = [session]
        path.write_text(json.dumps([*before, session], indent=1), encoding="utf-8")

    live.run(plan, loads, _model(plan, folder), folder, err.print, keep)
    return [*before, *latest]


def _valid_run(session: dict[str, Any], load: int) -> bool:
    return any(run["load"] == load and live.is_valid(run) for run in session["runs"])


def compared(plan: Plan, sessions: Sequence[dict[str, Any]], folder: Path) -> list[Row]:
    """
    Args:
        sessions: of every load, in the order of `plan.loads`; one may stand there several times.
    """
    rows = []
    for place, rate in enumerate(plan.rates_per_s):
        loads = [(sessions[load - 1], load) for load in plan.loads_at(place)]
        fit = fits.around(loads) if plan.fit else None
        mine = [_both_sides(plan, session, load, fit, folder) for session, load in loads]
        records = [r for side in mine for r in side.live]
        plays = [[r for side in mine for r in side.plays[seed]] for seed in range(SEEDS)]
        theirs, each = figures(records), [figures(play) for play in plays]
        ours = Figures(
            theirs.requests, **{name: mean(getattr(f, name) for f in each) for name in Figures.__slots__[1:]}
        )
        overheads = tuple(dict.fromkeys(side.overheads for side in mine))
        valid = all(side.valid for side in mine)
        agreed = weighted([(agreement(side.plays[0], side.live), len(side.live)) for side in mine])
        rows.append(Row(rate, theirs, ours, errors(ours, theirs), agreed, overheads, valid))
    return rows


@dataclass(frozen=True, slots=True)
class _Sides:
    """One load: live, and simulated `SEEDS` times."""

    live: list[RequestRecord]
    plays: list[list[RequestRecord]]
    overheads: simulator.Overheads
    valid: bool


def _both_sides(plan: Plan, session: dict[str, Any], load: int, fit: Profile | None, folder: Path) -> _Sides:
    config = _twin(plan, session, load, fit, folder)
    overheads = simulator.measured_overheads(config, plan, session)
    run = next(run for run in session["runs"] if run["load"] == load)
    plays = [simulator.play(config, plan, session, overheads, seed)[load] for seed in range(SEEDS)]
    return _Sides(simulator.live_records(run, config.slo.to_slo()), plays, overheads, live.is_valid(run))


def _twin(plan: Plan, session: dict[str, Any], load: int, fit: Profile | None, folder: Path) -> ClusterConfig:
    if fit is None:
        return twin(plan, None, None)
    fixed_s, byte_s = simulator.measured_transfer(session)
    whole = replace(fit, coefficients=replace(fit.coefficients, transfer_fixed_s=fixed_s, transfer_byte_s=byte_s))
    path = folder / f"profile-{load}.json"
    write_profile(whole, path)
    return twin(plan, path, fit)


def _model(plan: Plan, folder: Path) -> Path | None:
    return None if plan.shape is None else write_model(plan.shape, folder / "model")


def table(plan: Plan, rows: Sequence[Row]) -> str:
    lines = [
        f"{plan.description}.",
        "",
        "| req/s | requests | side | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | attainment | same path, P, D |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for side, f in (("live", row.live), ("simulator", row.simulated)):
            times = (f.ttft_p50_s, f.ttft_p99_s, f.tpot_p50_s, f.tpot_p99_s)
            cells = " | ".join(f"{1e3 * t:.1f} ms" for t in times)
            lines.append(
                f"| {row.rate_per_s:g} | {row.live.requests} | {side} | {cells} | {100 * f.attainment:.1f}% | |"
            )
        e, a = row.errors, row.agreement
        cells = " | ".join(f"{100 * e[n]:+.1f}%" for n in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"))
        same = f"{100 * a.path:.0f}%, {100 * a.prefill:.0f}%, {100 * a.decode:.0f}%"
        lines.append(f"| | | error | {cells} | {e['attainment_points']:+.1f} points | {same} |")
    overheads = list(dict.fromkeys(o for row in rows for o in row.overheads))
    hops, edges = (
        [f"{1e3 * s:.1f}" for s in all_s] for all_s in ([o.hop_s for o in overheads], [o.edge_s for o in overheads])
    )
    lines += [
        "",
        f"Fixed overheads, measured on the idle cluster and given to the simulator: {' and '.join(hops)} ms a message "
        f"between router and engine, {' and '.join(edges)} ms between client and router.",
    ]
    busy = [f"{row.rate_per_s:g}" for row in rows if not row.valid]
    if busy:
        lines.append(
            f"At {', '.join(busy)} req/s the machine was too busy for the client to keep its schedule: measure again."
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="one part only; default: both")
    parser.add_argument("--again", action="store_true", help="measure the live side again")
    parser.add_argument("--out", type=Path, default=Path("out/fidelity"))
    o = parser.parse_args(argv)
    key: dict[str, float | None] = {}
    verdicts = []
    try:
        for part in o.part or PARTS:
            plan, folder = load(part), o.out / part
            folder.mkdir(parents=True, exist_ok=True)
            rows = compared(plan, measured(plan, folder, o.again), folder)
            text = table(plan, rows)
            (folder / "table.md").write_text(text + "\n", encoding="utf-8")
            print(text + "\n")
            e = [row.errors for row in rows]
            prefix = "live_simulated" if part == "simulated" else part
            key |= {f"{prefix}_p50_err": largest(e, "p50"), f"{prefix}_p99_err": largest(e, "p99")}
            verdicts.append(_verdict(part, plan, e))
            if plan.tolerance.attainment_points is not None:
                key["attainment_err_points"] = max(abs(row["attainment_points"]) for row in e)
            (folder / "rows.json").write_text(json.dumps([asdict(r) for r in rows], indent=1), encoding="utf-8")
    except UserError as mistake:
        print(f"fidelity: {mistake}", file=sys.stderr)
        return 2
    for line in verdicts:
        print(line)
    print(json.dumps({k: None if v is None else round(v, 4) for k, v in key.items()}), flush=True)
    return 0


def _verdict(part: str, plan: Plan, e: Sequence[dict[str, float]]) -> str:
    t = plan.tolerance
    checks = [(f"p50 {100 * largest(e, 'p50'):.1f}%", largest(e, "p50") <= t.p50, f"{100 * t.p50:g}%")]
    checks.append((f"p99 {100 * largest(e, 'p99'):.1f}%", largest(e, "p99") <= t.p99, f"{100 * t.p99:g}%"))
    if t.attainment_points is not None:
        worst = max(abs(row["attainment_points"]) for row in e)
        checks.append((f"attainment {worst:.1f} points", worst <= t.attainment_points, f"{t.attainment_points:g}"))
    words = ", ".join(f"{what} ({'within' if ok else 'NOT within'} {bound})" for what, ok, bound in checks)
    return f"{part}: largest errors: {words}"


if __name__ == "__main__":
    sys.exit(main())
