"""What one router knows of one engine's load: the engine's own snapshots plus what this router placed since.

A snapshot is true but late, a reservation is immediate but only this router's own. So load = latest snapshot +
reservations that the snapshot cannot contain yet. Other routers' requests arrive with the snapshot; ours are counted
from the moment of the decision, which is what keeps a burst from piling onto one engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.messages import Request, Role, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import StepTimes

RECENT_S = 60.0
STEPS_MEASURED = 16
"""Enough that the jitter of two messages does not matter."""
STALE = -1.0
CURVE_TOKENS = 4096
"""Context over which the slope of a decode step is taken."""


@dataclass(slots=True, eq=False)
class Reservation:
    """What one placed request holds on its workers until it ends.

    Attributes:
        prefill_s: predicted compute of the uncached prompt on the worker that prefills.
        started_s: when the decode leg was started (placed, on a local path); None before.
        prefilling: the prompt is not computed yet.
        leased: the prefill engine's blocks are still held.
        tpot_limit_s: what others on the decode engine must leave it; infinity where it was never kept.
    """

    request: Request
    prefill_worker: str | None
    decode_worker: str
    placed_s: float
    prefill_s: float
    cached_tokens: int
    prefill_blocks: int
    decode_blocks: int
    context_tokens: float
    tpot_limit_s: float
    started_s: float | None = None
    prefilled_s: float | None = None
    prefilling: bool = True
    leased: bool = True


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured decode step: the mean of several with one batch."""

    batch: int
    context_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it, for status and metrics."""

    worker_id: str
    role: Role
    state: WorkerState
    running: int
    waiting: int
    prefill_backlog_s: float
    kv_used_blocks: int
    kv_total_blocks: int
    reserved_requests: int
    indexed_blocks: int
    index_exact: bool


class WorkerLoad:
    """Mutable load of one engine. Reads are O(1); a snapshot or an end costs O(own requests it does not show yet).

    Args:
        visible_after_s: a snapshot that arrives this much later than a leg was started counts that leg.
    """

    __slots__ = (
        "_context_tokens",
        "_fresh_blocks",
        "_fresh_context",
        "_fresh_sequences",
        "_limits",
        "_local_share",
        "_local_window_s",
        "_recent",
        "_recent_s",
        "_run",
        "_unseen",
        "block",
        "free_blocks",
        "free_s",
        "free_sequences",
        "index_exact",
        "info",
        "leases",
        "local_until_s",
        "name",
        "own",
        "snapshot",
        "state",
        "step_base_s",
        "step_slope_s",
        "tightest_tpot_s",
        "times",
        "times_id",
        "visible_after_s",
    )

    def __init__(self, info: WorkerInfo, times: StepTimes, now: float, visible_after_s: float = 0.0) -> None:
        self.info, self.times, self.visible_after_s = info, times, visible_after_s
        self.name, self.block, self.times_id = info.worker_id, info.block_size_tokens, id(times)
        self.state = WorkerState.READY
        self.index_exact = False
        self.snapshot: WorkerSnapshot | None = None
        self.own: dict[str, Reservation] = {}
        self._unseen: dict[str, Reservation] = {}
        self._run: tuple[WorkerSnapshot, float] | None = None
        self.free_s = now
        """When the prefill work that is known now will be done."""
        self.leases = 0
        """This router's unfinished prompts on this prefill engine that no snapshot shows yet."""
        self.tightest_tpot_s = float("inf")
        """The smallest TPOT limit among this router's requests on this decode engine."""
        self._limits: dict[float, int] = {}
        self._recent, self._recent_s = 0.0, now
        self._local_share, self._local_window_s = 0.0, 1.0
        self.local_until_s = now
        self.step_slope_s = 0.0
        self._recount()

    # -- reading ------------------------------------------------------------------------------------------------

    def backlog_s(self, now: float) -> float:
        """Seconds of prefill work ahead of a prompt that arrives now."""
        return self.free_s - now if self.free_s > now else 0.0

    @property
    def sequences(self) -> int:
        return self.info.max_num_seqs - self.free_sequences

    @property
    def used_blocks(self) -> int:
        return self.info.kv_total_blocks - self.free_blocks

    @property
    def requests(self) -> int:
        """Unfinished requests: what balancers that know no more compare."""
        snapshot = self.snapshot
        return max(len(self.own), snapshot.running + snapshot.waiting if snapshot else 0)

    def step_s(self, context_tokens: float) -> float:
        """One decode step with one more sequence of `context_tokens`."""
        if self.step_base_s < 0:
            self.refresh_step()
        return self.step_base_s + self.step_slope_s * context_tokens

    def refresh_step(self) -> None:
        """With one more sequence of c tokens a step takes `step_base_s + step_slope_s * c`."""
        batch, context = self.sequences + 1, self._context_tokens
        base = self.times.step_s((), batch, context)
        self.step_slope_s = (self.times.step_s((), batch, context + CURVE_TOKENS) - base) / CURVE_TOKENS
        self.step_base_s = base

    def recent(self, now: float) -> float:
        """What was placed here lately, fading over `RECENT_S`; breaks ties between engines that look equal."""
        return self._recent * math.exp((self._recent_s - now) / RECENT_S)

    def local_share(self, now: float) -> float:
        """Fraction of this engine's time that local prefills take; it fades out until `local_until_s`."""
        if now >= self.local_until_s:
            return 0.0
        return self._local_share * (self.local_until_s - now) / self._local_window_s

    # -- writing ------------------------------------------------------------------------------------------------

    def add_prefill(self, r: Reservation, now: float) -> None:
        self.own[r.request.request_id] = self._unseen[r.request.request_id] = r
        self.free_s = max(self.free_s, now) + r.prefill_s
        if r.prefill_worker is not None:
            self.leases += 1
            self.free_blocks -= r.prefill_blocks

    def end_prefill(self, r: Reservation, now: float, *, done: bool) -> None:
        """The prompt was computed (`done`) or will not be: its work no longer delays others."""
        if not done:
            self.free_s = max(now, self.free_s - r.prefill_s)
        elif self.snapshot is None:
            # Own work is all there is to know, and this request was the oldest of it.
            rest = sum(o.prefill_s for o in self.own.values() if o.prefilling and o is not r)
            self.free_s = min(self.free_s, now + rest)

    def end_lease(self, r: Reservation) -> None:
        """The prefill side of a split request is over."""
        self._forget(r)

    def add_decode(self, r: Reservation) -> None:
        self.own[r.request.request_id] = self._unseen[r.request.request_id] = r
        self._fresh_sequences += r.request.n
        self._fresh_blocks += r.decode_blocks
        self._fresh_context += r.context_tokens
        self._settle()
        limit = r.tpot_limit_s
        self._limits[limit] = self._limits.get(limit, 0) + 1
        self.tightest_tpot_s = min(self.tightest_tpot_s, limit)

    def end_decode(self, r: Reservation) -> None:
        self._forget(r)
        limit = r.tpot_limit_s
        left = self._limits.get(limit, 0) - 1
        if left > 0:
            self._limits[limit] = left
        else:
            self._limits.pop(limit, None)
            self.tightest_tpot_s = min(self._limits, default=float("inf"))

    def add_recent(self, now: float, amount: float) -> None:
        self._recent, self._recent_s = self.recent(now) + amount, now

    def add_local_prefill(self, now: float, window_s: float, work_s: float) -> None:
        """A prompt of `work_s` is computed between the steps of requests that decode for about `window_s`."""
        self._local_share = self.local_share(now) + work_s / window_s
        self._local_window_s = window_s
        self.local_until_s = now + window_s

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float, queued_s: float) -> StepSample | None:
        """`queued_s` is the time the engine needs for `snapshot.queued_prefill_tokens`.

        Returns a measured decode step where this snapshot ends a run of them.
        """
        self.snapshot, self.state = snapshot, snapshot.state
        sample = self._measure(snapshot, now)
        if self._unseen:
            me, visible = self.info.worker_id, now - self.visible_after_s
            for request_id, r in list(self._unseen.items()):
                since = r.started_s if r.decode_worker == me else r.placed_s
                if since is not None and since <= visible:
                    del self._unseen[request_id]
        self.free_s = now + queued_s + sum(r.prefill_s for r in self._unseen.values() if self._prefills(r))
        self._recount()
        return sample

    def _measure(self, snapshot: WorkerSnapshot, now: float) -> StepSample | None:
        """Time `STEPS_MEASURED` engine steps during which the same sequences decoded and no prompt was computed."""
        run = self._run
        if snapshot.running == 0 or snapshot.waiting or snapshot.queued_prefill_tokens:
            self._run = None
        elif run is None or run[0].running != snapshot.running or snapshot.steps < run[0].steps:
            self._run = snapshot, now
        elif snapshot.steps - run[0].steps >= STEPS_MEASURED:
            self._run = snapshot, now
            used = (run[0].kv_used_blocks + snapshot.kv_used_blocks) // 2
            seconds = (now - run[1]) / (snapshot.steps - run[0].steps)
            return StepSample(snapshot.running, used * self.block, seconds)
        return None

    def _prefills(self, r: Reservation) -> bool:
        return r.prefilling and (r.prefill_worker or r.decode_worker) == self.info.worker_id

    def _forget(self, r: Reservation) -> None:
        self.own.pop(r.request.request_id, None)
        if self._unseen.pop(r.request.request_id, None) is not None:
            self._recount()

    def _recount(self) -> None:
        """Sum up what no snapshot shows yet."""
        blocks = sequences = leases = 0
        context = 0.0
        for r in self._unseen.values():
            if r.decode_worker == self.name:
                blocks += r.decode_blocks
                sequences += r.request.n
                context += r.context_tokens
            else:
                leases += 1
                blocks += r.prefill_blocks
        self._fresh_blocks, self._fresh_sequences, self._fresh_context, self.leases = blocks, sequences, context, leases
        self._settle()

    def _settle(self) -> None:
        """Bring what decisions read up to date; the step curve only when a decision asks for it."""
        sequences, used, context = self._fresh_sequences, self._fresh_blocks, self._fresh_context
        if self.snapshot is not None:
            sequences += self.snapshot.running + self.snapshot.waiting
            used += self.snapshot.kv_used_blocks
            context += self.snapshot.kv_used_blocks * self.block
        self.free_sequences = self.info.max_num_seqs - sequences
        self.free_blocks = self.info.kv_total_blocks - used
        self._context_tokens = int(context)
        self.step_base_s = STALE


@dataclass(slots=True)
class Mean:
    """Exponentially weighted mean of what was observed; `value` is the prior until the first sample."""

    value: float
    weight: float = 0.05
    samples: int = field(default=0)

    def add(self, sample: float) -> None:
        self.samples += 1
        # The first samples count fully, so the prior is forgotten at once.
        self.value += max(self.weight, 1.0 / self.samples) * (sample - self.value)
