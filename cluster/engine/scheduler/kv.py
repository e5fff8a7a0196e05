"""Paged KV memory: block tables, reference counts, copy-on-write sharing, and a prefix cache with LRU eviction.

A block is free (owned by nobody, content unknown), held (reference count above 0) or idle (count 0, content known
by its key and reusable until evicted). held + idle + free = total, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice


@dataclass(slots=True)
class Stored:
    """Blocks whose content became known: `owner`'s blocks from index `first` on; `parent` is the key before them."""

    keys: list[int]
    parent: int | None
    owner: str
    first: int


@dataclass(slots=True)
class Removed:
    """Keys that were evicted."""

    keys: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole prefix cache was dropped."""


KvEvent = Stored | Removed | Cleared


class PagedKv:
    """KV blocks of one engine. A table is a list of block numbers; whoever holds one releases it once."""

    def __init__(self, blocks: int, *, prefix_caching: bool = True, record_events: bool = True) -> None:
        self.total_blocks = blocks
        self.prefix_caching = prefix_caching
        self.record_events = record_events
        self.copies = 0
        self._free: list[int] = []
        # Blocks are numbered when first used, so that an idle engine costs no memory.
        self._refs: list[int] = []
        self._key_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        # Oldest first. Taken from the front many at a time, so a plain dict beats an OrderedDict.
        self._idle: dict[int, None] = {}
        self._events: list[KvEvent] = []

    @property
    def available_blocks(self) -> int:
        """Blocks that can be had now: free ones and idle ones."""
        return self.total_blocks - len(self._refs) + len(self._free) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks with known content, held or idle."""
        return len(self._block_of)

    def match(self, keys: Sequence[int], limit: int) -> int:
        """How many leading keys, at most `limit`, are in the cache."""
        known = self._block_of
        hit = 0
        for key in keys:
            if hit == limit or key not in known:
                break
            hit += 1
        return hit

    def acquire(self, keys: Sequence[int], hit: int, count: int) -> list[int] | None:
        """A table of `count` blocks whose first `hit` are the cached blocks of `keys`; None if there is no room."""
        refs, idle = self._refs, self._idle
        table = [self._block_of[key] for key in keys[:hit]]
        revived = [block for block in table if not refs[block]]
        if count - hit + len(revived) > self.available_blocks:
            return None
        for block in revived:
            del idle[block]
        for block in table:
            refs[block] += 1
        table += self._take(count - hit)
        return table

    def grow(self, table: list[int], count: int) -> bool:
        """Append blocks until the table has `count`; False, and nothing done, if there is no room."""
        missing = count - len(table)
        if missing > self.available_blocks:
            return False
        if missing > 0:
            table += self._take(missing)
        return True

    def store(self, table: list[int], keys: Sequence[int], first: int, end: int, owner: str) -> None:
        """Blocks [first, end) of the table now hold the content that `keys` name: later prompts may share them."""
        if not self.prefix_caching or first >= end:
            return
        new = keys[first:end]
        if self._block_of.keys().isdisjoint(new):
            self._remember(table[first:end], new)
            self._announce(list(new), keys, end, owner)
            return
        # Some were computed twice: the cache knows one copy, this one stays private. Runs of stored keys end there.
        start = first
        for index in range(first, end + 1):
            if index < end and keys[index] not in self._block_of:
                continue
            self._remember(table[start:index], keys[start:index])
            self._announce(list(keys[start:index]), keys, index, owner)
            start = index + 1

    def fork(self, table: list[int]) -> list[int]:
        """A second owner of the same blocks."""
        for block in table:
            self._refs[block] += 1
        return list(table)

    def own(self, table: list[int], index: int) -> bool | None:
        """Make block `index` writable: copy it if it is shared. True if copied, None if there is no room to."""
        block = table[index]
        if self._refs[block] == 1:
            return False
        if not self.available_blocks:
            return None
        (copy,) = self._take(1)
        self._refs[block] -= 1
        table[index] = copy
        self.copies += 1
        return True

    def release(self, table: list[int]) -> None:
        """Give the blocks up and empty the table. The end of a prompt is evicted before its beginning."""
        refs, keyed, idle, free = self._refs, self._key_of, self._idle, self._free
        for block in reversed(table):
            left = refs[block] - 1
            assert left >= 0, f"block {block} released twice"
            refs[block] = left
            if not left:
                if block in keyed:
                    idle[block] = None
                else:
                    free.append(block)
        table.clear()

    def clear_cache(self) -> None:
        """Forget all content. Held blocks stay held; they are free once released."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._block_of.clear()
        self._key_of.clear()
        if self.record_events:
            self._events.append(Cleared())

    def take_events(self) -> list[KvEvent]:
        """Changes of the cache since the last call, in order."""
        events = self._events
        if events:
            self._events = []
        return events

    def _take(self, count: int) -> list[int]:
        refs = self._refs
        free = self._free
        blocks: list[int] = []
        if free and count:
            cut = max(len(free) - count, 0)
            blocks = free[cut:]
            del free[cut:]
            for block in blocks:
                refs[block] = 1
        fresh = min(count - len(blocks), self.total_blocks - len(refs))
        if fresh > 0:
            blocks.extend(range(len(refs), len(refs) + fresh))
            refs.extend([1] * fresh)
        if len(blocks) < count:
            self._evict(count - len(blocks), blocks)
        return blocks

    def _evict(self, count: int, into: list[int]) -> None:
        blocks = list(islice(self._idle, count))
        removed = list(map(self._key_of.pop, blocks))
        for block in blocks:
            del self._idle[block]
            self._refs[block] = 1
        for key in removed:
            del self._block_of[key]
        into += blocks
        if self.record_events:
            if self._events and isinstance(self._events[-1], Removed):
                self._events[-1].keys += removed
            else:
                self._events.append(Removed(removed))

    def _remember(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        self._block_of.update(zip(keys, blocks, strict=True))
        self._key_of.update(zip(blocks, keys, strict=True))

    def _announce(self, stored: list[int], keys: Sequence[int], end: int, owner: str) -> None:
        if stored and self.record_events:
            first = end - len(stored)
            self._events.append(Stored(stored, keys[first - 1] if first else None, owner, first))
