"""All policies on one workload: ours once, every other one tuned for that workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cluster.autoscale_report import baselines, oracle
from cluster.autoscale_report.evaluate import INTERVAL_S, Result, run
from cluster.autoscale_report.scenarios import Scenario
from cluster.autoscaling.messages import Settings
from cluster.messages import Role
from cluster.sim.fleet import Fleet
from cluster.sim.scaling import GoodputDriver, Policy
from cluster.workload.arrival import Arrival

TARGET = 0.95
PREFILL_TARGETS = (1, 2, 4)
DECODE_TARGETS = (16, 32, 64, 96)
# (up, down) as shares of the limit. An idle decode step takes 0.4 of the TPOT limit here, so its band lies above that.
TTFT_BANDS = ((0.3, 0.15), (0.5, 0.25))
TPOT_BANDS = ((0.7, 0.5), (0.85, 0.6))
Tell = Callable[[str], None]


def compare(scenario: Scenario, seed: int, tell: Tell, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rows by policy, ready for JSON.

    Args:
        known: rows of an earlier run that are taken as they are.
    """
    arrivals = scenario.arrivals(seed)
    rows: dict[str, Any] = dict(known or {}) | {"requests": len(arrivals)}

    def one(name: str, make: Callable[[Fleet], Policy], **more: Any) -> Result:
        tell(f"{scenario.name}: {name}")
        result, _ = run(scenario, arrivals, make, **more)
        return result

    if "goodput" not in rows:
        rows["goodput"] = one("goodput", goodput).row()
    wanted = min(TARGET, rows["goodput"]["attainment"])
    if "queue length" not in rows:
        queue, how = _queue_length(wanted, one)
        rows["queue length"] = queue.row() | {"tuned": how}
    if "mean latency" not in rows:
        latency, how = _mean_latency(wanted, one)
        rows["mean latency"] = latency.row() | {"tuned": how}
    largest = scenario.first
    if "oracle" not in rows:
        result, largest = _oracle(scenario, arrivals, one, tell)
        rows["oracle"] = result.row()
    if "static" not in rows:
        size, fixed = _static(scenario, largest, one)
        rows["static"] = fixed.row() | {"tuned": f"P{size[0]} D{size[1]}"}
    return rows


def goodput(fleet: Fleet) -> Policy:
    return GoodputDriver(Settings.from_config(fleet.config))


def _queue_length(wanted: float, one: Callable[..., Result]) -> tuple[Result, str]:
    """Targets tuned one pool after the other: the cheapest that attains what is wanted, or the best attainment."""

    def tried(prefill: float, decode: float) -> tuple[Result, tuple[float, float]]:
        def make(fleet: Fleet) -> Policy:
            return baselines.QueueLength(baselines.bounds(fleet), {Role.PREFILL: prefill, Role.DECODE: decode})

        return one(f"queue length {prefill}/{decode}", make), (prefill, decode)

    runs = [tried(PREFILL_TARGETS[0], d) for d in DECODE_TARGETS]
    _, (_, best_decode) = _cheapest(runs, wanted)
    runs += [tried(p, best_decode) for p in PREFILL_TARGETS[1:]]
    result, (prefill, decode) = _cheapest(runs, wanted)
    return result, f"target_ongoing {prefill}/{decode}"


def _mean_latency(wanted: float, one: Callable[..., Result]) -> tuple[Result, str]:
    Band = tuple[float, float]

    def tried(ttft: Band, tpot: Band) -> tuple[Result, tuple[Band, Band]]:
        def make(fleet: Fleet) -> Policy:
            high = {Role.PREFILL: ttft[0], Role.DECODE: tpot[0]}
            low = {Role.PREFILL: ttft[1], Role.DECODE: tpot[1]}
            return baselines.MeanLatency(fleet, baselines.bounds(fleet), high, low)

        return one(f"mean latency {ttft} {tpot}", make), (ttft, tpot)

    runs = [tried(TTFT_BANDS[0], band) for band in TPOT_BANDS]
    _, (_, best) = _cheapest(runs, wanted)
    runs += [tried(band, best) for band in TTFT_BANDS[1:]]
    result, (ttft, tpot) = _cheapest(runs, wanted)
    return result, f"up/down at {ttft[0]:g}/{ttft[1]:g} TTFT, {tpot[0]:g}/{tpot[1]:g} TPOT"


def _static(scenario: Scenario, guess: oracle.Size, one: Callable[..., Result]) -> tuple[tuple[int, int], Result]:
    known: dict[tuple[int, int], Result] = {}

    def attainment(size: tuple[int, int]) -> float:
        known[size] = one(f"static P{size[0]} D{size[1]}", baselines.static, first=size)
        return known[size].attainment

    size = oracle.cheapest(attainment, scenario.most, TARGET, guess)
    return size, known[size] if size in known else one("static", baselines.static, first=size)


def _oracle(
    scenario: Scenario, arrivals: list[Arrival], one: Callable[..., Result], tell: Tell
) -> tuple[Result, oracle.Size]:
    """The oracle's run, and the largest size it had in each pool."""
    sizes, guess = [], scenario.first
    for start_s in oracle.windows(scenario):
        tell(f"{scenario.name}: oracle at {start_s:.0f} s")
        guess = oracle.window_size(scenario, arrivals, start_s, guess)
        sizes.append((start_s, {Role.PREFILL: guess[0], Role.DECODE: guess[1]}))
    first = (sizes[0][1][Role.PREFILL], sizes[0][1][Role.DECODE])
    largest = (max(s[Role.PREFILL] for _, s in sizes), max(s[Role.DECODE] for _, s in sizes))
    result = one("oracle", lambda _: baselines.scheduled(sizes), first=first, startup_s=0.0, interval_s=INTERVAL_S)
    return result, largest


def _cheapest(runs: Iterable[tuple[Result, Any]], wanted: float) -> tuple[Result, Any]:
    """The smallest bill among those that attain what is wanted; where none does, the best attainment."""
    runs = list(runs)
    good = [r for r in runs if r[0].attainment >= wanted]
    if good:
        return min(good, key=lambda r: r[0].replica_h)
    return max(runs, key=lambda r: r[0].attainment)


def key_figures(rows_by_scenario: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The last line of the report.

    `attainment_min`: over the workloads where the oracle attains 0.95. `over_oracle_max`: our bill over the oracle's,
    the worst workload. `saved_vs_*`: share of all replica-hours saved, over the workloads where the other policy
    attains what ours does (or 0.95); the worst single workload stands beside it.
    """
    ours = {name: rows["goodput"] for name, rows in rows_by_scenario.items()}
    reachable = [n for n, rows in rows_by_scenario.items() if rows["oracle"]["attainment"] >= TARGET]
    figures: dict[str, Any] = {
        "attainment_min": min((ours[n]["attainment"] for n in reachable), default=None),
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
