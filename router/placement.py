"""Where a request runs: the pair of engines with the least predicted time to first token that keeps TPOT in the SLO.

For a prefill engine p, a decode engine d and a prompt whose first m_p tokens p holds (m_d: d):

    split   TTFT = backlog_p + prefill_p(prompt - m_p) + transfer(bytes beyond m_d) + step_d
    local   TTFT = backlog_d + prefill_d(prompt - m_d, between d's decode steps)
    TPOT  = step_d(batch + 1, context + prompt) / (1 - share of d's time that goes to local prefills)

Split is a sum of a term of p and a term of d, so choosing a pair costs one pass over each pool. Affinity is not a
separate goal: a matched block is work that is not done, so a hot prefix moves to a second engine as soon as its queue
costs more than computing it again. Equal candidates are drawn at random.

A decode engine prefills by itself where that is faster, every step that holds a chunk of it stays inside the tightest
TPOT limit on that engine, and so does the mean. Both bounds come from the cost model; there is no token threshold.

`place` selects and reserves in one step. Pure: no clock, no I/O; `now` and `rng` are arguments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.config import PlacementConfig
from cluster.messages import (
    Path,
    Placement,
    Rejection,
    Request,
    RequestRecord,
    Role,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from cluster.perf.times import StepTimes
from router.load import Mean, Reservation, WorkerLoad, WorkerView
from router.prefix_index import PrefixIndex

TimesOf = Callable[[WorkerInfo], StepTimes]
TIE_FRACTION = 0.02
TIE_S = 0.5e-3
T = TypeVar("T", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision before it is reserved."""

    path: Path
    decode: WorkerLoad
    prefill: WorkerLoad | None
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    prefill_s: float


