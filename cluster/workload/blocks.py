"""Keys of a prompt's KV blocks, straight from its segments.

Two prompts have equal keys for exactly the full blocks that hold equal leading tokens, which is the property of
the chained block hashes that engines and routers use on real token ids (router/prefix_index.py). Here no token
is ever written out: a key costs about 0.1 us.
"""

from __future__ import annotations

from cluster.workload.arrival import Prompt

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit integers that spreads every bit."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def block_keys(prompt: Prompt, block_size_tokens: int, namespace: int = 0) -> tuple[int, ...]:
    """64-bit keys of every full block of `block_size_tokens` tokens.

    `namespace` separates caches that must not share (tenant, salt, adapter). A key covers everything before it:
    the chain enters each segment with the content ids and lengths of all earlier ones, and inside a segment a
    block is told apart by the offset of its end. The hash is CPython's of a tuple of integers, which is 64-bit,
    the same in every process and far cheaper than any written here.
    """
    keys: list[int] = []
    chain = hash((0x5DEECE66D, namespace))
    filled = 0  # tokens of the open block that earlier segments hold
    for content, tokens in prompt:
        start = hash((chain, content))
        first = block_size_tokens - filled  # tokens of this segment that complete the open block
        if tokens >= first:
            keys += [hash((start, end)) & _MASK for end in range(first, tokens + 1, block_size_tokens)]
            filled = (tokens - first) % block_size_tokens
        else:
            filled += tokens
        chain = hash((start, -2, tokens))
    return tuple(keys)
