"""The fidelity comparison: a session that the simulator itself made up must be found without error."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import parse
from cluster.messages import Outcome, Path, RequestRecord, Slo
from cluster.perf.profile import Coefficients, HostSlowdown, Profile
from loadtests.fidelity import __main__ as fidelity
from loadtests.fidelity import simulator
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


def session(overheads: simulator.Overheads, later_s: float = 0.0) -> dict[str, Any]:
    """What a live run would have kept, had it been the simulator; answers reach the client `later_s` later."""
    starts = [{"load": i, "start_s": 100.0 * i} for i in range(1 + len(PLAN.rates_per_s))]
    runs = simulator.play(CONFIG, PLAN, {"runs": starts}, overheads, seed=3)
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


def test_a_profile_is_kept_for_the_cluster_it_was_measured_on(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[str]] = []

    def measure(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        measured.append(command)
        FilePath(command[command.index("--out") + 1]).write_text("{}")
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(fidelity, "_model", lambda *_: None)
    monkeypatch.setattr(fidelity, "start", lambda *_: nullcontext(SimpleNamespace(url="http://here")))
    monkeypatch.setattr(fidelity.subprocess, "run", measure)
    plan = load("real")
    other = plan.model_copy(update={"cluster": {**plan.cluster, "name": "other"}})
    for wanted, again, runs in (
        (plan, False, 1),
        (plan, False, 1),
        (plan.model_copy(update={"rates_per_s": (1.0,)}), False, 1),
        (other, False, 2),
        (other, True, 3),
    ):
        assert fidelity.fitted(wanted, tmp_path, again) == tmp_path / "fitted.json"
        assert len(measured) == runs
    (tmp_path / "fitted.plan.json").unlink()
    fidelity.fitted(other, tmp_path, False)
    assert len(measured) == 4
