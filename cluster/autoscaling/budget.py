"""Sharing one accelerator budget between the pools, deterministically."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cluster.autoscaling.messages import Observation, Settings
from cluster.messages import Role

# A new split must raise the worse-served pool's share of its need by this factor to be worth a move.
WORTH = 1.15


def split(
    settings: Settings, wanted: Mapping[Role, int], needs: Mapping[Role, float], current: Mapping[Role, int]
) -> dict[Role, int]:
    """Targets that fit the budget.

    Where not everything wanted fits, replicas are given one by one to the pool that has the smallest share of its
    need (ties: prefill first), after every pool has its minimum. A current split that serves the worse-off pool
    nearly as well is kept, so that noise does not move accelerators back and forth.
    """
    budget, pools = settings.accelerators_max, settings.pools
    if budget is None or _cost(settings, wanted) <= budget:
        return dict(wanted)
    need = {role: max(needs[role], 1e-9) for role in pools}
    share = {role: pool.min for role, pool in pools.items()}
    while True:
        free = budget - _cost(settings, share)
        open_ = [r for r in pools if share[r] < wanted[r] and pools[r].accelerators <= free]
        if not open_:
            break
        poorest = min(open_, key=lambda r: share[r] / need[r])
        share[poorest] += 1
    keep = {role: min(max(current.get(role, 0), pools[role].min), wanted[role]) for role in pools}
    if _cost(settings, keep) <= budget:
        would, is_now = _worst(share, need), _worst(keep, need)
        full = all(keep[r] >= wanted[r] or pools[r].accelerators > budget - _cost(settings, keep) for r in pools)
        if full and would < is_now * WORTH:
            return keep
    return share


def hold_back(settings: Settings, targets: Mapping[Role, int], seen: Observation) -> dict[Role, int]:
    """Targets that keep even the accelerators in use within the budget while the other pool still lets go of its own.

    A pool that shrinks holds its accelerators until its replicas have drained; the pool that grows has to wait.
    """
    budget, pools = settings.accelerators_max, settings.pools
    if budget is None:
        return dict(targets)
    out = dict(targets)
    for role, pool in pools.items():
        others = sum(
            max(out[other], seen.pools[other].held) * pools[other].accelerators for other in pools if other is not role
        )
        fits = max(0, budget - others) // pool.accelerators
        # Its own draining replicas hold accelerators beside the ones asked for.
        serving = seen.pools[role].ready + seen.pools[role].starting
        room = max(serving, fits - seen.pools[role].draining)
        out[role] = min(out[role], max(room, pool.min))
    return out


def _cost(settings: Settings, replicas: Mapping[Role, int]) -> int:
    return sum(replicas[role] * pool.accelerators for role, pool in settings.pools.items())


def _worst(replicas: Mapping[Role, int], need: Mapping[Role, float]) -> float:
    return min((replicas[role] / need[role] for role in need), default=math.inf)