class Placer:
    """The state of placement: workers, their load, this router's reservations.

    Args:
        config: `router.placement` of the cluster's configuration.
        times_of: what a step costs on a given worker; asked once, when the worker is added.
        index: blocks that the engines hold; the event decoder writes it, the placer reads it.
        colocated: there is no prefill pool; the decode workers do both phases.
        lease_headroom: share of a prefill engine's KV that prompts waiting to be pulled may not take.
        retry_after_s: what a rejected client is told where no better figure is predicted.
        key_block_tokens: tokens per key in `Request.block_keys`; default: the smallest block of any worker.
    """

    def __init__(
        self,
        config: PlacementConfig,
        times_of: TimesOf,
        index: PrefixIndex,
        *,
        colocated: bool = False,
        lease_headroom: float = 0.1,
        retry_after_s: float = 1.0,
        key_block_tokens: int | None = None,
    ) -> None:
        self.config, self.index, self.colocated = config, index, colocated
        self._times_of = times_of
        self._lease_headroom, self._retry_after_s = lease_headroom, retry_after_s
        self._key_block_tokens = key_block_tokens
        self._pools: dict[Role, dict[str, WorkerLoad]] = {Role.PREFILL: {}, Role.DECODE: {}}
        self._reservations: dict[str, Reservation] = {}
        self._pending: dict[int, dict[str, tuple[int, ...]]] = {}
        self.output_tokens = Mean(200.0)
        self.predicted_cached_tokens = self.actual_cached_tokens = 0

    # -- workers ------------------------------------------------------------------------------------------------

    @property
    def key_block_tokens(self) -> int:
        """Tokens per block key: hash prompts with this block size."""
        if self._key_block_tokens is not None:
            return self._key_block_tokens
        sizes = [w.info.block_size_tokens for pool in self._pools.values() for w in pool.values()]
        return min(sizes, default=16)

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        """A worker is ready. One with a known id and a new incarnation replaces the old one and starts empty."""
        old = self._find(info.worker_id)
        if old is not None:
            if old.info.incarnation == info.incarnation:
                return
            self.remove_worker(info.worker_id, now)
        self._pools[info.role][info.worker_id] = WorkerLoad(info, self._times_of(info), now)

    def remove_worker(self, worker_id: str, now: float) -> None:  # noqa: ARG002 - every event carries its time
        """A worker died or left. It is chosen no more and the index forgets its blocks; unknown ids are ignored."""
        for pool in self._pools.values():
            pool.pop(worker_id, None)
        self.index.clear(worker_id)
        for holders in self._pending.values():
            holders.pop(worker_id, None)

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float) -> None:
        worker = self._find(snapshot.worker_id)
        if worker is None or worker.info.incarnation != snapshot.incarnation:
            return
        queued = snapshot.queued_prefill_tokens
        worker.on_snapshot(snapshot, now, self._prefill_s(worker, queued, 0) if queued else 0.0)

    def workers(self, role: Role, now: float) -> list[WorkerView]:
        return [
            WorkerView(
                worker_id=w.info.worker_id,
                role=role,
                state=w.state,
                running=w.snapshot.running if w.snapshot else 0,
                waiting=w.snapshot.waiting if w.snapshot else 0,
                prefill_backlog_s=w.backlog_s(now),
                kv_used_blocks=w.used_blocks,
                kv_total_blocks=w.info.kv_total_blocks,
                reserved_requests=len(w.own),
                indexed_blocks=self.index.held_blocks(w.info.worker_id),
                index_exact=w.index_exact,
            )
            for w in self._pools[role].values()
        ]

    # -- requests -----------------------------------------------------------------------------------------------

    def place(
        self,
        request: Request,
        now: float,
        rng: random.Random,
        *,
        exclude: frozenset[str] = frozenset(),
        local_only: bool = False,
    ) -> Placement | Rejection:
        """Choose workers and reserve their time and KV for this request, in one step.

        Args:
            exclude: workers that failed this request before.
            local_only: no transfer (it failed before): the decode engine computes the prompt.
        """
        if request.request_id in self._reservations:
            self.on_end(request.request_id, now)
        choice = self.choose(request, now, rng, exclude=exclude, local_only=local_only)
        if isinstance(choice, Rejection):
            return choice
        self._reserve(request, choice, now)
        return Placement(
            path=choice.path,
            decode=choice.decode.info.worker_id,
            prefill=choice.prefill.info.worker_id if choice.prefill else None,
            predicted_ttft_s=now - request.arrival_s + choice.ttft_s,
            predicted_tpot_s=choice.tpot_s,
            predicted_cached_tokens=choice.cached_tokens,
        )

    def on_prefilled(self, request_id: str, now: float, cached_tokens: int) -> None:
        """The ticket is here: the prefill engine's time is free again, the decode leg starts."""
        r = self._reservations.get(request_id)
        if r is None or not r.prefilling:
            return
        self.predicted_cached_tokens += r.cached_tokens
        self.actual_cached_tokens += cached_tokens
        self._end_prefill(r, now, done=True)
        r.started_s = now

    def on_first_token(self, request_id: str, now: float) -> None:
        """The prompt is computed (local) or pulled (split): the prefill engine holds nothing more for it."""
        r = self._reservations.get(request_id)
        if r is None:
            return
        if r.prefilling:
            self._end_prefill(r, now, done=True)
            r.started_s = now if r.started_s is None else r.started_s
        if r.prefill_worker is not None and (worker := self._find(r.prefill_worker)) is not None:
            worker.end(r, decode=False)

    def on_end(self, request_id: str, now: float) -> None:
        """The request, or this attempt at it, is over. Releases everything; idempotent."""
        r = self._reservations.pop(request_id, None)
        if r is None:
            return
        if r.prefilling:
            self._end_prefill(r, now, done=False)
        if r.prefill_worker is not None and (worker := self._find(r.prefill_worker)) is not None:
            worker.end(r, decode=False)
        if (worker := self._find(r.decode_worker)) is not None:
            worker.end(r, decode=True)

    def observe(self, record: RequestRecord) -> None:
        """Learn from a finished request."""
        if record.output_tokens:
            self.output_tokens.add(record.output_tokens)

    @property
    def reserved(self) -> int:
        return len(self._reservations)

    # -- choosing -----------------------------------------------------------------------------------------------

    def choose(
        self,
        request: Request,
        now: float,
        rng: random.Random,
        *,
        exclude: frozenset[str] = frozenset(),
        local_only: bool = False,
    ) -> Choice | Rejection:
        """`place` without the reservation."""
        decodes = self._ready(Role.DECODE, exclude)
        if not decodes:
            return Rejection(503, "no decode worker is ready", self._retry_after_s)
        prefills = [] if self.colocated or local_only else self._ready(Role.PREFILL, exclude)
        forced: Path | None = None
        if self.colocated:
            forced = Path.COLOCATED
        elif local_only:
            forced = Path.LOCAL_RETRY
        elif not prefills:
            if self.config.no_prefill_worker == "fail":
                return Rejection(503, "no prefill worker is ready", self._retry_after_s)
            forced = Path.LOCAL_NO_PREFILL
        matched = self._matched_tokens(request)
        roomy = [d for d in decodes if self._has_room(d, request, matched)]
        if not roomy:
            return Rejection(503, "no decode worker has KV room", self._retry_after_s)
        local = self._local(request, roomy, matched, now, rng, forced)
        if forced is not None or not prefills:
            assert local is not None
            return local
        split = self._split(request, prefills, roomy, matched, now, rng)
        if local is not None and local.ttft_s < split.ttft_s and local.tpot_s <= request.slo.tpot_s:
            return local
        return split

    def _split(
        self,
        request: Request,
        prefills: Sequence[WorkerLoad],
        decodes: Sequence[WorkerLoad],
        matched: dict[str, int],
        now: float,
        rng: random.Random,
    ) -> Choice:
        pending = self._pending_tokens(request)
        memo: dict[tuple[int, int], float] = {}
        costs = []
        for p in prefills:
            cached = max(matched.get(p.info.worker_id, 0), pending.get(p.info.worker_id, 0))
            key = (id(p.times), cached)
            work = memo.get(key)
            if work is None:
                work = memo[key] = self._prefill_s(p, request.prompt_tokens - cached, cached)
            costs.append((p.backlog_s(now) + work, work, p, cached))
        ready_s, work, p, cached = _draw(costs, rng)
        context = request.prompt_tokens + int(self._expected_output(request) / 2)
        candidates = []
        for d in decodes:
            missing = max(0, request.prompt_tokens - matched.get(d.info.worker_id, 0))
            transfer = d.times.transfer_s(missing * d.info.kv_bytes_per_token)
            tpot = self._tpot_s(d, context, now)
            candidates.append((ready_s + transfer + tpot, tpot, d))
        inside = [c for c in candidates if c[1] <= min(request.slo.tpot_s, c[2].tightest_tpot_s)]
        ttft, tpot, d = _draw(inside, rng) if inside else min(candidates, key=lambda c: (c[1], rng.random()))
        return Choice(Path.SPLIT, d, p, ttft, tpot, cached, work)

    def _local(
        self,
        request: Request,
        decodes: Sequence[WorkerLoad],
        matched: dict[str, int],
        now: float,
        rng: random.Random,
        forced: Path | None,
    ) -> Choice | None:
        if forced is None and not self.config.conditional:
            return None
        context = request.prompt_tokens + int(self._expected_output(request) / 2)
        pending = self._pending_tokens(request)
        candidates = []
        for d in decodes:
            cached = max(matched.get(d.info.worker_id, 0), pending.get(d.info.worker_id, 0))
            step = self._tpot_s(d, context, now)
            work = self._prefill_s(d, request.prompt_tokens - cached, cached)
            chunks = -(-(request.prompt_tokens - cached) // d.info.max_num_batched_tokens)
            limit = min(request.slo.tpot_s, d.tightest_tpot_s)
            if forced is None and work / chunks + step > limit:
                continue
            window = self._window_s(request, step)
            tpot = step / (1.0 - d.share_of_local_prefill(now, window, work))
            ttft = d.backlog_s(now) + work + chunks * step
            candidates.append((ttft, tpot, d, cached, work, tpot <= limit))
        inside = [c for c in candidates if c[5]]
        if not inside and (forced is None or not candidates):
            return None
        ttft, tpot, d, cached, work, _ = (
            _draw(inside, rng) if inside else min(candidates, key=lambda c: (c[1], rng.random()))
        )
        path = forced or (Path.LOCAL_CACHED if cached >= request.prompt_tokens - cached else Path.LOCAL_SHORT)
        return Choice(path, d, None, ttft, tpot, cached, work)

    # -- predictions --------------------------------------------------------------------------------------------

    def _prefill_s(self, worker: WorkerLoad, new: int, context: int) -> float:
        """Seconds to compute `new` prompt tokens after `context` cached ones, in chunks of the engine's budget."""
        if new <= 0:
            return 0.0
        budget = worker.info.max_num_batched_tokens
        full, rest = divmod(new, budget)
        total = 0.0
        if full:
            # Attention makes chunks linearly slower as the context grows: first and last give the mean.
            first = worker.times.step_s(((budget, context),), 0, 0)
            last = worker.times.step_s(((budget, context + (full - 1) * budget),), 0, 0) if full > 1 else first
            total = full * (first + last) / 2
        if rest:
            total += worker.times.step_s(((rest, context + full * budget),), 0, 0)
        return total

    def _tpot_s(self, d: WorkerLoad, context: int, now: float) -> float:
        base, slope = d.decode_curve()
        step = base + slope * context
        if d.local_share:
            step /= 1.0 - d.share_of_local_prefill(now, max(1e-3, self.output_tokens.value * step))
        return step

    def _window_s(self, request: Request, step_s: float) -> float:
        return max(1e-3, self._expected_output(request) * step_s)

    def _expected_output(self, request: Request) -> float:
        return min(self.output_tokens.value, request.max_output_tokens)

    def _has_room(self, d: WorkerLoad, request: Request, matched: dict[str, int]) -> bool:
        if d.sequences and d.sequences + request.n > d.info.max_num_seqs:
            return False
        return d.used_blocks + self._decode_blocks(d, request, matched) <= d.info.kv_total_blocks

    def _decode_blocks(self, d: WorkerLoad, request: Request, matched: dict[str, int]) -> int:
        block = d.info.block_size_tokens
        tokens = request.prompt_tokens + request.n * int(self._expected_output(request))
        return max(0, -(-tokens // block) - matched.get(d.info.worker_id, 0) // block)

    def _matched_tokens(self, request: Request) -> dict[str, int]:
        block = self.key_block_tokens
        most = (request.prompt_tokens - 1) // block  # an engine always computes the last token
        return {w: min(m, most) * block for w, m in self.index.longest_match(request.block_keys).items()}

    def _pending_tokens(self, request: Request) -> dict[str, int]:
        """Prefixes that are being computed now: the engine will hold them by the time this request is scheduled."""
        keys = request.block_keys
        holders = self._pending.get(keys[0]) if keys else None
        if not holders:
            return {}
        block = self.key_block_tokens
        most = (request.prompt_tokens - 1) // block
        return {w: min(_common(keys, other), most) * block for w, other in holders.items()}

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _find(self, worker_id: str) -> WorkerLoad | None:
        return self._pools[Role.DECODE].get(worker_id) or self._pools[Role.PREFILL].get(worker_id)

    def _ready(self, role: Role, exclude: frozenset[str]) -> list[WorkerLoad]:
        return [w for i, w in self._pools[role].items() if w.state is WorkerState.READY and i not in exclude]

    def _reserve(self, request: Request, choice: Choice, now: float) -> None:
        d, p = choice.decode, choice.prefill
        matched = self._matched_tokens(request)
        r = Reservation(
            request=request,
            prefill_worker=p.info.worker_id if p else None,
            decode_worker=d.info.worker_id,
            placed_s=now,
            prefill_s=choice.prefill_s,
            cached_tokens=choice.cached_tokens,
            prefill_blocks=-(-request.prompt_tokens // p.info.block_size_tokens) if p else 0,
            decode_blocks=self._decode_blocks(d, request, matched),
            context_tokens=request.prompt_tokens + int(self._expected_output(request) / 2),
            sequences=request.n,
            started_s=None if p else now,
        )
        self._reservations[request.request_id] = r
        worker = p or d
        worker.add_prefill(r, now)
        d.add_decode(r)
        if p is None:
            d.add_local_prefill(now, self._window_s(request, choice.tpot_s), choice.prefill_s)
        if request.block_keys:
            self._pending.setdefault(request.block_keys[0], {})[worker.info.worker_id] = request.block_keys

    def _end_prefill(self, r: Reservation, now: float, *, done: bool) -> None:
        r.prefilling = False
        worker_id = r.prefill_worker or r.decode_worker
        worker = self._find(worker_id)
        if worker is not None and r.request.request_id in worker.own:
            worker.end_prefill(r, now, done=done)
        keys = r.request.block_keys
        if keys:
            holders = self._pending.get(keys[0], {})
            if holders.get(worker_id) is keys:
                del holders[worker_id]
            if not holders:
                self._pending.pop(keys[0], None)


def _draw(costs: list[T], rng: random.Random) -> T:
    best = min(costs, key=_first)[0]
    limit = best + max(TIE_S, TIE_FRACTION * best)
    ties = [c for c in costs if c[0] <= limit]
    return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


def _first(cost: tuple[Any, ...]) -> Any:
    return cost[0]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common start of two key chains: keys are chained, so equality is monotone."""
    lo, hi = 0, min(len(a), len(b))
    while lo < hi:
        mid = (lo + hi) // 2
        if a[mid] == b[mid]:
            lo = mid + 1
        else:
            hi = mid
    return lo
