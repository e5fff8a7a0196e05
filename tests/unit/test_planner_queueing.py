"""Closed forms of waiting against textbook values and against a simulated queue."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planner.queueing import erlang_c, mean_wait, normal_cdf, poisson_at_most, wait_tail


@pytest.mark.parametrize(("servers", "load", "expected"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092)])
def test_erlang_c_equals_the_textbook(servers: int, load: float, expected: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(expected, rel=1e-3)


def _simulate(servers: int, rate: float, service: float, n: int = 60_000) -> list[float]:
    rng, now, free, waits = random.Random(5), 0.0, [0.0] * servers, []
    for _ in range(n):
        now += rng.expovariate(rate)
        i = min(range(servers), key=free.__getitem__)
        start = max(now, free[i])
        free[i] = start + service
        waits.append(start - now)
    return waits


@pytest.mark.parametrize(("servers", "rho"), [(1, 0.5), (1, 0.8), (4, 0.7), (8, 0.85)])
def test_waits_are_near_a_simulated_queue(servers: int, rho: float) -> None:
    service = 0.5
    rate = rho * servers / service
    waits = _simulate(servers, rate, service)
    assert mean_wait(servers, rate, service) == pytest.approx(sum(waits) / len(waits), rel=0.15, abs=0.004)
    for t in (0.1, 0.5, 1.5):
        share = sum(w > t for w in waits) / len(waits)
        assert wait_tail(t, servers, rate, service) == pytest.approx(share, abs=0.04)


@given(servers=st.integers(1, 200), load=st.floats(0, 250))
def test_probabilities_stay_probabilities(servers: int, load: float) -> None:
    assert 0 <= erlang_c(servers, load) <= 1
    assert 0 <= wait_tail(0.3, servers, load, 1.0) <= 1
    assert mean_wait(servers, load, 1.0) >= 0


def test_a_full_queue_never_ends() -> None:
    assert mean_wait(2, 4.0, 0.5) == math.inf and wait_tail(1e9, 2, 4.0, 0.5) == 1.0


def test_normal_and_poisson_shares() -> None:
    assert normal_cdf(0) == 0.5 and normal_cdf(1.2816) == pytest.approx(0.9, abs=1e-4)
    assert poisson_at_most(100, 80) == pytest.approx(0.987, abs=0.01)
    assert poisson_at_most(5, 0) == 1.0
