"""An experiment: one cluster, one workload, what is varied, and every run of it.

    title: Prefill to decode ratio
    cluster: {...}                    # a ClusterConfig, simulated engines
    workload: {...}                   # a workload, or {file: ../scenarios/chat.yaml}
    rates: [2, 4, 6]                  # requests/s; the workload's own rate is scaled to each (default: as it is)
    seeds: [1, 2]
    axes:
      split: {4P4D: {cluster.pools.prefill.replicas: 4, cluster.pools.decode.replicas: 4}, ...}   # named variants
      tp:    {path: cluster.pools.decode.layout.tp, values: [1, 2, 4]}                             # one path
    report: {heatmap: [split, tp], at_rate: 4, timeline: {split: 4P4D}}

Every combination of the axes is run at every rate with every seed. A whole number at `replicas` sets minimum and
maximum. A run that cannot be (weights do not fit, no request arrives, ...) is kept with its reason, and means are over
the others. A relative trace path starts at the folder of the file that names it. Runs are repeatable: the
same file gives the same figures.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from cluster.config import ClusterConfig, Section, parse
from cluster.diagnosis.evidence import gather
from cluster.errors import ConfigError, UserError
from cluster.planner.setting import set_path
from cluster.planner.simulate import Run, arrival_rate, by_tenant, simulate, summary
from cluster.sim.fleet import Options
from cluster.workload.processes import SteadyProcess
from cluster.workload.spec import Workload
from cluster.workload.traces import resolve_traces
from cluster.yaml_file import read_yaml

Setting = dict[str, Any]


class Report(Section):
    heatmap: tuple[str, str] | None = None
    at_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="rate of the CDFs, the heat map and the timeline"
    )
    timeline: dict[str, Any] = Field(default_factory=dict, description="axis -> variant of the run that is drawn")
    metrics: tuple[str, ...] = Field((), description="further figures to draw over the rate, e.g. itl_max_ms")


class Spec(Section):
    title: str
    question: str = Field("", description="what the experiment asks, and what to look at")
    conditions: str = Field("", description="what the published effect needs, and what is left out here")
    cluster: dict[str, Any] = Field(default_factory=dict)
    workload: dict[str, Any]
    rates: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()
    seeds: tuple[int, ...] = Field((1,), min_length=1)
    axes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    report: Report = Report()


@dataclass(slots=True)
class Case:
    """One combination: what was chosen on each axis, the figures of each run, or why it cannot be."""

    choice: dict[str, str]
    rate: float | None
    seed: int
    figures: dict[str, Any] = field(default_factory=dict)
    tenants: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    impossible: str | None = None
    evidence: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return ", ".join(self.choice.values()) or "base"


@dataclass(slots=True)
class Result:
    """All cases, and the latencies and one run that the report draws."""

    spec: Spec
    cases: list[Case]
    latencies: dict[str, dict[str, list[float]]]
    timeline: Run | None
    timeline_label: str


def load(path: Path) -> Spec:
    """Read an experiment file.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it cannot be used.
    """
    raw = read_yaml(path, "give the path of an experiment file")
    if not isinstance(raw, dict):
        raise ConfigError(str(path), "holds no mapping", "start with `title:`, `cluster:` and `workload:`")
    resolve_traces(raw.get("workload"), path.parent)
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(p) for p in first["loc"]) or "(top level)"
        known = "known keys: " + ", ".join(Spec.model_fields) if first["type"] == "extra_forbidden" else ""
        given = f"{first['input']!r}: " if isinstance(first["input"], (int, float, str)) else ""
        raise ConfigError(where, given + first["msg"].lower(), known) from None
    if "file" in spec.workload:
        spec = spec.model_copy(update={"workload": _from_file(path.parent / str(spec.workload["file"]), spec.workload)})
    for axis in spec.report.heatmap or ():
        if axis not in spec.axes:
            raise ConfigError("report.heatmap", f"{axis!r} is not an axis", f"axes: {', '.join(spec.axes)}")
    for axis, value in spec.report.timeline.items():
        if axis not in spec.axes or str(value) not in variants(spec)[axis]:
            raise ConfigError("report.timeline", f"{axis}: {value!r} is not a variant", "use one of the axes' variants")
    return spec


def _from_file(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario's workload, with the keys that stand beside `file`."""
    raw = read_yaml(path, "give a scenario", key="workload.file")
    base = raw.get("workload", raw) if isinstance(raw, dict) else raw
    if isinstance(raw, dict) and isinstance(base, str):
        base = read_yaml(path.parent / base, "give a workload file beside the scenario", key="workload.file")
    if not isinstance(base, dict):
        raise ConfigError("workload.file", f"{path} holds no workload", "give a scenario")
    resolve_traces(base, path.parent)
    return {**base, **{k: v for k, v in given.items() if k != "file"}}


