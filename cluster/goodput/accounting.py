"""The one definition of goodput: what is good, which stage a miss is charged to, and the counters of both.

The router, the simulator and the load tests all count with this module, so their figures compare.

    good      finished without error, TTFT <= slo.ttft_s, TPOT <= slo.tpot_s, ITL p99 <= slo.itl_p99_s where set
    excused   the client left by itself before any deadline had passed: neither good nor missed
    refused   answered 4xx before a token (a tenant beyond its budget, a prompt that fits nowhere): neither good nor
              missed, because no number of replicas would have served it
    missed    everything else that ended: late, failed, rejected, or cancelled after a deadline had passed
    offered   every request that arrived = good + missed + excused + refused + running

A miss is charged to exactly one stage:

    =====================================  ======================================================================
    how the request missed                 stage
    =====================================  ======================================================================
    rejected                               router queue: it was refused for want of a place
    ended without a first token            the last stage that it reached
    first token late                       (1) the stages that serve (prefill compute, decode step) alone exceed
                                           the limit: the longer of the two; (2) otherwise the longest wait
                                           (router queue, prefill queue, KV transfer, decode queue)
    first token in time, the rest not      decode step (too slow, or cut while decoding)
    =====================================  ======================================================================

Why serving and waiting are told apart: what a request costs on an idle cluster cannot be bought away with
replicas, what it waits can. If 300 ms of prefill and 250 ms in decode's queue miss a limit of 500 ms, the longest
stage is the prefill, yet more prefill engines would change nothing; the queue made the difference. TTFT is looked
at before TPOT because a request is lost at the first limit that it breaks. Time before the first token that no
stage owns was spent in the router and counts as its queue.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.goodput.timing import itl_p99_s
from cluster.messages import Outcome, RequestRecord, Role, Slo, Stage

# Upper edges of "how much of its limit did this use": exact counters whose difference gives a window's quantile.
USED_EDGES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, math.inf)

SERVING = (Stage.PREFILL_COMPUTE, Stage.DECODE_STEP)
WAITING = (Stage.ROUTER_QUEUE, Stage.PREFILL_QUEUE, Stage.KV_TRANSFER, Stage.DECODE_QUEUE)
PIPELINE = tuple(Stage)
PRIORITIES_APART = 100
"""Priorities from here on, in either direction, are counted together."""
LEAVING_S = 0.5
"""How long it may take until a client's leaving is heard of."""


def is_good(record: RequestRecord) -> bool:
    """Whether the request finished without error within every limit of its SLO."""
    return record.outcome is Outcome.DONE and _ttft_met(record) and _tokens_met(record)


def is_excused(record: RequestRecord) -> bool:
    """Whether the client left by itself while every deadline could still be met."""
    if record.outcome is not Outcome.CANCELLED or record.deadline_passed:
        return False
    return _ttft_met(record) and _tokens_met(record)


def is_refused(record: RequestRecord) -> bool:
    """Whether a rule turned the request away that more replicas would not change."""
    by_rule = record.status is not None and 400 <= record.status < 500
    return record.outcome is Outcome.REJECTED and by_rule and record.ttft_s is None


def is_missed(record: RequestRecord) -> bool:
    return not is_good(record) and not is_excused(record) and not is_refused(record)


def is_behind(record: RequestRecord) -> bool:
    """Whether the tokens so far came slower than the TPOT limit, with the wait for the one that never came.

    The tokens of several choices count together: in doubt a client that leaves is excused.
    """
    if record.ttft_s is None:
        return False
    since_first_s = record.end_s - record.arrival_s - record.ttft_s
    return since_first_s > record.slo.tpot_s * record.output_tokens + LEAVING_S


