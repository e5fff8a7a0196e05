"""From an engine's KV events to the prefix index: translation of its block hashes, and a sequence that may not gap.

Engines publish batches `[timestamp, [events], rank]` in msgpack, numbered from 0 by the publisher. Their block hashes
depend on the engine's hash function, so every engine's hashes are translated to our own keys (router/block_keys.py)
by the tokens that the events carry: a block's key continues its parent's key, a first block starts from the namespace
(cache salt, adapter) in its extra keys.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from router.block_keys import block_keys, extend_keys, namespace
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


@dataclass(slots=True)
class EventCounts:
    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    resyncs: int = 0
    epochs: int = 0
    unresolved_blocks: int = 0
    malformed: int = 0


class BlockTranslator:
    """One engine's block hashes in terms of our keys; applies its events to the index.

    An engine block of r times `block_tokens` is r keys; an engine block that is smaller than ours, or no multiple of
    it, cannot be translated and is counted as unresolved, as are blocks whose hash holds more than tokens, salt and
    adapter (images, prompt embeddings).
    """

    def __init__(self, worker_id: str, index: PrefixIndex, block_tokens: int, counts: EventCounts) -> None:
        self._worker_id, self._index, self._block_tokens, self._counts = worker_id, index, block_tokens, counts
        self._keys: dict[int, int | tuple[int, ...]] = {}
        # An engine may compute the same block twice, side by side: it announces and removes each copy.
        self._copies: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        self._keys.clear()
        self._copies.clear()
        self._index.clear(self._worker_id)

    def apply(self, events: Sequence[Any]) -> None:
        """Raises ValueError, TypeError or KeyError for what is no event."""
        removed: list[int] = []
        for event in events:
            kind, get = _fields(event)
            if kind == "BlockRemoved":
                if _on_device(get):
                    self._removed(get("block_hashes"), removed)
                continue
            if removed:
                self._index.remove(self._worker_id, removed)
                removed = []
            if kind == "BlockStored":
                if _on_device(get):
                    self._stored(get)
            elif kind == "AllBlocksCleared":
                self.clear()
            else:
                raise ValueError(f"unknown event {kind!r}")
        if removed:
            self._index.remove(self._worker_id, removed)

    def _stored(self, get: Any) -> None:
        hashes = [_short(h) for h in get("block_hashes")]
        tokens, size = get("token_ids"), get("block_size")
        ratio, rest = divmod(size, self._block_tokens)
        if not hashes:
            return
        if rest or not ratio or len(tokens) != size * len(hashes):
            self._counts.unresolved_blocks += len(hashes)
            return
        parent_hash = get("parent_block_hash")
        extra = get("extra_keys")
        if parent_hash is None:
            space = _namespace(extra[0] if extra else None, get("lora_name"))
            if space is None or not _plain(extra, get("lora_name"), 1):
                self._counts.unresolved_blocks += len(hashes)
                return
            parent = None
            keys = block_keys(tokens, self._block_tokens, space)
        else:
            known = self._keys.get(_short(parent_hash))
            if known is None or not _plain(extra, get("lora_name"), 0):
                self._counts.unresolved_blocks += len(hashes)
                return
            parent = known if isinstance(known, int) else known[-1]
            keys = extend_keys(parent, tokens, self._block_tokens)
        mine, copies = self._keys, self._copies
        for i, short in enumerate(hashes):
            if short in mine:
                copies[short] = copies.get(short, 1) + 1
            mine[short] = keys[i] if ratio == 1 else keys[i * ratio : (i + 1) * ratio]
        self._index.store(self._worker_id, keys, parent)

    def _removed(self, hashes: Sequence[Any], removed: list[int]) -> None:
        for full in hashes:
            short = _short(full)
            copies = self._copies.get(short)
            if copies is not None:
                if copies > 2:
                    self._copies[short] = copies - 1
                else:
                    del self._copies[short]
                continue
            keys = self._keys.pop(short, None)
            if keys is None:
                continue
            if isinstance(keys, int):
                removed.append(keys)
            else:
                removed.extend(reversed(keys))


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


_ORDER = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Field order where events come as arrays (older engines); newer ones send maps."""


def _fields(event: Any) -> tuple[str, Any]:
    if isinstance(event, Mapping):
        return event["type"], event.get
    kind = event[0]
    return kind, dict(zip(_ORDER[kind], event[1:], strict=False)).get


def _on_device(get: Any) -> bool:
    """Only the engine's own first-tier KV of its first cache group counts; offloaded copies must be loaded first."""
    return get("medium") in (None, "GPU") and get("locality") in (None, "LOCAL") and not get("group_idx")


def _namespace(extra: Sequence[Any] | None, adapter: str | None) -> bytes | None:
    """The namespace of a first block: its extra keys are the adapter, if any, then the salt, if any."""
    rest = list(extra or ())
    if adapter is not None and rest and rest[0] == adapter:
        rest.pop(0)
    if len(rest) > 1 or (rest and not isinstance(rest[0], str)):
        return None
    return namespace(rest[0] if rest else None, adapter)


def _plain(extra: Sequence[Any] | None, adapter: str | None, start: int) -> bool:
    """Whether blocks from `start` on hash nothing but tokens and adapter."""
    if not extra:
        return True
    return all(not keys or (len(keys) == 1 and keys[0] == adapter) for keys in extra[start:])


def _short(block_hash: Any) -> int:
    """64 bits of an engine's hash name a block of one engine well enough, in a fifth of the memory."""
    if isinstance(block_hash, int):
        return block_hash
    return int.from_bytes(block_hash[:8], "little")


def _timestamp(payload: bytes) -> float:
    try:
        return float(msgspec.msgpack.decode(payload)[0])
    except (msgspec.DecodeError, ValueError, TypeError, IndexError):
        return float("-inf")
