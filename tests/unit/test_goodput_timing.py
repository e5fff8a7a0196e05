"""Token times: the token is the unit of account, never the message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.goodput.timing import TokenTimes, itl_p99_s, token_times


def test_messages_of_several_tokens_and_of_none():
    times = token_times(0.0, [(1.0, 1), (1.3, 3), (1.3, 0), (1.5, 2)])
    assert times.tokens == 6
    assert times.ttft_s == 1.0
    assert times.tpot_s == pytest.approx(0.1)
    assert times.itl_s == pytest.approx([0.1] * 5)


def test_one_token_and_no_token():
    assert token_times(0.5, [(1.0, 1)]).tpot_s is None
    assert token_times(0.5, [(1.0, 1)]).ttft_s == 0.5
    none = token_times(0.0, [(1.0, 0)])
    assert (none.ttft_s, none.tpot_s, none.itl_s, none.tokens) == (None, None, [], 0)


def test_tokens_are_counted_whatever_their_text():
    assert token_times(0.0, [(1.0 + 0.1 * i, 1) for i in range(20)]).tokens == 20


def test_first_message_with_several_tokens():
    times = token_times(0.0, [(1.0, 3), (1.4, 1)])
    assert times.itl_s == pytest.approx([0.0, 0.0, 0.4])
    assert times.tpot_s == pytest.approx(0.4 / 3)


def test_a_clock_that_steps_back_stands_still():
    times = token_times(2.0, [(1.0, 1), (0.5, 2), (3.0, 1)])
    assert times.ttft_s == 0.0
    assert times.itl_s == [0.0, 0.0, 1.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 8)), max_size=40), st.floats(0, 5))
def test_samples_add_up(gaps, first_gap):
    now, times = first_gap, TokenTimes(arrival_s=0.0)
    for gap, tokens in gaps:
        now += gap
        times.on_tokens(now, tokens)
    assert times.tokens == sum(t for _, t in gaps)
    assert len(times.itl_s) == max(0, times.tokens - 1)
    if times.tokens >= 2:
        assert sum(times.itl_s) == pytest.approx(times.last_s - times.first_s, abs=1e-9)
        assert times.tpot_s * (times.tokens - 1) == pytest.approx(sum(times.itl_s), abs=1e-9)


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_p99_is_the_nearest_rank(n, rank):
    assert itl_p99_s([float(i) for i in range(n, 0, -1)]) == rank
    assert itl_p99_s([]) is None


def test_stages_at_the_front_door():
    """Queue 30, prefill 100, transfer 40, decode queue 60, first step 10 ms: 240 if decode sends the first token."""
    by_decode = token_times(0.0, [(0.240, 1), (0.250, 1)])
    by_prefill = token_times(0.0, [(0.130, 1), (0.240, 1)])
    assert by_decode.ttft_s == 0.240
    assert (by_prefill.ttft_s, by_prefill.itl_s) == (0.130, pytest.approx([0.110]))