def within_promise(record: RequestRecord, slo: Slo) -> RequestRecord:
    """The record under limits no stricter than `slo`: what a client asks beyond the cluster's limits is its own wish,
    and no reason for replicas."""
    own = record.slo
    itl_p99_s = None if own.itl_p99_s is None or slo.itl_p99_s is None else max(own.itl_p99_s, slo.itl_p99_s)
    wider = Slo(max(own.ttft_s, slo.ttft_s), max(own.tpot_s, slo.tpot_s), itl_p99_s)
    if wider == own:
        return record
    judged = replace(record, slo=wider)
    if record.outcome is Outcome.CANCELLED:
        judged.deadline_passed = is_behind(judged)
    return judged


def miss_stage(record: RequestRecord) -> Stage | None:
    """The one stage that is charged with the miss (the table above); None where nothing was missed."""
    if not is_missed(record):
        return None
    if record.outcome is Outcome.REJECTED:
        return Stage.ROUTER_QUEUE
    if record.ttft_s is None:
        reached = [stage for stage in PIPELINE if stage in record.stage_s]
        return reached[-1] if reached else Stage.ROUTER_QUEUE
    if not _ttft_met(record):
        return _late_first_token_stage(record)
    return Stage.DECODE_STEP


def _ttft_met(record: RequestRecord) -> bool:
    # Without a token the whole stay counts: a request that ends empty is judged by when it ended.
    first_s = record.ttft_s if record.ttft_s is not None else record.end_s - record.arrival_s
    return first_s <= record.slo.ttft_s


def _tokens_met(record: RequestRecord) -> bool:
    if record.tpot_s is not None and not record.tpot_s <= record.slo.tpot_s:
        return False
    limit_s = record.slo.itl_p99_s
    if limit_s is None:
        return True
    p99_s = itl_p99_s(record.itl_s)
    return p99_s is None or p99_s <= limit_s


def _late_first_token_stage(record: RequestRecord) -> Stage:
    spent = dict(record.stage_s)
    unowned_s = (record.ttft_s or 0.0) - sum(spent.values())
    if unowned_s > 0:
        spent[Stage.ROUTER_QUEUE] = spent.get(Stage.ROUTER_QUEUE, 0.0) + unowned_s
    serving_s = sum(spent.get(stage, 0.0) for stage in SERVING)
    suspects = SERVING if serving_s > record.slo.ttft_s else WAITING
    # max() keeps the first of equals: a tie goes to the earlier stage of the pipeline.
    return max(suspects, key=lambda stage: spent.get(stage, 0.0))


