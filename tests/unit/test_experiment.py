"""Experiments: every combination is run, mistakes are one line, and the folder holds what the page shows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.config import ClusterConfig
from cluster.errors import ConfigError, UserError
from cluster.planner import experiment, report
from cluster.planner.experiment import Case, Measure, Result, averaged
from cluster.planner.simulate import quantile
from cluster.planner.timeline import chrome_trace, lanes, spans
from cluster.workload.spec import Workload

EXPERIMENTS = Path(__file__).resolve().parents[2] / "loadtests" / "experiments"

SMALL = {
    "title": "Small",
    "cluster": {
        "model": {"max_model_len": 2048},
        "pools": {"prefill": {"replicas": {"min": 1, "max": 1}}, "decode": {"replicas": {"min": 1, "max": 1}}},
        "engine": {"simulated": {"prefix_caching": False}},
        "router": {"placement": {"conditional": False}},
    },
    "workload": {
        "requests": 30,
        "slo": {"ttft_ms": 500, "tpot_ms": 20, "attainment": 0.9},
        "arrivals": {"process": "poisson", "rate_per_s": 5},
        "prompts": {
            "kind": "plain",
            "prompt_tokens": {"dist": "fixed", "tokens": 200},
            "output_tokens": {"dist": "fixed", "tokens": 20},
        },
    },
    "rates": [2, 40],
    "axes": {
        "split": {"1P1D": {}, "2C": {"cluster.pools.prefill": None, "cluster.pools.decode.replicas": 2}},
        "seqs": {"path": "cluster.engine.simulated.max_num_seqs", "values": [4, 32]},
    },
    "report": {"heatmap": ["split", "seqs"], "at_rate": 2, "timeline": {"split": "1P1D"}, "metrics": ["ttft_p95_ms"]},
}


def _write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture
def result(tmp_path: Path) -> Result:
    return experiment.run(experiment.load(_write(tmp_path, SMALL)))


def test_every_combination_is_run_once(result: Result) -> None:
    assert len(result.cases) == experiment.count(result.spec) == 8
    assert {(c.label, c.rate) for c in result.cases} == {
        (f"{split}, {seqs}", rate) for split in ("1P1D", "2C") for seqs in ("4", "32") for rate in (2, 40)
    }
    for case in result.cases:
        assert case.figures["offered"] == case.figures["done"] == 30
        paths = {name for name in case.figures if name.startswith("path ")}
        assert paths == ({"path colocated"} if "2C" in case.label else {"path split"})


def test_the_same_file_gives_the_same_figures(tmp_path: Path, result: Result) -> None:
    again = experiment.run(experiment.load(_write(tmp_path, SMALL)))
    drop = {"wall_s"}
    first, second = ([{k: v for k, v in c.figures.items() if k not in drop} for c in r.cases] for r in (result, again))
    assert first == second


def test_the_folder_holds_figures_pictures_and_one_page_that_needs_no_other(tmp_path: Path, result: Result) -> None:
    folder = tmp_path / "out"
    names = {p.name for p in report.write(result, folder, "pdserve experiment e.yaml")}
    expected = {"results.json", "runs.csv", "report.html", "timeline.json"}
    assert expected | {"goodput.png", "attainment.png", "heatmap.png", "cdf.png", "timeline.png"} <= names
    for name in names:
        if name.endswith(".png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")
    data = json.loads((folder / "results.json").read_text())
    assert data["title"] == "Small" and len(data["runs"]) == 8 and data["attainment_target"] == 0.9
    rows = list(csv.DictReader((folder / "runs.csv").read_text().splitlines()))
    assert len(rows) == 8 and rows[0]["split"] == "1P1D" and float(rows[0]["attainment"]) <= 1
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len([n for n in names if n.endswith(".png")])
    assert "src='http" not in page and "href" not in page


def test_the_timeline_has_each_stage_on_its_worker_and_boxes_of_a_lane_never_overlap(result: Result) -> None:
    assert result.timeline is not None
    records = result.timeline.records
    for record in records:
        parts = list(spans(record))
        first = record.arrival_s + (record.ttft_s or 0)
        before = [s for s in parts if s.name != "decode"]
        assert sum(s.end_s - s.begin_s for s in before) == pytest.approx(record.ttft_s, rel=0.01)
        assert parts[-1].end_s == pytest.approx(record.end_s) and parts[-1].begin_s == pytest.approx(first)
    trace = chrome_trace(records)["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} >= {"prefill-0", "decode-0"}
    placed = lanes([s for r in records for s in spans(r)])
    by_lane: dict[tuple[str, int], float] = {}
    for span, lane in placed:
        assert span.begin_s >= by_lane.get((span.worker, lane), 0.0) - 1e-9
        by_lane[span.worker, lane] = span.end_s


def test_a_combination_that_cannot_be_is_kept_with_its_reason(tmp_path: Path) -> None:
    content = {
        **SMALL,
        "rates": [2],
        "axes": {
            "model": {
                "fits": {},
                "does not": {
                    "cluster.engine.simulated.times": "roofline",
                    "cluster.engine.simulated.model": "llama-3.1-70b",
                },
            }
        },
        "report": {},
    }
    done = experiment.run(experiment.load(_write(tmp_path, content)))
    reasons = {c.label: c.impossible for c in done.cases}
    assert reasons["fits"] is None and "nothing is left for KV" in str(reasons["does not"])
    assert "nothing is left for KV" in (
        report.write(done, tmp_path / "o", "x") and (tmp_path / "o/report.html").read_text()
    )
    content["axes"]["model"].pop("fits")
    with pytest.raises(UserError, match="no combination can run"):
        experiment.run(experiment.load(_write(tmp_path, content)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"axs": {}}, "axs: extra inputs are not permitted; known keys: title"),
        ({"axes": {"x": [1]}}, "axes.x: input should be a valid dictionary"),
        ({"axes": {"x": {"path": "cluster.a"}}, "report": {}}, "axes.x: is neither named variants nor"),
        ({"report": {"heatmap": ["split", "nothing"]}}, "report.heatmap: 'nothing' is not an axis"),
        ({"report": {"timeline": {"split": "9P"}}}, "report.timeline: split: '9P' is not a variant"),
        ({"axes": {"x": {"a": {"pools.prefill": None}}}, "report": {}}, "axes: pools.prefill: does not start with"),
        ({"axes": {"x": {"a": {"cluster.pols": 1}}}, "report": {}}, "pols: unknown key; did you mean `pools`?"),
        ({"axes": {"x": {"a": {"workload.requests": 0}}}, "report": {}}, "workload.requests: input should be greater"),
        ({"seeds": []}, "seeds: tuple should have at least 1 item"),
        ({"rates": [0, 2]}, "rates.0: 0: input should be greater than 0"),
        ({"rates": [2, -1]}, "rates.1: -1: input should be greater than 0"),
        ({"rates": [float("inf")]}, "rates.0: inf: input should be a finite number"),
        ({"rates": ["fast"]}, "rates.0: 'fast': input should be a valid number"),
        ({"cluster": {"engine": "kind"}}, "cluster.engine: 'kind' is not a mapping; leave it out"),
        (
            {"axes": {"x": {"a": {"cluster.autoscaling.policy": "goodput"}}}, "report": {}},
            "cluster.autoscaling.policy: goodput: an experiment's clusters keep their size; leave it out",
        ),
        ({"axes": {"x": {"a": {"workload.streams.one.weight": 1}}}, "report": {}}, "axes: workload.streams.one.weight"),
        ({"axes": {"x": {"a": {"workload.streams.7": 1}}}, "report": {}}, "axes: workload.streams.7: '7' is no index"),
        ({"axes": {"x": {"a": {"workload.streams.0.a": 1}}}, "report": {}}, "axes: workload.streams.0.a: 0 holds no"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, change: dict, line: str) -> None:
    with pytest.raises(UserError) as caught:
        workload = {**SMALL["workload"], "streams": ["plain"]} if "streams" in str(change) else SMALL["workload"]
        spec = experiment.load(_write(tmp_path, {**SMALL, "workload": workload, **change}))
        for _, settings in experiment.combinations(spec):
            experiment.apply(spec, settings)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        experiment.load(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        experiment.load(tmp_path / "bad.yaml")
    for text in ("[1, 2]", "workload: [1]", ""):
        (tmp_path / "scenario.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"^workload\.file: .*scenario\.yaml holds no workload"):
            experiment.load(_write(tmp_path, {**SMALL, "workload": {"file": "scenario.yaml"}}))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_experiments_of_the_repository_can_run(path: Path) -> None:
    """Every combination gives a cluster, a workload and engines that fit; nothing is simulated here."""
    from cluster.engine.simulation.settings import engine_spec
    from cluster.messages import Role

    spec = experiment.load(path)
    assert spec.question and spec.conditions
    for _, settings in experiment.combinations(spec):
        config, workload = experiment.apply(spec, settings)
        assert next(iter(workload.arrivals())).prompt_tokens > 0
        for role in [Role.DECODE] if config.colocated else list(Role):
            assert engine_spec(config, role).scheduler.kv_blocks > 0


def test_the_experiments_ask_what_topologies_are_chosen_by() -> None:
    names = {p.stem for p in EXPERIMENTS.glob("*.yaml")}
    assert names >= {
        "policies",
        "batch-cap",
        "split-or-colocated",
        "pd-ratio",
        "tp-per-pool",
        "prefix-affinity",
        "conditional-disaggregation",
        "speculative-load",
        "fairness",
        "preemption",
        "heterogeneous",
    }


def test_rates_at_an_attainment_are_interpolated_and_end_at_the_first_miss() -> None:
    rows = [{"label": "a", "rate_rps": r, "attainment": s} for r, s in [(1, 1.0), (2, 1.0), (3, 0.8), (4, 1.0)]]
    assert report.highest_rate_at(rows, 0.9) == {"a": pytest.approx(2.5)}
    assert report.highest_rate_at([{"label": "b", "rate_rps": 1, "attainment": 0.1}], 0.9) == {"b": 0.0}


def test_rows_are_means_over_seeds_with_their_spread() -> None:
    cases = [
        Case({"x": "a"}, 1.0, seed, {"goodput_rps": value, "miss decode_step": value})
        for seed, value in ((1, 2.0), (2, 4.0))
    ]
    cases[1].figures.pop("miss decode_step")
    (row,) = averaged(cases)
    assert row["goodput_rps"] == 3.0 and row["goodput_spread"] == 2.0 and row["miss decode_step"] == 1.0


@pytest.mark.parametrize(("q", "expected"), [(0.5, 5), (0.95, 10), (0.01, 1)])
def test_quantiles_are_observed_values(q: float, expected: int) -> None:
    assert quantile([float(v) for v in range(1, 11)], q) == expected
    assert quantile([], q) is None


# At 0.1/s for ten seconds seed 1 draws no request, seed 2 three, seed 3 one.
SPARSE = {
    **SMALL,
    "workload": {**{k: v for k, v in SMALL["workload"].items() if k != "requests"}, "duration_s": 10},
    "rates": [0.1, 2],
    "axes": {},
    "report": {"at_rate": 0.1},
}
NONE = "workload: it has no requests; raise its rate, duration_s or requests"
ONE = "workload: one request has no rate; raise its rate, duration_s or requests"


def _sparse(tmp_path: Path, *seeds: int) -> Result:
    return experiment.run(experiment.load(_write(tmp_path, {**SPARSE, "seeds": seeds})))


def test_a_run_without_requests_spoils_no_other(tmp_path: Path) -> None:
    done = _sparse(tmp_path, 1, 2, 3)
    assert [c.impossible for c in done.cases] == [NONE, None, ONE, None, None, None]
    low, high = averaged(done.cases)
    kept = done.cases[1]
    assert (low["runs"], high["runs"]) == (1, 3)
    assert low["goodput_rps"] == kept.figures["goodput_rps"] and low["goodput_spread"] == 0
    assert done.latencies and kept.evidence, "the first seed that ran is drawn, not the first one of the file"
    report.write(done, tmp_path / "o", "x")
    page = (tmp_path / "o/report.html").read_text()
    assert NONE in page and "seed 1 at 0.1/s" in page and "<th>runs</th>" in page


def test_a_rate_that_no_seed_reaches_is_kept_with_its_reason(tmp_path: Path) -> None:
    done = _sparse(tmp_path, 1)
    low, high = averaged(done.cases)
    assert low["impossible"] == NONE and high["goodput_rps"] > 0
    assert report.best_rows([low, high]) == [high]
    assert experiment.left_out(done.cases) == [{"variant": "base", "runs": "seed 1 at 0.1/s", "reason": NONE}]


def test_one_request_has_no_rate(tmp_path: Path) -> None:
    """Its goodput would be a request in no time."""
    done = _sparse(tmp_path, 3)
    assert done.cases[0].impossible == ONE
    assert all(row["goodput_rps"] < 3 for row in report.best_rows(averaged(done.cases)))


def test_the_command_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cluster.cli import main

    content = {**SPARSE, "title": "A [/b] title", "seeds": [1]}
    arguments = ["experiment", str(_write(tmp_path, content)), "--out", str(tmp_path / "o"), "--seeds"]
    main([*arguments, "1,2"])
    shown = capsys.readouterr().out
    assert "A [/b] title" in shown and f"left out base (seed 1 at 0.1/s): {NONE}" in shown
    main([*arguments, "1,2", "--json"])
    assert json.loads(capsys.readouterr().out)["left_out"] == [
        {"variant": "base", "runs": "seed 1 at 0.1/s", "reason": NONE}
    ]
    with pytest.raises(SystemExit):
        main([*arguments, "1,²"])
    assert "seeds: '1,²' is not a list of whole numbers" in capsys.readouterr().err


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.0,200,20\n" for second in range(30)
)


@pytest.mark.parametrize(
    "scenario",
    [
        {"workload": {"trace": {"path": "../traces/t.csv"}}},
        {"workload": {"streams": [{"trace": {"path": "../traces/t.csv"}}]}},
        {"workload": "w.yaml"},
        {"trace": {"path": "../traces/t.csv"}},
    ],
)
def test_a_scenario_finds_its_trace_from_its_own_folder(tmp_path: Path, scenario: dict) -> None:
    for name in ("traces", "scenarios", "experiments"):
        (tmp_path / name).mkdir()
    (tmp_path / "traces/t.csv").write_text(TRACE)
    (tmp_path / "scenarios/s.yaml").write_text(yaml.safe_dump(scenario))
    (tmp_path / "scenarios/w.yaml").write_text(yaml.safe_dump({"trace": {"path": "../traces/t.csv"}}))
    content = {**SMALL, "workload": {"file": "../scenarios/s.yaml"}, "axes": {}, "report": {}, "rates": [2]}
    done = experiment.run(experiment.load(_write(tmp_path / "experiments", content)))
    assert done.cases[0].figures["done"] == 30


def test_an_experiment_finds_its_own_trace_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    content = {**SMALL, "workload": {"trace": {"path": "t.csv"}}, "axes": {}, "report": {}, "rates": [2]}
    assert experiment.run(experiment.load(_write(tmp_path, content))).cases[0].figures["done"] == 30


def test_the_packaged_trace_scenarios_can_be_experiments(tmp_path: Path) -> None:
    for path in sorted((EXPERIMENTS.parent / "scenarios").glob("trace-*.yaml")):
        content = {**SMALL, "workload": {"file": str(path)}, "axes": {}, "report": {}}
        _, workload = experiment.apply(experiment.load(_write(tmp_path, content)), [])
        assert next(iter(workload.arrivals())).prompt_tokens > 0


def test_a_rate_that_the_processes_state_is_taken_at_their_word(tmp_path: Path) -> None:
    """One seed's own rate is a few percent off, and every run would be."""
    base = {k: v for k, v in SMALL["workload"].items() if k not in ("arrivals", "prompts")}
    stream = {"prompts": SMALL["workload"]["prompts"]}

    def rate(**workload: object) -> float:
        return experiment.mean_rate(Workload.model_validate({**base, **workload}))

    assert rate(arrivals={"process": "poisson", "rate_per_s": 5}, **stream) == 5
    both = [{"arrivals": {"process": name, "rate_per_s": 2}, **stream} for name in ("gamma", "constant")]
    assert rate(streams=both) == 4
    (tmp_path / "t.csv").write_text(TRACE)
    assert rate(trace={"path": str(tmp_path / "t.csv")}) == pytest.approx(1.0)
    # A rate that changes has another mean over the run than over its whole period.
    steps = [{"rate_per_s": 10, "for_s": 100}, {"rate_per_s": 1, "for_s": 900}]
    assert rate(arrivals={"process": "steps", "steps": steps}, **stream) > 5


