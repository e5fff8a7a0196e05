"""The autoscaling policy: `decide(state, observation, now) -> (state, decision)`, pure.

Targets are absolute. Each pool's need is feed-forward, from demand at the entrance against the capacity of one
replica within the SLO (sizing.py), multiplied by a feedback factor from misses and slack of that pool's stages
(feedback.py). Then, in this order:

    hysteresis   up when every need of the last `upscale_delay_s` exceeds the target (at once where waiting costs
                 requests); down to the largest need, plus a margin, of the last `downscale_delay_s`
    budget       both pools together, deterministic; a pool grows only into accelerators that nobody still holds
    min, max     always last, also when there is no data

Replicas that are starting count as capacity under way. A missing or impossible number holds the last targets.
The same function runs in Ray Serve's controller and in the simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from cluster.autoscaling import feedback
from cluster.autoscaling.budget import hold_back, split
from cluster.autoscaling.demand import REACH, Demand, measure
from cluster.autoscaling.messages import Decision, Observation, PoolDecision, PoolLoad, Settings
from cluster.autoscaling.sizing import UP_MARGIN, Need, Queue, decode_need, prefill_need
from cluster.autoscaling.state import PoolState, State, initial
from cluster.messages import Role

__all__ = ["State", "decide", "initial"]

# A pool shrinks only to what would still be enough if the need were this much larger.
DOWN_MARGIN = 1.1
# Decisions until a replica that has just come or left shows in the routers' queue.
SETTLE_INTERVALS = 2
# Growth of the running sequences that is projected over a replica's start-up is at most this.
GROWTH_MAX = 2.5


@dataclass(frozen=True, slots=True)
class _Wish:
    """One pool's target after hysteresis."""

    target: int
    need: Need


def decide(state: State, observation: Observation, now: float) -> tuple[State, Decision]:
    """Absolute targets for both pools.

    Args:
        state: the last decision's state, or `initial(settings)`.
        observation: the cluster now. Numbers that are None, not finite, negative or no numbers are missing.
        now: seconds; may be any monotone clock, the same at every call.
    """
    problem = _unusable(state, observation, now)
    if problem is not None:
        return _hold(state, observation, problem)
    observation = _clean(observation)
    state = _learn(state, observation, now)
    demand = measure(state.history, state.settings)
    state, verdicts = feedback.judge(state, observation, now)
    needs = _needs(state, observation, demand)
    state, wishes = _hysteresis(state, observation, needs, demand, now)
    return _settle(state, observation, wishes, verdicts, demand)


def _unusable(state: State, seen: Observation, now: float) -> str | None:
    if set(seen.pools) != set(state.settings.pools):
        return "pools differ from the settings"
    if seen.requests is None:
        return "request counters are missing"
    for key, value in seen.requests.items():
        if not _is_amount(value):
            return f"{key} is {value!r}"
    if state.seen is not None and now <= state.seen_at_s:
        return "the clock did not advance"
    waits: tuple[tuple[str, Any], ...] = (("queue_depth", seen.queue_depth), ("oldest_wait_s", seen.oldest_wait_s))
    for name, value in waits:
        if value is None or not _is_amount(value):
            return f"{name} is {value!r}"
    if any(not _is_amount(n) for load in seen.pools.values() for n in (load.ready, load.starting, load.draining)):
        return "a number of replicas is impossible"
    return None


