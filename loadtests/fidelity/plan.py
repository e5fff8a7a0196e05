"""What one part of the fidelity table compares: a YAML beside this file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from cluster.config import ClusterConfig, Section, parse
from cluster.perf.profile import Profile
from cluster.workload.processes import Closed, Steps
from cluster.workload.spec import Workload

PARTS = ("simulated", "real")


class Tolerance(Section):
    """Relative errors of percentiles, and points of attainment."""

    p50: float = Field(gt=0)
    p99: float = Field(gt=0)
    attainment_points: float | None = Field(None, gt=0)


class Shape(Section):
    """A decoder with random weights, of a size that makes steps long beside what surrounds them."""

    hidden: int = Field(512, ge=64)
    layers: int = Field(8, ge=1)
    intermediate: int = Field(1536, ge=64)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(4, ge=1)


class Plan(Section):
    """
    Attributes:
        probes: sent before all loads, one at a time: what an idle cluster adds to the engines' own times.
        rates_per_s: arrival rates; each is `workload` at that rate.
        passes: how often the rates are gone through, each time with seeds of their own. A rate's figures are of all its
            requests, so that a minute in which the machine is slow is not all that is known of it.
        fit: the simulator takes its step times from profiles that are measured on this cluster, between the loads.
        shape: served instead of `cluster.model`.
    """

    description: str
    tolerance: Tolerance
    cluster: dict[str, Any]
    probes: Workload
    workload: Workload
    rates_per_s: tuple[float, ...] = Field(min_length=1)
    passes: int = Field(1, ge=1)
    fit: bool = False
    shape: Shape | None = None

    @model_validator(mode="after")
    def _open(self) -> Plan:
        if self.probes.closed or isinstance(self.workload.arrivals_, Closed | Steps | None):
            raise ValueError("the workload needs one open arrival process with one rate")
        return self

    def key(self) -> dict[str, Any]:
        """What a measurement is of: everything that the file says."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    def live(self, model: Path | None) -> dict[str, Any]:
        """The cluster as `pdserve serve` takes it."""
        if model is None:
            return self.cluster
        return {**self.cluster, "model": {**self.cluster.get("model", {}), "id": str(model)}}

    @property
    def loads(self) -> range:
        """Numbers of all loads: the rates of the first pass, then those of the next."""
        return range(1, len(self.rates_per_s) * self.passes + 1)

    def loads_at(self, rate: int) -> list[int]:
        """The loads of one rate, by its place in `rates_per_s`."""
        return [load for load in self.loads if (load - 1) % len(self.rates_per_s) == rate]

    def workload_of(self, load: int) -> Workload:
        """Load 0 is the probes."""
        if load == 0:
            return self.probes
        arrivals = self.workload.arrivals_
        assert arrivals is not None and not isinstance(arrivals, Closed | Steps), "checked when the plan was read"
        factor = self.rates_per_s[(load - 1) % len(self.rates_per_s)] / arrivals.rate_per_s
        return self.workload.at_rate(factor).model_copy(update={"seed": self.workload.seed + load - 1})


def load(part: str) -> Plan:
    path = Path(__file__).parent / f"{part}.yaml"
    return Plan.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def twin(plan: Plan, path: Path | None, fit: Profile | None) -> ClusterConfig:
    """The cluster that the simulator runs: the same one, with simulated engines as they were measured (`fit`, in the
    file `path`)."""
    if path is None or fit is None:
        return parse(plan.cluster)
    fitted = fit.provenance
    engine = {
        "kind": "simulated",
        "simulated": {
            "times": str(path),
            "kv_blocks": fitted["kv_total_blocks"],
            "kv_bytes_per_token": fitted["kv_bytes_per_token"],
            "block_size_tokens": fitted["block_size_tokens"],
            "max_num_batched_tokens": fitted["max_num_batched_tokens"],
            "max_num_seqs": fitted["max_num_seqs"],
            "host_slowdown": asdict(fit.host_slowdown) if fit.host_slowdown else None,
            "step_variation": fit.step_variation or None,
        },
    }
    return parse({**plan.cluster, "engine": engine})
