"""One simulated run of a ClusterConfig under a workload, and its summary: what experiments and verification share."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.simulation.settings import SimulatedSettings
from cluster.errors import UserError
from cluster.goodput.accounting import is_good, miss_stage
from cluster.messages import Outcome, RequestRecord, Role
from cluster.perf.hardware import Hardware, hardware
from cluster.sim.fleet import Fleet, Options, Transfer
from cluster.sim.run import require_start
from cluster.workload.arrival import Arrival

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Run:
    """What one run left behind.

    Attributes:
        rate_rps: at which the requests arrived.
        span_s: from the first arrival to the last end.
        preemptions: of all engines; None: nobody was asked.
    """

    records: list[RequestRecord]
    transfers: list[Transfer]
    offered: int
    rate_rps: float
    span_s: float
    wall_s: float
    events: int
    preemptions: int | None
    accelerators: int
    price_per_hour: float | None
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def accelerators(config: ClusterConfig) -> tuple[int, float | None]:
    """GPUs of all replicas, and their price an hour where every pool's type is in the hardware table."""
    total, price, known = 0, 0.0, True
    for role in [Role.DECODE] if config.colocated else [Role.PREFILL, Role.DECODE]:
        pool = config.pool(role)
        gpus = pool.replicas.start * pool.layout.ranks
        device = _device(config, role)
        total += gpus
        known = known and device is not None
        price += gpus * device.price_per_hour if device else 0.0
    return total, price if known else None


def _device(config: ClusterConfig, role: Role) -> Hardware | None:
    """A pool's accelerators, where the hardware table has them."""
    pool = config.pool(role)
    simulated = {**config.engine.simulated, **pool.simulated}
    name = simulated.get("hardware") or pool.accelerator
    if name is None and config.engine.kind == "simulated" and simulated.get("times") == "roofline":
        name = SimulatedSettings().hardware
    try:
        return hardware(str(name)) if name else None
    except UserError:
        return None


def arrival_rate(times_s: Sequence[float]) -> float:
    """Requests a second; between arrivals there is one gap fewer than arrivals.

    Raises:
        UserError: there are too few, or all come at once.
    """
    if not times_s:
        raise UserError("workload: it has no requests; raise its rate, duration_s or requests")
    if len(times_s) == 1:
        raise UserError("workload: one request has no rate; raise its rate, duration_s or requests")
    span_s = max(times_s) - min(times_s)
    if span_s <= 0:
        raise UserError(f"workload: all {len(times_s)} requests arrive at once, which is no rate; spread them in time")
    return (len(times_s) - 1) / span_s


def simulate(
    config: ClusterConfig,
    arrivals: Iterable[Arrival],
    seed: int = 0,
    options: Options | None = None,
) -> Run:
    """Serve all arrivals to their end.

    Raises:
        UserError: a cluster that cannot be, or a workload that has no rate.
    """
    begin = time.perf_counter()
    require_start(config, scales=False)
    fleet = Fleet(config, options or Options(seed=seed))
    times_s: list[float] = []

    def arrive(arrival: Arrival) -> None:
        fleet.arrive(arrival)

    for arrival in arrivals:
        fleet.kernel.at(arrival.at_s, arrive, arrival)
        times_s.append(arrival.at_s)
    rate_rps = arrival_rate(times_s)
    fleet.kernel.run()
    records = fleet.records
    end = max((r.end_s for r in records), default=times_s[-1])
    count, price = accelerators(config)
    workers = [*fleet.workers.values(), *fleet.gone]
    return Run(
        records=records,
        transfers=fleet.log.transfers,
        offered=len(times_s),
        rate_rps=rate_rps,
        span_s=max(end - times_s[0], 1e-9),
        wall_s=time.perf_counter() - begin,
        events=fleet.kernel.events,
        preemptions=sum(w.engine.scheduler.counters.preemptions for w in workers),
        accelerators=count,
        price_per_hour=price,
        seed=seed,
    )


def quantile(values: list[float], q: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered) - 1e-9) - 1))]


def summary(run: Run) -> dict[str, Any]:
    """Flat figures of one run. Rates are per second of arrivals; latencies are of requests that finished."""
    done = [r for r in run.records if r.outcome is Outcome.DONE]
    good = [r for r in run.records if is_good(r)]
    misses = Counter(stage.value for r in run.records if (stage := miss_stage(r)) is not None)
    paths = Counter(r.path.value for r in run.records if r.path is not None)
    ttft = [r.ttft_s for r in done if r.ttft_s is not None]
    tpot = [r.tpot_s for r in done if r.tpot_s is not None and r.output_tokens >= 2]
    itl = [gap for r in done for gap in r.itl_s]
    tokens = sum(r.output_tokens for r in run.records)
    prompt_tokens = sum(r.prompt_tokens for r in done)
    goodput = run.rate_rps * len(good) / run.offered
    figures: dict[str, Any] = {
        "offered": run.offered,
        "rate_rps": run.rate_rps,
        "done": len(done),
        "failed": sum(r.outcome is not Outcome.DONE for r in run.records),
        "attainment": len(good) / run.offered,
        "goodput_rps": goodput,
        "goodput_per_gpu": goodput / run.accelerators,
        "requests_per_dollar": goodput * 3600 / run.price_per_hour if run.price_per_hour else None,
        "output_tokens_per_s": tokens / run.span_s,
        "accelerators": run.accelerators,
        "cached_share": sum(r.cached_tokens for r in done) / prompt_tokens if prompt_tokens else None,
        "preemptions": run.preemptions,
        "transfers": len(run.transfers),
        "transferred_gb": sum(t.bytes for t in run.transfers) / 1e9,
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        figures[f"{name}_mean_ms"] = 1e3 * sum(values) / len(values) if values else None
        for q in QUANTILES:
            value = quantile(values, q)
            figures[f"{name}_p{round(100 * q)}_ms"] = None if value is None else 1e3 * value
    figures["itl_max_ms"] = 1e3 * max(itl) if itl else None
    figures |= {f"miss {stage}": n for stage, n in sorted(misses.items())}
    figures |= {f"path {path}": n for path, n in sorted(paths.items())}
    figures |= {"wall_s": run.wall_s, "events": run.events, "seed": run.seed}
    return figures


def by_tenant(run: Run) -> dict[str, Mapping[str, Any]]:
    """Attainment and TTFT of each tenant."""
    tenants: dict[str, list[RequestRecord]] = {}
    for record in run.records:
        tenants.setdefault(record.tenant, []).append(record)
    result: dict[str, Mapping[str, Any]] = {}
    for tenant, records in sorted(tenants.items()):
        ttft = [r.ttft_s for r in records if r.ttft_s is not None]
        p95 = quantile(ttft, 0.95)
        result[tenant] = {
            "requests": len(records),
            "attainment": sum(is_good(r) for r in records) / len(records),
            "ttft_p95_ms": None if p95 is None else 1e3 * p95,
            "ttft_max_ms": 1e3 * max(ttft) if ttft else None,
        }
    return result
