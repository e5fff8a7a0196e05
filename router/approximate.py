"""Guesses of what an engine caches, from what it was sent: for engines whose KV events are off or incomplete.

Each worker gets an LRU list as long as its KV cache. A prompt's tail is older than its head, as in an engine that
frees a finished request's last block first. What the engine reports (its cached tokens) corrects the guess.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from router.prefix_index import PrefixIndex


class ApproximateCache:
    """One worker's guessed cache, kept in the shared index.

    Args:
        capacity_blocks: the engine's KV blocks, in blocks of our keys.
    """

    def __init__(self, worker_id: str, index: PrefixIndex, capacity_blocks: int) -> None:
        self._worker_id, self._index, self._capacity = worker_id, index, max(1, capacity_blocks)
        self._lru: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lru)

    def sent(self, keys: Sequence[int]) -> None:
        """The engine has computed or received these blocks."""
        keys = keys[: self._capacity]
        lru = self._lru
        for key in reversed(keys):
            lru[key] = None
            lru.move_to_end(key)
        over = len(lru) - self._capacity
        if over > 0:
            self._index.remove(self._worker_id, [lru.popitem(last=False)[0] for _ in range(over)])
        self._index.store(self._worker_id, keys)

    def missed(self, keys: Sequence[int]) -> None:
        """The engine had to compute these blocks although they were believed to be there."""
        for key in keys:
            self._lru.pop(key, None)
        self._index.remove(self._worker_id, reversed(keys))

    def clear(self) -> None:
        self._lru.clear()
        self._index.clear(self._worker_id)
