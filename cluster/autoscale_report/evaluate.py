"""One run of one policy on one workload, and its key figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.autoscale_report.scenarios import STARTUP_S, Scenario
from cluster.goodput.accounting import is_good, is_missed
from cluster.messages import RequestRecord, Role
from cluster.sim.fleet import Fleet, Options
from cluster.sim.scaling import Policy, Scaler
from cluster.workload.arrival import Arrival

INTERVAL_S = 5.0
# Recovered: this share of the requests that arrive within a minute is good again.
RECOVERED = 0.95


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run.

    Attributes:
        replica_h: hours of replicas that held accelerators, those that start or drain included.
        reversals_per_h: changes of direction of the busier pool.
        recover_s: from the start of a burst until requests are good again; None without a burst or a recovery.
    """

    attainment: float
    replica_h: float
    goodput_per_replica_h: float
    reversals_per_h: float
    recover_s: float | None
    peak_accelerators: int
    sizes: str

    def row(self) -> dict[str, float | int | str | None]:
        return {
            "attainment": round(self.attainment, 4),
            "replica_h": round(self.replica_h, 3),
            "goodput_per_replica_h": round(self.goodput_per_replica_h, 1),
            "reversals_per_h": round(self.reversals_per_h, 2),
            "recover_s": None if self.recover_s is None else round(self.recover_s),
            "sizes": self.sizes,
        }


def arrive(fleet: Fleet, arrival: Arrival) -> None:
    """The kernel's call for one arrival."""
    fleet.arrive(arrival)


MakePolicy = Callable[[Fleet], Policy]


def run(
    scenario: Scenario,
    arrivals: list[Arrival],
    make_policy: MakePolicy,
    *,
    first: tuple[int, int] | None = None,
    startup_s: float = STARTUP_S,
    interval_s: float = INTERVAL_S,
) -> tuple[Result, list[RequestRecord]]:
    """Serve all arrivals under a policy. The bill covers the workload's duration, the records everything."""
    fleet = Fleet(scenario.config(*(first or scenario.first)), Options(keep_itl=False))
    for arrival in arrivals:
        fleet.kernel.at(arrival.at_s, arrive, fleet, arrival)
    scaler = Scaler(fleet, make_policy(fleet), interval_s=interval_s, startup_s=startup_s, end_s=scenario.duration_s)
    fleet.kernel.run()
    hours, log = scenario.duration_s / 3600, scaler.log
    sizes = [targets for _, targets in log.changes]
    return (
        Result(
            attainment=fleet.counters.attainment or 0.0,
            replica_h=log.replica_s / 3600,
            goodput_per_replica_h=fleet.counters.good / (log.replica_s / 3600),
            reversals_per_h=max(log.reversals(role) for role in fleet.specs) / hours,
            recover_s=recover_s(scenario, fleet.records),
            peak_accelerators=log.peak_accelerators,
            sizes=" ".join(
                f"{role.value[0].upper()}{min(s[role] for s in sizes)}-{max(s[role] for s in sizes)}"
                for role in (Role.PREFILL, Role.DECODE)
            ),
        ),
        fleet.records,
    )


def recover_s(scenario: Scenario, records: list[RequestRecord]) -> float | None:
    """From the burst's start to the first of three minutes in a row in which arrivals are good again."""
    if scenario.burst_s is None:
        return None
    start_s, _ = scenario.burst_s
    minutes: dict[int, list[bool]] = {}
    for record in records:
        if record.arrival_s >= start_s and (is_good(record) or is_missed(record)):
            minutes.setdefault(int((record.arrival_s - start_s) // 60), []).append(is_good(record))
    fine = {m: sum(good) >= RECOVERED * len(good) for m, good in minutes.items()}
    for minute in range(max(fine, default=0) + 1):
        if all(fine.get(minute + i, True) for i in range(3)):
            return 60.0 * minute
    return None
