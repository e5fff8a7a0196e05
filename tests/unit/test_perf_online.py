"""Times learnt from served requests: they converge, ignore outliers, follow a change, and stay bounded."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Outcome, Path, RequestRecord, Slo, Stage
from cluster.perf.online import OFFSET_BOUND_S, SCALE_BOUND, Correction, OnlineTimes
from cluster.perf.times import LinearTimes


def _feed(correction: Correction, offset: float, scale: float, n: int, start: float, outliers: float = 0.0) -> float:
    rng = random.Random(7)
    now = start
    for _ in range(n):
        now += 0.1
        x = math.exp(rng.uniform(math.log(0.01), math.log(2)))
        y = (offset + scale * x) * rng.uniform(0.95, 1.05)
        correction.observe(x, y * 50 if rng.random() < outliers else y, now)
    return now


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (0.01, 3.0), (0.2, 0.1), (0.0, 80.0)])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_any_line_is_learnt_from_a_few_hundred_requests(offset: float, scale: float, outliers: float) -> None:
    correction = Correction()
    _feed(correction, offset, scale, 600, 0.0, outliers)
    for x in (0.02, 0.2, 1.5):
        assert correction(x) == pytest.approx(offset + scale * x, rel=0.25)


def test_it_follows_a_change_within_a_few_half_lives() -> None:
    correction = Correction(half_life_s=10)
    now = _feed(correction, 0.0, 1.0, 300, 0.0)
    _feed(correction, 0.0, 4.0, 600, now)
    assert correction(0.5) == pytest.approx(2.0, rel=0.1)


def test_requests_that_all_look_alike_give_their_own_time() -> None:
    correction = Correction()
    for i in range(200):
        correction.observe(0.1, 0.5, i * 0.1)
    assert correction(0.1) == pytest.approx(0.5, rel=0.02)
    assert correction(0.2) >= correction(0.1)


@given(
    st.lists(
        st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=60,
    )
)
def test_no_measurement_breaks_the_bounds(pairs) -> None:
    correction = Correction()
    for i, (x, y) in enumerate(pairs):
        correction.observe(x, y, float(i))
    assert 0 <= correction.offset_s <= OFFSET_BOUND_S
    assert 1 / SCALE_BOUND <= correction.scale <= SCALE_BOUND
    assert correction(1.0) <= correction(2.0)


def _idle(correction: Correction, hours: float) -> float:
    """A full window of quick, nearly equal requests, then nothing for hours."""
    rng = random.Random(3)
    for i in range(96):
        x = math.exp(rng.uniform(math.log(0.01), math.log(2)))
        correction.observe(x, (0.01 + x) * rng.uniform(0.99, 1.01), i * 0.1)
    return hours * 3600


@pytest.mark.parametrize("hours", [1, 40, 1000])
def test_slower_requests_after_a_silence_of_any_length_are_learnt(hours: float) -> None:
    """The old samples have no weight left while the new ones are still outliers to them."""
    correction = Correction()
    now = _idle(correction, hours)
    before = correction(0.1)
    rng = random.Random(4)
    for i in range(160):
        x = math.exp(rng.uniform(math.log(0.01), math.log(2)))
        correction.observe(x, 1.6 * (0.01 + x) * rng.uniform(0.95, 1.05), now + i)
        if i == 15:
            assert correction(0.1) == pytest.approx(before, rel=0.02), "too few to tell from outliers"
    assert correction(0.1) == pytest.approx(1.6 * 0.11, rel=0.05)
    assert correction(1.0) == pytest.approx(1.6 * 1.01, rel=0.05)


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1e4), st.floats(1e-6, 1e4), st.sampled_from([0.0, 0.1, 60.0, 3600.0, 2e5, 1e9])),
        max_size=150,
    )
)
def test_no_silence_breaks_the_bounds(samples) -> None:
    correction, now = Correction(), 0.0
    for x, y, silent_s in samples:
        now += silent_s
        correction.observe(x, y, now)
        assert 0 <= correction.offset_s <= OFFSET_BOUND_S
        assert 1 / SCALE_BOUND <= correction.scale <= SCALE_BOUND


def test_a_clock_that_steps_back_does_no_harm() -> None:
    correction = Correction(half_life_s=1)
    for now in (100.0, 0.0, 101.0):
        correction.observe(1.0, 2.0, now)
    assert math.isfinite(correction.scale)


def _record(**changes) -> RequestRecord:
    record = RequestRecord("r", Outcome.DONE, Slo(1, 0.1), 0.0, 1.0, prompt_tokens=1000, path=Path.SPLIT)
    record.stage_s = {Stage.PREFILL_COMPUTE: 0.5, Stage.KV_TRANSFER: 0.2}
    record.transfer_bytes = 10_000_000
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_finished_requests_teach_prefill_and_transfer_and_failed_ones_nothing() -> None:
    times = OnlineTimes(LinearTimes())
    before = times.prefill_s(1000), times.transfer_s(10_000_000)
    for at_s, nothing in (
        (1.0, _record(outcome=Outcome.FAILED)),
        (2.0, _record(cached_tokens=1000, path=Path.LOCAL_CACHED)),
    ):
        times.observe_prompt(nothing, at_s)
        times.observe_transfer(nothing, at_s)
    assert (times.prefill_s(1000), times.transfer_s(10_000_000)) == before
    for i in range(100):
        times.observe_prompt(_record(), float(i))
        times.observe_transfer(_record(), float(i))
    assert times.prefill_s(1000) == pytest.approx(0.5, rel=0.05)
    assert times.transfer_s(10_000_000) == pytest.approx(0.2, rel=0.05)
    assert times.prefill_s(0) == 0.0


def test_decode_steps_are_learnt_apart_from_prompts() -> None:
    times = OnlineTimes(LinearTimes())
    for i in range(200):
        batch = 1 + i % 32
        times.observe_decode(batch, batch * 1000, 2 * LinearTimes().step_s((), batch, batch * 1000), float(i))
    assert times.step_s((), 8, 8000) == pytest.approx(2 * LinearTimes().step_s((), 8, 8000), rel=0.05)
    assert times.decode_run_s(8, 8000, 3)[0] == pytest.approx(times.step_s((), 8, 8000))
    assert times.prefill_s(500) == LinearTimes().step_s([(500, 0)], 0, 0)
