"""All policies on one workload: ours once, every other one tuned for that workload."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cluster.autoscale_report import baselines, oracle
from cluster.autoscale_report.evaluate import INTERVAL_S, Result, run
from cluster.autoscale_report.scenarios import STARTUP_S, Scenario
from cluster.autoscaling.messages import Settings
from cluster.messages import Role
from cluster.sim.fleet import Fleet
from cluster.sim.scaling import GoodputDriver, Policy
from cluster.workload.arrival import Arrival

TARGET = 0.95
PREFILL_TARGETS: tuple[float, ...] = (1, 2, 4)
DECODE_TARGETS: tuple[float, ...] = (16, 32, 64, 96)
# (up, down) as shares of the limit. An idle decode step takes 0.4 of the TPOT limit here, so its band lies above that.
TTFT_BANDS = ((0.3, 0.15), (0.5, 0.25))
TPOT_BANDS = ((0.7, 0.5), (0.85, 0.6))
Tell = Callable[[str], None]
P = TypeVar("P")
D = TypeVar("D")
S = TypeVar("S")


class OutOfTime(Exception):
    """The time that this invocation may take is over; what is done is kept."""


class Store:
    """Runs that are done, one file a workload, so that a report may be made in pieces.

    Args:
        until_s: on `time.monotonic`; no run starts after it. None: no limit.
    """

    def __init__(self, file: Path, *, reuse: bool = False, until_s: float | None = None) -> None:
        self._file, self._until_s = file, until_s
        self._known: dict[str, Any] = json.loads(file.read_text()) if reuse and file.is_file() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """What an earlier run of `key` gave, or `make()`, which must be ready for JSON."""
        if key not in self._known:
            if self._until_s is not None and time.monotonic() > self._until_s:
                raise OutOfTime(key)
            self._known[key] = make()
            self._file.write_text(json.dumps(self._known))
        return self._known[key]


def compare(scenario: Scenario, seed: int, tell: Tell, store: Store) -> dict[str, Any]:
    """Rows by policy, ready for JSON.

    Raises:
        OutOfTime: a later call with the same store goes on where this one stopped.
    """
    arrivals = scenario.arrivals(seed)
    rows: dict[str, Any] = {"requests": len(arrivals)}

    def one(name: str, make: Callable[[Fleet], Policy], **more: Any) -> Result:
        def measured() -> dict[str, Any]:
            tell(f"{scenario.name}: {name}")
            return asdict(run(scenario, arrivals, make, **more)[0])

        return Result(**store.get(name, measured))

    rows["goodput"] = one("goodput", goodput).row()
    wanted = min(TARGET, rows["goodput"]["attainment"])
    queue, how = _queue_length(wanted, one)
    rows["queue length"] = queue.row() | {"tuned": how}
    latency, how = _mean_latency(wanted, one)
    rows["mean latency"] = latency.row() | {"tuned": how}
    schedule = _schedule(scenario, arrivals, store, tell)
    for name, startup_s in (("oracle", 0.0), ("oracle, start-up", STARTUP_S)):
        first = (schedule[0][1][Role.PREFILL], schedule[0][1][Role.DECODE])
        make = partial(_scheduled, schedule)
        # Its first move is at the start, so the interval is a divisor of the window.
        rows[name] = one(name, make, first=first, startup_s=startup_s, interval_s=INTERVAL_S).row()
    largest = (max(s[Role.PREFILL] for _, s in schedule), max(s[Role.DECODE] for _, s in schedule))
    size, fixed = _static(scenario, largest, one)
    rows["static"] = fixed.row() | {"tuned": f"P{size[0]} D{size[1]}"}
    return rows


def goodput(fleet: Fleet) -> Policy:
    return GoodputDriver(Settings.from_config(fleet.config))


def _queue_length(wanted: float, one: Callable[..., Result]) -> tuple[Result, str]:
    def tried(prefill: float, decode: float) -> tuple[Result, tuple[float, float]]:
        def make(fleet: Fleet) -> Policy:
            return baselines.QueueLength(baselines.bounds(fleet), {Role.PREFILL: prefill, Role.DECODE: decode})

        return one(f"queue length {prefill}/{decode}", make), (prefill, decode)

    result, (prefill, decode) = _one_after_the_other(PREFILL_TARGETS, DECODE_TARGETS, tried, wanted)
    return result, f"target_ongoing {prefill}/{decode}"


def _mean_latency(wanted: float, one: Callable[..., Result]) -> tuple[Result, str]:
    Band = tuple[float, float]

    def tried(ttft: Band, tpot: Band) -> tuple[Result, tuple[Band, Band]]:
        def make(fleet: Fleet) -> Policy:
            high = {Role.PREFILL: ttft[0], Role.DECODE: tpot[0]}
            low = {Role.PREFILL: ttft[1], Role.DECODE: tpot[1]}
            return baselines.MeanLatency(fleet, baselines.bounds(fleet), high, low)

        return one(f"mean latency {ttft} {tpot}", make), (ttft, tpot)

    result, (ttft, tpot) = _one_after_the_other(TTFT_BANDS, TPOT_BANDS, tried, wanted)
    return result, f"up/down at {ttft[0]:g}/{ttft[1]:g} TTFT, {tpot[0]:g}/{tpot[1]:g} TPOT"


def _static(scenario: Scenario, guess: oracle.Size, one: Callable[..., Result]) -> tuple[tuple[int, int], Result]:
    known: dict[tuple[int, int], Result] = {}

    def attainment(size: tuple[int, int]) -> float:
        known[size] = one(f"static P{size[0]} D{size[1]}", baselines.static, first=size)
        return known[size].attainment

    size = oracle.cheapest(attainment, scenario.most, TARGET, guess)
    return size, known[size] if size in known else one("static", baselines.static, first=size)


Schedule = list[tuple[float, dict[Role, int]]]


def _scheduled(schedule: Schedule, _fleet: Fleet) -> Policy:
    return baselines.scheduled(schedule)


def _schedule(scenario: Scenario, arrivals: list[Arrival], store: Store, tell: Tell) -> Schedule:
    """The oracle's size of every window."""
    sizes, guess = [], scenario.first
    for start_s in oracle.windows(scenario):

        def attainment(size: oracle.Size, start_s: float = start_s) -> float | None:
            def measured() -> float | None:
                tell(f"{scenario.name}: oracle at {start_s:.0f} s, P{size[0]} D{size[1]}")
                return oracle.attainment_in_window(scenario, arrivals, start_s, size)

            value: float | None = store.get(f"oracle {start_s:.0f} P{size[0]} D{size[1]}", measured)
            return value

        guess = oracle.cheapest(attainment, scenario.most, TARGET, guess)
        sizes.append((start_s, {Role.PREFILL: guess[0], Role.DECODE: guess[1]}))
    return sizes


