"""Do prompts share a long part that stands where no prefix cache can use it?

A prefix cache reuses equal tokens from token 0 on. If a date, a user's name or retrieved text stands in front, the
long common instructions behind it are computed again for every request. This finds such parts and counts what
putting them first would save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.workload.arrival import Prompt
from cluster.workload.blocks import block_keys

MIN_SHARED_TOKENS = 64
MIN_SHARE = 0.2
"""A part counts as common when at least this share of the prompts has it, and at least three do."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part that many prompts contain and that does not start at token 0.

    Attributes:
        tokens: its length.
        position_tokens: median position of its first token.
        prompts: how many prompts contain it away from the front.
        saved_tokens: prompt tokens that would come from the cache if it stood first.
    """

    content: int
    tokens: int
    position_tokens: int
    prompts: int
    saved_tokens: int


def prompt_evidence(prompts: Sequence[Prompt], block_size_tokens: int = 16) -> dict[str, float]:
    """`reusable_share`: of prompt tokens an endless prefix cache would not compute; `reorder_share`: what moving
    common parts to the front would add to it; position and size of the largest such part."""
    total = sum(tokens for prompt in prompts for _, tokens in prompt)
    if not total:
        return {}
    parts = misplaced(prompts)
    now, better = reusable(prompts, block_size_tokens), 0
    if parts:
        better = reusable([reordered(p, parts) for p in prompts], block_size_tokens) - now
    found = {"reusable_share": now / total, "reorder_share": max(0, better) / total}
    if parts:
        largest = max(parts, key=lambda part: part.saved_tokens)
        found["misplaced_position_tokens"] = float(largest.position_tokens)
        found["misplaced_part_tokens"] = float(largest.tokens)
        found["misplaced_part_prompts"] = float(largest.prompts)
        found["reorder_saves_tokens"] = float(max(0, better))
    return found


def misplaced(prompts: Sequence[Prompt]) -> list[SharedPart]:
    """Long parts that many prompts share behind something that varies."""
    holders: Counter[int] = Counter()
    length: dict[int, int] = {}
    for prompt in prompts:
        for content, tokens in dict(prompt).items():
            holders[content] += 1
            length[content] = min(tokens, length.get(content, tokens))
    enough = max(3, MIN_SHARE * len(prompts))
    common = {c for c, n in holders.items() if n >= enough and length[c] >= MIN_SHARED_TOKENS}
    away: dict[int, list[int]] = {}
    for prompt in prompts:
        at, in_front = 0, True
        for content, tokens in prompt:
            in_front = in_front and content in common
            if content in common and not in_front:
                away.setdefault(content, []).append(at)
            at += tokens
    found = [
        SharedPart(c, length[c], sorted(at)[len(at) // 2], len(at), length[c] * (len(at) - 1))
        for c, at in away.items()
        if len(at) >= enough
    ]
    return sorted(found, key=lambda part: -part.saved_tokens)


def reordered(prompt: Prompt, parts: Sequence[SharedPart]) -> Prompt:
    """The prompt with its common parts first, the most common one in front."""
    rank = {part.content: i for i, part in enumerate(sorted(parts, key=lambda p: (-p.prompts, p.content)))}
    front = sorted((s for s in prompt if s[0] in rank), key=lambda s: rank[s[0]])
    return (*front, *(s for s in prompt if s[0] not in rank))


def reusable(prompts: Sequence[Prompt], block_size_tokens: int) -> int:
    """Prompt tokens that an endless cache of whole blocks would already hold, in this order of arrival."""
    seen: set[int] = set()
    hits = 0
    for prompt in prompts:
        keys = block_keys(prompt, block_size_tokens)
        for key in keys:
            if key not in seen:
                break
            hits += block_size_tokens
        seen.update(keys)
    return hits
