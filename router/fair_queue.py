"""Requests that wait, in the order in which they go: fair between tenants, and of each tenant those in time first.

Start-time fair queuing (Goyal et al., 1996) over tokens: a tenant's next request starts at virtual time
max(now, the tenant's last finish) and finishes its tokens later; the tenant with the smallest start is next. Which of
its own requests a tenant's turn goes to is a second question: the oldest that can still have its first token in time,
and only without one of those the oldest late one. So a tenant that sends too much makes its own requests late, and
its share of the engines still goes to requests that are good.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from cluster.messages import Request

LATE_PLACES = 8
"""After so many places of a tenant one goes to its oldest late request, once that has waited `starvation_s`."""
TENANTS_KEPT = 4096
"""Tenants of one class whose use is remembered at a time."""


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
    """A tenant's waiting requests, each list in order of arrival; what left them is dropped when it comes first.

    Attributes:
        start: virtual time at which its next request starts.
        passed: places that its requests had since a late one had one.
    """

    tenant: str
    start: float
    in_time: deque[Waiting] = field(default_factory=deque)
    late: deque[Waiting] = field(default_factory=deque)
    size: int = 0
    passed: int = 0

    def turn(self, now: float, starvation_s: float) -> Waiting:
        """Which of its requests has its turn. There must be one."""
        self._clean()
        if self.late and (
            not self.in_time or (self.passed >= LATE_PLACES and now - self.late[0].since_s >= starvation_s)
        ):
            return self.late[0]
        return self.in_time[0]

    def in_order(self) -> Iterator[Waiting]:
        """All of them, those in time first."""
        return chain((w for w in self.in_time if not (w.gone or w.late)), (w for w in self.late if not w.gone))

    def _clean(self) -> None:
        while self.in_time and (self.in_time[0].gone or self.in_time[0].late):
            self.in_time.popleft()
        while self.late and self.late[0].gone:
            self.late.popleft()

    def compact(self) -> None:
        """Requests cancelled in the middle of a line must not gather there."""
        if len(self.in_time) + len(self.late) > 16 + 4 * self.size:
            self.in_time = deque(w for w in self.in_time if not (w.gone or w.late))
            self.late = deque(w for w in self.late if not w.gone)


@dataclass(slots=True)
class FairQueue:
    """The waiting requests of one priority.

    Attributes:
        lines: by tenant, those with waiting requests only.
        finish: virtual time at which what a tenant was given ends, for tenants that may owe something.
        virtual: start of the last request that was given a place.
    """

    lines: dict[str, Line] = field(default_factory=dict)
    finish: dict[str, float] = field(default_factory=dict)
    virtual: float = 0.0
    size: int = 0
    _order: list[tuple[float, float, int, Line]] = field(default_factory=list)
    _pushed: int = 0
    _finish_kept: int = 64
    _arrivals: deque[Waiting] = field(default_factory=deque)

    def add(self, waiting: Waiting) -> None:
        tenant = waiting.request.tenant
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = Line(tenant, max(self.virtual, self.finish.get(tenant, 0.0)))
            self._push(line, waiting.since_s)
        line.in_time.append(waiting)
        line.size += 1
        self.size += 1
        self._arrivals.append(waiting)

    def leave(self, waiting: Waiting) -> None:
        """It waits no more, whether it was given a place or not."""
        waiting.gone = True
        line = self.lines[waiting.request.tenant]
        line.size -= 1
        self.size -= 1
        if line.size:
            line.compact()
        else:
            del self.lines[line.tenant]
        if len(self._arrivals) > 64 + 4 * self.size:
            self._arrivals = deque(w for w in self._arrivals if not w.gone)

    def take(self, waiting: Waiting) -> None:
        """It is given a place."""
        line = self.lines[waiting.request.tenant]
        line.passed = 0 if waiting.late else line.passed + 1
        self.virtual = max(self.virtual, line.start)
        line.start = self._use(line.tenant, line.start, waiting.cost)
        self.leave(waiting)
        if line.size:
            self._push(line, next(line.in_order()).since_s)

    def pass_by(self, tenant: str, cost: float, *, idle: bool) -> None:
        """A request got a place without waiting. `idle`: the engines had worked off all that was placed."""
        if idle:
            self.forget()
        start = max(self.virtual, self.finish.get(tenant, 0.0))
        self._use(tenant, start, cost)
        self.virtual = start

    def set_late(self, waiting: Waiting) -> None:
        waiting.late = True
        self.lines[waiting.request.tenant].late.append(waiting)

    def forget(self) -> None:
        """Nobody owes anything."""
        self.virtual = max(self.finish.values(), default=self.virtual)
        self.finish.clear()

    def oldest_s(self) -> float | None:
        """Since when the oldest waits."""
        while self._arrivals and self._arrivals[0].gone:
            self._arrivals.popleft()
        return self._arrivals[0].since_s if self._arrivals else None

    def ahead(self, tenant: str) -> tuple[int, float]:
        """Requests that would go before a new one of this tenant, and their tokens."""
        own = self.lines.get(tenant)
        count, tokens = 0, 0.0
        if own is None:
            start = max(self.virtual, self.finish.get(tenant, 0.0))
        else:
            start = own.start
            for waiting in own.in_time:
                if not (waiting.gone or waiting.late):
                    count, tokens = count + 1, tokens + waiting.cost
            start += tokens
        for line in self.lines.values():
            at = line.start
            if line is own or at > start:
                continue
            for waiting in line.in_order():
                if at > start:
                    break
                count, tokens, at = count + 1, tokens + waiting.cost, at + waiting.cost
        return count, tokens

    def in_order(self, now: float, starvation_s: float, most: int) -> Iterator[Waiting]:
        """The request whose turn it is, then about `most` of those behind it.

        A request that is made late or leaves while it is looked at is followed by the one that has its turn instead.
        """
        while self._clean():
            first = self._order[0][3].turn(now, starvation_s)
            was_late = first.late
            yield first
            if not (first.gone or first.late != was_late):
                break
        else:
            return
        behind: list[tuple[float, float, int, Waiting]] = []
        for start, _, number, line in heapq.nsmallest(4 * most, self._order):
            if not self._is_current(start, line):
                continue
            for waiting in islice(line.in_order(), most):
                behind.append((start, waiting.since_s, number, waiting))
                start += waiting.cost
        behind.sort(key=lambda entry: entry[:3])
        for *_, waiting in behind:
            if waiting is not first and not waiting.gone:
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
