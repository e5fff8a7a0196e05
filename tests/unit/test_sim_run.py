"""A simulated run from first arrival to last end: refused clients, accelerators, clusters of nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import main
from cluster.config import ClusterConfig, parse
from cluster.errors import ConfigError, UserError
from cluster.messages import Outcome
from cluster.planner import simulate as planned
from cluster.sim.run import simulate
from cluster.workload.arrival import Arrival
from cluster.workload.spec import parse as parse_workload

SIMULATED = {"kv_blocks": 4000, "max_num_seqs": 4, "max_num_batched_tokens": 2048}


def config(replicas: dict[str, Any], **more: Any) -> ClusterConfig:
    return parse(
        {
            "engine": {"kind": "simulated", "simulated": SIMULATED},
            "pools": {"prefill": {"replicas": replicas}, "decode": {"replicas": replicas}},
            **more,
        }
    )


@pytest.mark.parametrize(("think_s", "retry_after_s"), [(0, 2.0), (0.1, 2.0)])
def test_a_user_who_is_refused_waits_before_asking_again(think_s: float, retry_after_s: float) -> None:
    workload = parse_workload(
        {
            "duration_s": 9,
            "arrivals": {"process": "closed", "users": 3, "think_s": think_s},
            "prompts": {"kind": "plain", "prompt_tokens": 3000, "output_tokens": 4},
        }
    )
    cluster = config(
        {"min": 1, "max": 1},
        model={"max_model_len": 2048},
        router={"admission": {"retry_after_s": retry_after_s}},
    )
    result = simulate(cluster, workload)
    assert not any(r.outcome is Outcome.DONE for r in result.records)
    assert sorted({r.arrival_s for r in result.records}) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert len(result.records) == 15


def test_a_pool_of_fixed_size_costs_the_same_with_and_without_autoscaling() -> None:
    workload = parse_workload(
        {
            "duration_s": 20,
            "arrivals": {"process": "poisson", "rate_per_s": 10},
            "prompts": {"kind": "plain", "prompt_tokens": 500, "output_tokens": 100},
        }
    )
    off = simulate(config({"min": 1, "max": 1}), workload)
    scaled = simulate(config({"min": 1, "max": 1}, autoscaling={"policy": "goodput", "interval_s": 5}), workload)
    assert off.duration_s > 25, "the overload must outlast the workload"
    assert scaled.duration_s == off.duration_s
    assert scaled.accelerators == pytest.approx(off.accelerators) == 2
    assert scaled.summary()["goodput_per_s_per_accelerator"] == pytest.approx(
        off.summary()["goodput_per_s_per_accelerator"]
    )


def test_a_cluster_that_starts_with_nothing_and_stays_so_is_refused_before_it_runs() -> None:
    nothing, arrivals = config({"min": 0, "max": 1, "initial": 0}), [Arrival(0.0, ((1, 100),), 2)]
    line = r"^pools\.decode\.replicas\.initial: 0: no engine would ever serve; start with at least 1"
    for run in (simulate, planned.simulate):
        with pytest.raises(ConfigError, match=line):
            run(nothing, arrivals)
    growing = config({"min": 0, "max": 1, "initial": 0}, autoscaling={"policy": "goodput"})
    with pytest.raises(ConfigError, match=line):
        planned.simulate(growing, arrivals)


def dying(die_after_s: float, *roles: str) -> dict[str, Any]:
    pool = {"replicas": {"min": 1, "max": 1}}
    faults = {"simulated": {"faults": {"die_after_s": die_after_s}}}
    return {
        "engine": {"kind": "simulated", "simulated": SIMULATED},
        "pools": {role: {**pool, **(faults if role in roles else {})} for role in ("prefill", "decode")},
    }


WORKLOAD = {
    "duration_s": 20,
    "arrivals": {"process": "poisson", "rate_per_s": 2},
    "prompts": {"kind": "plain", "prompt_tokens": 500, "output_tokens": 100},
}


@pytest.mark.parametrize("roles", [("prefill",), ("prefill", "decode")])
def test_replicas_that_died_held_their_accelerators_until_then(roles: tuple[str, ...]) -> None:
    result = simulate(parse(dying(5, *roles)), parse_workload(WORKLOAD))
    held_s = len(roles) * 5 + (2 - len(roles)) * result.duration_s
    assert result.duration_s > 15
    assert result.accelerators == pytest.approx(held_s / result.duration_s)
    summary = result.summary()
    assert summary["goodput_per_s_per_accelerator"] == pytest.approx(
        summary["goodput_per_s"] * result.duration_s / held_s
    )


def test_a_death_after_the_last_request_takes_no_accelerator_away() -> None:
    result = simulate(parse(dying(500, "prefill", "decode")), parse_workload(WORKLOAD))
    assert result.duration_s < 100
    assert result.accelerators == 2
    assert 0 < result.summary()["pools"]["decode"]["busy"] < 1


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(dying(0, "prefill", "decode")))
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(WORKLOAD))
    return [str(tmp_path / "cluster.yaml"), "--workload", str(tmp_path / "workload.yaml")]


def test_a_cluster_that_never_lived_has_no_goodput_of_an_accelerator(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["simulate", *files, "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["accelerators"] == 0 and "goodput_per_s_per_accelerator" not in summary
    main(["simulate", *files])
    shown = " ".join(capsys.readouterr().out.split())
    assert "goodput 0/s" in shown and "per accelerator" not in shown


@pytest.mark.parametrize("rate", ["inf", "nan"])
def test_a_rate_without_an_end_is_one_line(rate: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *files, "--rate", rate])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pdserve: Invalid value for '--rate'")


def test_arrivals_at_one_instant_have_no_rate() -> None:
    burst = [Arrival(1.0, ((i, 100),), 2) for i in range(3)]
    with pytest.raises(UserError, match=r"^workload: all 3 requests arrive at once, which is no rate"):
        planned.simulate(config({"min": 1, "max": 1}), burst)


def test_a_rate_is_of_the_gaps_between_arrivals() -> None:
    arrivals = [Arrival(0.5 + i / 4, ((i, 100),), 2) for i in range(5)]
    run = planned.simulate(config({"min": 1, "max": 1}), arrivals)
    figures = planned.summary(run)
    assert figures["rate_rps"] == figures["goodput_rps"] == pytest.approx(4.0)
