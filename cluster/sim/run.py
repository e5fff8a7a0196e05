"""Serve a workload with a simulated cluster, from its first arrival to the end of its last request."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.autoscaling.messages import Settings
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.goodput.stats import RequestStats
from cluster.messages import Outcome, RequestRecord, Role
from cluster.sim.fleet import Fleet, Options
from cluster.sim.scaling import GoodputDriver, Scaler
from cluster.workload.arrival import Arrival
from cluster.workload.processes import Closed
from cluster.workload.spec import Workload

PROGRESS_REQUESTS = 200


@dataclass(slots=True)
class Result:
    """A finished run.

    Attributes:
        duration_s: from the start of the workload to the end of its last request, in virtual time.
        wall_s: what it took here.
    """

    fleet: Fleet
    stats: RequestStats
    scaler: Scaler | None
    duration_s: float
    wall_s: float

    @property
    def records(self) -> list[RequestRecord]:
        return self.fleet.records

    @property
    def accelerators(self) -> float:
        """Accelerators held, averaged over the run; a replica that died held its own until then."""
        if self.scaler is not None and self.scaler.counted_s > 0:
            held_s, specs = self.scaler.log.held_s, self.fleet.specs
            return sum(held_s[role] * spec.accelerators for role, spec in specs.items()) / self.scaler.counted_s
        duration_s = max(self.duration_s, 1e-9)
        engines = [*self.fleet.workers.values(), *self.fleet.gone]
        return sum(w.spec.accelerators * (w.lived_s(duration_s) / duration_s) for w in engines)

    def summary(self) -> dict[str, Any]:
        """Key figures, ready for JSON."""
        fleet, duration_s = self.fleet, max(self.duration_s, 1e-9)
        engines = [*fleet.workers.values(), *fleet.gone]
        pools: dict[str, Any] = {}
        for role, spec in fleet.specs.items():
            mine = [w for w in engines if w.info.role is role]
            counters = [w.engine.scheduler.counters for w in mine]
            lived_s = sum(w.lived_s(duration_s) for w in mine)
            pools[role.value] = {
                "engines": len(fleet.pool(role)),
                "tp": spec.tp,
                "pp": spec.pp,
                "busy": sum(w.engine.busy_s for w in mine) / lived_s if lived_s > 0 else None,
                "mean_batch": sum(c.slot_steps for c in counters) / max(1, sum(c.steps for c in counters)),
                "computed_prompt_tokens": sum(c.computed_prompt_tokens for c in counters),
                "cached_prompt_tokens": sum(c.cached_prompt_tokens for c in counters),
                "pulled_prompt_tokens": sum(c.external_prompt_tokens for c in counters),
                "generated_tokens": sum(c.generated_tokens for c in counters),
                "preemptions": sum(c.preemptions for c in counters),
                "expired_leases": sum(w.expired_leases for w in mine),
            }
        paths: dict[str, int] = {}
        for record in fleet.records:
            name = record.path.value if record.path else "none"
            paths[name] = paths.get(name, 0) + 1
        return {
            # Where none was held there is no goodput of one.
            **self.stats.summary(duration_s, self.accelerators or None),
            "accelerators": self.accelerators,
            "duration_s": duration_s,
            "paths": paths,
            "pools": pools,
            "events": fleet.kernel.events,
            "wall_s": self.wall_s,
        }


def simulate(
    config: ClusterConfig,
    workload: Workload | Iterable[Arrival],
    options: Options | None = None,
    *,
    base: Path | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Result:
    """Run to the end.

    Args:
        workload: a Workload, seeded by `options.seed` where that is not 0 and by its own seed otherwise; or arrivals.
        base: the folder that relative trace paths start from.
        progress: told (ended requests, virtual time) every so often.

    Raises:
        ConfigError, UserError: a cluster or workload that cannot be.
    """
    options = options or Options()
    started_s = time.perf_counter()
    stats = RequestStats(config.slo.to_slo())
    users: dict[str, Callable[[bool], None]] = {}

    def on_record(record: RequestRecord) -> None:
        stats.observe(record)
        if progress and len(fleet.records) % PROGRESS_REQUESTS == 0:
            progress(len(fleet.records), fleet.kernel.now)
        again = users.pop(record.request_id, None)
        if again:
            again(record.outcome is Outcome.DONE)

    require_start(config)
    fleet = Fleet(config, options, on_record)
    end_s: float | None = None
    if isinstance(workload, Workload):
        end_s = workload.duration_s
    scaler = _scaler(config, fleet, end_s)
    if isinstance(workload, Workload) and workload.closed:
        _closed_loop(fleet, workload, users, options.seed or workload.seed)
    else:
        seed = options.seed or None
        arrivals = workload.arrivals(seed=seed, base=base) if isinstance(workload, Workload) else workload
        _feed(fleet, iter(arrivals))
    fleet.kernel.run()
    if fleet.runs:
        raise AssertionError(f"{len(fleet.runs)} requests never ended")
    duration_s = max((r.end_s for r in fleet.records), default=0.0)
    if scaler is not None:
        scaler.count_to(duration_s)
    return Result(fleet, stats, scaler, duration_s, time.perf_counter() - started_s)


def _scaler(config: ClusterConfig, fleet: Fleet, end_s: float | None) -> Scaler | None:
    if config.autoscaling.policy == "off":
        return None
    if end_s is None:
        raise ConfigError(
            "workload.duration_s", "is not set: autoscaling would never end", "set how long the workload lasts"
        )
    settings = Settings.from_config(config)
    startup_s = {role: fleet.specs[role].settings.startup_s or settings.startup_s for role in fleet.specs}
    return Scaler(fleet, GoodputDriver(settings), interval_s=settings.interval_s, startup_s=startup_s, end_s=end_s)


def require_start(config: ClusterConfig, *, scales: bool = True) -> None:
    """Raise ConfigError for a cluster that starts without a decode engine and never gets one.

    Args:
        scales: autoscaling is simulated where the config has it.
    """
    if config.pool(Role.DECODE).replicas.start == 0 and not (scales and config.autoscaling.policy != "off"):
        remedy = "start with at least 1" + (", or set autoscaling.policy" if scales else "")
        raise ConfigError("pools.decode.replicas.initial", "0: no engine would ever serve", remedy)


def _feed(fleet: Fleet, arrivals: Iterator[Arrival]) -> None:
    """One arrival waits in the heap at a time."""

    def arrive(arrival: Arrival) -> None:
        schedule()
        fleet.arrive(arrival)

    def schedule() -> None:
        following = next(arrivals, None)
        if following is not None:
            fleet.kernel.at(following.at_s, arrive, following)

    schedule()


def _closed_loop(fleet: Fleet, workload: Workload, users: dict[str, Callable[[bool], None]], seed: int) -> None:
    """Users who each wait for an answer, think, and ask again.

    One whose request failed waits as long as Retry-After says: at the same instant the answer would be the same.
    """
    end_s = workload.duration_s if workload.duration_s is not None else math.inf
    left = workload.requests if workload.requests is not None else math.inf
    rng = random.Random(f"{seed}/think")
    retry_after_s = fleet.config.router.admission.retry_after_s

    def ask(source: Any, index: int, think_s: float) -> None:
        nonlocal left
        if left <= 0 or fleet.kernel.now >= end_s:
            return
        left -= 1
        stream = workload.all_streams[index]
        prompt, output_tokens, session = source.next(fleet.kernel.now)
        arrival = Arrival(fleet.kernel.now, prompt, output_tokens, stream.tenant, stream.priority, session)

        def again(done: bool) -> None:
            pause_s = rng.expovariate(1 / think_s) if think_s else 0.0
            if not done:
                pause_s = max(pause_s, retry_after_s)
            fleet.kernel.after(pause_s, ask, source, index, think_s)

        request_id = fleet.arrive(arrival)
        if request_id in fleet.runs:
            users[request_id] = again
        else:
            again(False)

    for index, stream in enumerate(workload.all_streams):
        assert isinstance(stream.arrivals, Closed)
        source = workload.source(index, seed=seed)
        for _ in range(stream.arrivals.users):
            fleet.kernel.at(0.0, ask, source, index, stream.arrivals.think_s)


def worker_count(config: ClusterConfig) -> dict[Role, int]:
    """Replicas per pool at the start."""
    roles = [Role.DECODE] if config.colocated else [Role.PREFILL, Role.DECODE]
    return {role: config.pool(role).replicas.start for role in roles}