def _is_amount(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def _clean(seen: Observation) -> Observation:
    """Impossible optional numbers become missing ones."""
    prefill = None if seen.prefill is None else _clean_load(seen.prefill)
    return replace(seen, prefill=prefill, decode=_clean_load(seen.decode))


def _clean_load(load: PoolLoad) -> PoolLoad:
    optional = ("busy_s", "steps", "sequence_steps", "prompt_tokens", "running", "waiting", "queued_prompt_tokens")
    bad: dict[str, Any] = {name: None for name in (*optional, "kv_used_ratio") if not _is_amount(getattr(load, name))}
    return replace(load, **bad) if bad else load


def _hold(state: State, seen: Observation, problem: str) -> tuple[State, Decision]:
    """Keep the targets; the clamps still apply, and a gap in the data restarts every delay."""
    settings, decided, pools, were = state.settings, {}, dict(state.pools), {}
    for role, bounds in settings.pools.items():
        kept, load = state.pools[role].target, seen.pools.get(role)
        were[role] = kept if kept is not None else _present(load) if load is not None else bounds.min
    bounded = {role: min(max(were[role], b.min), b.max) for role, b in settings.pools.items()}
    shared = split(settings, bounded, bounded, bounded)
    for role, target in shared.items():
        clamped = "maximum" if target < were[role] else "minimum"
        reason = "no data" if target == were[role] else clamped if target == bounded[role] else "budget"
        decided[role] = PoolDecision(target, reason, f"hold: {problem}")
        pools[role] = replace(state.pools[role], target=target, needs=(), running=())
    state = replace(state, pools=pools, since_s=None, seen=None, queue=())
    return state, Decision(decided, warnings=(f"no usable data: {problem}",))


def _present(load: PoolLoad) -> int:
    if load.target is not None:
        return load.target
    return (load.ready if _is_amount(load.ready) else 0) + (load.starting if _is_amount(load.starting) else 0)


def _learn(state: State, seen: Observation, now: float) -> State:
    """Take in counters, step costs and start-up times."""
    settings, before = state.settings, state.seen
    pools, settled_s = {}, state.settled_s
    for role, load in seen.pools.items():
        pool = state.pools[role]
        if before is not None:
            was = before.pools[role]
            pool = replace(pool, costs=pool.costs.learn(was, load, now - state.seen_at_s))
            if load.ready != was.ready:
                settled_s = now
            if load.ready > was.ready and pool.waiting_since_s is not None:
                took_s = now - pool.waiting_since_s
                pool = replace(pool, startup_s=took_s if pool.startup_s is None else (pool.startup_s + took_s) / 2)
            if load.starting == 0:
                pool = replace(pool, waiting_since_s=None)
        if load.starting and pool.waiting_since_s is None:
            pool = replace(pool, waiting_since_s=now)
        if load.running is not None:
            recent = [p for p in pool.running if p[0] >= now - settings.look_back_s / 2]
            pool = replace(pool, running=(*recent, (now, load.running)))
        pools[role] = pool
    queue = (*(q for q in state.queue if q[0] >= now - settings.look_back_s / 2), (now, seen.queue_depth or 0.0))
    state = replace(state, queue=queue)
    if settings.late_last and state.queue_shrinks and (seen.oldest_wait_s or 0.0) > settings.slo.ttft_s:
        # Misses that end now were made by a shortage that is over: they say nothing about the size of today.
        settled_s = now
    return replace(
        state,
        pools=pools,
        history=state.history.add(now, seen.requests or {}, settings.look_back_s * REACH),
        seen=seen,
        seen_at_s=now,
        since_s=now if state.since_s is None else state.since_s,
        settled_s=now if settled_s is None else settled_s,
    )


def _needs(state: State, seen: Observation, demand: Demand) -> dict[Role, Need]:
    settings = state.settings
    startup_s = {role: _startup_s(settings, pool) for role, pool in state.pools.items()}
    settled = state.seen_at_s - (state.settled_s or 0.0) >= SETTLE_INTERVALS * settings.interval_s
    queue = Queue(seen.queue_depth or 0.0, seen.oldest_wait_s or 0.0, state.queue_shrinks, settled)

    def sized(role: Role, share: Queue) -> Need:
        pool, load = state.pools[role], seen.pools[role]
        cost = pool.costs.cost()
        if role is Role.PREFILL:
            need = prefill_need(settings, demand, load, cost, share, startup_s[role])
        else:
            need = decode_need(settings, demand, load, cost, share, _growth(pool, startup_s[role]))
        corrected = need.replicas * pool.factor
        if pool.factor > 1.0 and math.ceil(corrected - 1e-9) > math.ceil(need.replicas - 1e-9):
            return Need(corrected, "misses", f"{need.why}, corrected by {pool.factor:.2f} for misses", need.urgent)
        return replace(need, replicas=corrected)

    needs = {role: sized(role, Queue()) for role in settings.pools}
    if queue.depth > 0:
        # The routers' queue stands in front of both pools; it is charged to the one that is short.
        short = max(needs, key=lambda role: _shortage(needs[role], seen.pools[role]))
        needs[short] = sized(short, queue)
    active = queue.depth > 0 or demand.arrivals_per_s > 0 or any((p.running or 0) > 0 for p in seen.pools.values())
    for role, load in seen.pools.items():
        if active and needs[role].replicas < 1:
            # Any traffic at all keeps one replica of every pool; from zero they wake together.
            asleep = load.ready + load.starting == 0
            floor = Need(min(1.0, max(needs[role].replicas, 0.01)), "wake" if asleep else "demand", needs[role].why)
            needs[role] = replace(floor, urgent=asleep)
    return needs


def _shortage(need: Need, load: PoolLoad) -> tuple[float, float]:
    full = 1.0 if (load.kv_used_ratio or 0.0) >= 0.9 else 0.0
    return full, need.replicas / max(0.5, load.ready)


def _startup_s(settings: Settings, pool: PoolState) -> float:
    return settings.startup_s if pool.startup_s is None else pool.startup_s


def _growth(pool: PoolState, startup_s: float) -> float:
    """Factor by which the running sequences grow over a start-up if they go on as in the last half look-back."""
    if len(pool.running) < 4:
        return 1.0
    (t0, _), (t1, latest) = pool.running[0], pool.running[-1]
    half = len(pool.running) // 2
    early = sum(n for _, n in pool.running[:half]) / half
    late = sum(n for _, n in pool.running[half:]) / (len(pool.running) - half)
    if t1 <= t0 or late <= early + 3 * math.sqrt(max(1.0, early)):
        return 1.0
    slope = (late - early) / ((t1 - t0) / 2)
    return min(GROWTH_MAX, 1 + slope * startup_s / max(1.0, latest))


def _hysteresis(
    state: State, seen: Observation, needs: dict[Role, Need], demand: Demand, now: float
) -> tuple[State, dict[Role, _Wish]]:
    settings = state.settings
    up_margin = max(UP_MARGIN, 1 + demand.uncertainty)
    longest_s = max(settings.upscale_delay_s, settings.downscale_delay_s)
    pools, wishes = dict(state.pools), {}
    for role, need in needs.items():
        pool = state.pools[role]
        target = _present(seen.pools[role]) if pool.target is None else pool.target
        history = (*(n for n in pool.needs if n[0] >= now - longest_s - settings.interval_s), (now, need.replicas))
        pools[role] = replace(pool, needs=history)
        wishes[role] = _wish(settings, target, need, history, up_margin, now)
    return replace(state, pools=pools), wishes


def _wish(
    settings: Settings, target: int, need: Need, needs: tuple[tuple[float, float], ...], up_margin: float, now: float
) -> _Wish:
    wanted = _whole(need.replicas / (UP_MARGIN if need.urgent else up_margin))
    if wanted > target:
        lasting = [n for at_s, n in needs if at_s > now - settings.upscale_delay_s - 1e-6]
        covered = needs[0][0] <= now - settings.upscale_delay_s + 1e-6
        if need.urgent or (covered and _whole(min(lasting) / up_margin) > target):
            return _Wish(wanted if need.urgent else _whole(min(lasting) / up_margin), need)
        return _Wish(target, replace(need, reason="delay", why=f"{need.why}; waits for upscale_delay_s"))
    lasting = [n for at_s, n in needs if at_s > now - settings.downscale_delay_s - 1e-6]
    covered = needs[0][0] <= now - settings.downscale_delay_s + 1e-6
    enough = _whole(max(lasting) * DOWN_MARGIN)
    if enough < target:
        if covered:
            reason = "idle" if enough == 0 else "demand"
            return _Wish(enough, replace(need, reason=reason))
        return _Wish(target, replace(need, reason="delay", why=f"{need.why}; waits for downscale_delay_s"))
    return _Wish(target, replace(need, reason="steady"))


def _whole(replicas: float) -> int:
    return math.ceil(min(replicas, 1e6) - 1e-9)


def _settle(
    state: State, seen: Observation, wishes: dict[Role, _Wish], verdicts: feedback.Verdicts, demand: Demand
) -> tuple[State, Decision]:
    """Budget, then the clamps, then the words."""
    settings = state.settings
    bounded = {role: min(max(wishes[role].target, b.min), b.max) for role, b in settings.pools.items()}
    current = {role: _present(load) for role, load in seen.pools.items()}
    shared = split(settings, bounded, {role: wish.need.replicas for role, wish in wishes.items()}, current)
    shared = hold_back(settings, shared, seen)
    decided, pools, warnings = {}, dict(state.pools), list(verdicts.warnings)
    for role, bounds in settings.pools.items():
        wish, target = wishes[role], min(max(shared[role], bounds.min), bounds.max)
        reason, why = wish.need.reason, wish.need.why
        if target != bounded[role]:
            reason, why = "budget", f"{why}; wants {bounded[role]}, {settings.accelerators_max} accelerators in all"
        elif bounded[role] != wish.target:
            reason = "maximum" if wish.target > bounds.max else "minimum"
            why = f"{why}; wants {wish.target}, bounds {bounds.min} to {bounds.max}"
        asked, was = seen.pools[role].target, state.pools[role].target
        if asked is not None and was is not None and asked != was:
            warnings.append(f"{role.value} pool was set to {asked} by somebody else, not {was}")
        decided[role] = PoolDecision(target, reason, why, wish.need.replicas)
        pools[role] = replace(state.pools[role], target=target)
    figures = {"arrivals_per_s": demand.arrivals_per_s, "dispersion": demand.dispersion} | verdicts.figures
    return replace(state, pools=pools), Decision(decided, tuple(warnings), figures)