@dataclass(slots=True)
class GoodputCounters:
    """Monotone counters, safe to add, merge and difference; at any time

        started == done + failed + rejected + cancelled + running

    `start` counts an arrival, `finish` its one end. One flat table of numbers is the whole state, so it travels
    as it is (`values`); every key is a name, or a name and a label: `missed{router_queue}`.
    """

    values: dict[str, float] = field(default_factory=dict)

    def start(self, *, prompt_tokens: int = 0, tenant: str = "default", priority: int = 0) -> None:
        """Count an arrival, before anything can refuse it."""
        self._inc("started")
        self._inc("started_prompt_tokens", prompt_tokens)
        self._inc(label("tenant_started", tenant))
        self._inc(label("priority_started", _priority_class(priority)))

    def finish(self, record: RequestRecord) -> None:
        """Count the end of a request that `start` has counted."""
        self._inc(label("outcome", record.outcome))
        self._inc(label("path", record.path.value if record.path else "none"))
        if is_good(record):
            verdict = "good"
        elif is_excused(record):
            verdict = "excused"
        elif is_refused(record):
            verdict = "refused"
            self._inc("refused_prompt_tokens", record.prompt_tokens)
        else:
            verdict = "missed"
            stage = miss_stage(record) or Stage.ROUTER_QUEUE
            self._inc(label("missed_stage", stage))
            if record.prefill_worker is None and record.decode_worker is not None:
                # Its prompt was for the decode engine: whatever the stage, the prefill pool had no part in it.
                self._inc(label("missed_local", stage))
        self._inc(verdict)
        self._inc(label(f"tenant_{verdict}", record.tenant))
        self._inc(label(f"priority_{verdict}", _priority_class(record.priority)))
        self._inc("prompt_tokens", record.prompt_tokens)
        if record.ttft_s is not None or Stage.PREFILL_COMPUTE in record.stage_s:
            # Only these tell what a request costs: one that was refused or gave up waiting computed nothing.
            self._inc("served")
            self._inc("served_prompt_tokens", record.prompt_tokens)
            self._inc("predicted_cached_tokens", record.predicted_cached_tokens)
        leg = Role.PREFILL if record.prefill_worker is not None else Role.DECODE
        self._inc(label("cached_tokens", leg), record.cached_tokens)
        if leg is Role.PREFILL and Stage.PREFILL_COMPUTE in record.stage_s:
            computed = record.prompt_tokens - record.cached_tokens
            self._inc(label("computed_tokens", Role.PREFILL), computed)
            self._inc("prefill_computed_tokens_squared", computed * computed)
            self._inc("prefill_legs")
        by_decode = record.decode_computed_tokens
        if leg is Role.DECODE and not by_decode and record.ttft_s is not None:
            by_decode = record.prompt_tokens - record.cached_tokens
        self._inc(label("computed_tokens", Role.DECODE), by_decode)
        self._inc("output_tokens", record.output_tokens)
        if verdict == "good":
            self._inc("good_output_tokens", record.output_tokens)
        self._inc("transfer_bytes", record.transfer_bytes)
        self._inc("transfer_blocks", record.transfer_blocks)
        self._inc("retries", max(0, record.attempts - 1))
        self._inc("migrations", record.migrations)
        if record.outcome is Outcome.DONE and record.ttft_s is not None:
            self._use("ttft", record.ttft_s, record.slo.ttft_s)
            self._use("tpot", record.tpot_s or 0.0, record.slo.tpot_s)
            for stage in WAITING:
                self._use(stage, record.stage_s.get(stage, 0.0), record.slo.ttft_s)

    def count(self, record: RequestRecord) -> None:
        """Arrival and end at once, for records that are read after the fact."""
        self.start(prompt_tokens=record.prompt_tokens, tenant=record.tenant, priority=record.priority)
        self.finish(record)

    def merge(self, other: GoodputCounters) -> None:
        for key, value in other.values.items():
            self._inc(key, value)

    def copy(self) -> GoodputCounters:
        return GoodputCounters(dict(self.values))

    def since(self, before: GoodputCounters) -> GoodputCounters:
        """What was counted after `before`. A counter below its earlier value was restarted and counts from zero."""
        delta = {}
        for key, value in self.values.items():
            was = before.values.get(key, 0.0)
            delta[key] = value - was if value >= was else value
        return GoodputCounters(delta)

    def get(self, name: str, of: object = None) -> float:
        return self.values.get(name if of is None else label(name, of), 0.0)

    def labels(self, name: str) -> dict[str, float]:
        """All values of a labelled counter, by label."""
        start = name + "{"
        return {key[len(start) : -1]: value for key, value in self.values.items() if key.startswith(start)}

    def used_quantile(self, of: str, q: float) -> float | None:
        """Upper edge of the q-quantile of the share of its limit that finished requests used; None without one.

        Args:
            of: `ttft`, `tpot`, or a waiting stage, whose time is measured against the TTFT limit.
        """
        counts = [self.get("used", f"{of}:{edge:g}") for edge in USED_EDGES]
        rank, seen = q * sum(counts), 0.0
        for edge, n in zip(USED_EDGES, counts, strict=True):
            seen += n
            if n and seen >= rank:
                return edge
        return None

    @property
    def started(self) -> int:
        return int(self.get("started"))

    @property
    def ended(self) -> int:
        return int(sum(self.get("outcome", outcome) for outcome in Outcome))

    @property
    def running(self) -> int:
        return self.started - self.ended

    @property
    def good(self) -> int:
        return int(self.get("good"))

    @property
    def missed(self) -> int:
        return int(self.get("missed"))

    @property
    def excused(self) -> int:
        return int(self.get("excused"))

    @property
    def refused(self) -> int:
        return int(self.get("refused"))

    @property
    def to_serve(self) -> float:
        """Requests that arrived, without those that no number of replicas would have served."""
        return max(0.0, self.get("started") - self.get("refused"))

    @property
    def prompt_tokens_to_serve(self) -> float:
        return max(0.0, self.get("started_prompt_tokens") - self.get("refused_prompt_tokens"))

    @property
    def attainment(self) -> float | None:
        """Good over good and missed. None without such a request: no data is not zero."""
        return _ratio(self.good, self.missed)

    def attainment_of(self, kind: str, name: object) -> float | None:
        """Attainment of one `tenant` or one `priority` class."""
        return _ratio(self.get(f"{kind}_good", name), self.get(f"{kind}_missed", name))

    def missed_by_stage(self) -> dict[Stage, int]:
        return {Stage(name): int(n) for name, n in self.labels("missed_stage").items()}

    def goodput_per_s(self, duration_s: float, accelerators: float = 1.0) -> float:
        """Good requests per second, per accelerator where their number is given."""
        if duration_s <= 0 or accelerators <= 0:
            raise ValueError("duration_s and accelerators must be above 0")
        return self.good / duration_s / accelerators

    def _use(self, of: str, spent_s: float, limit_s: float) -> None:
        edge = USED_EDGES[min(bisect_left(USED_EDGES, spent_s / limit_s), len(USED_EDGES) - 1)]
        self._inc(label("used", f"{of}:{edge:g}"))

    def _inc(self, key: str, by: float = 1) -> None:
        if by > 0:
            self.values[key] = self.values.get(key, 0) + by


