"""The live side of the comparison: start the cluster, send probes, then every load; keep what was measured.

    python -m loadtests.fidelity --part simulated

The result is plain values, so that the simulator can be compared again without a live run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.workload.spec import Workload
from loadtests.bench.servers import start
from loadtests.discover import fetch_records
from loadtests.fidelity import fits
from loadtests.fidelity.plan import Plan
from loadtests.results import quantiles
from loadtests.runner import Run
from loadtests.scenario import RequestOptions, Scenario, Validity
from loadtests.session import Session, Settings

KEPT = ("path", "prefill_worker", "decode_worker", "cached_tokens", "transfer_bytes", "stage_s")


def run(
    plan: Plan,
    loads: Sequence[int],
    model: Path | None,
    folder: Path,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """The probes and some of a part's loads, on one cluster.

    Args:
        loads: which ones, from 1.
        keep: called after every load with what was measured so far: `runs` holds the probes (load 0), then each load,
            with `start_s` on one clock and a row for every request; `fits`, where the plan asks for them, a round of
            the engines' step times before each load and one after the last.

    Raises:
        UserError: the cluster did not start or does not answer.
    """
    say("starting the cluster")
    with start("pdserve", folder, plan.live(model)) as front:
        session = Session(
            Scenario(name="fidelity", workload=plan.probes, request=RequestOptions(api="tokens")),
            Settings(front.url),
            say,
        )
        session.warm_up()
        began = time.perf_counter()
        runs: list[dict[str, Any]] = []
        rounds: list[dict[str, Any]] = []
        for load in (0, *loads):
            name = f"load {load}" if load else "probes"
            say(name)
            runs.append(_one(session, load, plan.workload_of(load), began))
            say(f"{name}: {len(runs[-1]['requests'])} requests; {_condition(runs[-1])}")
            if plan.fit:
                say("measuring the engines' steps")
                rounds.append(fits.measure(front.url))
            keep({"plan": plan.key(), "runs": runs, "fits": rounds})


def is_valid(run: dict[str, Any]) -> bool:
    """Whether the machine let the client keep its schedule; the bounds are those of the load tests."""
    limits = Validity()
    late_ms = [1e3 * (run[key] or 0.0) for key in ("client_lag_p99_s", "client_loop_late_p99_s")]
    return late_ms[0] <= limits.schedule_lag_p99_ms and late_ms[1] <= limits.loop_lag_p99_ms


def _condition(run: dict[str, Any]) -> str:
    lag_ms = 1e3 * (run["client_lag_p99_s"] or 0.0)
    return f"client's lag p99 {lag_ms:.0f} ms, load average {run['load_average']:.1f}"


def _one(session: Session, load: int, workload: Workload, began: float) -> dict[str, Any]:
    start_s = time.perf_counter() - began
    run: Run = session.run(workload, f"load-{load}")
    asked = [(a.prompt_tokens, a.output_tokens) for a in workload.arrivals()]
    samples = sorted(run.samples, key=lambda s: s.index)
    if [(s.asked_prompt_tokens, s.asked_output_tokens) for s in samples] != asked:
        raise UserError(f"load {load}: not every request of the schedule was sent")
    theirs = {r.get("client_request_id"): r for r in fetch_records(session.served.base_url)}
    rows = []
    for sample in samples:
        entry = theirs.get(sample.request_id) or {}
        rows.append(
            {
                "at_s": sample.scheduled_s,
                "lag_s": sample.lag_s,
                "outcome": None if sample.outcome is None else sample.outcome.value,
                "ttft_s": sample.ttft_s,
                "tpot_s": sample.tpot_s,
                "tokens": sample.times.tokens,
                "prompt_tokens": sample.prompt_tokens,
                "error": sample.error,
                **{key: entry.get(key) for key in KEPT},
            }
        )
    lag = quantiles([s.lag_s for s in samples if s.lag_s is not None])
    return {
        "load": load,
        "start_s": start_s,
        "load_average": os.getloadavg()[0],
        "client_lag_p99_s": lag["p99"],
        "client_loop_late_p99_s": quantiles(run.loop_late_s)["p99"],
        "requests": rows,
    }
