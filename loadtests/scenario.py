"""Scenario: a workload and how it is put to an endpoint. One YAML file each in `loadtests/scenarios/`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from cluster.config import Section, SloConfig
from cluster.errors import ConfigError
from cluster.workload.spec import Workload
from cluster.workload.traces import resolve_traces
from cluster.yaml_file import read_yaml
from loadtests.client import Limits
from loadtests.endpoint import header_text

FOLDER = Path(__file__).parent / "scenarios"


class RequestOptions(Section):
    """How prompts become requests; see `loadtests/endpoint.py`."""

    api: Literal["chat", "completions", "tokens"] = "chat"
    exact_output: bool = Field(True, description="ignore_eos and min_tokens: outputs have the workload's length")
    counts: bool = Field(True, description="continuous_usage_stats: a token count with each chunk")
    temperature: float = Field(0.0, ge=0)
    tenant_header: str | None = "x-tenant-id"


class Warmup(Section):
    """Requests sent before the clock starts, `concurrency` at a time: first contact of engines is not the test."""

    requests: int = Field(4, ge=0)
    concurrency: int = Field(2, ge=1)


class Validity(Section):
    """What the load generator itself must keep, or the run is marked invalid."""

    schedule_lag_p99_ms: float = Field(50, gt=0, description="sent after scheduled")
    loop_lag_p99_ms: float = Field(50, gt=0, description="the client's event loop late for a timer")
    achieved_rate: float = Field(0.98, gt=0, le=1, description="share of the planned rate")


class Sweep(Section):
    """Rates to try, as factors of the workload's own; the run itself is factor 1."""

    factors: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = Field((0.25, 0.5, 1.0, 1.5, 2.0, 3.0), min_length=1)
    attainments: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.90, 0.95)
    refine: int = Field(
        2, ge=0, le=8, description="bisections between the last rate that held and the first that did not"
    )
    duration_s: float | None = Field(None, gt=0, description="of each step; default: the workload's")


class ClientLimits(Section):
    connect_s: float = Field(10, gt=0)
    idle_s: float = Field(120, gt=0)
    total_s: float = Field(900, gt=0)
    max_in_flight: int | None = Field(
        None, ge=1, description="an artificial limit, of all processes together; what it delays counts as latency"
    )
    drain_s: float = Field(60, ge=0, description="wait after the last arrival; what still runs then is a miss")

    def to_limits(self) -> Limits:
        return Limits(self.connect_s, self.idle_s, self.total_s)


class Scenario(Section):
    name: str = "scenario"
    description: str = ""
    workload: Workload
    request: RequestOptions = RequestOptions()
    warmup: Warmup = Warmup()
    client: ClientLimits = ClientLimits()
    validity: Validity = Validity()
    sweep: Sweep | None = None

    @property
    def slo(self) -> SloConfig:
        return self.workload.slo or SloConfig()


def check_tenants(scenario: Scenario) -> None:
    """Raises ConfigError where a tenant's name cannot be sent in the header that carries it."""
    streams = scenario.workload.all_streams
    if scenario.request.tenant_header is None:
        return
    header_text("request.tenant_header", scenario.request.tenant_header, charset="ascii")
    for i, stream in enumerate(streams):
        header_text("workload.tenant" if len(streams) == 1 else f"workload.streams.{i}.tenant", stream.tenant)


def names() -> list[str]:
    """The scenarios in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name: str) -> Path:
    """A packaged scenario by name, or a file. ConfigError lists what there is."""
    packaged = FOLDER / f"{name}.yaml"
    if packaged.is_file():
        return packaged
    path = Path(name)
    if path.is_file():
        return path
    raise ConfigError("SCENARIO", f"{name!r} is neither a scenario nor a file", "scenarios: " + ", ".join(names()))


def load(path: Path) -> Scenario:
    """Read a scenario. `workload` may be a mapping or the path of a workload file beside it."""
    raw = read_yaml(path)
    if isinstance(raw, dict):
        raw.setdefault("name", path.stem)
        if isinstance(raw.get("workload"), str):
            raw["workload"] = read_yaml(
                path.parent / raw["workload"], "give a workload file beside the scenario", key="workload"
            )
        resolve_traces(raw.get("workload"), path.parent)
    return parse(raw)


def parse(raw: Any) -> Scenario:
    """Validate a mapping. Raises ConfigError with the first mistake."""
    if not isinstance(raw, dict):
        raise ConfigError("scenario", f"is a {type(raw).__name__}, not a mapping", "start with `workload:`")
    try:
        return Scenario.model_validate(raw)
    except ValidationError as e:
        first = min(e.errors(include_url=False), key=lambda m: m["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"]) or "scenario"
        if first["type"] == "extra_forbidden":
            raise ConfigError(where, "unknown key", "see docs/loadtests.md") from None
        value = "" if isinstance(first["input"], dict) else f"{first['input']!r}: "
        raise ConfigError(where, value + first["msg"].removeprefix("Value error, ")) from None
