"""Which topology serves a workload within its SLO at the highest rate: a search over everything that can run.

Candidates: pools that do both phases (prompts whole or in chunks), and split pools with any tp and pp a pool, any
replica counts, and any GPU type a pool. Each is rated by the highest arrival rate at which the wanted share of
requests meets TTFT and TPOT (DistServe, Zhong et al., 2024, section 2: goodput), found from steady-state formulas
(rates.py). The best few can then be run in the simulator, which knows queues, block tables and the router's policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from cluster.errors import UserError
from cluster.messages import Slo
from cluster.perf.hardware import Hardware, hardware
from cluster.perf.model_shape import ModelShape
from cluster.perf.source import step_times
from cluster.perf.times import StepTimes
from cluster.perf.transfer import link_between, transfer_bytes, transfer_s
from cluster.planner.capacity import EngineLimits, memory_budget
from cluster.planner.layout import Layout, Pool, Topology, require_pair
from cluster.planner.rates import (
    DecodeCurve,
    MixedCurve,
    Outlook,
    PrefillCurve,
    Workload,
    highest_rate,
    split_outlook,
)

TP = (1, 2, 4, 8)
PP = (1,)
CHUNKS = (None, 512, 2048)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the planner.

    Attributes:
        gpus: type -> how many there are.
        attainment: share of requests that must meet both limits.
        link: between replicas: `rdma`, `nvlink` or `tcp`.
        model: what `shape` was read from, where that is not its name: a folder.
        itl_max_s: longest step a decoding sequence may see; None sets no limit.
    """

    shape: ModelShape
    gpus: Mapping[str, int]
    load: Workload
    slo: Slo
    attainment: float = 0.9
    times: str = "roofline"
    profile: str | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    link: str = "rdma"
    itl_max_s: float | None = None
    model: str = ""
    tp: tuple[int, ...] = TP
    pp: tuple[int, ...] = PP
    chunks: tuple[int | None, ...] = CHUNKS
    limits: EngineLimits = field(default_factory=EngineLimits)


@dataclass(frozen=True, slots=True)
class Rated:
    """One topology at its goodput.

    Attributes:
        goodput_rps: the highest rate at which the wanted share meets the SLO.
        saturated_rps: where means alone meet the limits and nothing waits: what a tool without queues would say.
        outlook: TTFT, TPOT, batch and limits at `goodput_rps`; `outlook.bottleneck` names what binds.
    """

    topology: Topology
    goodput_rps: float
    saturated_rps: float
    outlook: Outlook
    output_tokens: int
    price_per_hour: float

    @property
    def gpus(self) -> int:
        return self.topology.gpus

    @property
    def goodput_per_gpu(self) -> float:
        return self.goodput_rps / self.gpus

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.goodput_per_gpu * self.output_tokens

    @property
    def saturated_tokens_per_s_per_gpu(self) -> float:
        return self.saturated_rps * self.output_tokens / self.gpus

    @property
    def requests_per_dollar(self) -> float:
        return self.goodput_rps * 3600 / self.price_per_hour


@dataclass(frozen=True, slots=True)
class Answer:
    """Every topology that meets the SLO at some rate, best first; `impossible` counts why layouts fell out."""

    rated: list[Rated]
    considered: int
    impossible: dict[str, str]

    def best(self, kind: str | None = None) -> Rated | None:
        """The first of a kind: `split`, `colocated` (chunked or not), or any."""
        for entry in self.rated:
            if kind is None or (entry.topology.kind == "split") == (kind == "split"):
                return entry
        return None


