"""Block keys: chained, continued, apart by namespace."""

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.block_keys import KEY_BITS, block_keys, extend_keys, namespace

tokens = st.lists(st.integers(0, 200_000), max_size=200)


def slow_keys(token_ids: list[int], block_size: int, space: bytes) -> list[int]:
    """The recurrence of the docstring, one block at a time, from the first key's own chain."""
    keys: list[int] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size]
        keys.append((extend_keys(keys[-1], block, block_size) if keys else block_keys(block, block_size, space))[0])
    return keys


@given(tokens, st.sampled_from([1, 4, 16]), st.binary(max_size=8))
def test_whole_prompt_equals_block_by_block(token_ids, block_size, space):
    assert list(block_keys(token_ids, block_size, space)) == slow_keys(token_ids, block_size, space)


@given(tokens, st.integers(0, 12))
def test_a_chain_continues_from_its_last_key(token_ids, cut):
    keys = block_keys(token_ids, 4)
    cut = min(cut, len(keys))
    if cut:
        assert keys[:cut] + extend_keys(keys[cut - 1], token_ids[cut * 4 :], 4) == keys


@given(tokens, st.integers(0, 199), st.integers(1, 5))
def test_a_changed_token_changes_its_block_and_all_later_ones(token_ids, at, by):
    at = min(at, len(token_ids) - 1)
    if at < 0:
        return
    changed = list(token_ids)
    changed[at] += by
    before, after = block_keys(token_ids, 4), block_keys(changed, 4)
    assert before[: at // 4] == after[: at // 4]
    assert all(a != b for a, b in zip(before[at // 4 :], after[at // 4 :], strict=True))


def test_partial_blocks_have_no_key():
    assert block_keys([1] * 15, 16) == ()
    assert len(block_keys([1] * 33, 16)) == 2
    assert block_keys([], 16) == ()


def test_repeated_and_zero_blocks_are_distinct():
    keys = block_keys([0] * 16 * 300, 16)
    assert len(set(keys)) == 300
    assert keys[0] != block_keys([0] * 16, 16, b"other")[0]


def test_input_kinds_agree():
    ids = [random.Random(1).randrange(150_000) for _ in range(100)]
    assert block_keys(ids, 16) == block_keys(array("Q", ids), 16) == block_keys(np.array(ids), 16)


def test_no_collision_and_full_width_in_a_large_sample():
    rng = random.Random(2)
    keys = set()
    for _ in range(200):
        # Neighbouring prompts: same start, last tokens one apart, as chat turns are.
        head = [rng.randrange(1000) for _ in range(64)]
        for i in range(50):
            keys.update(block_keys([*head, *([i] * 16), *([i + 1] * 16)], 16)[4:])
    assert len(keys) == 200 * 50 * 2
    assert max(keys) < 1 << KEY_BITS
    for bit in range(KEY_BITS):
        ones = sum(key >> bit & 1 for key in keys) / len(keys)
        assert 0.47 < ones < 0.53, bit


def test_negative_token_is_refused():
    with pytest.raises(OverflowError):
        block_keys([-1] * 16, 16)


def test_namespaces_are_framed():
    parts = [None, "", "a", "ab", "abc", "bc", "c"]
    pairs = [(salt, adapter) for salt in parts for adapter in parts]
    assert len({namespace(*pair) for pair in pairs}) == len(pairs)
    ids = list(range(64))
    assert len({block_keys(ids, 16, namespace(*pair)) for pair in pairs}) == len(pairs)
