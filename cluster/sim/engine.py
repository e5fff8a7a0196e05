"""One engine in virtual time: the scheduler of the real-time engine, driven by the kernel.

An event covers all iterations in which nothing changes. Whatever arrives in between cuts the step at the end of the
iteration that is running, so the result is that of one event an iteration (tests/unit/test_sim_engine.py).
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate

from cluster.engine.scheduler.config import SchedulerConfig
from cluster.engine.scheduler.scheduler import Scheduler
from cluster.engine.scheduler.sequence import Sequence
from cluster.engine.scheduler.step import Load, Output, Step
from cluster.perf.profile import HostSlowdown
from cluster.perf.times import StepTimes
from cluster.sim.host import Host
from cluster.sim.kernel import Kernel, Timer
from cluster.sim.variation import StepVariation

# Longer runs gain little, and a cut one throws its tail away.
MAX_REPEATS = 128


class SimEngine:
    """
    Args:
        on_output: called at the end of an iteration that gave a first or a last token, with all its outputs.
        on_load: called with KV to pull; the callee answers later with `loaded` or `load_failed`.
        max_repeats: 1 gives one event an iteration.

    Attributes:
        slowdown: multiplies every step's time (a slow node); takes effect with the next step.
        host: where other engines that compute slow this one, by `host_slowdown`; None: they do not.
        variation: of its decode steps from second to second; None: they take what the cost model says.
        stalled: no step is begun any more; requests are accepted and wait.
        watch: called with (start, end, iterations, step) of every event.
    """

    def __init__(
        self,
        kernel: Kernel,
        config: SchedulerConfig,
        times: StepTimes,
        rng: random.Random,
        on_output: Callable[[list[Output]], None],
        on_load: Callable[[Load], None] | None = None,
        *,
        max_repeats: int = MAX_REPEATS,
        record_events: bool = True,
    ) -> None:
        self.scheduler = Scheduler(config, times, rng, record_events=record_events)
        self.slowdown = 1.0
        self.host: Host | None = None
        self.host_slowdown = HostSlowdown()
        self.variation: StepVariation | None = None
        self.stalled = self.stopped = False
        self.watch: Callable[[float, float, int, Step], None] | None = None
        # End of every iteration, by its number.
        self.step_ends_s = array("d")
        self.busy_s = 0.0
        self._kernel, self._on_output, self._on_load = kernel, on_output, on_load
        self._max_repeats = max_repeats
        self._step: Step | None = None
        self._started_s = 0.0
        self._ends: list[float] = []
        self._timer: Timer | None = None
        self._completing = False
        self._told = 0

    def submit(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence, self._kernel.now)
        self._changed()

    def abort(self, seq_id: str) -> None:
        self.sync()
        self.scheduler.abort(seq_id)
        self._changed()

    def release(self, seq_id: str) -> bool:
        """Free a lease's KV; False if it is gone already."""
        known = self.scheduler.release(seq_id)
        if known:
            self._changed()
        return known

    def loaded(self, seq_id: str) -> bool:
        alive = self.scheduler.loaded(seq_id)
        self._changed()
        return alive

    def load_failed(self, seq_id: str, *, recompute: bool) -> bool:
        going_on = self.scheduler.load_failed(seq_id, recompute=recompute)
        self._changed()
        return going_on

    def stop(self) -> None:
        """The engine is gone: nothing happens here any more."""
        self.sync()
        self.stopped = True
        if self._timer:
            self._timer.cancel()
        if self.host is not None:
            self.host.end(self)

    def stall(self) -> None:
        """No step is begun any more; the iteration that runs is the last."""
        self.stalled = True
        self._changed()

    def sync(self) -> None:
        """Complete the iterations of a long step that are over, so that what is seen is of this moment."""
        if self._step is None or self.stopped:
            return
        # One that ends just now has its event yet to come, as each has where an event covers one iteration.
        passed = bisect_left(self._ends, self._kernel.now)
        if passed:
            # What runs goes on as it is: who has come since its iteration began is not in it.
            self._note(passed, self._step)
            self.scheduler.advance(self._step, passed)
            self._started_s, self._told = self._ends[passed - 1], 0
            del self._ends[:passed]

    def progress(self) -> tuple[int, float, int] | None:
        """Iterations of a long step that are over, the last one's end, and the KV blocks they have taken.

        None where there is nothing new to tell since the last call, or since the step began.
        """
        ends, now = self._ends, self._kernel.now
        if len(ends) < 2 or ends[0] > now or self._step is None:
            return None
        passed = bisect_right(ends, now)
        if passed in (self._told, len(ends)):
            return None
        self._told = passed
        size, grown = self.scheduler.config.block_size_tokens, 0
        for sequence in self._step.decodes:
            missing = -(-(sequence.computed + passed) // size) - len(sequence.table)
            if missing > 0:
                grown += missing
        return passed, ends[passed - 1], grown

    def token_times(self, sequence: Sequence) -> Iterator[tuple[float, int]]:
        """(time, tokens) of every iteration that gave tokens."""
        ends = self.step_ends_s
        for first, steps, tokens in sequence.runs:
            for at_s in ends[first : first + steps]:
                yield at_s, tokens

    def _changed(self) -> None:
        """Start an iteration, or let the running one be the last of its step."""
        if self.stopped or self._completing:
            return
        if self._step is None:
            self._begin(self._kernel.now)
        elif len(self._ends) > 1:
            running = bisect_left(self._ends, self._kernel.now)
            if running + 1 < len(self._ends):
                del self._ends[running + 1 :]
                assert self._timer is not None
                self._timer.cancel()
                self._timer = self._kernel.at(self._ends[running], self._step_over)

    def _begin(self, started_s: float) -> None:
        if self.stalled:
            return
        # An event of many iterations would keep one factor beyond its period.
        step = self.scheduler.schedule(started_s, self._max_repeats if self.variation is None else 1)
        if step is not None:
            durations, slowdown = step.durations_s, self.slowdown
            if self.variation is not None and not step.chunks:
                slowdown *= self.variation.factor(started_s)
            if self.host is not None:
                own = self.host_slowdown.prefill if step.chunks else self.host_slowdown.decode
                slowdown *= self.host.begin(self, own, self._stretch)
            if slowdown != 1.0:
                durations = [d * slowdown for d in durations]
            self._step, self._started_s, self._told = step, started_s, 0
            self._ends = list(accumulate(durations, initial=started_s))[1:]
            self._timer = self._kernel.at(self._ends[-1], self._step_over)
        for load in self.scheduler.take_loads():
            assert self._on_load is not None, "a ticket needs somebody to pull its KV"
            self._on_load(load)

    def _stretch(self, factor: float) -> None:
        """What is left of the running step takes `factor` times as long."""
        assert self._timer is not None
        now = self._kernel.now
        self._ends = [end if end <= now else now + (end - now) * factor for end in self._ends]
        self._timer.cancel()
        self._timer = self._kernel.at(self._ends[-1], self._step_over)

    def _step_over(self) -> None:
        outputs = self._complete(len(self._ends))
        self._completing = True
        self._on_output(outputs)
        self._completing = False
        if not self.stopped:
            self._begin(self._kernel.now)

    def _complete(self, passed: int) -> list[Output]:
        assert self._step is not None and self._timer is not None
        step = self._step
        self._note(passed, step)
        self._step, self._ends = None, []
        self._timer.cancel()
        if self.host is not None:
            self.host.end(self)
        return self.scheduler.complete(step, passed)

    def _note(self, passed: int, step: Step) -> None:
        """The times of iterations that are over."""
        end_s = self._ends[passed - 1]
        self.step_ends_s.extend(self._ends[:passed])
        self.busy_s += end_s - self._started_s
        if self.watch:
            self.watch(self._started_s, end_s, passed, step)
