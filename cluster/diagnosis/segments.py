"""Real prompts as segments: which long parts do many of them share, wherever they stand?

Workloads know their segments; logs of prompts do not. Parts are found by windows of tokens: a window that enough
prompts contain is common, and consecutive common windows make a part. The rest is each prompt's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from cluster.diagnosis.prompt_order import MIN_SHARE
from cluster.workload.arrival import Prompt

WINDOW_TOKENS = 32
MAX_TOKENS = 16_384
"""Beyond this a prompt is its own: the common parts of templates stand before it."""

Token = Hashable


def segment(prompts: Sequence[Sequence[Token]], window: int = WINDOW_TOKENS) -> list[Prompt]:
    """Every prompt as segments `(content id, tokens)`; equal ids are equal parts.

    A part is named by its first window, so that prompts whose common run ends a few tokens earlier or later by
    chance still agree on it. `MIN_SHARE` of the prompts, and at least three, must have a window for it to be common.
    """
    holders: Counter[int] = Counter()
    for tokens in prompts:
        holders.update(set(_windows(tokens, window)))
    enough = max(3, MIN_SHARE * len(prompts))
    common = {key for key, n in holders.items() if n >= enough}
    return [_split(tokens, common, window) for tokens in prompts]


def _windows(tokens: Sequence[Token], window: int) -> Iterator[int]:
    part = list(tokens[:MAX_TOKENS])
    for i in range(len(part) - window + 1):
        yield hash(tuple(part[i : i + window]))


def _split(tokens: Sequence[Token], common: set[int], window: int) -> Prompt:
    found: list[tuple[int, int]] = []
    own_from = at = 0
    keys = list(_windows(tokens, window))
    while at < len(keys):
        if keys[at] not in common:
            at += 1
            continue
        end = at
        while end < len(keys) and keys[end] in common:
            end += 1
        _own(found, tokens, own_from, at)
        length = end - 1 - at + window
        found.append((keys[at] & (2**60 - 1), length))
        own_from = at = at + length
    _own(found, tokens, own_from, len(tokens))
    return tuple(found)


def _own(found: list[tuple[int, int]], tokens: Sequence[Token], start: int, end: int) -> None:
    if end > start:
        # Tagged, so that a short own part is never taken for a window.
        found.append((hash(("own", tuple(tokens[start:end]))) & (2**60 - 1) | 2**60, end - start))
