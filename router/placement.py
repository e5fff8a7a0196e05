"""Where a request runs: the pair of engines with the least predicted time to first token that keeps TPOT in the SLO.

The formula is in router/cost.py. Affinity is not a separate goal: a matched block is work that is not done, so a hot
prefix moves to a second engine as soon as its queue costs more than computing it again. Equal candidates are drawn at
random.

A decode engine prefills by itself where that is faster, every step that holds a chunk of it stays inside the tightest
TPOT limit on that engine, and so does the mean. Both bounds come from the cost model; there is no token threshold.

`place` selects and reserves in one step. Pure: no clock, no I/O; `now` and `rng` are arguments.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

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
from cluster.perf.online import OnlineTimes
from cluster.perf.times import StepTimes
from kv_transfer.compatibility import TpPairs
from router.admission import Forecast
from router.approximate import ApproximateCache
from router.choice import Choice, Question
from router.cost import CostModel, decode_blocks, prefill_s
from router.decision_log import Watch
from router.load import Reservation, WorkerLoad, WorkerView
from router.pairing import Pairing
from router.policies import Baseline, baseline
from router.prefix_index import PrefixIndex

TimesOf = Callable[[WorkerInfo], StepTimes]

VISIBLE_AFTER_S = 0.02
"""A call to an engine takes about a millisecond, the step that admits it some more."""


class Placer:
    """The state of placement: workers, their load, this router's reservations.

    Args:
        config: `router.placement` of the cluster's configuration.
        times_of: what a step costs on a given worker; asked once, when the worker is added.
        index: blocks that the engines hold; the event decoder writes it, the placer reads it.
        colocated: there is no prefill pool; the decode workers do both phases.
        lease_headroom: share of a prefill engine's KV that prompts waiting to be pulled should leave free.
        retry_after_s: what a rejected client is told where no better figure is predicted.
        key_block_tokens: tokens per key in `Request.block_keys`; default: the smallest block of any worker.
        promised_tpot_s: a client's limit below this binds its own placement, but keeps nobody else off an engine.
        visible_after_s: a snapshot that arrives this much later than a leg's start counts it (0 in simulation).
        tp_pairs: see `kv_transfer.tp_pairs`: engines that may not exchange KV are never paired.
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
        promised_tpot_s: float = 0.0,
        visible_after_s: float = VISIBLE_AFTER_S,
        tp_pairs: TpPairs = "tested",
    ) -> None:
        self.config, self.index, self.colocated = config, index, colocated
        self._times_of = times_of
        self.model = CostModel(lease_headroom)
        self._retry_after_s, self._promised_tpot_s = retry_after_s, promised_tpot_s
        self._key_block_tokens, self._visible_after_s = key_block_tokens, visible_after_s
        self._pools: dict[Role, dict[str, WorkerLoad]] = {Role.PREFILL: {}, Role.DECODE: {}}
        self._ready: dict[Role, list[WorkerLoad] | None] = dict.fromkeys(Role)
        self.pairing = Pairing(tp_pairs)
        self._reservations: dict[str, Reservation] = {}
        self._pending: dict[int, dict[str, tuple[int, ...]]] = {}
        self._approximate: dict[str, ApproximateCache] = {}
        self._exact: set[str] = set()
        self._forecast_rng = random.Random(0)  # draws among ties, which have equal forecasts
        self._asked: tuple[str, Mapping[str, float] | None] = "", None
        """The last forecast's request, and what waits ahead of it: if it is let through, it is placed by the same."""
        self._baseline: Baseline | None = baseline(config.policy)
        self.paths: Counter[Path] = Counter()
        self.watch: Watch | None = None
        """Follows decisions for the log and for shadow scoring."""
        self.predicted_cached_tokens = self.actual_cached_tokens = 0

    # -- workers ------------------------------------------------------------------------------------------------

    @property
    def key_block_tokens(self) -> int:
        """Tokens per block key: hash prompts with this block size."""
        if self._key_block_tokens is None:
            sizes = [w.info.block_size_tokens for pool in self._pools.values() for w in pool.values()]
            if not sizes:
                return 16
            self._key_block_tokens = min(sizes)
        return self._key_block_tokens

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        """A worker is ready. One with a known id and a new incarnation replaces the old one and starts empty."""
        old = self.find(info.worker_id)
        if old is not None:
            if old.info.incarnation == info.incarnation:
                return
            self.remove_worker(info.worker_id, now)
        worker = WorkerLoad(info, self._times_of(info), now, self._visible_after_s)
        worker.index_exact = info.worker_id in self._exact
        pool = self._pools[info.role]
        if pool:
            # Not from zero: a worker that comes new, or back, would get everything until it had caught up.
            worker.add_recent(now, sum(w.recent(now) for w in pool.values()) / len(pool))
        pool[info.worker_id] = worker
        self.pairing.add(info)
        self._ready = dict.fromkeys(Role)

    def pause_worker(self, worker_id: str, now: float) -> None:
        """A worker is not trusted now: it is not chosen until `add_worker`. Its events still keep the index right."""
        self._drop(worker_id)

    def remove_worker(self, worker_id: str, now: float) -> None:
        """A worker died or left. It is chosen no more and the index forgets its blocks; unknown ids are ignored."""
        self._drop(worker_id)
        self._approximate.pop(worker_id, None)
        self.index.clear(worker_id)

    def _drop(self, worker_id: str) -> None:
        for pool in self._pools.values():
            pool.pop(worker_id, None)
        self.pairing.remove(worker_id)
        self._ready = dict.fromkeys(Role)
        for holders in self._pending.values():
            holders.pop(worker_id, None)

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float) -> None:
        worker = self.find(snapshot.worker_id)
        if worker is None or worker.info.incarnation != snapshot.incarnation:
            return
        if snapshot.state is not worker.state:
            self._ready = dict.fromkeys(Role)
        queued = snapshot.queued_prefill_tokens
        sample = worker.on_snapshot(snapshot, now, prefill_s(worker, queued, 0) if queued else 0.0)
        if sample is not None and isinstance(worker.times, OnlineTimes):
            worker.times.observe_decode(sample.batch, sample.context_tokens, sample.step_s, now)

    def set_index_exact(self, worker_id: str, exact: bool) -> None:
        """Whether the index follows this worker's KV events completely. Until told so, it is guessed from placements.

        Going from guessed to exact drops the guesses: call it before the first event is applied.
        """
        if exact:
            self._exact.add(worker_id)
            guessed = self._approximate.pop(worker_id, None)
            if guessed is not None:
                guessed.clear()
        else:
            self._exact.discard(worker_id)
        worker = self.find(worker_id)
        if worker is not None:
            worker.index_exact = exact

    def pool(self, role: Role) -> Sequence[WorkerLoad]:
        return list(self._pools[role].values())

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

    def find(self, worker_id: str) -> WorkerLoad | None:
        return self._pools[Role.DECODE].get(worker_id) or self._pools[Role.PREFILL].get(worker_id)

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
        asked = self._asked
        if request.request_id in self._reservations:
            # Another try at the same place, as where a pair is not to be used: what admission saw still holds.
            self.on_end(request.request_id, now)
            self._asked = asked
        question = self.question(request)
        if self._asked[0] == request.request_id:
            question.ahead_s = self._asked[1]
        choice = self._choose(question, now, rng, exclude, local_only=local_only, baseline=self._baseline)
        if isinstance(choice, Rejection):
            return choice
        if self.watch is not None:
            self.watch.on_choice(self, question, choice, now)
        self._reserve(question, choice, now)
        self.paths[choice.path] += 1
        return Placement(
            path=choice.path,
            decode=choice.decode.info.worker_id,
            prefill=choice.prefill.info.worker_id if choice.prefill else None,
            predicted_ttft_s=now - request.arrival_s + choice.ttft_s,
            predicted_tpot_s=choice.tpot_s,
            predicted_cached_tokens=choice.cached_tokens,
        )

    def choose(
        self,
        request: Request,
        now: float,
        rng: random.Random,
        *,
        exclude: frozenset[str] = frozenset(),
        local_only: bool = False,
    ) -> Choice | Rejection:
        """What `place` would choose, without the reservation: a prediction for admission, shadow scoring and tests."""
        return self._choose(self.question(request), now, rng, exclude, local_only=local_only, baseline=self._baseline)

    def forecast(
        self, request: Request, now: float, ahead_s: Mapping[str, float] | None = None
    ) -> Forecast | Rejection:
        """What would happen if the request were placed now; for admission.

        Args:
            ahead_s: by engine, where others wait in the router for it: the work before this request with theirs.
        """
        q = self.question(request)
        q.ahead_s = ahead_s
        self._asked = request.request_id, ahead_s
        choice = self.best(q, now, self._forecast_rng)
        if isinstance(choice, Rejection):
            return choice
        worker = choice.prefill or choice.decode
        wait = worker.backlog_s(now)
        if ahead_s:
            wait = ahead_s.get(worker.name, wait)
        computing = self.ready(Role.PREFILL) or self.ready(Role.DECODE)
        return Forecast(
            wait_s=wait,
            ready_s=wait + choice.prefill_s,
            room_s=self.model.room_s(choice.decode, q) if _decodes(q, choice) else 0.0,
            ttft_s=choice.ttft_s,
            output_tokens=q.output_tokens,
            worker=worker.name,
            least_wait_s=max(0.0, min(w.free_s for w in computing) - now),
        )

    def on_prefilled(self, request_id: str, now: float, cached_tokens: int) -> None:
        """The ticket is here: the prefill engine's time is free again, the decode leg starts."""
        r = self._reservations.get(request_id)
        if r is None or not r.prefilling:
            return
        self._end_prefill(r, now, done=True)
        self._learn_cached(r, r.prefill_worker or r.decode_worker, cached_tokens)
        r.started_s = r.prefilled_s = now

    def on_first_token(self, request_id: str, now: float) -> None:
        """The prompt is computed (local) or pulled (split): the prefill engine holds nothing more for it."""
        r = self._reservations.get(request_id)
        if r is None:
            return
        if r.prefilling:
            # No ticket came first: whoever computed the prompt gave the token too.
            self._end_prefill(r, now, done=True)
            self._remember(r.prefill_worker or r.decode_worker, r.request.block_keys)
            r.started_s = now if r.started_s is None else r.started_s
        elif r.leased and r.prefill_worker is not None:
            self._remember(r.decode_worker, r.request.block_keys)
            if r.prefilled_s is not None:
                self.model.hold_s.add(now - r.prefilled_s)
        self._end_lease(r)

    def on_end(self, request_id: str, now: float) -> None:
        """The request, or this attempt at it, is over. Releases everything; idempotent."""
        if self._asked[0] == request_id:
            self._asked = "", None
        r = self._reservations.pop(request_id, None)
        if r is None:
            return
        if r.prefilling:
            self._end_prefill(r, now, done=False)
        self._end_lease(r)
        if (worker := self.find(r.decode_worker)) is not None and worker.own.get(request_id) is r:
            worker.end_decode(r)

    def observe(self, record: RequestRecord) -> None:
        """Learn from a finished request: output lengths, and how far from the model transfers over a distance are."""
        self.model.observe(record, self.find(record.prefill_worker or ""), self.find(record.decode_worker or ""))
        if self.watch is not None:
            self.watch.on_record(record)

    def ready(self, role: Role) -> Sequence[WorkerLoad]:
        """Workers that may be chosen now."""
        return self._candidates(role, frozenset())

    def best(self, q: Question, now: float, rng: random.Random) -> Choice | Rejection:
        """What the cost policy would choose, whatever policy is configured."""
        return self._choose(q, now, rng, frozenset(), local_only=False, baseline=None)

    @property
    def reserved(self) -> int:
        return len(self._reservations)

    # -- choosing -----------------------------------------------------------------------------------------------

    def question(self, request: Request) -> Question:
        """Look a prompt up once."""
        keys = request.block_keys
        if not keys:
            return self.model.question(request, {}, {})
        block = self.key_block_tokens
        most = (request.prompt_tokens - 1) // block  # an engine always computes the last token
        matched: dict[str, int] = {}
        deepest = 0
        for mask, depth in self.index.match_masks(keys):
            matched.update(dict.fromkeys(self.index.names_of(mask), min(depth, most) * block))
            deepest = max(deepest, depth)
        fan_out = self.index.fan_out(keys[deepest - 1]) if 0 < deepest < len(keys) else 0
        pending = {}
        for worker_id, other in self._pending.get(keys[0], {}).items():
            held = matched.get(worker_id, 0) // block
            if held < most and held < len(other) and keys[held] == other[held]:
                pending[worker_id] = min(_common(keys, other, held), most) * block
        return self.model.question(request, matched, pending, deepest * block, fan_out)

    def _choose(
        self,
        q: Question,
        now: float,
        rng: random.Random,
        exclude: frozenset[str],
        *,
        local_only: bool,
        baseline: Baseline | None,
    ) -> Choice | Rejection:
        decodes = self._candidates(Role.DECODE, exclude)
        if not decodes:
            return Rejection(503, "no decode worker is ready", self._retry_after_s)
        prefills = [] if self.colocated or local_only else self._candidates(Role.PREFILL, exclude)
        groups = self.pairing.groups(prefills, decodes)
        forced: Path | None = None
        if self.colocated:
            forced = Path.COLOCATED
        elif local_only:
            forced = Path.LOCAL_RETRY
        elif not groups:
            if self.config.no_prefill_worker == "fail":
                return Rejection(503, "no prefill worker is ready", self._retry_after_s)
            forced = Path.LOCAL_NO_PREFILL
        if baseline is not None:
            if forced is not None:
                return self.model.predict(q, None, baseline.decode(decodes, q.request, rng), now, forced)
            d = baseline.decode([d for _, sinks in groups for d in sinks], q.request, rng)
            p = baseline.prefill(next(ps for ps, sinks in groups if d in sinks), q.request, rng)
            return self.model.predict(q, p, d, now, Path.SPLIT)
        local = None
        if forced is not None or (self.config.conditional and not q.one_token):
            local = self.model.local(q, decodes, now, rng, forced)
        split = None
        if forced is None:
            best = self.model.one_token if q.one_token else self.model.split
            offers = [best(q, sources, sinks, now, rng) for sources, sinks in groups]
            split = min((o for o in offers if o is not None), key=lambda o: o.ttft_s, default=None)
        if split is not None and local is not None:
            return local if local.ttft_s < split.ttft_s else split
        return split or local or self._too_large(q)

    def _too_large(self, q: Question) -> Rejection:
        seats = max((w.info.max_num_seqs for w in self.ready(Role.DECODE)), default=0)
        if 0 < seats < q.request.n:
            return Rejection(400, f"n: {q.request.n} choices are more than the {seats} sequences of any decode worker")
        return Rejection(400, f"{q.request.prompt_tokens} prompt tokens do not fit the KV cache of any worker")

    def _candidates(self, role: Role, exclude: frozenset[str]) -> list[WorkerLoad]:
        ready = self._ready[role]
        if ready is None:
            ready = self._ready[role] = [w for w in self._pools[role].values() if w.state is WorkerState.READY]
        return [w for w in ready if w.name not in exclude] if exclude else ready

    # -- bookkeeping --------------------------------------------------------------------------------------------

    def _reserve(self, q: Question, choice: Choice, now: float) -> None:
        d, p, request = choice.decode, choice.prefill, q.request
        r = Reservation(
            request=request,
            prefill_worker=p.info.worker_id if p else None,
            decode_worker=d.info.worker_id,
            placed_s=now,
            prefill_s=choice.prefill_s,
            cached_tokens=choice.cached_tokens,
            prefill_blocks=-(-request.prompt_tokens // p.info.block_size_tokens) if p else 0,
            decode_blocks=decode_blocks(d, request, q.output_tokens, q.matched.get(d.name, 0)),
            context_tokens=q.context_tokens,
            tpot_limit_s=max(request.slo.tpot_s, self._promised_tpot_s) if choice.inside_tpot else float("inf"),
            started_s=None if p else now,
        )
        self._reservations[request.request_id] = r
        worker = p or d
        worker.add_prefill(r, now)
        worker.add_recent(now, choice.prefill_s)
        if _decodes(q, choice):
            d.add_decode(r)
            d.add_recent(now, self.model.window_s(q, choice.tpot_s))
        if p is None:
            d.add_local_prefill(now, self.model.window_s(q, choice.tpot_s), choice.prefill_s)
        if request.block_keys:
            self._pending.setdefault(request.block_keys[0], {})[worker.info.worker_id] = request.block_keys
        if self._baseline is not None:
            self._baseline.placed(request, p, d)

    def _end_prefill(self, r: Reservation, now: float, *, done: bool) -> None:
        r.prefilling = False
        worker_id = r.prefill_worker or r.decode_worker
        worker = self.find(worker_id)
        if worker is not None and worker.own.get(r.request.request_id) is r:
            worker.end_prefill(r, now, done=done)
        keys = r.request.block_keys
        if keys:
            holders = self._pending.get(keys[0], {})
            if holders.get(worker_id) is keys:
                del holders[worker_id]
            if not holders:
                self._pending.pop(keys[0], None)

    def _end_lease(self, r: Reservation) -> None:
        if r.leased and r.prefill_worker is not None:
            worker = self.find(r.prefill_worker)
            if worker is not None and worker.own.get(r.request.request_id) is r:
                worker.end_lease(r)
        r.leased = False

    def _learn_cached(self, r: Reservation, worker_id: str, cached_tokens: int) -> None:
        """Compare a prediction with the engine's own count; where the index is guessed, correct it."""
        self.predicted_cached_tokens += r.cached_tokens
        self.actual_cached_tokens += cached_tokens
        worker, keys = self.find(worker_id), r.request.block_keys
        if worker is None or worker.index_exact or not keys:
            return
        held = cached_tokens // self.key_block_tokens
        guess = self._approximate.get(worker_id)
        if guess is not None and cached_tokens < r.cached_tokens:
            guess.missed(keys[held : r.cached_tokens // self.key_block_tokens])
        self._remember(worker_id, keys)

    def _remember(self, worker_id: str, keys: tuple[int, ...]) -> None:
        worker = self.find(worker_id)
        if worker is None or worker.index_exact or not keys:
            return
        guess = self._approximate.get(worker_id)
        if guess is None:
            capacity = worker.info.kv_total_blocks * worker.info.block_size_tokens // self.key_block_tokens
            guess = self._approximate[worker_id] = ApproximateCache(worker_id, self.index, capacity)
        guess.sent(keys)


def _decodes(q: Question, choice: Choice) -> bool:
    """Whether the decode engine takes part: one token is the prefill engine's own."""
    return choice.prefill is None or not q.one_token


def _common(a: tuple[int, ...], b: tuple[int, ...], known: int) -> int:
    """Length of the common start of two key chains of which `known` keys agree: chained, so equality is monotone."""
    lo, hi = known, min(len(a), len(b))
    while lo < hi:
        mid = (lo + hi) // 2
        if a[mid] == b[mid]:
            lo = mid + 1
        else:
            hi = mid
    return lo
