"""Admission: which request may be placed next, which waits in the router, which is refused at once.

A request waits here, not in an engine, while its prompt would only queue (so that order and fairness are the router's)
and while decode has no room for the result (so that prefill does not compute KV that nobody can take). The order:

1. Priority classes, lower first. A class whose oldest request has waited `starvation_s` gets every second place.
2. Inside a class, tenants by start-time fair queuing over tokens (router/fair_queue.py). A tenant's 100k-token prompts
   therefore delay that tenant, not the others; an idle tenant saves nothing up.
3. Before all others of the class, requests that can still have their first token in time (`late_last`). In order of
   arrival an overload makes every request late by the same time, and goodput falls to nothing until the last of them is
   gone; this way all that the engines can do is done in time. The late ones get what time is left, and one place of 32
   once the oldest has waited `starvation_s`.
4. A request whose KV does not fit yet is passed over until it has waited `starvation_s`; then all others wait for it.
5. A request whose engine has its queue (the one that holds its prefix, say) is passed over by those for other engines,
   and by none for the same one. What waits ahead of it for that engine counts like the engine's own queue, so it goes
   elsewhere once that takes less time. With a queue on every engine that computes prompts nobody goes.

Refused: more than `max_queue` waiting (503; the newest request of the tenant that waits with the most makes room for a
tenant that waits with fewer), a tenant beyond its token budget (429), and, if `reject_unattainable`, a request whose
deadline no pair of engines can meet any more (503; on arrival, or when its turn has come too late). Each comes with the
time after which a retry makes sense. What no engine can ever hold is refused with 400.

Pure: `now` is an argument; the caller places what `offer` or `next` lets through before it asks again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from cluster.config import AdmissionConfig
from cluster.messages import Rejection, Request
from router.fair_queue import FairQueue, Waiting

BURST_S = 10.0
"""A tenant that was idle may spend this many seconds of its budget at once."""
PASSED_OVER = 8
"""Requests that may not go which `next` asks for: each costs a prediction, on the event loop."""
LOOKED_AT = 128
"""Requests of one priority that `next` looks at; most of those that wait for a busy engine cost no prediction."""
AS_BEFORE = 0.1
"""Of the backlog that an engine may have: a change of its queue below this is none."""
LATE_BACKLOG = 0.1
"""Of the backlog that an engine may have for others, what it may have for a late request: it takes the time that
nobody in time needs, and leaves no queue to those that come next."""
DRAIN_MEMORY = 0.9
CLASSES_KEPT = 64
"""Priorities whose fair order is remembered while nothing of them waits."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What placement expects if the request were placed now. Seconds from now.

    Attributes:
        wait_s: prefill work ahead of it on the engine it would get.
        ready_s: until its prompt would be computed.
        room_s: until the decode engine has room for it.
        ttft_s: until its first token.
        output_tokens: expected length of the answer.
        worker: the engine that would compute its prompt.
        least_wait_s: work on the engine that has the least of it, of those that compute prompts; infinite where that
            is the only one.
    """

    wait_s: float
    ready_s: float
    room_s: float
    ttft_s: float
    output_tokens: float
    worker: str = ""
    least_wait_s: float = math.inf


class Gate(Protocol):
    """What admission asks of placement; `router.placement.Placer` is one."""

    def forecast(
        self, request: Request, now: float, ahead_s: Mapping[str, float] | None = None
    ) -> Forecast | Rejection:
        """`ahead_s`: by engine, where others wait here for it: the work before this request with theirs."""
        ...


@dataclass(frozen=True, slots=True)
class Admit:
    """Place it now."""


@dataclass(frozen=True, slots=True)
class Queue:
    """It waits; `next` returns it later. `ahead` counts requests that wait already."""

    ahead: int
    predicted_wait_s: float | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that waited and will not be placed."""

    request: Request
    rejection: Rejection


