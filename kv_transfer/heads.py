"""Which KV heads a tensor-parallel rank holds, and from which rank of the other pool each one is read.

Everything starts from the model's *total* number of KV heads. Local heads times ranks is not it: with more ranks
than heads every head has several copies, and the product counts each of them.

    total 4, tp 2:  rank 0 holds 0 1, rank 1 holds 2 3
    total 4, tp 8:  ranks 0 and 1 hold 0, ranks 2 and 3 hold 1, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Read:
    """One KV head on its way: `decode_rank` fills its slot `decode_slot` from a slot of `prefill_rank`."""

    head: int
    decode_rank: int
    decode_slot: int
    prefill_rank: int
    prefill_slot: int


def divides(total_kv_heads: int, tp: int) -> bool:
    """Whether `tp` ranks can hold `total_kv_heads`: whole heads each, or whole copies of one head."""
    return total_kv_heads % tp == 0 or tp % total_kv_heads == 0


def replicated(total_kv_heads: int, tp: int) -> bool:
    """Whether some head has more than one copy."""
    return tp > total_kv_heads


def heads_of(rank: int, total_kv_heads: int, tp: int) -> range:
    """Heads that `rank` holds, in the order of its slots.

    Raises:
        ValueError: the heads do not divide over `tp` ranks.
    """
    if not divides(total_kv_heads, tp):
        raise ValueError(f"{total_kv_heads} KV heads do not divide over {tp} ranks")
    if replicated(total_kv_heads, tp):
        head = rank * total_kv_heads // tp
        return range(head, head + 1)
    each = total_kv_heads // tp
    return range(rank * each, (rank + 1) * each)


def reads(total_kv_heads: int, prefill_tp: int, decode_tp: int) -> Iterator[Read]:
    """Every read that fills a decode engine's KV: each of its slots exactly once.

    A head with several copies is read from the copy nearest in rank order, which spreads the readers evenly and is
    what the NIXL connector does.
    """
    holders: dict[int, list[int]] = {}
    for rank in range(prefill_tp):
        for head in heads_of(rank, total_kv_heads, prefill_tp):
            holders.setdefault(head, []).append(rank)
    for decode_rank in range(decode_tp):
        near = decode_rank * prefill_tp // decode_tp
        for decode_slot, head in enumerate(heads_of(decode_rank, total_kv_heads, decode_tp)):
            source = min(holders[head], key=lambda rank: (abs(rank - near), rank))
            slot = head - heads_of(source, total_kv_heads, prefill_tp).start
            yield Read(head, decode_rank, decode_slot, source, slot)
