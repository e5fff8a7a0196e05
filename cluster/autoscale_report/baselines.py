"""What others do: Ray Serve's default policy by queue length, thresholds on mean latency, a fixed split, a schedule.

Each is made for one fleet and has the signature of a simulated policy: `(observation, now) -> targets`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.autoscaling.messages import Observation
from cluster.messages import Outcome, Role
from cluster.sim.fleet import Fleet
from cluster.sim.scaling import Policy, Targets

Bounds = Mapping[Role, tuple[int, int]]


def bounds(fleet: Fleet) -> dict[Role, tuple[int, int]]:
    return {role: (fleet.config.pool(role).replicas.min, fleet.config.pool(role).replicas.max) for role in fleet.specs}


def static(fleet: Fleet) -> Policy:
    """The size at the start, for ever."""
    sizes = {role: fleet.config.pool(role).replicas.start for role in fleet.specs}
    return lambda _seen, _now: sizes


def scheduled(schedule: Sequence[tuple[float, Mapping[Role, int]]]) -> Policy:
    """Targets by the clock: (from when, sizes), in order."""

    def policy(_seen: Observation, now: float) -> Targets:
        return next(sizes for from_s, sizes in reversed(schedule) if from_s <= now + 1e-6 or from_s == schedule[0][0])

    return policy


@dataclass(slots=True)
class QueueLength:
    """Ray Serve's default: replicas = mean ongoing requests / target_ongoing_requests, per pool.

    The figures are Serve's defaults: ongoing requests averaged over `look_back_s`, up after `upscale_delay_s`, down
    after `downscale_delay_s`, factors 1. `target` is what an operator tunes.
    """

    limits: Bounds
    target: Mapping[Role, float]
    look_back_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    _seen: dict[Role, list[tuple[float, float]]] = field(default_factory=dict)
    _wants: dict[Role, tuple[int, float]] = field(default_factory=dict)
    _sizes: dict[Role, int] = field(default_factory=dict)

    def __call__(self, seen: Observation, now: float) -> Targets:
        for role, load in seen.pools.items():
            size = self._sizes.setdefault(role, load.ready + load.starting)
            recent = [s for s in self._seen.get(role, []) if s[0] > now - self.look_back_s]
            recent.append((now, (load.running or 0) + (load.waiting or 0)))
            self._seen[role] = recent
            ongoing = sum(n for _, n in recent) / len(recent)
            wanted = _within(self.limits[role], math.ceil(ongoing / self.target[role]))
            direction = (wanted > size) - (wanted < size)
            was, since_s = self._wants.get(role, (0, now))
            if direction != was:
                since_s = now
            self._wants[role] = (direction, since_s)
            delay_s = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
            if direction and now - since_s >= delay_s:
                self._sizes[role] = wanted
                self._wants[role] = (0, now)
        return dict(self._sizes)


@dataclass(slots=True)
class MeanLatency:
    """One replica more or less when the mean TTFT (prefill) or TPOT (decode) crosses a share of its limit.

    Means are over the requests that ended within `window_s`; a pool rests for `cooldown_s` after a change.
    """

    fleet: Fleet
    limits: Bounds
    high: Mapping[Role, float]
    low: Mapping[Role, float]
    window_s: float = 60.0
    up_cooldown_s: float = 30.0
    down_cooldown_s: float = 120.0
    _changed_s: dict[Role, float] = field(default_factory=dict)
    _sizes: dict[Role, int] = field(default_factory=dict)

    def __call__(self, seen: Observation, now: float) -> Targets:
        used = self._used(now)
        for role, load in seen.pools.items():
            size = self._sizes.setdefault(role, load.ready + load.starting)
            share = used[role]
            since_s = now - self._changed_s.get(role, -math.inf)
            idle = (load.running or 0) + (load.waiting or 0) == 0
            step = 0
            if share is not None and share > self.high[role] and since_s >= self.up_cooldown_s:
                step = 1
            elif ((share is not None and share < self.low[role]) or (share is None and idle)) and (
                since_s >= self.down_cooldown_s
            ):
                step = -1
            changed = _within(self.limits[role], size + step)
            if changed != size:
                self._sizes[role], self._changed_s[role] = changed, now
        return dict(self._sizes)

    def _used(self, now: float) -> dict[Role, float | None]:
        slo = self.fleet.config.slo.to_slo()
        ttft, tpot = [], []
        for record in reversed(self.fleet.records):
            if record.end_s < now - self.window_s:
                break
            if record.outcome is Outcome.DONE and record.ttft_s is not None:
                ttft.append(record.ttft_s / slo.ttft_s)
                tpot.append((record.tpot_s or 0.0) / slo.tpot_s)
        return {
            Role.PREFILL: sum(ttft) / len(ttft) if ttft else None,
            Role.DECODE: sum(tpot) / len(tpot) if tpot else None,
        }


def _within(limits: tuple[int, int], size: int) -> int:
    return min(max(size, limits[0]), limits[1])