def test_a_trace_of_one_instant_is_kept_with_its_reason(tmp_path: Path) -> None:
    lines = TRACE.splitlines()
    (tmp_path / "t.csv").write_text("\n".join([lines[0], *[lines[1]] * 3]))
    content = {**SMALL, "workload": {"trace": {"path": "t.csv"}}, "axes": {}, "report": {}, "rates": []}
    with pytest.raises(UserError, match="workload: all 3 requests arrive at once, which is no rate"):
        experiment.run(experiment.load(_write(tmp_path, content)))


def test_what_nobody_was_asked_is_left_out(tmp_path: Path) -> None:
    @contextmanager
    def unasked(config: ClusterConfig) -> Iterator[Measure]:
        with experiment.simulated(config) as measure:
            yield lambda workload, seed: replace(measure(workload, seed), preemptions=None)

    content = {**SMALL, "rates": [2, 5], "axes": {}, "report": {"metrics": ["preemptions"]}}
    spec = experiment.load(_write(tmp_path, content))
    done, asked = experiment.run(spec, cluster=unasked), experiment.run(spec)
    assert "preemptions" in asked.cases[0].evidence and "preemptions" not in done.cases[0].evidence
    assert [row["preemptions"] for row in averaged(done.cases)] == [None, None]
    assert report.write(done, tmp_path / "o", "x")
