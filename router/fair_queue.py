"""Requests that wait, in the order in which they go: those still in time, fair between tenants, then the late.

Start-time fair queuing (Goyal et al., 1996) over tokens: a tenant's next request starts at virtual time
max(now, the tenant's last finish) and finishes its tokens later; the tenant with the smallest start is next.

A request is late when its first token cannot be in time any more. A tenant within its share gets its places soon, so
late are the requests of those who send more than their share, and in an overload of all the ones that came too much.
Both wait in a lane of their own, for time that nobody in time needs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cluster.messages import Request

LATE_PLACES = 31
"""After so many places given to others the oldest late request has one, once it has waited `starvation_s`."""
TENANTS_KEPT = 4096
"""Tenants of one lane whose use is remembered at a time."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One request. `cost` is in tokens; `gone`: over; `late`: its first token cannot be in time any more."""

    request: Request
    cost: float
    since_s: float
    gone: bool = False
    late: bool = False


@dataclass(slots=True, eq=False)
class Line:
    """A tenant's requests in one lane, in order of arrival; what left the lane is dropped when it comes first.

    Attributes:
        start: virtual time at which the next of them starts.
    """

    tenant: str
    late: bool
    start: float
    waiting: deque[Waiting] = field(default_factory=deque)
    size: int = 0

    def first(self) -> Waiting:
        """The oldest. There must be one."""
        while not self._here(self.waiting[0]):
            self.waiting.popleft()
        return self.waiting[0]

    def __iter__(self) -> Iterator[Waiting]:
        return (w for w in self.waiting if self._here(w))

    def compact(self) -> None:
        """Requests that left from the middle of a line must not gather there."""
        if len(self.waiting) > 16 + 4 * self.size:
            self.waiting = deque(self)

    def _here(self, waiting: Waiting) -> bool:
        return not waiting.gone and waiting.late == self.late