def label(name: str, value: object) -> str:
    return f"{name}{{{value}}}"


def _ratio(good: float, missed: float) -> float | None:
    judged = good + missed
    return good / judged if judged else None


REMEMBERED = 1000


@dataclass(slots=True)
class Totals:
    """Counters summed over sources that come and go; the sum never falls.

    What a source had counted stays in the sum when it leaves, and when it starts again from zero under the
    same name (any of its counters fell). One that was only out of sight, and returns with counters that did not
    fall, is counted once; that is known of the last `REMEMBERED` that left.

    Attributes:
        departed: last counters of sources that left and may return, the one that left first before the others.
        gone: all that will not.
    """

    gone: GoodputCounters = field(default_factory=GoodputCounters)
    latest: dict[str, GoodputCounters] = field(default_factory=dict)
    departed: dict[str, GoodputCounters] = field(default_factory=dict)

    def update(self, source: str, values: Mapping[str, float]) -> None:
        before = self.latest.get(source) or self.departed.pop(source, None)
        if before is not None and any(values.get(key, 0.0) < was for key, was in before.values.items()):
            self.gone.merge(before)
        self.latest[source] = GoodputCounters(dict(values))

    def keep_only(self, sources: Iterable[str]) -> None:
        """Count every other source as departed."""
        alive = set(sources)
        for source in [s for s in self.latest if s not in alive]:
            self.departed[source] = self.latest.pop(source)
        while len(self.departed) > REMEMBERED:
            self.gone.merge(self.departed.pop(next(iter(self.departed))))

    def sum(self) -> GoodputCounters:
        total = self.gone.copy()
        for counters in (*self.departed.values(), *self.latest.values()):
            total.merge(counters)
        return total


def _priority_class(priority: int) -> str:
    """Clients may send any number; what is counted apart must have an end."""
    return str(priority) if abs(priority) < PRIORITIES_APART else "(other)"


def slo_limits_s(slo: Slo) -> tuple[float | None, float | None, float | None]:
    """TTFT, TPOT and ITL p99 limits: the values that must be bucket edges."""
    return slo.ttft_s, slo.tpot_s, slo.itl_p99_s
