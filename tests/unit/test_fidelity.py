"""The fidelity comparison: a session that the simulator itself made up must be found without error."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import parse
from cluster.errors import EngineFailed, UserError
from cluster.messages import Outcome, Path, RequestRecord, Slo
from cluster.perf.fitting import StepSample
from cluster.perf.profile import Coefficients, HostSlowdown, Profile
from loadtests.fidelity import fits, live, simulator
from loadtests.fidelity.__main__ import compared
from loadtests.fidelity.compare import agreement, errors, figures, largest
from loadtests.fidelity.plan import PARTS, Plan, load, twin

FILE = load("simulated")
SHORT = FILE.workload.model_copy(update={"duration_s": 15})
PLAN = FILE.model_copy(update={"rates_per_s": (3.0, 6.0), "workload": SHORT})
CONFIG = parse(PLAN.cluster)
FITTED = dict.fromkeys(
    ("kv_total_blocks", "kv_bytes_per_token", "block_size_tokens", "max_num_seqs", "max_num_batched_tokens"), 1024
)
PROFILE = Profile(Coefficients(0.01, 1e-4, 0.0, 0.0, 0.0), FITTED, host_slowdown=HostSlowdown(0.2, 0.4))


def session(overheads: simulator.Overheads, later_s: float = 0.0, plan: Plan = PLAN) -> dict[str, Any]:
    """What a live run would have kept, had it been the simulator; answers reach the client `later_s` later."""
    starts = [{"load": i, "start_s": 100.0 * i} for i in (0, *plan.loads)]
    runs = simulator.play(CONFIG, plan, {"runs": starts}, overheads, seed=3)
    return {
        "runs": [
            {
                **start,
                "requests": [
                    {
                        "at_s": r.arrival_s - start["start_s"],
                        "outcome": r.outcome.value,
                        "ttft_s": r.ttft_s + later_s,
                        "tpot_s": r.tpot_s,
                        "tokens": r.output_tokens,
                        "path": r.path.value,
                        "prefill_worker": f"replica-{r.prefill_worker}",
                        "decode_worker": f"replica-{r.decode_worker}",
                        "cached_tokens": r.cached_tokens,
                        "transfer_bytes": r.transfer_bytes,
                        "stage_s": {stage.value: s for stage, s in r.stage_s.items()},
                    }
                    for r in run
                ],
            }
            for start, run in zip(starts, runs.values(), strict=True)
        ]
    }


def test_a_session_of_the_simulators_own_is_reproduced() -> None:
    made_up = session(simulator.Overheads(0.004, 0.0), later_s=0.015)
    overheads = simulator.measured_overheads(CONFIG, PLAN, made_up)
    assert overheads.hop_s == pytest.approx(0.004, abs=1e-6)
    assert overheads.edge_s == pytest.approx(0.015, abs=1e-6)
    again = simulator.play(CONFIG, PLAN, made_up, overheads, seed=3)
    for run in made_up["runs"][1:]:
        ours = again[run["load"]]
        theirs = simulator.live_records(run, CONFIG.slo.to_slo())
        assert errors(figures(ours), figures(theirs)) == pytest.approx(
            dict.fromkeys(errors(figures(ours), figures(theirs)), 0.0), abs=1e-9
        )
        assert agreement(ours, theirs) == agreement(theirs, theirs)


def test_a_slower_cluster_is_an_error() -> None:
    made_up = session(simulator.Overheads(0.004, 0.0))
    theirs = simulator.live_records(made_up["runs"][1], CONFIG.slo.to_slo())
    slower = [replace(r, ttft_s=1.1 * (r.ttft_s or 0.0)) for r in theirs]
    found = errors(figures(theirs), figures(slower))
    assert found["ttft_p50_s"] == pytest.approx(1 / 1.1 - 1)
    assert [largest([found], q) for q in ("p50", "p99")] == pytest.approx([1 - 1 / 1.1] * 2)


def record(path: Path, prefill: str | None, decode: str) -> RequestRecord:
    return RequestRecord(
        "1", Outcome.DONE, Slo(1, 1), 0.0, 1.0, path=path, prefill_worker=prefill, decode_worker=decode
    )


def test_engines_are_paired_by_what_they_served() -> None:
    ours = [record(Path.SPLIT, "p0", "d0"), record(Path.SPLIT, "p1", "d1"), record(Path.LOCAL_SHORT, None, "d1")]
    theirs = [record(Path.SPLIT, "x", "v"), record(Path.SPLIT, "y", "u"), record(Path.SPLIT, "y", "v")]
    found = agreement(ours, theirs)
    assert (found.path, found.prefill, found.decode) == (2 / 3, 2 / 3, 2 / 3)


def test_measured_transfers_become_a_line() -> None:
    rows = [
        {"stage_s": {"kv_transfer": 0.002 + b * 1e-9}, "transfer_bytes": b} for b in (1_000_000, 2_000_000, 8_000_000)
    ]
    fixed_s, byte_s = simulator.measured_transfer({"runs": [{"requests": rows}]})
    assert (fixed_s, byte_s) == (pytest.approx(0.002, rel=1e-3), pytest.approx(1e-9, rel=1e-3))


@pytest.mark.parametrize("part", PARTS)
def test_the_plans_can_be_run(part: str) -> None:
    plan: Plan = load(part)
    for load_number, rate in enumerate(plan.rates_per_s, 1):
        workload = plan.workload_of(load_number)
        requests = list(workload.arrivals())
        assert len(requests) == pytest.approx(rate * workload.duration_s, rel=0.35)
        assert max(a.prompt_tokens + a.output_tokens for a in requests) < plan.cluster["model"]["max_model_len"]
    config = twin(plan, FilePath("profile.json"), PROFILE) if plan.fit else twin(plan, None, None)
    assert config.engine.kind == "simulated"


def fit_round(step_s: float, slowdown: float) -> dict[str, Any]:
    """What a round on an engine of `step_s` a step and 0.1 ms a prompt token would have kept."""
    prompts = [StepSample(((n, 0),), 0, 0, step_s + 1e-4 * n) for n in (16, 64, 256, 1024)]
    decodes = [StepSample((), batch, 300 * batch, step_s + 1e-4 * batch) for batch in (1, 2, 4)]
    samples = [asdict(sample) for sample in (*prompts, *decodes)]
    kept = {
        "limits": FITTED,
        "samples": samples,
        "decode_batches": [(4, 5), (5, 7)],
        "host_slowdown": {"prefill": slowdown, "decode": 2 * slowdown},
    }
    return json.loads(json.dumps(kept))  # as it comes out of the file


def test_a_load_is_compared_with_the_rounds_around_it() -> None:
    rounds = [fit_round(step_s, 10 * step_s) for step_s in (0.010, 0.012, 0.030)]
    kept = {"runs": [{"load": 0}, {"load": 2}, {"load": 3}], "fits": rounds}
    early, late = fits.around([(kept, 2)]), fits.around([(kept, 3)])
    assert 0.010 < early.times().step_s((), 1, 300) < 0.0125
    assert 0.0125 < late.times().step_s((), 1, 300) < 0.031
    assert early.host_slowdown == HostSlowdown(pytest.approx(0.11), pytest.approx(0.22))
    assert late.host_slowdown == HostSlowdown(pytest.approx(0.21), pytest.approx(0.42))
    assert early.provenance == FITTED
    both = fits.around([(kept, 2), (kept, 3)])
    assert early.times().step_s((), 1, 300) < both.times().step_s((), 1, 300) < 0.031
    assert both.host_slowdown == HostSlowdown(pytest.approx(0.16), pytest.approx(0.32))


def test_a_round_before_each_load_and_one_after_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    order: list[str] = []

    class Client:
        def __init__(self, *_: Any) -> None: ...
        def warm_up(self) -> None: ...

    def one(_session: Any, load_number: int, *_: Any) -> dict[str, Any]:
        order.append(f"load {load_number}")
        quiet = {"client_lag_p99_s": 0.0, "client_loop_late_p99_s": 0.0, "load_average": 0.0}
        return {"load": load_number, "requests": [], **quiet}

    def measure(_url: str) -> dict[str, Any]:
        order.append("fit")
        return {"number": order.count("fit")}

    monkeypatch.setattr(live, "start", lambda *_: nullcontext(SimpleNamespace(url="http://here")))
    monkeypatch.setattr(live, "Session", Client)
    monkeypatch.setattr(live, "_one", one)
    monkeypatch.setattr(live.fits, "measure", measure)
    for part, expected in (
        ("real", ["load 0", "fit", "load 1", "fit", "load 3", "fit"]),
        ("simulated", ["load 0", "load 1", "load 3"]),
    ):
        order.clear()
        kept: list[dict[str, Any]] = []
        live.run(
            load(part), (1, 3), None, tmp_path, lambda _: None, lambda s, to=kept: to.append(json.loads(json.dumps(s)))
        )
        assert order == expected
        assert [len(k["fits"]) for k in kept] == ([1, 2, 3] if part == "real" else [0, 0, 0])


def test_passes_repeat_the_rates_with_other_requests() -> None:
    twice = PLAN.model_copy(update={"passes": 2})
    assert list(twice.loads) == [1, 2, 3, 4]
    assert [twice.loads_at(place) for place in (0, 1)] == [[1, 3], [2, 4]]
    first, again = (list(twice.workload_of(load_number).arrivals()) for load_number in (1, 3))
    assert [a.at_s for a in first] != [a.at_s for a in again]
    assert len(again) == pytest.approx(len(first), rel=0.5)


def test_a_rates_figures_are_of_all_its_loads(tmp_path: FilePath) -> None:
    twice = PLAN.model_copy(update={"passes": 2})
    one = session(simulator.Overheads(0.004, 0.0), plan=twice)
    other = session(simulator.Overheads(0.004, 0.0), later_s=0.5, plan=twice)
    sessions = [one, one, other, one]  # the second time its first rate was half a second late, its second was not
    for run in other["runs"]:  # another cluster has other names
        for row in run["requests"]:
            row["prefill_worker"] = f"again-{row['prefill_worker']}"
    for found in sessions:
        for run in found["runs"]:
            run |= {"client_lag_p99_s": 0.0, "client_loop_late_p99_s": 0.0}
    late, exact = compared(twice, sessions, tmp_path)
    counts = {run["load"]: len(run["requests"]) for run in one["runs"]}
    assert (late.live.requests, exact.live.requests) == (counts[1] + counts[3], counts[2] + counts[4])
    for row in (late, exact):
        assert row.errors["ttft_p50_s"] == pytest.approx(0.0, abs=0.05)
    assert len(exact.overheads) == 1 and len(late.overheads) == 2
    assert late.agreement.prefill > 0.9 * exact.agreement.prefill


def test_a_cluster_that_fails_while_it_is_measured_is_a_mistake_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise EngineFailed("a request failed")

    monkeypatch.setattr(fits, "fetch_status", lambda *_: {})
    monkeypatch.setattr(fits, "measure_served", fails)
    with pytest.raises(UserError, match="while its engines were measured: a request failed; see its log"):
        fits.measure("http://here")