class Planner:
    """Holds the curves of one question, so that layouts are costed once."""

    def __init__(self, question: Question) -> None:
        self.q = question
        self.devices: dict[str, Hardware] = {name: hardware(name) for name in question.gpus}
        self.impossible: dict[str, str] = {}
        longest = question.load.prompt_tokens + question.load.output_tokens
        if longest > question.shape.max_context:
            raise UserError(
                f"prompt: {longest} tokens with the output are above the {question.shape.max_context} that "
                f"{question.shape.name} was made for; lower --prompt or --output"
            )
        # Bound caches belong to this object: a question's curves are dropped with it.
        self.times: Callable[[Layout], StepTimes] = cache(self._times)
        self.room: Callable[[Layout], int] = cache(self._room)
        self.prefill: Callable[[Layout], PrefillCurve] = cache(
            lambda layout: PrefillCurve(self.times(layout), question.load, layout.pp)
        )
        self.decode: Callable[[Layout], DecodeCurve] = cache(
            lambda layout: DecodeCurve(self.times(layout), question.load, self.room(layout))
        )

    def _times(self, layout: Layout) -> StepTimes:
        q, device = self.q, self.devices[layout.gpu]
        return step_times(
            q.times,
            q.shape,
            device,
            layout.tp,
            layout.pp,
            q.weight_dtype,
            q.kv_dtype,
            q.profile,
            link_between(device, q.link),
        )

    def _room(self, layout: Layout) -> int:
        """Sequences that fit at their final length, so that none is preempted."""
        q = self.q
        budget = memory_budget(q.shape, self.devices[layout.gpu], layout.tp, layout.pp, q.weight_dtype, q.limits)
        longest = q.load.prompt_tokens + q.load.output_tokens
        one = q.shape.kv_bytes(longest, q.limits.block_tokens, layout.tp, layout.pp, q.kv_dtype)
        return min(budget.kv_pool_bytes // one, q.limits.max_num_seqs)

    def layouts(self) -> list[Layout]:
        """Layouts that can run the model on the GPUs there are; the others are noted with their reason."""
        possible = []
        for gpu, count in self.q.gpus.items():
            for tp in self.q.tp:
                for pp in self.q.pp:
                    layout = Layout(self.devices[gpu].name, tp, pp)
                    if layout.gpus > count or tp > self.devices[gpu].gpus_per_node:
                        continue
                    try:
                        self.times(layout)
                        room = self.room(layout)
                    except UserError as e:
                        self.impossible[str(layout)] = str(e)
                        continue
                    if room < 1:
                        self.impossible[str(layout)] = "not one sequence of this length fits the KV pool"
                        continue
                    possible.append(layout)
        return possible

    # -- rating -------------------------------------------------------------------------------------------------

    def rate(self, topology: Topology) -> Rated:
        """Goodput of one topology."""
        at = self._outlook(topology)
        goodput = highest_rate(lambda r: at(r).attainment, self.q.attainment)
        saturated = highest_rate(lambda r: float(self._means_hold(at(r))), 0.5)
        price = sum(self.devices[g].price_per_hour * n for g, n in topology.gpus_by_type().items())
        return Rated(
            topology, goodput, max(goodput, saturated), at(max(goodput, 1e-3)), self.q.load.output_tokens, price
        )

    def check(self, topology: Topology) -> None:
        """Raise UserError, in one line, where a topology cannot run: GPUs, memory, heads, or the pair's layouts."""
        for gpu, used in topology.gpus_by_type().items():
            there = self.q.gpus.get(gpu, 0)
            if used > there:
                raise UserError(f"gpus: {topology} takes {used} {gpu}, there are {there}")
        for pool in topology.pools:
            self.times(pool.layout)
            if self.room(pool.layout) < 1:
                longest = self.q.load.prompt_tokens + self.q.load.output_tokens
                raise UserError(f"prompt: not one sequence of {longest} tokens fits the KV pool of {pool.layout}")
        if topology.prefill is not None and topology.decode is not None:
            require_pair(self.q.shape, topology.prefill.layout, topology.decode.layout)

    def _means_hold(self, outlook: Outlook) -> bool:
        return (
            not math.isinf(outlook.ttft_s)
            and outlook.tpot_s <= self.q.slo.tpot_s
            and outlook.limits.get("longest step", 0.0) >= 0
            and outlook.limits.get("KV transfer", 0.0) >= 0
            and min(outlook.limits.get("KV memory", 1.0), outlook.limits.get("decode KV memory", 1.0)) >= 0.5
            and outlook.limits["prefill compute"] > 0
        )

    def _outlook(self, topology: Topology) -> Callable[[float], Outlook]:
        q = self.q
        if topology.prefill is not None and topology.decode is not None:
            source, target = topology.prefill, topology.decode
            moved = transfer_bytes(q.shape, q.load.prompt_tokens, q.limits.block_tokens, q.kv_dtype)
            links = {p: link_between(self.devices[p.layout.gpu], q.link) for p in (source, target)}
            slower = min(links.values(), key=lambda link: link.bytes_per_s)
            ranks = min(source.layout.gpus, target.layout.gpus)
            one_s = transfer_s(moved, slower, ranks)
            use_s = max(moved / (links[p].bytes_per_s * p.gpus) for p in (source, target))
            prefill, decode = self.prefill(source.layout), self.decode(target.layout)
            return lambda r: split_outlook(
                r, prefill, source.replicas, decode, target.replicas, one_s, use_s, q.slo, q.itl_max_s
            )
        curves = [
            MixedCurve(self.times(p.layout), q.load, self.room(p.layout), p.replicas, topology.chunk_tokens)
            for p in topology.colocated
        ]
        (curve,) = curves
        return lambda r: curve.outlook(r, q.slo, q.itl_max_s)

    # -- search -------------------------------------------------------------------------------------------------

    def candidates(self, layouts: list[Layout]) -> Iterator[Topology]:
        """Every topology of one GPU type, or of one type a pool; none to which a replica could be added."""
        counts = {self.devices[g].name: n for g, n in self.q.gpus.items()}
        for layout in layouts:
            pool = Pool(layout, counts[layout.gpu] // layout.gpus)
            for chunk in self.q.chunks:
                if chunk is None or chunk < self.q.load.new_tokens:
                    yield Topology(colocated=(pool,), chunk_tokens=chunk)
        for source in layouts:
            for target in layouts:
                try:
                    require_pair(self.q.shape, source, target)
                except UserError as e:
                    self.impossible[f"P {source} + D {target}"] = str(e)
                    continue
                for p, d in _replica_counts(source, target, counts):
                    yield Topology(prefill=Pool(source, p), decode=Pool(target, d))

    def search(self, progress: Callable[[int], None] | None = None, only: Topology | None = None) -> Answer:
        """Rate all candidates (or one); best goodput per GPU first.

        Raises:
            UserError: no layout can run the model, or none meets the SLO at any rate; the line says what comes closest.
        """
        if only is not None:
            self.check(only)
        layouts = self.layouts() if only is None else [pool.layout for pool in only.pools]
        if not layouts:
            raise UserError(next(reversed(self.impossible.values()), "gpus: there are none"))
        rated, considered = [], 0
        for topology in self.candidates(layouts) if only is None else [only]:
            considered += 1
            entry = self.rate(topology)
            if entry.goodput_rps > 0:
                rated.append(entry)
            if progress and considered % 20 == 0:
                progress(considered)
        if not rated:
            raise UserError(self._unattainable(layouts))
        rated = self._merge_types(rated)
        rated.sort(key=lambda e: (-e.goodput_per_gpu, e.gpus))
        return Answer(rated, considered, dict(self.impossible))

    def _merge_types(self, rated: list[Rated]) -> list[Rated]:
        """With several GPU types, colocated pools of every type side by side serve the sum of their rates."""
        if len(self.q.gpus) < 2:
            return rated
        best: dict[str, Rated] = {}
        for entry in rated:
            if entry.topology.colocated:
                gpu = entry.topology.colocated[0].layout.gpu
                if gpu not in best or entry.goodput_rps > best[gpu].goodput_rps:
                    best[gpu] = entry
        if len(best) < 2:
            return rated
        parts = list(best.values())
        total = sum(p.goodput_rps for p in parts)
        worst = max(parts, key=lambda p: p.outlook.ttft_s).outlook
        merged = Rated(
            Topology(
                colocated=tuple(p.topology.colocated[0] for p in parts), chunk_tokens=parts[0].topology.chunk_tokens
            ),
            total,
            sum(p.saturated_rps for p in parts),
            Outlook(
                total,
                sum(p.outlook.ttft_s * p.goodput_rps for p in parts) / total,
                sum(p.outlook.tpot_s * p.goodput_rps for p in parts) / total,
                worst.itl_max_s,
                worst.batch,
                min(p.outlook.attainment for p in parts),
                worst.limits,
            ),
            self.q.load.output_tokens,
            sum(p.price_per_hour for p in parts),
        )
        return [*rated, merged]

    def _unattainable(self, layouts: list[Layout]) -> str:
        q = self.q
        ttft, ttft_by = min((self.prefill(layout).latency_s, str(layout)) for layout in layouts)
        tpot, tpot_by = min((self.decode(layout).step_s(1), str(layout)) for layout in layouts)
        if ttft > q.slo.ttft_s:
            return (
                f"slo.ttft: {q.slo.ttft_s * 1e3:.0f} ms cannot be met at any rate: an idle {ttft_by} takes "
                f"{ttft * 1e3:.0f} ms for {q.load.new_tokens} prompt tokens"
            )
        if tpot > q.slo.tpot_s:
            return (
                f"slo.tpot: {q.slo.tpot_s * 1e3:.0f} ms cannot be met at any rate: an idle {tpot_by} takes "
                f"{tpot * 1e3:.1f} ms a step"
            )
        if q.itl_max_s is not None and tpot > q.itl_max_s:
            return (
                f"itl-max-ms: {q.itl_max_s * 1e3:g} ms cannot be met at any rate: an idle {tpot_by} takes "
                f"{tpot * 1e3:.1f} ms a step"
            )
        longest = "" if q.itl_max_s is None else f", steps of at most {q.itl_max_s * 1e3:g} ms"
        gpus = ", ".join(f"{n} {g}" for g, n in q.gpus.items())
        return (
            f"slo: {q.slo.ttft_s * 1e3:.0f} ms TTFT{longest} and {q.slo.tpot_s * 1e3:.0f} ms TPOT for "
            f"{q.attainment:.0%} of the requests leave no room for queues on {gpus}"
        )


def _replica_counts(source: Layout, target: Layout, counts: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(prefill, decode) replicas: with one GPU type those that leave no room for another; with two, all."""
    if source.gpu != target.gpu:
        for p in range(1, counts[source.gpu] // source.gpus + 1):
            for d in range(1, counts[target.gpu] // target.gpus + 1):
                yield p, d
        return
    count = counts[source.gpu]
    for p in range(1, count // source.gpus + 1):
        left = count - p * source.gpus
        d = left // target.gpus
        if d >= 1 and left - d * target.gpus < source.gpus:
            yield p, d


def pareto(rated: list[Rated]) -> list[Rated]:
    """Those that no other beats in both tokens a second a GPU and speed of one user (1 / TPOT), fastest user first."""
    front: list[Rated] = []
    best = 0.0
    for entry in sorted(rated, key=lambda e: (e.outlook.tpot_s, -e.tokens_per_s_per_gpu)):
        if entry.tokens_per_s_per_gpu > best:
            front.append(entry)
            best = entry.tokens_per_s_per_gpu
    return front
