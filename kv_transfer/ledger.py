"""The lease ledger: who holds KV on a prefill engine, since when, and how each lease ended.

A lease is granted when a prefill call yields its ticket, and ends exactly once as pulled, released or expired:

    granted = pulled + released + expired + open        at every moment

What must never happen is counted, not hidden: a lease that is open although its request has ended (`outlived`), a
lease granted to a request that had ended before (`orphaned`), and a pull that is reported after the lease had
ended (`late_pulls`): the blocks may belong to another prompt by then, so whoever pulled must not use them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class LeaseEnd(StrEnum):
    PULLED = "pulled"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass(slots=True)
class Lease:
    """One grant. `owner` is the router's request id; `expires_s` is None where there is no backstop."""

    lease_id: str
    owner: str
    granted_s: float
    blocks: int
    bytes: int
    expires_s: float | None = None
    outlived: bool = False


@dataclass(frozen=True, slots=True)
class LedgerCounters:
    """Monotone since the engine started. `held_s` adds up the ages at which leases ended."""

    granted: int = 0
    pulled: int = 0
    released: int = 0
    expired: int = 0
    outlived: int = 0
    orphaned: int = 0
    late_pulls: int = 0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LedgerGauges:
    """What is held now. `oldest_s` is the age of the oldest open lease, 0 without one."""

    open: int
    open_blocks: int
    open_bytes: int
    open_outlived: int
    oldest_s: float


class LeaseLedger:
    """All leases of one prefill engine.

    Args:
        lease_s: the backstop after which a lease counts as expired (see `overdue`); None = none.
        remember: how many ended requests and leases are remembered to recognise what comes late.
    """

    def __init__(self, lease_s: float | None = None, remember: int = 4096) -> None:
        self._lease_s = lease_s
        self._remember = remember
        self._open: OrderedDict[str, Lease] = OrderedDict()  # in the order of granting: the first is the oldest
        self._by_owner: dict[str, set[str]] = {}
        self._ended_owners: OrderedDict[str, None] = OrderedDict()
        self._ended_leases: OrderedDict[str, None] = OrderedDict()
        self._ends = dict.fromkeys(LeaseEnd, 0)
        self._granted = self._outlived = self._orphaned = self._late_pulls = 0
        self._held_s = 0.0
        self._blocks = self._bytes = self._open_outlived = 0

    def grant(self, lease_id: str, owner: str, blocks: int, bytes: int, now: float) -> bool:
        """Open a lease.

        Returns:
            Whether its request still lives. If not, the caller must release it at once.

        Raises:
            ValueError: the id has been granted before; ids are minted, never reused.
        """
        if self.knows(lease_id):
            raise ValueError(f"lease {lease_id} is granted twice")
        expires_s = None if self._lease_s is None else now + self._lease_s
        lease = self._open[lease_id] = Lease(lease_id, owner, now, blocks, bytes, expires_s)
        self._by_owner.setdefault(owner, set()).add(lease_id)
        self._granted += 1
        self._blocks += blocks
        self._bytes += bytes
        alive = owner not in self._ended_owners
        if not alive:
            self._orphaned += 1
            self._mark_outlived(lease)
        return alive

    def end(self, lease_id: str, how: LeaseEnd, now: float) -> bool:
        """Close a lease. Only the first end counts; True if this was it."""
        lease = self._open.pop(lease_id, None)
        if lease is None:
            if how is LeaseEnd.PULLED and lease_id in self._ended_leases:
                self._late_pulls += 1
            return False
        owned = self._by_owner[lease.owner]
        owned.discard(lease_id)
        if not owned:
            del self._by_owner[lease.owner]
        self._ends[how] += 1
        self._held_s += max(0.0, now - lease.granted_s)
        self._blocks -= lease.blocks
        self._bytes -= lease.bytes
        self._open_outlived -= lease.outlived
        self._recall(self._ended_leases, lease_id)
        return True

    def request_ended(self, owner: str) -> list[Lease]:
        """The request is over, and all its leases should be. Those that are not are faults, returned and counted."""
        self._recall(self._ended_owners, owner)
        left = [self._open[lease_id] for lease_id in sorted(self._by_owner.get(owner, ()))]
        for lease in left:
            if not lease.outlived:
                self._mark_outlived(lease)
        return left

    def overdue(self, now: float) -> list[Lease]:
        """Open leases whose backstop has passed, oldest first. The caller makes sure and then ends them as expired."""
        found: list[Lease] = []
        for lease in self._open.values():
            if lease.expires_s is None or lease.expires_s > now:
                break  # granted later, expires later
            found.append(lease)
        return found

    def knows(self, lease_id: str) -> bool:
        """Whether the id was granted, now or among the last `remember`: it must not be granted again."""
        return lease_id in self._open or lease_id in self._ended_leases

    def holds(self, lease_id: str) -> bool:
        """Whether the lease is open: the check before and after reading its blocks."""
        return lease_id in self._open

    def leases(self) -> list[Lease]:
        """The open leases, oldest first."""
        return list(self._open.values())

    def counters(self) -> LedgerCounters:
        return LedgerCounters(
            granted=self._granted,
            pulled=self._ends[LeaseEnd.PULLED],
            released=self._ends[LeaseEnd.RELEASED],
            expired=self._ends[LeaseEnd.EXPIRED],
            outlived=self._outlived,
            orphaned=self._orphaned,
            late_pulls=self._late_pulls,
            held_s=self._held_s,
        )

    def gauges(self, now: float) -> LedgerGauges:
        oldest = next(iter(self._open.values()), None)
        return LedgerGauges(
            open=len(self._open),
            open_blocks=self._blocks,
            open_bytes=self._bytes,
            open_outlived=self._open_outlived,
            oldest_s=0.0 if oldest is None else max(0.0, now - oldest.granted_s),
        )

    def __len__(self) -> int:
        return len(self._open)

    def _mark_outlived(self, lease: Lease) -> None:
        lease.outlived = True
        self._outlived += 1
        self._open_outlived += 1

    def _recall(self, memory: OrderedDict[str, None], key: str) -> None:
        memory[key] = None
        memory.move_to_end(key)
        if len(memory) > self._remember:
            memory.popitem(last=False)
