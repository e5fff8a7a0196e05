"""One replica of a pool in virtual time: an engine, the leases it granted, and its network adapter."""

from __future__ import annotations

import random
from collections.abc import Callable

from cluster.engine.scheduler.step import Load, Output
from cluster.engine.simulation.settings import EngineSpec
from cluster.messages import WorkerInfo, WorkerSnapshot, WorkerState
from cluster.sim.engine import SimEngine
from cluster.sim.kernel import Kernel, Timer


class SimWorker:
    """
    Args:
        on_output: receives the worker and the outputs of an engine iteration that gave a first or last token.
        on_load: receives the worker and KV that it wants to pull.
    """

    def __init__(
        self,
        kernel: Kernel,
        spec: EngineSpec,
        info: WorkerInfo,
        rng: random.Random,
        on_output: Callable[[SimWorker, list[Output]], None],
        on_load: Callable[[SimWorker, Load], None],
        *,
        max_repeats: int,
        record_events: bool,
    ) -> None:
        self.spec, self.info, self._kernel = spec, info, kernel
        self.engine = SimEngine(
            kernel,
            spec.scheduler,
            spec.times,
            rng,
            lambda outputs: on_output(self, outputs),
            lambda load: on_load(self, load),
            max_repeats=max_repeats,
            record_events=record_events,
        )
        self.engine.slowdown = spec.settings.faults.slowdown
        self.state = WorkerState.READY
        self.since_s = kernel.now
        self.left_s: float | None = None
        # KV leaves and enters one transfer at a time.
        self.adapter_free_s = 0.0
        self._lease_timers: dict[str, Timer] = {}
        self.expired_leases = 0

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def idle(self) -> bool:
        scheduler = self.engine.scheduler
        return not (scheduler.running or scheduler.waiting_count or scheduler.leased)

    def lived_s(self, until_s: float) -> float:
        """How long it was there before `until_s`."""
        left_s = until_s if self.left_s is None else min(self.left_s, until_s)
        return max(0.0, left_s - self.since_s)

    def progressed(self) -> tuple[WorkerSnapshot, float] | None:
        """What a live engine has said meanwhile, in the middle of iterations that one event covers, and when."""
        progress = self.engine.progress()
        if progress is None:
            return None
        steps, at_s, blocks = progress
        return self.snapshot(steps, blocks), at_s

    def snapshot(self, more_steps: int = 0, more_blocks: int = 0) -> WorkerSnapshot:
        scheduler = self.engine.scheduler
        return WorkerSnapshot(
            self.info.worker_id,
            self.info.incarnation,
            self.state,
            scheduler.counters.steps + more_steps,
            len(scheduler.running),
            scheduler.waiting_count,
            scheduler.queued_prefill_tokens,
            scheduler.kv.used_blocks + more_blocks,
            len(scheduler.leased),
        )

    def grant(self, lease_id: str, lease_s: float, on_expired: Callable[[str], None]) -> None:
        """A prefill ended: its KV stays until it is pulled, given up, or `lease_s` has passed."""

        def expire() -> None:
            if self.release(lease_id):
                self.expired_leases += 1
                on_expired(lease_id)

        self._lease_timers[lease_id] = self._kernel.after(lease_s, expire)

    def release(self, lease_id: str) -> bool:
        """End a lease; False if it is not open."""
        timer = self._lease_timers.pop(lease_id, None)
        if timer is None:
            return False
        timer.cancel()
        return self.engine.release(lease_id)

    def holds(self, lease_id: str) -> bool:
        return not self.engine.stopped and lease_id in self._lease_timers

    def stop(self) -> None:
        """The process is gone, with everything it held."""
        self.engine.stop()
        self.state = WorkerState.DEAD
        self.left_s = self._kernel.now
        for timer in self._lease_timers.values():
            timer.cancel()
        self._lease_timers.clear()