def _one_after_the_other(
    prefill: Sequence[P], decode: Sequence[D], tried: Callable[[P, D], tuple[Result, tuple[P, D]]], wanted: float
) -> tuple[Result, tuple[P, D]]:
    """Tune decode's setting under the first one of prefill, then prefill's under the best one of decode."""
    runs = [tried(prefill[0], d) for d in decode]
    _, (_, best) = _cheapest(runs, wanted)
    runs += [tried(p, best) for p in prefill[1:]]
    return _cheapest(runs, wanted)


def _cheapest(runs: Sequence[tuple[Result, S]], wanted: float) -> tuple[Result, S]:
    """The smallest bill among those that attain what is wanted; where none does, the best attainment."""
    good = [r for r in runs if r[0].attainment >= wanted]
    if good:
        return min(good, key=lambda r: r[0].replica_h)
    return max(runs, key=lambda r: r[0].attainment)


def key_figures(rows_by_scenario: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The last line of the report.

    `attainment_min`: over the workloads where the oracle attains 0.95. `attainment_min_startup`: where it does so
    although its replicas take their time to start. `over_oracle_max`: our bill over its, the worst workload.
    `saved_vs_*`: share of all replica-hours saved, over the workloads where the other policy attains what ours does
    (or 0.95); the worst single workload stands beside it.
    """
    ours = {name: rows["goodput"] for name, rows in rows_by_scenario.items()}

    def lowest(of: str) -> float | None:
        reached = [n for n, rows in rows_by_scenario.items() if rows[of]["attainment"] >= TARGET]
        return min((ours[n]["attainment"] for n in reached), default=None)

    figures: dict[str, Any] = {
        "attainment_min": lowest("oracle"),
        "attainment_min_startup": lowest("oracle, start-up"),
        "over_oracle_max": round(
            max(ours[n]["replica_h"] / rows["oracle"]["replica_h"] for n, rows in rows_by_scenario.items()), 3
        ),
        "reversals_per_h_max": max(row["reversals_per_h"] for row in ours.values()),
    }
    for other in ("queue length", "mean latency", "static"):
        key = f"saved_vs_{other.replace(' ', '_')}"
        equal = [
            n
            for n, rows in rows_by_scenario.items()
            if rows[other]["attainment"] >= min(TARGET, ours[n]["attainment"]) - 1e-4
        ]
        theirs = sum(rows_by_scenario[n][other]["replica_h"] for n in equal)
        mine = sum(ours[n]["replica_h"] for n in equal)
        figures[key] = round(1 - mine / theirs, 3) if theirs else None
        figures[f"{key}_worst"] = round(
            min((1 - ours[n]["replica_h"] / rows_by_scenario[n][other]["replica_h"] for n in equal), default=0.0), 3
        )
        figures[f"{key}_workloads"] = len(equal)
    return figures