@dataclass(slots=True)
class Lane:
    """Waiting requests in fair order.

    Attributes:
        lines: by tenant, those with waiting requests only.
        finish: virtual time at which what a tenant was given ends, for tenants that may owe something.
        virtual: start of the last request that was given a place.
    """

    late: bool = False
    lines: dict[str, Line] = field(default_factory=dict)
    finish: dict[str, float] = field(default_factory=dict)
    virtual: float = 0.0
    size: int = 0
    _order: list[tuple[float, float, int, Line]] = field(default_factory=list)
    _pushed: int = 0
    _finish_kept: int = 64

    def add(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = Line(tenant, self.late, max(self.virtual, self.finish.get(tenant, 0.0)))
            self._push(line, waiting.since_s)
        line.waiting.append(waiting)
        line.size += 1
        self.size += 1

    def drop(self, tenant: str) -> None:
        """One of the tenant's requests is here no more."""
        line = self.lines[tenant]
        line.size -= 1
        self.size -= 1
        if line.size:
            line.compact()
        else:
            del self.lines[tenant]

    def use(self, waiting: Waiting) -> None:
        """It is given a place; `drop` follows."""
        line = self.lines[waiting.request.tenant]
        self.virtual = max(self.virtual, line.start)
        line.start = self._use(line.tenant, line.start, waiting.cost)
        if line.size > 1:
            self._push(line, waiting.since_s)

    def pass_by(self, tenant: str, cost: float) -> None:
        """A request got a place without waiting."""
        start = max(self.virtual, self.finish.get(tenant, 0.0))
        self._use(tenant, start, cost)
        self.virtual = start

    def forget(self) -> None:
        """Nobody owes anything."""
        self.virtual = max(self.finish.values(), default=self.virtual)
        self.finish.clear()

    def ahead(self, tenant: str) -> tuple[int, float]:
        """Requests that would go before a new one of this tenant, and their tokens."""
        own = self.lines.get(tenant)
        count, tokens = 0, 0.0
        if own is None:
            start = max(self.virtual, self.finish.get(tenant, 0.0))
        else:
            for waiting in own:
                count, tokens = count + 1, tokens + waiting.cost
            start = own.start + tokens
        for line in self.lines.values():
            at = line.start
            if line is own or at > start:
                continue
            for waiting in line:
                if at > start:
                    break
                count, tokens, at = count + 1, tokens + waiting.cost, at + waiting.cost
        return count, tokens

    def in_order(self) -> Iterator[Waiting]:
        """The request whose turn it is, then those behind it.

        One that leaves the lane while it is looked at is followed by the one that has its turn instead.
        """
        while self._clean():
            first = self._order[0][3].first()
            yield first
            if not first.gone and first.late == self.late:
                break
        else:
            return
        # A heap like `_order`; of a line that was looked at, the next request and an iterator over the rest.
        behind: list[tuple[float, float, int, Any]] = self._order.copy()
        while behind:
            start, _, number, at = heapq.heappop(behind)
            if isinstance(at, Line):
                if not self._is_current(start, at):
                    continue
                rest = iter(at)
                waiting = next(rest)
            else:
                waiting, rest = at
            following = next(rest, None)
            if following is not None:
                heapq.heappush(behind, (start + waiting.cost, following.since_s, number, (following, rest)))
            if waiting is not first and not waiting.gone and waiting.late == self.late:
                yield waiting

    def _use(self, tenant: str, start: float, cost: float) -> float:
        """A tenant is given tokens; returns its finish."""
        finish = self.finish[tenant] = start + cost
        if len(self.finish) > self._finish_kept:
            self.finish = {t: f for t, f in self.finish.items() if f > self.virtual}
            if len(self.finish) > TENANTS_KEPT:
                self.forget()
            self._finish_kept = 2 * len(self.finish) + 64
        return finish

    def _push(self, line: Line, since_s: float) -> None:
        self._pushed += 1
        heapq.heappush(self._order, (line.start, since_s, self._pushed, line))
        if len(self._order) > 64 + 4 * len(self.lines):
            self._order = [e for e in self._order if self._is_current(e[0], e[3])]
            heapq.heapify(self._order)

    def _is_current(self, start: float, line: Line) -> bool:
        return self.lines.get(line.tenant) is line and line.start == start

    def _clean(self) -> bool:
        """Whether anything waits; its first line is then the first entry."""
        while self._order and not self._is_current(self._order[0][0], self._order[0][3]):
            heapq.heappop(self._order)
        return bool(self._order)


@dataclass(slots=True)
class FairQueue:
    """The waiting requests of one priority.

    Attributes:
        passed: places that others had since a late request had one.
    """

    in_time: Lane = field(default_factory=Lane)
    late: Lane = field(default_factory=lambda: Lane(late=True))
    passed: int = 0
    _arrivals: deque[Waiting] = field(default_factory=deque)
    _late: deque[Waiting] = field(default_factory=deque)

    @property
    def size(self) -> int:
        return self.in_time.size + self.late.size

    def add(self, waiting: Waiting) -> None:
        self.in_time.add(waiting)
        self._arrivals.append(waiting)

    def leave(self, waiting: Waiting) -> None:
        """It waits no more, whether it was given a place or not."""
        waiting.gone = True
        self._lane(waiting).drop(waiting.request.tenant)
        if len(self._arrivals) > 64 + 4 * self.size:
            self._arrivals = deque(w for w in self._arrivals if not w.gone)
        if len(self._late) > 64 + 4 * self.late.size:
            self._late = deque(w for w in self._late if not w.gone)

    def take(self, waiting: Waiting) -> None:
        """It is given a place."""
        self.passed = 0 if waiting.late else self.passed + 1
        self._lane(waiting).use(waiting)
        self.leave(waiting)

    def set_late(self, waiting: Waiting) -> None:
        waiting.late = True
        self.in_time.drop(waiting.request.tenant)
        self.late.add(waiting)
        self._late.append(waiting)

    def pass_by(self, tenant: str, cost: float, *, idle: bool) -> None:
        """A request got a place without waiting. `idle`: the engines had worked off all that was placed."""
        if idle:
            self.in_time.forget()
        self.in_time.pass_by(tenant, cost)

    def oldest_s(self) -> float | None:
        """Since when the oldest waits."""
        return _oldest_s(self._arrivals)

    def owes_late(self, now: float, starvation_s: float) -> bool:
        """Whether a late request has its turn although others are in time."""
        oldest = _oldest_s(self._late) if self.passed >= LATE_PLACES else None
        return oldest is not None and now - oldest >= starvation_s

    def _lane(self, waiting: Waiting) -> Lane:
        return self.late if waiting.late else self.in_time


def _oldest_s(waiting: deque[Waiting]) -> float | None:
    while waiting and waiting[0].gone:
        waiting.popleft()
    return waiting[0].since_s if waiting else None
