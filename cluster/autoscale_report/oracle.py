"""The bill of somebody who knows the future: the smallest split that keeps the SLO, per window, and for a whole run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from cluster.autoscale_report.evaluate import arrive
from cluster.autoscale_report.scenarios import Scenario
from cluster.goodput.accounting import is_good, is_missed
from cluster.messages import Role, WorkerState
from cluster.sim.fleet import Fleet, Options
from cluster.workload.arrival import Arrival

# Full-size operation before a window, so that caches are warm and no backlog is carried in.
LEAD_S = 60.0
# Load goes on for this long after a window while its last requests finish.
TAIL_S = 30.0
Size = tuple[int, int]


def attainment_in_window(scenario: Scenario, arrivals: list[Arrival], start_s: float, size: Size) -> float | None:
    """Attainment of the requests that arrive in a window, with `size` from its start on; None if none arrive."""
    end_s = min(start_s + scenario.window_s, scenario.duration_s)
    fleet = Fleet(scenario.config(*scenario.most), Options(keep_itl=False))
    lead_s = max(0.0, start_s - LEAD_S)
    first = bisect_left(arrivals, lead_s, key=lambda a: a.at_s)
    last = bisect_left(arrivals, end_s + TAIL_S, key=lambda a: a.at_s)
    for arrival in arrivals[first:last]:
        fleet.kernel.at(arrival.at_s - lead_s, arrive, fleet, arrival)
    fleet.kernel.run(start_s - lead_s)
    for role, keep in zip((Role.PREFILL, Role.DECODE), size, strict=True):
        workers = [w for w in fleet.pool(role) if w.state is WorkerState.READY]
        for worker in sorted(workers, key=lambda w: len(w.engine.scheduler.running))[: len(workers) - keep]:
            fleet.drain(worker)
    fleet.kernel.run()
    inside = [r for r in fleet.records if start_s <= r.arrival_s + lead_s < end_s]
    judged = [r for r in inside if is_good(r) or is_missed(r)]
    return sum(map(is_good, judged)) / len(judged) if judged else None


def cheapest(attainment: Callable[[Size], float | None], most: Size, target: float, guess: Size) -> Size:
    """A size that attains `target` and that neither pool can shrink from; nearly the best one where none attains it.

    Attainment is taken to grow with either pool. From the guess the search first grows until the target is attained
    (prefill, then decode, then both), and then shrinks one pool after the other.
    """
    known: dict[Size, float | None] = {}

    def attains(size: Size) -> bool:
        if size not in known:
            known[size] = attainment(size)
        value = known[size]
        return value is None or value >= goal

    goal = target
    prefill, decode = (min(max(n, 1), m) for n, m in zip(guess, most, strict=True))
    while not attains((prefill, decode)):
        more = (min(prefill + 1, most[0]), min(decode + 1, most[1]))
        if more == (prefill, decode):
            best = known[most]
            assert best is not None
            goal = best - 0.005
            continue
        if more[0] > prefill and attains((more[0], decode)):
            prefill = more[0]
        elif more[1] > decode and attains((prefill, more[1])):
            decode = more[1]
        else:
            prefill, decode = more
    while prefill > 1 and attains((prefill - 1, decode)):
        prefill -= 1
    while decode > 1 and attains((prefill, decode - 1)):
        decode -= 1
    return prefill, decode


def windows(scenario: Scenario) -> list[float]:
    return [i * scenario.window_s for i in range(int(-(-scenario.duration_s // scenario.window_s)))]
