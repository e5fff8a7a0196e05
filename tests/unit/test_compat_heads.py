"""The KV head map on tagged tensors: every destination byte is written exactly once, by the right source byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kv_transfer.heads import divides, heads_of, reads, replicated

SIZES = (1, 2, 4, 8)
ALL = list(itertools.product(SIZES, SIZES, SIZES))
LAYERS, TOKENS, HEAD_BYTES = 2, 3, 4


def tagged(total: int) -> np.ndarray:
    """[layer, head, token, byte] of the whole model, every byte with a tag of its own."""
    shape = (LAYERS, total, TOKENS, HEAD_BYTES)
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


def rank_cache(whole: np.ndarray, rank: int, total: int, tp: int) -> np.ndarray:
    """What the engine itself computes on one rank, by the rule of its attention layers."""
    if tp <= total:
        each = total // tp
        return whole[:, rank * each : (rank + 1) * each]
    copies = tp // total
    return whole[:, rank // copies : rank // copies + 1]


@pytest.mark.parametrize(("total", "prefill_tp", "decode_tp"), ALL)
def test_every_destination_byte_is_written_once_with_its_own_value(total: int, prefill_tp: int, decode_tp: int) -> None:
    whole = tagged(total)
    sources = [rank_cache(whole, rank, total, prefill_tp) for rank in range(prefill_tp)]
    expected = [rank_cache(whole, rank, total, decode_tp) for rank in range(decode_tp)]
    got = [np.full_like(cache, -1) for cache in expected]
    writes = [np.zeros(cache.shape, int) for cache in expected]
    for read in reads(total, prefill_tp, decode_tp):
        got[read.decode_rank][:, read.decode_slot] = sources[read.prefill_rank][:, read.prefill_slot]
        writes[read.decode_rank][:, read.decode_slot] += 1
    for rank in range(decode_tp):
        assert (writes[rank] == 1).all()
        np.testing.assert_array_equal(got[rank], expected[rank])


@pytest.mark.parametrize(("total", "prefill_tp", "decode_tp"), ALL)
def test_readers_spread_over_the_copies_of_a_head(total: int, prefill_tp: int, decode_tp: int) -> None:
    readers = [0] * prefill_tp
    for read in reads(total, prefill_tp, decode_tp):
        readers[read.prefill_rank] += 1
    busy = [count for count in readers if count]
    assert max(busy) == min(busy)
    if decode_tp >= prefill_tp:
        assert len(busy) == prefill_tp


@pytest.mark.parametrize(("total", "tp"), list(itertools.product(SIZES, SIZES)))
def test_local_heads_times_ranks_is_not_the_total_where_heads_are_copied(total: int, tp: int) -> None:
    local = len(heads_of(0, total, tp))
    assert (local * tp == total) is not replicated(total, tp)
    assert {head for rank in range(tp) for head in heads_of(rank, total, tp)} == set(range(total))


def test_a_map_made_from_local_heads_times_ranks_corrupts() -> None:
    """The classic mistake: with 2 heads on 4 ranks it sees 4 heads and reads the wrong half."""
    total, prefill_tp, decode_tp = 2, 1, 4
    whole = tagged(total)
    wrong_total = len(heads_of(0, total, decode_tp)) * decode_tp
    wrong = {read.decode_rank: read.head for read in reads(wrong_total, prefill_tp, decode_tp)}
    right = {read.decode_rank: read.head for read in reads(total, prefill_tp, decode_tp)}
    assert wrong != right
    assert max(wrong.values()) >= whole.shape[1]


def test_heads_that_do_not_divide_are_refused() -> None:
    assert not divides(3, 2)
    with pytest.raises(ValueError, match="3 KV heads do not divide over 2 ranks"):
        heads_of(0, 3, 2)
    with pytest.raises(ValueError, match="do not divide"):
        list(reads(3, 1, 2))
