"""Keys of prompt blocks: a chained 60-bit hash that router, index and event decoder share.

For tokens x of block j and fixed odd weights k:

    b_j = sum_t k_t * x_t            H_j = M * H_(j-1) + b_j          (mod 2^60)
    key_j = mix(H_j)                 H_-1 = digest of the namespace

so key_j names the namespace and every token up to and including block j. The recurrence has the closed form
H_j = M^j * (M * H_-1 + sum_i M^-i * b_i), which numpy evaluates for all blocks at once, and `mix` is a bijection,
so a chain can be continued from its last key alone (`extend_keys`), as the event decoder must.

Two distinct chains collide with a probability near 2^-60; with 4 million indexed blocks that is about 1e-5 for the
whole index. A collision costs a wrong prediction, never a wrong answer: engines keep their own hash. 60 bits, not 64,
because CPython stores such an int in 32 bytes instead of 48.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

KEY_BITS = 60
_MASK = (1 << KEY_BITS) - 1
_U64 = np.uint64
_MASK_U = _U64(_MASK)
_HALF = _U64(KEY_BITS // 2)
_CHAIN = 0x9E3779B97F4A7C15 & _MASK
_MIX = 0xF1357AEA2E62A9C5 & _MASK
_UNMIX = pow(_MIX, -1, 1 << KEY_BITS)
_UNCHAIN = pow(_CHAIN, -1, 1 << KEY_BITS)


def block_keys(token_ids: Sequence[int], block_size: int, namespace: bytes = b"") -> tuple[int, ...]:
    """Keys of the full blocks of a prompt, in order; a partial last block has none.

    Args:
        token_ids: non-negative ids; an `array('Q')` or a uint64 numpy array saves the copy.
        block_size: tokens per block.
        namespace: see `namespace`; equal tokens in different namespaces share no key.
    """
    return _chain(_seed(namespace), token_ids, block_size)


def extend_keys(parent: int, token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Keys of the blocks that follow the block with key `parent`."""
    return _chain(_unmix(parent), token_ids, block_size)


def namespace(cache_salt: str | None = None, adapter: str | None = None) -> bytes:
    """The cache namespace of a request: what the engine mixes into its own block hashes besides the tokens.

    Every part is framed by its length and absence differs from emptiness, so no two pairs encode alike.
    """
    if cache_salt is None and adapter is None:
        return b""
    parts = []
    for part in (cache_salt, adapter):
        raw = b"" if part is None else part.encode("utf-8", "surrogatepass")
        parts.append((b"-" if part is None else b"+") + len(raw).to_bytes(8, "big") + raw)
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _seed(namespace: bytes) -> int:
    digest = hashlib.blake2b(namespace, digest_size=8, person=b"pdserve-blocks").digest()
    return int.from_bytes(digest, "big") & _MASK | 1


def _unmix(key: int) -> int:
    half = KEY_BITS // 2
    key ^= key >> half
    key = key * _UNMIX & _MASK
    return key ^ key >> half


@lru_cache(maxsize=64)
def _weights(block_size: int) -> NDArray[np.uint64]:
    rng = np.random.default_rng(0x5DEECE66D)
    return rng.integers(0, 1 << 63, block_size, dtype=np.uint64) | _U64(1)


class _Powers:
    """M^j and M^-j for j = 0..n-1; grows to the longest prompt seen."""

    __slots__ = ("down", "up")

    def __init__(self) -> None:
        self.up: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
        self.down: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)

    def reserve(self, blocks: int) -> None:
        if len(self.up) >= blocks:
            return
        size = max(1024, 1 << (blocks - 1).bit_length())
        for name, base in (("up", _CHAIN), ("down", _UNCHAIN)):
            powers = np.empty(size, dtype=np.uint64)
            powers[0] = 1
            known = 1
            while known < size:
                powers[known : 2 * known] = powers[:known] * _U64(pow(base, known, 1 << 64))
                known *= 2
            setattr(self, name, powers)


_POWERS = _Powers()


def _chain(state: int, token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    blocks = len(token_ids) // block_size
    if blocks == 0:
        return ()
    tokens: NDArray[np.uint64]
    if isinstance(token_ids, np.ndarray):
        tokens = token_ids.astype(np.uint64, copy=False)
    else:
        is_u64 = isinstance(token_ids, array) and token_ids.typecode == "Q"
        words = cast("array[int]", token_ids) if is_u64 else array("Q", token_ids)
        tokens = np.frombuffer(words, dtype=np.uint64)
    _POWERS.reserve(blocks)
    sums = np.einsum("ij,j->i", tokens[: blocks * block_size].reshape(blocks, block_size), _weights(block_size))
    sums *= _POWERS.down[:blocks]
    sums[:1] += _U64(state * _CHAIN & _MASK)  # a slice: scalars warn when they wrap
    np.cumsum(sums, out=sums)
    sums *= _POWERS.up[:blocks]
    sums &= _MASK_U
    sums ^= sums >> _HALF
    sums *= _U64(_MIX)
    sums &= _MASK_U
    sums ^= sums >> _HALF
    return tuple(sums.tolist())
