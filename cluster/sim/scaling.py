"""Replicas of a simulated fleet follow an autoscaling policy, as Serve and Ray's autoscaler would make them do.

A replica that is asked for starts after `startup_s`; one that is given up takes no new work and leaves when it holds
none. Both hold their accelerators meanwhile, and both are paid for. Nothing here chooses a target.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.autoscaling.messages import Decision, Observation, PoolLoad, Settings
from cluster.autoscaling.policy import decide, initial
from cluster.drain import Candidate, victims
from cluster.messages import Role, WorkerState
from cluster.sim.fleet import Fleet
from cluster.sim.kernel import Timer

Targets = Mapping[Role, int]
Policy = Callable[[Observation, float], Targets]


class GoodputDriver:
    """`decide` with its state and its decisions kept."""

    def __init__(self, settings: Settings) -> None:
        self.state = initial(settings)
        self.decisions: list[tuple[float, Decision]] = []

    def __call__(self, seen: Observation, now: float) -> Targets:
        self.state, decision = decide(self.state, seen, now)
        self.decisions.append((now, decision))
        return decision.targets


@dataclass(slots=True)
class ScalingLog:
    """What scaling did: (time, targets) at every change, and replica-seconds paid per pool."""

    changes: list[tuple[float, dict[Role, int]]] = field(default_factory=list)
    held_s: dict[Role, float] = field(default_factory=dict)
    peak: dict[Role, int] = field(default_factory=dict)
    peak_accelerators: int = 0

    @property
    def replica_s(self) -> float:
        return sum(self.held_s.values())

    def reversals(self, role: Role) -> int:
        """Changes of a pool against the direction of its change before."""
        sizes = [targets[role] for _, targets in self.changes]
        moves = [b > a for a, b in itertools.pairwise(sizes) if a != b]
        return sum(a != b for a, b in itertools.pairwise(moves))


class Scaler:
    """Asks `policy` every `interval_s` until `end_s` and makes the fleet follow.

    Args:
        startup_s: from a target to a replica that serves; by pool, or one for all.
    """

    def __init__(
        self, fleet: Fleet, policy: Policy, *, interval_s: float, startup_s: float | Mapping[Role, float], end_s: float
    ) -> None:
        self.fleet, self.policy = fleet, policy
        self.interval_s, self.end_s = interval_s, end_s
        self.startup_s = dict.fromkeys(fleet.specs, startup_s) if isinstance(startup_s, float | int) else startup_s
        self.log = ScalingLog(held_s=dict.fromkeys(fleet.specs, 0.0), peak=dict.fromkeys(fleet.specs, 0))
        self._starting: dict[Role, list[Timer]] = {role: [] for role in fleet.specs}
        self._targets: dict[Role, int] = {role: len(fleet.pool(role)) for role in fleet.specs}
        self._counted_s = fleet.kernel.now
        self.log.changes.append((fleet.kernel.now, dict(self._targets)))
        fleet.kernel.after(interval_s, self._tick)

    def observe(self) -> Observation:
        """What routers and workers would push at this moment."""
        fleet, now = self.fleet, self.fleet.kernel.now
        waits = [now - run.request.arrival_s for run in fleet.runs.values() if run.placement is None]
        return Observation(
            decode=self._load(Role.DECODE),
            prefill=self._load(Role.PREFILL) if Role.PREFILL in fleet.specs else None,
            requests=dict(fleet.counters.values),
            queue_depth=float(len(waits)),
            oldest_wait_s=max(waits, default=0.0),
        )

    def held(self, role: Role) -> int:
        """Replicas of a pool that hold accelerators."""
        return len(self.fleet.pool(role)) + len(self._starting[role])

    @property
    def counted_s(self) -> float:
        """Until when `log.held_s` is counted."""
        return self._counted_s

    def count_to(self, end_s: float) -> None:
        """Count on after the last tick, once the run is over: what is still served then holds its accelerators."""
        since_s = self._counted_s
        if end_s <= since_s:
            return
        for worker in (*self.fleet.workers.values(), *self.fleet.gone):
            left_s = end_s if worker.left_s is None else min(worker.left_s, end_s)
            self.log.held_s[worker.info.role] += max(0.0, left_s - max(worker.since_s, since_s))
        self._counted_s = end_s

    def _tick(self) -> None:
        now = self.fleet.kernel.now
        self._count(now)
        if now >= self.end_s - 1e-9:
            return
        targets = {role: int(n) for role, n in self.policy(self.observe(), now).items()}
        if targets != self._targets:
            self._targets = targets
            self.log.changes.append((now, dict(targets)))
        for role, target in targets.items():
            self._resize(role, target)
        for role in self.fleet.specs:
            self.log.peak[role] = max(self.log.peak[role], self.held(role))
        cost = sum(self.held(role) * spec.accelerators for role, spec in self.fleet.specs.items())
        self.log.peak_accelerators = max(self.log.peak_accelerators, cost)
        self.fleet.kernel.after(min(self.interval_s, self.end_s - now), self._tick)

    def _count(self, now: float) -> None:
        for role in self.fleet.specs:
            self.log.held_s[role] += self.held(role) * (now - self._counted_s)
        self._counted_s = now

    def _resize(self, role: Role, target: int) -> None:
        ready = [w for w in self.fleet.pool(role) if w.state is WorkerState.READY]
        starting = self._starting[role]
        for _ in range(target - len(ready) - len(starting)):
            timer = self.fleet.kernel.after(self.startup_s[role], self._started, role)
            starting.append(timer)
        surplus = len(ready) + len(starting) - target
        while surplus > 0 and starting:
            starting.pop().cancel()
            surplus -= 1
        for worker_id in victims([Candidate(w.snapshot()) for w in ready], surplus):
            self.fleet.drain(self.fleet.workers[worker_id])

    def _started(self, role: Role) -> None:
        self._count(self.fleet.kernel.now)
        self._starting[role].pop(0)
        self.fleet.add_worker(role)

    def _load(self, role: Role) -> PoolLoad:
        workers = self.fleet.pool(role)
        for worker in workers:
            worker.engine.sync()
        ready = [w for w in workers if w.state is WorkerState.READY]
        ever = [*workers, *(w for w in self.fleet.gone if w.info.role is role)]
        loads = [w.snapshot() for w in ready]
        blocks = sum(w.info.kv_total_blocks for w in ready)
        return PoolLoad(
            ready=len(ready),
            starting=len(self._starting[role]),
            draining=len(workers) - len(ready),
            target=self._targets[role],
            busy_s=sum(w.engine.busy_s for w in ever),
            steps=float(sum(w.engine.scheduler.counters.steps for w in ever)),
            sequence_steps=float(sum(w.engine.scheduler.counters.generated_tokens for w in ever)),
            prompt_tokens=float(sum(w.engine.scheduler.counters.computed_prompt_tokens for w in ever)),
            running=float(sum(load.running for load in loads)),
            waiting=float(sum(load.waiting for load in loads)),
            queued_prompt_tokens=float(sum(load.queued_prefill_tokens for load in loads)),
            kv_used_ratio=sum(load.kv_used_blocks for load in loads) / blocks if blocks else None,
        )
