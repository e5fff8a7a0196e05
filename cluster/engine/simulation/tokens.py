"""Output tokens of a simulated engine: each a function of all tokens before it, and of nothing else.

So a prompt continued by another engine, after a hand-over or a migration, continues with the same tokens, and a test
can compare texts. The prefix enters as a polynomial hash modulo 2^64, which a new token updates in one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_CHUNK = 4096
_POWERS = np.array([pow(_BASE, _CHUNK - 1 - i, 1 << 64) for i in range(_CHUNK)], dtype=np.uint64)


class TokenStream:
    """The continuation of one prompt, drawn from ids in [lowest, highest]."""

    __slots__ = ("_lowest", "_span", "_state")

    def __init__(self, prompt_token_ids: Sequence[int], lowest: int, highest: int) -> None:
        self._lowest, self._span = lowest, highest - lowest + 1
        state = 1
        for start in range(0, len(prompt_token_ids), _CHUNK):
            chunk = np.asarray(prompt_token_ids[start : start + _CHUNK], dtype=np.uint64)
            size = len(chunk)
            part = int((chunk * _POWERS[_CHUNK - size :]).sum(dtype=np.uint64))
            state = (state * pow(_BASE, size, 1 << 64) + part) & _MASK
        self._state = state

    def take(self, count: int) -> list[int]:
        """The next tokens."""
        tokens: list[int] = []
        for _ in range(count):
            x = self._state
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
            token = self._lowest + (x ^ (x >> 31)) % self._span
            self._state = (self._state * _BASE + token) & _MASK
            tokens.append(token)
        return tokens


class BlockHashes:
    """Content keys of one sequence's full blocks, extended as tokens come. Equal prefixes have equal keys."""

    __slots__ = ("_parent", "_rest", "_size", "keys")

    def __init__(self, token_ids: Sequence[int], block_size_tokens: int, salt: str | None) -> None:
        self.keys: list[int] = []
        self._size = block_size_tokens
        self._parent = hash((0x5EED, *(salt or "").encode()))
        self._rest: list[int] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._rest += token_ids
        size, full = self._size, len(self._rest) // self._size
        for index in range(full):
            # CPython's hash of integers is the same in every process.
            self._parent = hash((self._parent, *self._rest[index * size : (index + 1) * size]))
            self.keys.append(self._parent & _MASK)
        del self._rest[: full * size]
