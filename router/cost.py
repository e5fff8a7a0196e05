"""Predicted TTFT and TPOT of a request on given workers, and the best pair by them.

For a prefill engine p, a decode engine d and a prompt whose first m_p tokens p holds (m_d: d):

    split   TTFT = max(wait_p + prefill_p(prompt - m_p) + transfer_pd(bytes beyond m_d), room_d) + step_d
    local   TTFT = max(wait_d, room_d) + prefill_d(prompt - m_d, between d's decode steps)
    TPOT  = step_d(batch + 1, context + prompt) / (1 - share of d's time that goes to local prefills)

`wait` is a queue of prefill work (and of KV that leases must give back), `room_d` the wait for free sequences and KV
blocks. All but the transfer's distance is a term of p plus a term of d, so the best pair takes one pass over each pool.
An answer of one token is the prefill engine's own: it is there at wait_p + prefill_p.

Shared prefixes. Where a prompt leaves what others hold at a point from which `fan_out` prompts go on differently, the
prefix up to there will be used about as often again (Lindy). An engine that lacks it computes it once for all of those,
so the cost of doing so is divided by 1 + fan_out; if that is below 1% of the TTFT limit, the engine ranks as if it held
the prefix. New conversations thus spread over the pool although one engine has the system prompt, at a cost of at most
one computation of it per engine, while a conversation's own history is never computed twice for balance.

Equal candidates: the one that was given least lately, at random where that is equal too.

Nothing here changes a load; the model learns three means from finished requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cluster.messages import Outcome, Path, Request, RequestRecord, Stage
from router.choice import Choice, Distance, Question, distance
from router.load import Mean, WorkerLoad

T = TypeVar("T", bound=tuple[Any, ...])

TIE_FRACTION = 0.02
TIE_S = 0.5e-3
"""Predictions that differ by less are equal: the model is not better than that."""
OUTPUT_TOKENS_PRIOR = 200.0
HOLD_PRIOR_S = 0.1
SHARED_FAN_OUT = 2
SHARED_FRACTION = 0.01
"""Of the TTFT limit: what a request may pay for its part of a prefix that others will use."""
DISTANCE_LEARNED = 5
"""Transfers over a distance before its factor is used."""
DISTANCE_BOUND = 20.0
LONGEST_SHARE = 0.95
LONGEST_WAIT_S = 3600.0
SHORTEST_WINDOW_S = 1e-3


def prefill_s(worker: WorkerLoad, new: int, context: int) -> float:
    """Seconds to compute `new` prompt tokens behind `context` cached ones, in chunks of the engine's step budget."""
    if new <= 0:
        return 0.0
    budget = worker.info.max_num_batched_tokens
    if new <= budget:
        return worker.times.step_s(((new, context),), 0, 0)
    full, rest = divmod(new, budget)
    # Attention makes chunks linearly slower as the context grows: first and last give the mean.
    first = worker.times.step_s(((budget, context),), 0, 0)
    last = worker.times.step_s(((budget, context + (full - 1) * budget),), 0, 0) if full > 1 else first
    total = full * (first + last) / 2
    if rest:
        total += worker.times.step_s(((rest, context + full * budget),), 0, 0)
    return total