def share_of(config: AdmissionConfig, routers: int) -> AdmissionConfig:
    """The limits of one of so many routers: they tell each other nothing, and requests are spread over them evenly."""
    rate = config.tenant_tokens_per_s
    share = {
        "max_queue": -(-config.max_queue // routers),
        "tenant_tokens_per_s": None if rate is None else rate / routers,
    }
    return config.model_copy(update=share)


@dataclass(slots=True)
class _Bucket:
    """A token bucket that may go into debt once: a prompt larger than the burst is possible, then the tenant waits."""

    tokens: float
    at_s: float

    def refill(self, rate: float, now: float) -> None:
        self.tokens = min(rate * BURST_S, self.tokens + rate * (now - self.at_s))
        self.at_s = now


@dataclass(slots=True)
class _Look:
    """What one walk along the queue has learnt of the engines.

    Attributes:
        same_s: changes below this are none.
        ahead_s: by engine that has its queue: the work before the next request for it, with those passed over.
        not_idle: engines with too much work for a late request.
        least_s: work on the engine that has the least.
        no_room: a late request did not fit, so none does.
        none_idle: every engine has too much work for a late request.
    """

    same_s: float
    ahead_s: dict[str, float] = field(default_factory=dict)
    not_idle: set[str] = field(default_factory=set)
    least_s: float = 0.0
    no_room: bool = False
    none_idle: bool = False

    def ends_late(self, owed: bool) -> bool:
        """Whether no late request can go; one that is `owed` a place may have time that others need."""
        return self.no_room or (self.none_idle and not owed)

    def still_queues(self, known: Forecast | None, spare: bool) -> bool:
        """Whether a request may not go because nothing is better than at its last forecast, if `known`.

        Args:
            spare: it may only have time that nobody else needs.
        """
        if known is None or self.least_s < known.least_wait_s - self.same_s:
            return False
        ahead = self.ahead_s.get(known.worker)
        if ahead is None:
            return spare and known.worker in self.not_idle
        if ahead > known.wait_s + self.same_s:
            return False
        self.ahead_s[known.worker] = ahead + known.ready_s - known.wait_s
        return True


class Admission:
    """The queue of one router.

    Args:
        config: `router.admission` of the cluster's configuration.
        gate: predictions.
        ttft_s: the cluster's limit. How long a queue an engine may have must not depend on limits that clients set:
            a very short one would hold up whoever stands behind it, a very long one would let its flood through.
    """

    def __init__(self, config: AdmissionConfig, gate: Gate, ttft_s: float) -> None:
        self.config, self._gate = config, gate
        self._backlog_s = config.backlog_fraction * ttft_s
        self._classes: dict[int, FairQueue] = {}
        self._waiting: dict[str, Waiting] = {}
        self._tenants: dict[str, int] = {}
        self._refusals: list[Refusal] = []
        self._known: dict[str, Forecast] = {}
        """By request that was passed over because of its engine's queue: its last forecast."""
        self._asked = 0
        self._buckets: dict[str, _Bucket] = {}
        self._favoured: int | None = None
        self._favoured_last = False
        # How fast the queue drains while it is not empty: fading sums of tokens and seconds.
        self._drained_tokens = self._drained_s = 0.0
        self._taken_at_s: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting_by_tenant(self) -> dict[str, int]:
        return dict(self._tenants)

    # -- arrival --------------------------------------------------------------------------------------------------

    def offer(self, request: Request, now: float) -> Admit | Queue | Rejection:
        """A request has arrived, with its arrival time in the past or now."""
        forecast = self._gate.forecast(request, now)
        if isinstance(forecast, Rejection) and (forecast.status < 500 or not self.config.wait_for_workers):
            return forecast
        cost = self._cost(request, forecast)
        over = self._over_budget(request.tenant, cost, now)
        if over is not None:
            return over
        ahead, wait = self._ahead(request)
        late = self._too_late(request, forecast, wait or 0.0, now)
        if late is not None:
            return late
        if not self._waiting and isinstance(forecast, Forecast) and self._open(forecast):
            self._charge(request.tenant, cost)
            self._class(request.priority).pass_by(request.tenant, cost, idle=forecast.wait_s <= 0.0)
            return Admit()
        full = self._make_room(request.tenant, wait)
        if full is not None:
            return full
        self._charge(request.tenant, cost)
        self._enqueue(request, cost, now)
        return Queue(ahead, wait)

    def remove(self, request_id: str) -> bool:
        """A waiting request was cancelled or timed out. False if it does not wait (any more)."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        self._leave(waiting)
        self._refund(waiting)
        return True

    # -- departure ------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Request | None:
        """The request to place now, or None. Call it again until None after anything that may have made room."""
        if not self._waiting:
            self._taken_at_s = None
            return None
        self._asked = 0
        found, again = self._look(now)
        while again:
            found, again = self._look(now)
        return found

    def _look(self, now: float) -> tuple[Request | None, bool]:
        """The request to place now; where there is none, whether some fell behind, so that the order is another."""
        look, fell = _Look(AS_BEFORE * self._backlog_s), False
        for waiting in self._in_order(now, look):
            request = waiting.request
            if self._falls_behind(waiting, 0.0, now):  # whatever an engine could do
                fell = True
                continue
            spare = waiting.late and not self._owes_late(request.priority, now)
            if look.still_queues(self._known.get(request.request_id), spare):
                continue
            if self._asked > PASSED_OVER:
                return None, False
            self._asked += 1
            forecast = self._gate.forecast(request, now, look.ahead_s)
            if isinstance(forecast, Rejection):
                if forecast.status >= 500:
                    return None, False  # no engine is ready: as it would be with the next one
                self._refusals.append(self._refuse(waiting, forecast))
                continue
            look.least_s = forecast.least_wait_s
            if self._only_queues(forecast.wait_s):
                if self._only_queues(forecast.least_wait_s):
                    return None, False  # as it would be with the next one
                if forecast.worker not in look.ahead_s:
                    self._asked -= 1  # one an engine at most, and an idle engine may be behind any number of busy ones
                look.ahead_s[forecast.worker] = forecast.ready_s
                self._known[request.request_id] = forecast
                continue
            if self._falls_behind(waiting, forecast.ttft_s, now):
                fell = True
                continue
            if spare and self._only_queues(forecast.wait_s, LATE_BACKLOG):
                look.none_idle = self._only_queues(forecast.least_wait_s, LATE_BACKLOG)
                look.not_idle.add(forecast.worker)
                self._known[request.request_id] = forecast
                continue
            if self._open(forecast):
                self._take(waiting, now)
                return request, False
            look.no_room |= waiting.late
            if now - waiting.since_s >= self.config.starvation_s:
                return None, False
        return None, fell

    def refusals(self, now: float) -> list[Refusal]:
        """Requests that waited and are refused: displaced, or (`reject_unattainable`) too late by now."""
        refused, self._refusals = self._refusals, []
        if self.config.reject_unattainable:
            for waiting in list(self._waiting.values()):
                # Only time that has passed and the fastest possible start count: no forecast per waiting request.
                if now - waiting.request.arrival_s > waiting.request.slo.ttft_s:
                    refused.append(self._refuse_late(waiting))
        return refused

    # -- order ----------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request, cost: float, now: float) -> None:
        waiting = Waiting(request, cost, now)
        self._class(request.priority).add(waiting)
        self._waiting[request.request_id] = waiting
        self._tenants[request.tenant] = self._tenants.get(request.tenant, 0) + 1

    def _class(self, priority: int) -> FairQueue:
        if priority not in self._classes and len(self._classes) >= CLASSES_KEPT:
            self._classes = {p: c for p, c in self._classes.items() if c.size}
        return self._classes.setdefault(priority, FairQueue())

    def _active(self) -> list[int]:
        return sorted(p for p, c in self._classes.items() if c.size)

    def _in_order(self, now: float, look: _Look) -> Iterator[Waiting]:
        """Waiting requests, the one whose turn it is first; of the late ones as many as may find time."""
        ready = self._active()
        self._favoured = None
        if not self._favoured_last:
            oldest = {p: self._classes[p].oldest_s() for p in ready[1:]}
            starving = [(s, p) for p, s in oldest.items() if s is not None and now - s >= self.config.starvation_s]
            if starving:
                self._favoured = min(starving)[1]
                ready.remove(self._favoured)
                ready.insert(0, self._favoured)
        for priority in ready:
            queue = self._classes[priority]
            owed = next(queue.late.in_order(), None) if self._owes_late(priority, now) else None
            if owed is not None:
                yield owed
            yield from islice(queue.in_time.in_order(), LOOKED_AT)
            for waiting in islice(queue.late.in_order(), LOOKED_AT):
                if look.ends_late(self._owes_late(priority, now)):
                    break
                if waiting is not owed:
                    yield waiting

    def _falls_behind(self, waiting: Waiting, ttft_s: float, now: float) -> bool:
        """Whether its turn has come too late for its first token; then it is refused, or others go before it."""
        if waiting.late or not (self.config.late_last or self.config.reject_unattainable):
            return False
        if now - waiting.request.arrival_s + ttft_s <= waiting.request.slo.ttft_s:
            return False
        if self.config.reject_unattainable:
            self._refusals.append(self._refuse_late(waiting))
        else:
            self._classes[waiting.request.priority].set_late(waiting)
        return True

    def _owes_late(self, priority: int, now: float) -> bool:
        return self._classes[priority].owes_late(now, self.config.starvation_s)

    def _refuse_late(self, waiting: Waiting) -> Refusal:
        return self._refuse(waiting, Rejection(503, "the TTFT limit passed in the queue", self.config.retry_after_s))

    def _refuse(self, waiting: Waiting, rejection: Rejection) -> Refusal:
        self._leave(waiting)
        self._refund(waiting)
        return Refusal(waiting.request, rejection)

    def _take(self, waiting: Waiting, now: float) -> None:
        self._favoured_last = waiting.request.priority == self._favoured
        self._classes[waiting.request.priority].take(waiting)
        self._forget(waiting)
        if self._taken_at_s is not None:
            self._drained_tokens = DRAIN_MEMORY * self._drained_tokens + waiting.cost
            self._drained_s = DRAIN_MEMORY * self._drained_s + now - self._taken_at_s
        self._taken_at_s = now

    def _leave(self, waiting: Waiting) -> None:
        self._classes[waiting.request.priority].leave(waiting)
        self._forget(waiting)

    def _forget(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        del self._waiting[waiting.request.request_id]
        self._known.pop(waiting.request.request_id, None)
        left = self._tenants[tenant] - 1
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]

    # -- rules ----------------------------------------------------------------------------------------------------

    def _open(self, forecast: Forecast) -> bool:
        """Whether it may go: it would not only queue, and decode has room by the time its prompt is computed."""
        return not self._only_queues(forecast.wait_s) and forecast.room_s <= forecast.ready_s

    def _only_queues(self, wait_s: float, share: float = 1.0) -> bool:
        return wait_s > share * self._backlog_s

    def _too_late(self, request: Request, forecast: Forecast | Rejection, wait: float, now: float) -> Rejection | None:
        if not self.config.reject_unattainable or isinstance(forecast, Rejection):
            return None
        ttft, limit = now - request.arrival_s + wait + forecast.ttft_s, request.slo.ttft_s
        if ttft <= limit:
            return None
        reason = f"first token in {ttft:.2f} s predicted, the limit is {limit:.2f} s"
        # What the engines must work off before the same request would make it.
        return Rejection(503, reason, max(self.config.retry_after_s, min(ttft - limit, wait + forecast.wait_s)))

    def _ahead(self, request: Request) -> tuple[int, float | None]:
        """Requests that would go before this one, and how long they take; None where that is not known yet."""
        if not self._waiting:
            return 0, 0.0
        count, tokens = 0, 0.0
        for waiting in self._waiting.values():
            if waiting.request.priority < request.priority:
                count, tokens = count + 1, tokens + waiting.cost
        if (own := self._classes.get(request.priority)) is not None:
            more, of_them = own.in_time.ahead(request.tenant)
            count, tokens = count + more, tokens + of_them
        if not self._drained_s:
            return count, None
        return count, tokens * self._drained_s / self._drained_tokens

    def _make_room(self, tenant: str, wait: float | None) -> Rejection | None:
        if len(self._waiting) < self.config.max_queue:
            return None
        largest = max(self._tenants, key=lambda t: self._tenants[t])
        retry = max(self.config.retry_after_s, wait or 0.0)
        if self._tenants[largest] <= self._tenants.get(tenant, 0) + 1:
            return Rejection(503, f"{self.config.max_queue} requests wait already", retry)
        newest = next(w for w in reversed(self._waiting.values()) if w.request.tenant == largest)
        reason = f"{self.config.max_queue} requests wait already, most of them of tenant {largest!r}"
        self._refusals.append(self._refuse(newest, Rejection(503, reason, retry)))
        return None

    @staticmethod
    def _cost(request: Request, forecast: Forecast | Rejection) -> float:
        output = forecast.output_tokens if isinstance(forecast, Forecast) else 0.0
        return request.prompt_tokens + request.n * min(output, request.max_output_tokens)

    # -- budgets --------------------------------------------------------------------------------------------------

    def _over_budget(self, tenant: str, cost: float, now: float) -> Rejection | None:
        rate = self.config.tenant_tokens_per_s
        if rate is None:
            return None
        bucket = self._buckets.get(tenant)
        if bucket is None:
            self._forget_full_buckets(rate, now)
            bucket = self._buckets[tenant] = _Bucket(rate * BURST_S, now)
        bucket.refill(rate, now)
        needed = min(cost, rate * BURST_S)
        if bucket.tokens >= needed:
            return None
        retry = max(self.config.retry_after_s, (needed - bucket.tokens) / rate)
        return Rejection(429, f"tenant {tenant!r} is beyond its {rate:g} tokens per second on this router", retry)

    def _charge(self, tenant: str, cost: float) -> None:
        if tenant in self._buckets:
            self._buckets[tenant].tokens -= cost

    def _refund(self, waiting: Waiting) -> None:
        self._charge(waiting.request.tenant, -waiting.cost)

    def _forget_full_buckets(self, rate: float, now: float) -> None:
        """A full bucket is as good as none, so tenants that come and go cost no memory."""
        if len(self._buckets) < 1024:
            return
        for bucket in self._buckets.values():
            bucket.refill(rate, now)
        self._buckets = {t: b for t, b in self._buckets.items() if b.tokens < rate * BURST_S}