def variants(spec: Spec) -> dict[str, dict[str, Setting]]:
    """axis -> variant -> paths to set. An axis with `path` and `values` names its variants by value."""
    result: dict[str, dict[str, Setting]] = {}
    for axis, content in spec.axes.items():
        if set(content) == {"path", "values"} and isinstance(content["values"], list):
            result[axis] = {str(value): {str(content["path"]): value} for value in content["values"]}
        elif content and all(isinstance(setting, dict) for setting in content.values()):
            result[axis] = {str(name): setting for name, setting in content.items()}
        else:
            raise ConfigError(f"axes.{axis}", "is neither named variants nor `path` and `values`", "see the examples")
    return result


def apply(spec: Spec, settings: Iterator[Setting] | list[Setting]) -> tuple[ClusterConfig, Workload]:
    """Cluster and workload with the settings of one combination.

    Raises:
        ConfigError: a path that does not start at `cluster` or `workload`, a value that they refuse, or autoscaling.
    """
    raw = {"cluster": copy.deepcopy(spec.cluster), "workload": copy.deepcopy(spec.workload)}
    engine = raw["cluster"].setdefault("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError("cluster.engine", f"{engine!r} is not a mapping", "leave it out, or give `simulated:` in it")
    engine.setdefault("kind", "simulated")
    for setting in settings:
        for path, value in setting.items():
            set_path(raw, path, value)
    config = parse(raw["cluster"])
    if config.autoscaling.policy != "off":
        raise ConfigError(
            "cluster.autoscaling.policy",
            f"{config.autoscaling.policy}: an experiment's clusters keep their size",
            "leave it out, or use `pdserve simulate`",
        )
    try:
        workload = Workload.model_validate(raw["workload"])
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(["workload", *(str(p) for p in first["loc"])])
        raise ConfigError(where, first["msg"].removeprefix("Value error, ").lower()) from None
    if workload.slo is not None:
        config = config.model_copy(update={"slo": workload.slo})
    return config, workload


def mean_rate(workload: Workload) -> float:
    """Requests a second as the workload stands: what its processes state, or else counted on its own arrivals."""
    stated = [s.arrivals.rate_per_s for s in workload.all_streams if isinstance(s.arrivals, SteadyProcess)]
    if len(stated) == len(workload.all_streams):
        return sum(stated)
    return arrival_rate([arrival.at_s for arrival in itertools.islice(workload.arrivals(), 20_000)])


def combinations(spec: Spec) -> list[tuple[dict[str, str], list[Setting]]]:
    """Every choice of one variant an axis, with the settings."""
    axes = variants(spec)
    names = list(axes)
    return [
        (dict(zip(names, chosen, strict=True)), [axes[a][v] for a, v in zip(names, chosen, strict=True)])
        for chosen in itertools.product(*(axes[name] for name in names))
    ]


def count(spec: Spec) -> int:
    """Runs that the experiment takes."""
    return math.prod(len(v) for v in variants(spec).values()) * max(1, len(spec.rates)) * len(spec.seeds)


Measure = Callable[[Workload, int], Run]
Cluster = Callable[[ClusterConfig], AbstractContextManager[Measure]]


@contextmanager
def simulated(config: ClusterConfig) -> Iterator[Measure]:
    """A cluster in virtual time. Each measurement starts from an empty one."""
    yield lambda workload, seed: simulate(config, workload.arrivals(seed=seed), seed, Options(seed=seed))


def run(spec: Spec, progress: Callable[[str], None] = lambda _label: None, cluster: Cluster = simulated) -> Result:
    """Run everything.

    Args:
        progress: called before each run with its label.
        cluster: starts what is measured, once a combination; the default is the simulator.

    Raises:
        UserError: not one combination can run.
    """
    cases: list[Case] = []
    latencies: dict[str, dict[str, list[float]]] = {}
    timeline: Run | None = None
    timeline_label = ""
    drawn_rate = _nearest(spec.report.at_rate, spec.rates)
    wanted = {axis: str(value) for axis, value in spec.report.timeline.items()}
    for choice, settings in combinations(spec):
        own = [Case(choice, rate, seed) for rate in (spec.rates or (None,)) for seed in spec.seeds]
        cases += own
        try:
            config, workload = apply(spec, settings)
            mean_rps = mean_rate(workload) if spec.rates else None
            with cluster(config) as measure:
                told: set[float | None] = set()
                for case in own:
                    progress(f"{case.label} at {case.rate:g}/s" if case.rate is not None else case.label)
                    asked = workload
                    if case.rate is not None and mean_rps is not None:
                        asked = workload.at_rate(case.rate / mean_rps)
                    try:
                        done = measure(asked, case.seed)
                    except UserError as e:
                        # Another rate or seed may well run.
                        case.impossible = str(e)
                        continue
                    case.figures, case.tenants = summary(done), by_tenant(done)
                    if case.rate in told:
                        continue
                    told.add(case.rate)
                    # For `pdserve diagnose`; one seed tells what the others would.
                    counters = {} if done.preemptions is None else {"preemptions": float(done.preemptions)}
                    prompts = [a.prompt for a in asked.arrivals(seed=case.seed)]
                    case.evidence = gather(done.records, config.slo.to_slo(), prompts=prompts, engine=counters)
                    if case.rate == drawn_rate:
                        latencies[case.label] = _latencies(done)
                        if timeline is None and all(choice.get(a) == v for a, v in wanted.items()):
                            timeline, timeline_label = done, case.label
        except UserError as e:
            for case in own:
                if not case.figures and case.impossible is None:
                    case.impossible = str(e)
    if all(case.impossible for case in cases):
        raise UserError(f"experiment: no combination can run: {cases[0].impossible}")
    return Result(spec, cases, latencies, timeline, timeline_label)


def _nearest(wanted: float | None, rates: tuple[float, ...]) -> float | None:
    if not rates:
        return None
    target = wanted if wanted is not None else rates[len(rates) // 2]
    return min(rates, key=lambda r: abs(r - target))


def _latencies(done: Run) -> dict[str, list[float]]:
    return {
        "ttft": sorted(r.ttft_s for r in done.records if r.ttft_s is not None),
        "tpot": sorted(r.tpot_s for r in done.records if r.tpot_s is not None and r.output_tokens >= 2),
        "itl": sorted(gap for r in done.records for gap in r.itl_s),
    }


def averaged(cases: list[Case]) -> list[dict[str, Any]]:
    """One row a (choice, rate): means over the `runs` that have figures, and the spread of goodput between them."""
    groups: dict[tuple[str, float | None], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.label, case.rate), []).append(case)
    rows = []
    for (label, rate), members in groups.items():
        row: dict[str, Any] = {"label": label, "rate": rate, **members[0].choice}
        ran = [m for m in members if m.impossible is None]
        if not ran:
            rows.append(row | {"impossible": members[0].impossible})
            continue
        row["runs"] = len(ran)
        names = dict.fromkeys(name for m in ran for name in m.figures)
        for name in names:
            values = [m.figures.get(name, 0.0 if name.startswith(("miss ", "path ")) else None) for m in ran]
            known = [v for v in values if isinstance(v, (int, float))]
            row[name] = sum(known) / len(known) if known else None
        spread = [m.figures["goodput_rps"] for m in ran]
        row["goodput_spread"] = max(spread) - min(spread)
        rows.append(row)
    return rows


def left_out(cases: list[Case]) -> list[dict[str, str]]:
    """Runs without figures: `variant`, `runs` (rates and seeds, or all) and `reason`; one row a variant and reason."""
    total = Counter(case.label for case in cases)
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.impossible is not None:
            groups.setdefault((case.label, case.impossible), []).append(case)
    return [
        {
            "variant": label,
            "runs": "all" if len(members) == total[label] else ", ".join(map(_which, members)),
            "reason": reason,
        }
        for (label, reason), members in groups.items()
    ]


def _which(case: Case) -> str:
    return f"seed {case.seed}" + ("" if case.rate is None else f" at {case.rate:g}/s")
