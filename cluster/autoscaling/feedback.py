"""Feedback: misses and slack by stage correct what feed-forward sizing believes, slowly and within bounds.

Only misses that replicas can mend count: waiting in a pool's stages, and decode steps that are too slow because of
their batch. A miss of serving alone (prefill compute) is not charged to any pool; where such misses alone exceed
what the attainment allows, the SLO is unattainable: a warning, and no reason to run to the maximum. Neither count
limits that clients set for themselves below the cluster's: routers judge what they tell here by the wider of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cluster.autoscaling.messages import Observation, Settings
from cluster.autoscaling.state import PoolState, State
from cluster.goodput.accounting import GoodputCounters
from cluster.messages import Role, Stage

RAISE, LOWER = 1.1, 0.97
FACTOR_MIN, FACTOR_MAX = 0.9, 2.0
# Slack enough to lower the factor: the 95th percentile uses no more than this share of the limit.
SLACK = 0.25
TIGHT = 0.8


@dataclass(frozen=True, slots=True)
class Verdicts:
    warnings: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)


def judge(state: State, seen: Observation, now: float) -> tuple[State, Verdicts]:
    """Move each pool's factor by at most one step, and name what replicas cannot fix."""
    settings = state.settings
    _, thin = state.history.window(settings.look_back_s * 5)
    warnings = unattainable(settings, thin)
    warm_s = (state.settled_s or 0.0) + settings.look_back_s / 2
    last_s = warm_s if state.judged_s is None else state.judged_s
    window = state.history.since(max(warm_s, last_s))
    starting = any(load.starting for load in seen.pools.values())
    if window.good + window.missed < settings.min_samples or now - last_s < settings.look_back_s / 2 or starting:
        return state, Verdicts(warnings, _figures(state.history.window(settings.look_back_s)[1]))
    allowed = 1 - settings.attainment
    pools = dict(state.pools)
    for role, share in mendable(settings, window, seen).items():
        factor = pools[role].factor
        if share > allowed / 2:
            factor = min(FACTOR_MAX, factor * RAISE)
        elif share < allowed / 4 and factor > 1:
            factor = max(1.0, factor * LOWER)
        elif share < allowed / 8 and _is_tight(pools[role], seen.pools[role].ready) and _has_slack(role, window):
            factor = max(FACTOR_MIN, factor * LOWER)
        pools[role] = replace(pools[role], factor=factor)
    return replace(state, pools=pools, judged_s=now), Verdicts(warnings, _figures(window))


def mendable(settings: Settings, window: GoodputCounters, seen: Observation) -> dict[Role, float]:
    """Share of the judged requests that missed in a way that more replicas of this pool would mend."""
    judged = max(1, window.good + window.missed)
    by_stage = window.missed_by_stage()
    slow_steps = by_stage.get(Stage.DECODE_STEP, 0) if window.used_quantile("tpot", 0.97) == float("inf") else 0
    decode = by_stage.get(Stage.DECODE_QUEUE, 0) + by_stage.get(Stage.KV_TRANSFER, 0) + slow_steps
    # A prompt that a decode engine prefills waits in that engine.
    local = int(window.get("missed_local", Stage.PREFILL_QUEUE))
    decode += local
    prefill = by_stage.get(Stage.PREFILL_QUEUE, 0) - local
    # Requests wait in the router for whichever pool has no room.
    kv_full = (seen.decode.kv_used_ratio or 0.0) >= 0.9
    router = by_stage.get(Stage.ROUTER_QUEUE, 0)
    if settings.prefill is None or kv_full or decode > prefill:
        decode += router
    else:
        prefill += router
    if settings.prefill is None:
        return {Role.DECODE: (decode + prefill) / judged}
    return {Role.PREFILL: prefill / judged, Role.DECODE: decode / judged}


def unattainable(settings: Settings, window: GoodputCounters) -> tuple[str, ...]:
    """Warnings where serving alone, without any wait, breaks the limit of more requests than may miss."""
    judged = window.good + window.missed
    if judged < settings.min_samples:
        return ()
    by_serving = window.missed_by_stage().get(Stage.PREFILL_COMPUTE, 0)
    by_waiting = window.missed - by_serving
    # Under load batches make serving slower too; a limit is out of reach only where hardly anything waited.
    if by_serving / judged <= 1 - settings.attainment or by_waiting > by_serving / 4:
        return ()
    return (
        f"unattainable: {by_serving / judged:.0%} of requests miss the TTFT limit of "
        f"{settings.slo.ttft_s * 1e3:.0f} ms by prefill compute alone; replicas cannot fix that",
    )


def _is_tight(pool: PoolState, ready: int) -> bool:
    """Slack says something about the need only while the pool is hardly larger than the need: what a pool with
    replicas to spare has left over tells nothing about one replica fewer."""
    return bool(pool.needs) and pool.needs[-1][1] > TIGHT * ready


def _has_slack(role: Role, window: GoodputCounters) -> bool:
    of = (Stage.PREFILL_QUEUE,) if role is Role.PREFILL else (Stage.DECODE_QUEUE, Stage.KV_TRANSFER)
    used = [window.used_quantile(stage, 0.95) for stage in of]
    if role is Role.DECODE:
        tpot = window.used_quantile("tpot", 0.95)
        if tpot is None or tpot > 0.75:
            return False
    return all(u is not None and u <= SLACK for u in used)


def _figures(window: GoodputCounters) -> dict[str, float]:
    attainment = window.attainment
    return {} if attainment is None else {"attainment": attainment}
