"""The live side of the comparison: start the cluster, send probes, then every load; keep what was measured.

    python -m loadtests.fidelity --part simulated

What is kept is a JSON file, so that the simulator can be compared again without a live run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.workload.spec import Workload
from loadtests.bench.servers import start
from loadtests.discover import fetch_records
from loadtests.fidelity.plan import Plan
from loadtests.results import quantiles
from loadtests.runner import Run
from loadtests.scenario import RequestOptions, Scenario
from loadtests.session import Session, Settings

KEPT = ("path", "prefill_worker", "decode_worker", "cached_tokens", "transfer_bytes", "stage_s")


def run(plan: Plan, model: Path | None, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All of a part's live runs on one cluster, kept in `session.json`.

    Returns:
        `runs`: the probes, then each load, with `start_s` on one clock and a row for every request.

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
        runs = []
        for name, workload in [("probes", plan.probes), *((f"load {i}", w) for i, w in enumerate(plan.loads(), 1))]:
            say(name)
            runs.append(_one(session, name, workload, began))
            say(f"{name}: {len(runs[-1]['requests'])} requests, load average {runs[-1]['load_average']:.1f}")
        result = {"plan": plan.model_dump(mode="json", by_alias=True), "runs": runs}
        (folder / "session.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def _one(session: Session, name: str, workload: Workload, began: float) -> dict[str, Any]:
    start_s = time.perf_counter() - began
    run: Run = session.run(workload, name.replace(" ", "-"))
    asked = [(a.prompt_tokens, a.output_tokens) for a in workload.arrivals()]
    samples = sorted(run.samples, key=lambda s: s.index)
    if [(s.asked_prompt_tokens, s.asked_output_tokens) for s in samples] != asked:
        raise UserError(f"{name}: not every request of the schedule was sent")
    theirs = {r.get("client_request_id"): r for r in fetch_records(session.served.base_url)}
    rows = []
    for sample in samples:
        entry = theirs.get(sample.request_id) or {}
        rows.append(
            {
                "at_s": sample.scheduled_s,
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
        "name": name,
        "start_s": start_s,
        "load_average": os.getloadavg()[0],
        "client_lag_p99_s": lag["p99"],
        "client_loop_late_p99_s": quantiles(run.loop_late_s)["p99"],
        "requests": rows,
    }
