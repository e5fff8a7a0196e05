"""From an engine's KV events to the prefix index: a sequence that may not gap.

Engines publish batches `[timestamp, [events], rank]` in msgpack, numbered from 0 by the publisher. What a batch says is
applied by router/block_translator.py; here it is decided which batch is next.

    state      event                          what happens                                     next
    ---------  -----------------------------  -----------------------------------------------  ------------
    STARTING   driver asks `replay_from`      history from 0 is requested                      WAITING
    LIVE       next number                    applied                                          LIVE
    LIVE       smaller number, no newer time  a duplicate: dropped                             LIVE
    LIVE       smaller number, newer time     a new epoch: the engine restarted and is empty   LIVE/WAITING
    LIVE       larger number                  held; the missing ones are asked for             WAITING
    LIVE       silence                        asked for whatever came after the last number    WAITING
    LIVE       asking brings news, twice      the subscription is deaf: asked every 0.2 s      LIVE
    WAITING    the missing number             applied, then all held that follow               LIVE
    WAITING    end of replay, still missing   the worker's entries are dropped; PARTIAL        LIVE
    WAITING    no answer                      asked again, after some tries as above           WAITING/LIVE

After a drop the index knows too little, never too much: blocks whose parents are unknown are left out.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from router.block_translator import BlockTranslator, EventCounts
from router.prefix_index import PrefixIndex

REORDER_S = 0.2
"""Without a replay endpoint, how long a missing number may still come by itself."""
REPLAY_TIMEOUT_S = 1.0
REPLAY_TRIES = 3
SILENCE_S = 2.0
"""A last batch that was lost shows only by asking: after this much silence the replay endpoint is asked."""
POLL_S = 0.2
"""The same where asking twice in a row brought what the subscription did not: it does not work, asking does."""
DEAF_ANSWERS = 2
HELD_BATCHES = 20_000


class Quality(StrEnum):
    """How far the index can be trusted for a worker."""

    EXACT = "exact"
    PARTIAL = "partial"
    APPROXIMATE = "approximate"


class KvEventStream:
    """The numbered stream of one engine, until the engine's incarnation ends. Pure: a driver moves the bytes.

    The driver calls `on_batch` for what the subscription delivers, `on_replay` and `on_replay_end` for what the
    replay endpoint answers, and asks `replay_from` every so often (at least every 100 ms) what to request.

    Args:
        replayable: the engine has a replay endpoint.
    """

    def __init__(self, worker_id: str, index: PrefixIndex, block_tokens: int, *, replayable: bool, now: float) -> None:
        self.counts = EventCounts()
        self.quality = Quality.EXACT
        self._translator = BlockTranslator(worker_id, index, block_tokens, self.counts)
        self._replayable = replayable
        self._next: int | None = 0 if replayable else None
        self._applied_ts = float("-inf")
        self._held: dict[int, bytes] = {}
        self._waiting_since: float | None = None
        self._asked_s: float | None = None
        self._request_s = now
        self._answered_s = now
        self._tries = 0
        self._started = False
        self._news = False
        self._deaf = 0

    @property
    def deaf(self) -> bool:
        """The subscription delivers nothing while the replay endpoint has news."""
        return self._deaf >= DEAF_ANSWERS

    @property
    def blocks(self) -> int:
        """Engine blocks that are known to be cached."""
        return len(self._translator)

    @property
    def expected(self) -> int | None:
        """The number of the next batch to apply; None before the first one where no history can be had."""
        return self._next

    @property
    def behind(self) -> bool:
        """Batches are missing and were asked for."""
        return self._waiting_since is not None or bool(self._held)

    def on_batch(self, seq: int, payload: bytes, now: float) -> None:
        """A batch of the subscription, in whatever order."""
        self._answered_s, self._deaf = now, 0
        if self._next is None:
            # No history can be had: what was cached before is unknown.
            self._next = seq
            if seq:
                self.quality = Quality.PARTIAL
        self._take(seq, payload, now)

    def on_replay(self, seq: int, payload: bytes, now: float) -> None:
        """A batch of the replay endpoint."""
        self._asked_s = now
        if self._started and not self.behind and self._next is not None and seq >= self._next:
            self._news = True
        self._take(seq, payload, now)

    def on_replay_end(self, now: float) -> None:
        """The replay endpoint sent all it has."""
        self._asked_s, self._answered_s, self._tries = None, now, 0
        self._started = True
        if self._news:
            self._deaf, self._news = self._deaf + 1, False
        if not self._held:
            self._waiting_since = None
        elif self._waiting_since is not None and self._waiting_since < self._request_s:
            self._give_up(now)
        # else the gap opened after this request was sent: `replay_from` asks again

    def replay_from(self, now: float) -> int | None:
        """The number from which batches should be requested now, or None."""
        if not self._replayable:
            if self._waiting_since is not None and now - self._waiting_since >= REORDER_S:
                self._give_up(now)
            return None
        if self._asked_s is not None:
            if now - self._asked_s < REPLAY_TIMEOUT_S:
                return None
            self._tries += 1
            if self._tries >= REPLAY_TRIES:
                self._asked_s, self._answered_s, self._tries, self._started = None, now, 0, True
                self._give_up(now)
                return None
        elif self._up_to_date(now):
            return None
        self._asked_s = self._request_s = now
        return self._next

    def _up_to_date(self, now: float) -> bool:
        silence = POLL_S if self.deaf else SILENCE_S
        return self._started and self._waiting_since is None and now - self._answered_s < silence

    # -- the sequence -------------------------------------------------------------------------------------------

    def _take(self, seq: int, payload: bytes, now: float) -> None:
        assert self._next is not None
        if seq < self._next:
            if _timestamp(payload) <= self._applied_ts:
                self.counts.duplicates += 1
                return
            self.counts.epochs += 1
            self._translator.clear()
            self._held.clear()
            self._next, self._applied_ts, self.quality = 0, float("-inf"), Quality.EXACT
            self._waiting_since = None
        if seq > self._next:
            if self._waiting_since is None:
                self._waiting_since = now
                self.counts.gaps += self._started or not self._replayable
            self._held[seq] = payload
            if len(self._held) > HELD_BATCHES:
                self._give_up(now)
            return
        self._apply(payload)
        self._next += 1
        while self._held:
            follower = self._held.pop(self._next, None)
            if follower is None:
                break
            self._apply(follower)
            self._next += 1
        if not self._held:
            self._waiting_since = None

    def _give_up(self, now: float) -> None:
        """The missing batches will not come: start again from what is held, knowing less."""
        self._waiting_since = None
        if not self._held:
            return
        if self._next:  # else nothing was applied yet and there is nothing to drop
            self.counts.resyncs += 1
            self._translator.clear()
        self.quality = Quality.PARTIAL
        held, self._held = sorted(self._held.items()), {}
        self._next = held[0][0]
        for seq, payload in held:
            self._take(seq, payload, now)

    def _apply(self, payload: bytes) -> None:
        self.counts.batches += 1
        try:
            batch = msgspec.msgpack.decode(payload)
            timestamp, events = float(batch[0]), batch[1]
            self._translator.apply(events)
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError, OverflowError):
            # Whatever it said is lost: better to know nothing of this engine than something false.
            self.counts.malformed += 1
            self._translator.clear()
            self.quality = Quality.PARTIAL
            return
        self._applied_ts = max(self._applied_ts, timestamp)


def _timestamp(payload: bytes) -> float:
    try:
        return float(msgspec.msgpack.decode(payload)[0])
    except (msgspec.DecodeError, ValueError, TypeError, IndexError):
        return float("-inf")
