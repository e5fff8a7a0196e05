"""Circuit breaker over workers and over pairs of workers whose transfers fail.

A key is a tuple of worker ids: `(worker,)` for a worker, `(prefill, decode)` for a pair.

State      Event                                    Next       What callers see
---------  ---------------------------------------  ---------  --------------------------------------------------
CLOSED     failed, `failures` in a row              OPEN       `failed` returns True once: reconnect the pair now
CLOSED     succeeded                                CLOSED     the row of failures starts anew
OPEN       `open_s` has passed                      HALF_OPEN  `allows` is true for one request: the probe
HALF_OPEN  begin                                    HALF_OPEN  `allows` is false while the probe runs
HALF_OPEN  succeeded                                CLOSED
HALF_OPEN  failed                                   OPEN       `open_s` doubles, up to `max_open_s`
HALF_OPEN  the probe gives no answer in `probe_s`   HALF_OPEN  another probe is allowed
any        a member has a new incarnation           CLOSED     what was known about its predecessor is void
any        a member is gone                         CLOSED     forgotten

Identity is worker id and incarnation, never an address: a peer that comes back on the same port is a new peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Key = tuple[str, ...]


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Entry:
    row: int = 0
    open_until_s: float | None = None
    open_s: float = 0.0
    probe_until_s: float | None = None


class Breaker:
    """One object watches any number of keys; a key that never failed costs nothing.

    Args:
        failures: failures in a row that open the breaker.
        open_s: how long it stays open at first.
        max_open_s: where doubling ends.
        probe_s: after this time without an answer a probe counts as lost.
    """

    def __init__(self, failures: int = 2, open_s: float = 1.0, max_open_s: float = 30.0, probe_s: float = 10.0) -> None:
        self._failures = failures
        self._open_s = open_s
        self._max_open_s = max_open_s
        self._probe_s = probe_s
        self._entries: dict[Key, _Entry] = {}
        self._incarnations: dict[str, str] = {}
        self.opened = 0

    def state(self, key: Key, now: float) -> BreakerState:
        entry = self._entries.get(key)
        if entry is None or entry.open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < entry.open_until_s else BreakerState.HALF_OPEN

    def allows(self, key: Key, now: float) -> bool:
        """Whether a request may use the key. Asking changes nothing; `begin` says that one does."""
        state = self.state(key, now)
        if state is not BreakerState.HALF_OPEN:
            return state is BreakerState.CLOSED
        probe_until_s = self._entries[key].probe_until_s
        return probe_until_s is None or now >= probe_until_s

    def begin(self, key: Key, now: float) -> None:
        """A request uses the key. In HALF_OPEN it is the probe that the others wait for."""
        if self.state(key, now) is BreakerState.HALF_OPEN and self.allows(key, now):
            self._entries[key].probe_until_s = now + self._probe_s

    def succeeded(self, key: Key, now: float) -> None:
        """A use went well. While OPEN it belongs to the time before the failures and does not close anything."""
        if self.state(key, now) is not BreakerState.OPEN:
            self._entries.pop(key, None)

    def failed(self, key: Key, now: float, *, fatal: bool = False) -> bool:
        """A use failed; `fatal` opens at once (the process is known to be dead).

        Returns:
            Whether this opened the breaker (from CLOSED or HALF_OPEN).
        """
        entry = self._entries.setdefault(key, _Entry())
        state = self.state(key, now)
        if state is BreakerState.OPEN:
            return False
        entry.row += 1
        if state is BreakerState.CLOSED and entry.row < self._failures and not fatal:
            return False
        entry.open_s = min(self._max_open_s, entry.open_s * 2 if entry.open_s else self._open_s)
        entry.open_until_s = now + entry.open_s
        entry.probe_until_s = None
        self.opened += 1
        return True

    def forget(self, key: Key) -> None:
        """What was held against the key is void."""
        self._entries.pop(key, None)

    def seen(self, worker_id: str, incarnation: str) -> bool:
        """A worker reports itself. Returns True if it is another incarnation than before: its keys are forgotten."""
        known = self._incarnations.get(worker_id)
        self._incarnations[worker_id] = incarnation
        if known is None or known == incarnation:
            return False
        self._forget(worker_id)
        return True

    def gone(self, worker_id: str) -> None:
        """The worker left the cluster."""
        self._incarnations.pop(worker_id, None)
        self._forget(worker_id)

    def not_closed(self, now: float) -> dict[Key, BreakerState]:
        """Every key that is open or half open, for status pages and metrics."""
        states = ((key, self.state(key, now)) for key in sorted(self._entries))
        return {key: state for key, state in states if state is not BreakerState.CLOSED}

    def _forget(self, worker_id: str) -> None:
        for key in [key for key in self._entries if worker_id in key]:
            del self._entries[key]
