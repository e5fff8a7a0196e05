"""What one router knows of one engine's load: the engine's own snapshots plus what this router placed since.

A snapshot is true but late, a reservation is immediate but only this router's own. So load = latest snapshot +
reservations that the snapshot cannot contain yet. Other routers' requests arrive with the snapshot; ours are counted
from the moment of the decision, which is what keeps a burst from piling onto one engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.messages import Request, Role, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import StepTimes

VISIBLE_AFTER_S = 0.02
"""A snapshot that arrives later than this after a leg was started counts that leg (a call to the engine takes about
a millisecond, a step some more)."""


@dataclass(slots=True)
class Reservation:
    """What one placed request holds on its workers until it ends.

    Attributes:
        prefill_s: predicted compute of the uncached prompt on the worker that prefills.
        started_s: when the decode leg was started (placed, on a local path); None before.
        prefilling: the prefill part is still held.
    """

    request: Request
    prefill_worker: str | None
    decode_worker: str
    placed_s: float
    prefill_s: float
    cached_tokens: int
    prefill_blocks: int
    decode_blocks: int
    context_tokens: int
    sequences: int
    started_s: float | None = None
    prefilling: bool = True


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it, for status and metrics."""

    worker_id: str
    role: Role
    state: WorkerState
    running: float
    waiting: float
    prefill_backlog_s: float
    kv_used_blocks: int
    kv_total_blocks: int
    reserved_requests: int
    indexed_blocks: int
    index_exact: bool


class WorkerLoad:
    """Mutable load of one engine. Every method is O(own unfinished requests) at most; reads are O(1)."""

    __slots__ = (
        "_curve",
        "_fresh_blocks",
        "_fresh_context",
        "_fresh_sequences",
        "_limits",
        "free_s",
        "index_exact",
        "info",
        "local_share",
        "local_share_s",
        "own",
        "snapshot",
        "snapshot_s",
        "state",
        "times",
    )

    def __init__(self, info: WorkerInfo, times: StepTimes, now: float) -> None:
        self.info, self.times = info, times
        self.state = WorkerState.READY
        self.index_exact = False
        self.snapshot: WorkerSnapshot | None = None
        self.snapshot_s = now
        self.free_s = now
        """When the prefill work that is known now will be done."""
        self.own: dict[str, Reservation] = {}
        self.local_share, self.local_share_s = 0.0, now
        self._fresh_blocks = self._fresh_sequences = self._fresh_context = 0
        self._limits: dict[float, int] = {}
        self._curve: tuple[float, float] | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    def backlog_s(self, now: float) -> float:
        """Seconds of prefill work ahead of a prompt that arrives now."""
        return self.free_s - now if self.free_s > now else 0.0

    @property
    def sequences(self) -> int:
        return self._fresh_sequences + (self.snapshot.running + self.snapshot.waiting if self.snapshot else 0)

    @property
    def used_blocks(self) -> int:
        return self._fresh_blocks + (self.snapshot.kv_used_blocks if self.snapshot else 0)

    @property
    def context_tokens(self) -> int:
        used = self.snapshot.kv_used_blocks * self.info.block_size_tokens if self.snapshot else 0
        return self._fresh_context + used

    @property
    def tightest_tpot_s(self) -> float:
        """The smallest TPOT limit among this router's requests on this engine; infinity with none."""
        return min(self._limits, default=float("inf"))

    def decode_curve(self) -> tuple[float, float]:
        """(a, b): with one more sequence of c context tokens a decode step is predicted to take a + b * c."""
        if self._curve is None:
            batch, context = self.sequences + 1, self.context_tokens
            base = self.times.step_s((), batch, context)
            probe = 4096
            self._curve = base, (self.times.step_s((), batch, context + probe) - base) / probe
        return self._curve

    # -- writing ------------------------------------------------------------------------------------------------

    def add_prefill(self, reservation: Reservation, now: float) -> None:
        self.own[reservation.request.request_id] = reservation
        self.free_s = max(self.free_s, now) + reservation.prefill_s

    def end_prefill(self, reservation: Reservation, now: float, *, done: bool) -> None:
        """The prompt was computed (`done`) or will not be: its work no longer delays others."""
        if not done:
            self.free_s = max(now, self.free_s - reservation.prefill_s)
        elif self.snapshot is None:
            # Own work is all there is, and this request was the oldest of it.
            rest = sum(r.prefill_s for r in self.own.values() if r.prefilling and r is not reservation)
            self.free_s = min(self.free_s, now + rest)

    def add_decode(self, reservation: Reservation) -> None:
        self.own[reservation.request.request_id] = reservation
        self._count(reservation, 1)
        limit = reservation.request.slo.tpot_s
        self._limits[limit] = self._limits.get(limit, 0) + 1

    def end(self, reservation: Reservation, *, decode: bool) -> None:
        if self.own.pop(reservation.request.request_id, None) is None:
            return
        if decode:
            self._recount()
            limit = reservation.request.slo.tpot_s
            left = self._limits[limit] - 1
            if left:
                self._limits[limit] = left
            else:
                del self._limits[limit]

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float, queued_s: float) -> None:
        """`queued_s` is the time the engine needs for `snapshot.queued_prefill_tokens`."""
        self.snapshot, self.snapshot_s, self.state = snapshot, now, snapshot.state
        fresh = sum(r.prefill_s for r in self.own.values() if r.prefilling and self._unseen(r.placed_s))
        self.free_s = now + queued_s + fresh
        self._recount()

    def share_of_local_prefill(self, now: float, window_s: float, add_s: float = 0.0) -> float:
        """Fraction of this decode engine's time that local prefills take, with `add_s` more over `window_s`."""
        elapsed = max(0.0, now - self.local_share_s)
        decayed = self.local_share * max(0.0, 1.0 - elapsed / window_s)
        return min(0.95, decayed + add_s / window_s)

    def add_local_prefill(self, now: float, window_s: float, work_s: float) -> None:
        self.local_share = self.share_of_local_prefill(now, window_s, work_s)
        self.local_share_s = now

    def _unseen(self, since_s: float | None) -> bool:
        return self.snapshot is None or since_s is None or since_s + VISIBLE_AFTER_S > self.snapshot_s

    def _count(self, r: Reservation, sign: int) -> None:
        self._fresh_blocks += sign * r.decode_blocks
        self._fresh_sequences += sign * r.sequences
        self._fresh_context += sign * r.context_tokens
        self._curve = None

    def _recount(self) -> None:
        self._fresh_blocks = self._fresh_sequences = self._fresh_context = 0
        self._curve = None
        me = self.info.worker_id
        for r in self.own.values():
            if r.decode_worker == me and self._unseen(r.started_s):
                self._count(r, 1)


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