def decode_blocks(worker: WorkerLoad, request: Request, output_tokens: float, matched_tokens: int) -> int:
    """KV blocks that the request will take on a decode engine beyond those it already holds.

    At most all of them: choices are sequences of their own, and those that find no room wait in the engine.
    """
    block = worker.block
    tokens = request.prompt_tokens + request.n * int(output_tokens)
    return min((tokens + block - 1) // block, worker.info.kv_total_blocks) - matched_tokens // block


def never_fits(worker: WorkerLoad, prompt_tokens: int) -> bool:
    """Whether one sequence is too much for an empty engine: the prompt's blocks, and one to go on in."""
    return -(-prompt_tokens // worker.block) + 1 > worker.info.kv_total_blocks


class CostModel:
    """Predictions for one router, and the choice by them.

    Args:
        lease_headroom: share of a prefill engine's KV that prompts waiting to be pulled should leave free.
    """

    def __init__(self, lease_headroom: float = 0.1) -> None:
        self.lease_headroom = lease_headroom
        self.output_tokens = Mean(OUTPUT_TOKENS_PRIOR)
        self.hold_s = Mean(HOLD_PRIOR_S)
        """From ticket to first token: how long a prompt's KV stays on its prefill engine."""
        self.distance_factor = {d: Mean(1.0) for d in Distance}

    def question(
        self,
        request: Request,
        matched: dict[str, int],
        pending: dict[str, int],
        shared_tokens: int = 0,
        fan_out: int = 0,
    ) -> Question:
        output = min(self.output_tokens.value, request.max_output_tokens)
        cached = matched
        if pending:
            cached = dict(matched)
            for worker_id, tokens in pending.items():
                if tokens > cached.get(worker_id, 0):
                    cached[worker_id] = tokens
        if fan_out < SHARED_FAN_OUT:
            shared_tokens = 0
        context = request.prompt_tokens + output / 2
        return Question(request, matched, cached, output, context, shared_tokens, fan_out)

    def observe(self, record: RequestRecord, prefill: WorkerLoad | None, decode: WorkerLoad | None) -> None:
        """Learn output lengths, and how much longer than modelled transfers over a distance take.

        A request that moved after its first token names the pair that ended it, while its transfer is the first pair's.
        """
        if record.output_tokens and record.outcome is Outcome.DONE:
            self.output_tokens.add(record.output_tokens)
        if record.migrations:
            return
        measured = record.stage_s.get(Stage.KV_TRANSFER)
        if prefill is None or decode is None or not measured or not record.transfer_bytes:
            return
        modelled = decode.times.transfer_s(record.transfer_bytes)
        if modelled > 0:
            ratio = min(DISTANCE_BOUND, max(1 / DISTANCE_BOUND, measured / modelled))
            self.distance_factor[distance(prefill, decode)].add(ratio)

    # -- the two ways ---------------------------------------------------------------------------------------------

    def split(
        self, q: Question, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], now: float, rng: random.Random
    ) -> Choice | None:
        """The best pair; None if no decode engine can ever hold the request."""
        waits = self._sources(q, prefills, now)
        _, index, best = _draw(waits, prefills, now, rng, q.ahead_s)
        near = self._nearest(prefills, waits, index, best)
        far = self.factor(Distance.FAR)
        request, slo_tpot = q.request, q.request.slo.tpot_s
        prompt, context, matched = request.prompt_tokens, q.context_tokens, q.matched.get
        tokens = prompt + request.n * int(q.output_tokens)
        transfers: dict[tuple[int, int], tuple[float, float]] = {}
        candidates: list[tuple[float, int, float, float, int]] = []
        outside: list[tuple[float, int, float, float, int]] = []
        for i, d in enumerate(decodes):
            held = matched(d.name, 0)
            if d.step_base_s < 0:
                d.refresh_step()
            tpot = d.step_base_s + d.step_slope_s * context
            if d.local_until_s > now:
                tpot = with_local_prefill(tpot, d.local_share(now))
            room = 0.0
            block = d.block
            if (tokens + block - 1) // block - held // block > d.free_blocks or request.n > d.free_sequences:
                room = self.room_s(d, q)
                if room == math.inf:
                    continue
            key = (d.times_id, held)
            known = transfers.get(key)
            if known is None:
                known = transfers[key] = self._transfer_s(q, d, held)
            counted, transfer = known
            # Less what every candidate shares, so that ties are judged on what d decides.
            own, source = (far * transfer, index) if near is None else near(d, transfer)
            rank = own - (transfer - counted)
            if best + own < room:
                own = room - best
                rank = max(rank, own)
            limit = slo_tpot if slo_tpot < d.tightest_tpot_s else d.tightest_tpot_s
            (candidates if tpot <= limit else outside).append((rank + tpot, i, own + tpot, tpot, source))
        if candidates:
            _, sink, own, tpot, source = _draw(candidates, decodes, now, rng)
        elif outside:
            _, sink, own, tpot, source = min(outside, key=lambda c: (c[3], c[0], rng.random()))
        else:
            return None
        p = prefills[source]
        cached = q.cached.get(p.name, 0)
        work = prefill_s(p, prompt - cached, cached)
        return Choice(Path.SPLIT, decodes[sink], p, best + own, tpot, cached, work, bool(candidates))

    def one_token(
        self, q: Question, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], now: float, rng: random.Random
    ) -> Choice | None:
        """The best prefill engine for a request that it serves whole; None if no engine can ever hold the prompt.

        A placement names a decode engine; that one never hears of it.
        """
        prefills = [p for p in prefills if not never_fits(p, q.request.prompt_tokens)]
        if not prefills:
            return None
        _, index, _ = _draw(self._sources(q, prefills, now), prefills, now, rng, q.ahead_s)
        return self.predict(q, prefills[index], decodes[0], now, Path.SPLIT)

    def local(
        self, q: Question, decodes: Sequence[WorkerLoad], now: float, rng: random.Random, forced: Path | None
    ) -> Choice | None:
        """The best decode engine to compute the prompt by itself.

        Unless `forced`, only where every step with a chunk of the prompt stays inside the tightest TPOT limit.
        """
        request, slo_tpot = q.request, q.request.slo.tpot_s
        prompt, n, context, output = request.prompt_tokens, request.n, q.context_tokens, q.output_tokens
        tokens = prompt + n * int(output)
        cached_of, held, ahead_s = q.cached.get, q.matched.get, q.ahead_s
        works: dict[tuple[int, int], tuple[float, int, float]] = {}
        candidates: list[tuple[float, int, float, float, float]] = []
        outside: list[tuple[float, int, float, float, float]] = []
        for i, d in enumerate(decodes):
            cached = cached_of(d.name, 0)
            key = (d.times_id, cached)
            known = works.get(key)
            if known is None:
                chunks = max(1, -(-(prompt - cached) // d.info.max_num_batched_tokens))
                work = prefill_s(d, prompt - cached, cached)
                known = works[key] = work, chunks, work - self._rank(q, d, cached, work)
            work, chunks, shared = known
            limit = slo_tpot if slo_tpot < d.tightest_tpot_s else d.tightest_tpot_s
            if forced is None and work > limit * chunks:
                continue
            # A step that also holds a chunk takes at most both times; their fixed parts are counted twice.
            if d.step_base_s < 0:
                d.refresh_step()
            step = d.step_base_s + d.step_slope_s * context
            if forced is None and work / chunks + step > limit:
                continue
            wait = d.free_s - now if d.free_s > now else 0.0
            if ahead_s:
                wait = ahead_s.get(d.name, wait)
            block = d.block
            if (tokens + block - 1) // block - held(d.name, 0) // block > d.free_blocks or n > d.free_sequences:
                room = self.room_s(d, q)
                if room == math.inf:
                    continue
                wait = max(wait, room)
            # The share of this prompt in the time that this request decodes, plus that of earlier ones.
            share = work / (output * step) if output else 1.0
            if d.local_until_s > now:
                share += d.local_share(now)
            tpot = step / (1.0 - share) if share < LONGEST_SHARE else step / (1.0 - LONGEST_SHARE)
            ttft = wait + work + chunks * step
            (candidates if tpot <= limit else outside).append((ttft - shared, i, ttft, tpot, work))
        if candidates:
            _, index, ttft, tpot, work = _draw(candidates, decodes, now, rng, ahead_s)
        elif forced is not None and outside:
            _, index, ttft, tpot, work = min(outside, key=lambda c: (c[0], rng.random()))
        else:
            return None
        d = decodes[index]
        cached = cached_of(d.name, 0)
        path = forced or (Path.LOCAL_CACHED if cached >= prompt - cached else Path.LOCAL_SHORT)
        return Choice(path, d, None, ttft, tpot, cached, work, bool(candidates))

    def predict(self, q: Question, p: WorkerLoad | None, d: WorkerLoad, now: float, path: Path) -> Choice:
        """What is expected of a given pair, or of d alone. An impossible wait is an hour."""
        prompt, room = q.request.prompt_tokens, min(self.room_s(d, q), LONGEST_WAIT_S)
        limit = min(q.request.slo.tpot_s, d.tightest_tpot_s)
        if p is None:
            cached = q.cached.get(d.name, 0)
            work = prefill_s(d, prompt - cached, cached)
            step = d.step_s(q.context_tokens)
            chunks = -(-(prompt - cached) // d.info.max_num_batched_tokens)
            tpot = with_local_prefill(step, d.local_share(now) + work / self.window_s(q, step))
            ttft = max(d.backlog_s(now), room) + work + chunks * step
            return Choice(path, d, None, ttft, tpot, cached, work, tpot <= limit)
        ready = self._sources(q, [p], now)[0][2]
        cached = q.cached.get(p.name, 0)
        if q.one_token:
            return Choice(path, d, p, ready, 0.0, cached, prefill_s(p, prompt - cached, cached), inside_tpot=True)
        missing = prompt - q.matched.get(d.name, 0)
        transfer = d.times.transfer_s(missing * d.info.kv_bytes_per_token) * self.factor(distance(p, d))
        tpot = with_local_prefill(d.step_s(q.context_tokens), d.local_share(now))
        ttft = max(ready + transfer, room) + tpot
        return Choice(path, d, p, ttft, tpot, cached, prefill_s(p, prompt - cached, cached), tpot <= limit)

    def explain_prefill(self, q: Question, prefills: Sequence[WorkerLoad], now: float) -> list[dict[str, Any]]:
        """Every prefill candidate with the terms of its prediction."""
        return [
            {
                "worker": prefills[i].name,
                "cached_tokens": q.cached.get(prefills[i].name, 0),
                "backlog_s": prefills[i].backlog_s(now),
                "ready_s": ready,
                "rank_s": rank,
            }
            for rank, i, ready in self._sources(q, prefills, now)
        ]

    def explain_decode(self, q: Question, decodes: Sequence[WorkerLoad], now: float) -> list[dict[str, Any]]:
        """Every decode candidate with the terms of its prediction."""
        return [
            {
                "worker": d.name,
                "cached_tokens": q.cached.get(d.name, 0),
                "backlog_s": d.backlog_s(now),
                "room_s": min(self.room_s(d, q), LONGEST_WAIT_S),
                "transfer_s": self._transfer_s(q, d, q.matched.get(d.name, 0))[1],
                "tpot_s": with_local_prefill(d.step_s(q.context_tokens), d.local_share(now)),
                "sequences": d.sequences,
                "used_blocks": d.used_blocks,
            }
            for d in decodes
        ]

    # -- terms ----------------------------------------------------------------------------------------------------

    def room_s(self, d: WorkerLoad, q: Question) -> float:
        """Wait until d has sequences and KV for this request, or has all its KV free; infinite if it can never hold the
        prompt or run all choices: those that wait would hold up whoever else waits, until the engine is empty.

        Running sequences end at a rate of running / (mean output x step), each giving back its share of the KV.
        """
        sequences = q.request.n
        if sequences > d.info.max_num_seqs or never_fits(d, q.request.prompt_tokens):
            return math.inf
        blocks = decode_blocks(d, q.request, q.output_tokens, q.matched.get(d.name, 0))
        if blocks <= d.free_blocks and sequences <= d.free_sequences:
            return 0.0
        running = max(1, d.sequences)
        excess_blocks = (blocks - d.free_blocks) * running / max(1, d.used_blocks)
        ending = max(float(sequences - d.free_sequences), excess_blocks, 1.0)
        step = d.step_s(q.context_tokens)
        return ending * self.output_tokens.value * step / min(running, d.info.max_num_seqs)

    def factor(self, d: Distance) -> float:
        """Measured over modelled transfer time for a distance, once enough transfers went over it."""
        mean = self.distance_factor[d]
        return mean.value if mean.samples >= DISTANCE_LEARNED else 1.0

    def _sources(self, q: Question, prefills: Sequence[WorkerLoad], now: float) -> list[tuple[float, int, float]]:
        """(rank, position, time until the prompt is computed there) for each prefill engine."""
        prompt, cached_of, ahead_s = q.request.prompt_tokens, q.cached.get, q.ahead_s
        works: dict[tuple[int, int], tuple[float, float]] = {}
        waits = []
        for i, p in enumerate(prefills):
            cached = cached_of(p.name, 0)
            key = (p.times_id, cached)
            known = works.get(key)
            if known is None:
                ready = prefill_s(p, prompt - cached, cached)
                known = works[key] = self._rank(q, p, cached, ready), ready
            rank, ready = known
            wait = p.free_s - now
            if ahead_s and p.name in ahead_s:
                wait = ahead_s[p.name]
            if wait > 0.0:
                rank += wait
                ready += wait
            if prompt > p.free_blocks * p.block:
                wait = self._lease_wait_s(p, prompt)
                rank += wait
                ready += wait
            waits.append((rank, i, ready))
        return waits

    def _rank(self, q: Question, worker: WorkerLoad, cached: int, work: float) -> float:
        """Compute time as it counts for the choice: without a shared prefix that is worth having there."""
        if cached >= q.shared_tokens:
            return work
        without = prefill_s(worker, q.request.prompt_tokens - q.shared_tokens, q.shared_tokens)
        return without if work - without <= self._share_limit_s(q) else work

    def _transfer_s(self, q: Question, d: WorkerLoad, held: int) -> tuple[float, float]:
        """Transfer time of what d does not hold: as it counts for the choice, and as it is."""
        size = d.info.kv_bytes_per_token
        transfer = d.times.transfer_s((q.request.prompt_tokens - held) * size)
        if held >= q.shared_tokens:
            return transfer, transfer
        without = d.times.transfer_s((q.request.prompt_tokens - q.shared_tokens) * size)
        return (without if transfer - without <= self._share_limit_s(q) else transfer), transfer

    def _share_limit_s(self, q: Question) -> float:
        return SHARED_FRACTION * q.request.slo.ttft_s * (1 + q.fan_out)

    def _lease_wait_s(self, p: WorkerLoad, prompt: int) -> float:
        """Wait for leases on p to end where the prompt needs their KV."""
        room = p.free_blocks - self.lease_headroom * p.info.kv_total_blocks
        short = prompt / p.block - room
        if short <= 0:
            return 0.0
        return self.hold_s.value * max(1.0, short / max(1, p.used_blocks) * max(1, p.leases))

    def _nearest(
        self, prefills: Sequence[WorkerLoad], waits: Sequence[tuple[float, int, float]], first: int, best: float
    ) -> Callable[[WorkerLoad, float], tuple[float, int]] | None:
        """How to find the best source for a given decode engine; None where distance makes no difference.

        Args:
            waits: see `_sources`; `first` is the position of the best source, `best` when it is ready.

        Returns:
            From a decode engine and the modelled transfer to (transfer time plus what the source is later than the
            best one, its position).
        """
        node, rack, far = (self.factor(d) for d in Distance)
        if node == rack == far:
            return None
        by_node: dict[str, tuple[float, int]] = {}
        by_rack: dict[str, tuple[float, int]] = {}
        for _, i, ready in sorted(waits):
            info = prefills[i].info
            if info.node not in by_node or info.rack not in by_rack:
                late = ready - best, i
                by_node.setdefault(info.node, late)
                by_rack.setdefault(info.rack, late)
        preferred = 0.0, first

        def nearest(d: WorkerLoad, transfer: float) -> tuple[float, int]:
            mine = d.info
            at, chosen = math.inf, first
            for option in (preferred, by_node.get(mine.node), by_rack.get(mine.rack)):
                if option is None:
                    continue
                late, i = option
                info = prefills[i].info
                if mine.node and info.node == mine.node:
                    factor = node
                else:
                    factor = rack if mine.rack and info.rack == mine.rack else far
                if late + factor * transfer < at:
                    at, chosen = late + factor * transfer, i
            return at, chosen

        return nearest

    def window_s(self, q: Question, step_s: float) -> float:
        """How long this request is expected to decode."""
        return max(SHORTEST_WINDOW_S, q.output_tokens * step_s)


def with_local_prefill(step_s: float, share: float) -> float:
    """TPOT of an engine that spends `share` of its time on prompts."""
    return step_s / (1.0 - min(share, LONGEST_SHARE))


def _draw(
    costs: list[T],
    workers: Sequence[WorkerLoad],
    now: float,
    rng: random.Random,
    ahead_s: Mapping[str, float] | None = None,
) -> T:
    """The candidate with the least first item. Of ties the worker (second item) that was given least lately, but first
    one for which nobody waits in the router: that is the one which admission takes the request to be for.
    """
    best = min(costs)[0]
    limit = best + max(TIE_S, TIE_FRACTION * best)
    ties = [c for c in costs if c[0] <= limit]
    if len(ties) == 1:
        return ties[0]
    if ahead_s:
        ties = [c for c in ties if workers[c[1]].name not in ahead_s] or ties
    return min(ties, key=lambda c: (workers[c[1]].recent(now), rng.random()))
