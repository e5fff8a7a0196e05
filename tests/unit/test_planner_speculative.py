"""Speculative decoding: best k, break-even acceptance, and the batch where it turns into a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import UserError
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.perf.roofline import RooflineTimes
from cluster.planner import speculative as s


@given(alpha=st.floats(0.05, 0.95), k=st.integers(1, 16), c=st.floats(0, 0.5), v=st.floats(0, 0.5))
def test_the_break_even_acceptance_neither_wins_nor_loses(alpha: float, k: int, c: float, v: float) -> None:
    edge = s.break_even(k, s.step_cost(k, c, v))
    if edge is None:
        assert s.speedup(1.0, k, c, v) <= 1
    else:
        assert s.speedup(edge, k, c, v) == pytest.approx(1, abs=1e-6)
        assert (s.speedup(alpha, k, c, v) > 1) == (alpha > edge) or abs(alpha - edge) < 1e-9


@given(low=st.floats(0.05, 0.9), step=st.floats(0.01, 0.09), c=st.floats(0.01, 0.3), more=st.floats(0.01, 0.3))
def test_best_k_grows_with_acceptance_and_shrinks_with_the_drafts_cost(low, step, c, more) -> None:
    assert s.best_k(low, c) <= s.best_k(low + step, c)
    assert s.best_k(low, c + more) <= s.best_k(low, c)


@given(alpha=st.floats(0, 1), k=st.integers(1, 16))
def test_expected_tokens_lie_between_one_and_all(alpha: float, k: int) -> None:
    assert 1 <= s.expected_tokens(alpha, k) <= k + 1
    assert 0 <= s.rejected_share(alpha, k) <= 1 + 1e-12


def _plan(alpha: float = 0.7) -> s.SpeculativePlan:
    shape = model_shape("llama-3.1-70b")
    times = RooflineTimes(shape, hardware("H100"), 4)
    draft = RooflineTimes(model_shape("llama-3.1-8b"), hardware("H100"), 4)
    return s.plan_speculative(times, alpha, 2000, lambda b: draft.step_s((), b, b * 2000))


def test_a_win_alone_turns_into_a_loss_under_load() -> None:
    plan = _plan()
    assert plan.best[1][0] >= 2 and plan.best[1][1] > 1.3
    assert plan.best[256] == (0, 1.0)
    batch = plan.loss_batch[4]
    assert batch is not None and 1 < batch <= 256
    by = {(p.batch, p.k): p.speedup for p in plan.points}
    assert all((speed > 1) == (b < batch) for (b, k), speed in by.items() if k == 4)


def test_a_better_drafter_keeps_winning_longer() -> None:
    low, high = _plan(0.5).loss_batch[2], _plan(0.9).loss_batch[2]
    assert low is not None and (high is None or high > low)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_acceptance_is_a_share(alpha: float) -> None:
    with pytest.raises(UserError, match="acceptance"):
        _plan(alpha)
