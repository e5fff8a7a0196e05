"""Arrival processes have the rate and the burstiness that they claim; lengths have their mean."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import fmean, pstdev

import pytest
from pydantic import TypeAdapter, ValidationError

from cluster.workload.lengths import Empirical, Fixed, Length, LogNormal, Uniform
from cluster.workload.processes import Constant, Diurnal, Gamma, Poisson, Process, Step, Steps


def gaps(process, n: int = 20_000) -> list[float]:
    times = list(islice(process.times(Random(3)), n))
    assert times == sorted(times)
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize(
    ("process", "rate", "cv"),
    [
        (Constant(process="constant", rate_per_s=8), 8, 0),
        (Poisson(process="poisson", rate_per_s=8), 8, 1),
        (Gamma(process="gamma", rate_per_s=8, cv=1), 8, 1),
        (Gamma(process="gamma", rate_per_s=8, cv=3), 8, 3),
        (Gamma(process="gamma", rate_per_s=8, cv=0.5), 8, 0.5),
    ],
)
def test_rate_and_variation(process, rate: float, cv: float) -> None:
    g = gaps(process)
    assert 1 / fmean(g) == pytest.approx(rate, rel=0.05)
    assert pstdev(g) / fmean(g) == pytest.approx(cv, rel=0.06, abs=1e-9)
    assert 1 / fmean(gaps(process.scaled(2.5))) == pytest.approx(2.5 * rate, rel=0.05)


@pytest.mark.parametrize("rate", [float("inf"), float("nan")])
@pytest.mark.parametrize("process", ["constant", "poisson", "gamma", "diurnal"])
def test_a_rate_is_a_finite_number(process: str, rate: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        TypeAdapter(Process).validate_python({"process": process, "rate_per_s": rate})
    with pytest.raises(ValidationError, match="finite number"):
        Step(rate_per_s=rate, for_s=1)


def test_diurnal_follows_its_sine() -> None:
    process = Diurnal(process="diurnal", rate_per_s=50, amplitude=0.9, period_s=400)
    times = [t for t in islice(process.times(Random(1)), 60_000) if t < 1000 * 1.2]
    peak = sum(1 for t in times if 75 <= t % 400 < 125)
    valley = sum(1 for t in times if 275 <= t % 400 < 325)
    assert peak / 150 == pytest.approx(50 * 1.88, rel=0.05)
    assert valley / 150 == pytest.approx(50 * 0.12, rel=0.15)


def test_steps_change_at_their_border_and_repeat() -> None:
    process = Steps(process="steps", steps=(Step(rate_per_s=5, for_s=100), Step(rate_per_s=0, for_s=50)))
    times = list(islice(process.times(Random(1)), 2000))
    assert not [t for t in times if t % 150 >= 100]
    assert sum(1 for t in times if t < 300) == pytest.approx(1000, rel=0.08)
    assert process.rate_per_s == pytest.approx(10 / 3)
    assert process.scaled(3).rate_per_s == pytest.approx(10)


@pytest.mark.parametrize(
    "length",
    [
        Fixed(dist="fixed", tokens=7),
        Uniform(dist="uniform", min=3, max=11),
        LogNormal(dist="lognormal", mean=300, sigma=0.7),
        Empirical(dist="empirical", values=(1, 2, 30)),
    ],
)
def test_lengths_have_their_mean(length) -> None:
    rng = Random(5)
    assert fmean(length.sample(rng) for _ in range(20_000)) == pytest.approx(length.mean, rel=0.03)


def test_lognormal_is_clamped_and_an_integer_is_a_fixed_length() -> None:
    rng = Random(5)
    length = LogNormal(dist="lognormal", mean=100, sigma=2, min=50, max=200)
    drawn = {length.sample(rng) for _ in range(1000)}
    assert min(drawn) == 50
    assert max(drawn) == 200
    assert TypeAdapter(Length).validate_python(12) == Fixed(dist="fixed", tokens=12)
