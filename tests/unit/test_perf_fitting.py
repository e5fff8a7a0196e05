"""Fitting finds the coefficients behind noisy steps; a profile survives the disk and refuses nonsense."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from cluster.config import parse
from cluster.engine.simulation.settings import engine_spec
from cluster.errors import UserError
from cluster.messages import Role
from cluster.perf.fitting import StepSample, fit_steps, fit_transfer, residuals_of, variation_of
from cluster.perf.profile import (
    Coefficients,
    HostSlowdown,
    Profile,
    ProfileTimes,
    Residuals,
    read_profile,
    write_profile,
)

TRUE = Coefficients(2e-3, 4e-5, 3e-9, 1e-4, 2e-7)


def _samples(noise: float, hiccups: float = 0.0, seed: int = 3) -> list[StepSample]:
    rng, times, samples = random.Random(seed), ProfileTimes(TRUE), []
    for _ in range(300):
        kind = rng.random()
        prefill = () if kind < 0.5 else ((rng.randint(16, 4096), rng.choice([0, 512, 4096])),)
        batch = 0 if kind > 0.8 else rng.randint(1, 64)
        context = batch * rng.randint(16, 4096)
        duration = times.step_s(prefill, batch, context) * rng.uniform(1 - noise, 1 + noise)
        samples.append(StepSample(prefill, batch, context, duration * (20 if rng.random() < hiccups else 1)))
    return samples


@pytest.mark.parametrize(("noise", "hiccups", "tolerance"), [(0.0, 0.0, 1e-6), (0.05, 0.0, 0.15), (0.05, 0.03, 0.2)])
def test_the_coefficients_behind_the_steps_are_found(noise: float, hiccups: float, tolerance: float) -> None:
    fit = fit_steps(_samples(noise, hiccups))
    fresh = residuals_of(fit.coefficients, _samples(0.0, seed=99))
    assert fresh["all"].p90 <= tolerance
    assert set(fit.residuals) == {"all", "prefill", "decode", "mixed"}
    assert fit.residuals["all"].samples == 300


def test_coefficients_are_never_negative() -> None:
    samples = [StepSample((), b, b * 100, 0.01 - b * 1e-5) for b in range(1, 50)]
    c = fit_steps(samples).coefficients
    assert min(c.fixed_s, c.token_s, c.pair_s, c.sequence_s, c.context_token_s) >= 0


def test_decoding_may_be_nearly_free_where_prompts_are_not() -> None:
    """A few decoding sequences cost one reading of the weights; every prompt token costs its computation."""
    samples = [StepSample(((n, 0),), 0, 0, 0.010 + 5e-4 * n) for n in (16, 64, 256, 1024)]
    samples += [StepSample((), b, 0, 0.010 + 1e-5 * b) for b in (1, 2, 4, 8)]
    fit = fit_steps(samples)
    assert fit.residuals["all"].max < 1e-6
    assert (fit.coefficients.token_s, fit.coefficients.prompt_token_s) == (pytest.approx(1e-5), pytest.approx(4.9e-4))
    assert ProfileTimes(fit.coefficients).step_s(((100, 0),), 3, 0) == pytest.approx(0.010 + 0.05 + 3e-5)


def test_too_few_samples_and_impossible_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        fit_steps(_samples(0.0)[:4])
    with pytest.raises(ValueError, match="positive"):
        fit_steps([*_samples(0.0)[:9], StepSample((), 1, 1, 0.0)])


def test_transfers_fit_a_latency_and_a_bandwidth() -> None:
    fixed, per_byte = fit_transfer([(n * 1_000_000, 1e-3 + n * 1e6 / 5e9) for n in range(1, 20)])
    assert fixed == pytest.approx(1e-3, rel=1e-3) and 1 / per_byte == pytest.approx(5e9, rel=1e-3)
    assert fit_transfer([]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["p.json", "p.yaml", "deeper/p.yml"])
def test_a_profile_comes_back_as_it_was_written(tmp_path, name: str) -> None:
    fit = fit_steps(_samples(0.05))
    profile = Profile(fit.coefficients, {"model": "embedded", "tp": 1}, fit.residuals)
    write_profile(profile, tmp_path / name)
    assert read_profile(tmp_path / name) == profile
    assert profile.times().decode_run_s(4, 400, 3) == pytest.approx(
        [profile.times().step_s((), 4, 400 + 4 * i) for i in range(3)]
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[1, 2]", "not a profile of format 1"),
        ("{", "neither JSON nor YAML"),
        (json.dumps({"format": 1, "coefficients": {"fixed_s": 1}}), "coefficients must be"),
        (json.dumps({"format": 1, "coefficients": {"fixed_s": 1, "token_s": -1}}), "token_s is -1, not a number"),
        (json.dumps({"format": 1, "coefficients": {"fixed_s": 1, "token_s": "x"}}), "token_s is 'x'"),
        (json.dumps({"format": 1, "coefficients": {"fixed_s": 1, "token_s": 1, "tokn_s": 1}}), "coefficients must be"),
    ],
)
def test_a_file_that_is_no_profile_is_one_line(tmp_path, content: str, line: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(UserError, match=line):
        read_profile(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


@pytest.mark.parametrize("name", ["p.json", "p.yaml"])
def test_small_numbers_are_read_back_as_numbers(tmp_path, name: str) -> None:
    profile = Profile(Coefficients(1e-05, 2e-05, 1e-10, 0.0, 3e-08), {}, {"all": Residuals(9, 1e-05, 0.1, 0.2)})
    profile = replace(profile, host_slowdown=HostSlowdown(1e-05, 0.0), step_variation=(0.9, 1.0, 1.25))
    write_profile(profile, tmp_path / name)
    assert read_profile(tmp_path / name) == profile


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"host_slowdown": 0.3}, "host_slowdown is 0.3, not a mapping"),
        ({"host_slowdown": {"prefill": 0.3}}, "host_slowdown must be decode, prefill"),
        ({"host_slowdown": {"prefill": 0.3, "decode": -1}}, "host_slowdown.decode is -1, not a number of at least 0"),
        ({"step_variation": 1.2}, "step_variation is 1.2, not a list"),
        ({"step_variation": [1.0, "x"]}, "step_variation.1 is 'x', not a number of at least 0"),
        ({"residuals": [1]}, r"residuals is \[1\], not a mapping"),
        ({"residuals": {"all": 3}}, "residuals.all is 3, not a mapping"),
        ({"residuals": {"all": {"median": 1}}}, "residuals.all must be max, median, p90, samples"),
        ({"provenance": "mine"}, "provenance is 'mine', not a mapping"),
    ],
)
def test_a_mistake_beside_the_coefficients_is_one_line(tmp_path, more: dict, line: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"format": 1, "coefficients": {"fixed_s": 1, "token_s": 1}, **more}))
    with pytest.raises(UserError, match=line) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


def test_a_profile_is_read_for_its_own_layout_alone(tmp_path) -> None:
    path = tmp_path / "p.json"
    write_profile(Profile(Coefficients(5e-3, 2e-5, 0.0, 1e-4, 1e-8), {"tp": 4}), path)
    assert read_profile(path).provenance == read_profile(path, 4, 2).provenance == {"tp": 4}
    raw = {"engine": {"kind": "simulated", "simulated": {"times": str(path)}}}
    with pytest.raises(UserError, match=r"p.json was measured at tp=4 pp=1, not tp=1 pp=1; use that layout"):
        engine_spec(parse(raw), Role.DECODE)
    four = {"decode": {"layout": {"tp": 4}}}
    assert engine_spec(parse({**raw, "pools": four}), Role.DECODE).times.step_s((), 1, 0) > 0


def test_variation_is_what_each_batch_took_beside_the_fit() -> None:
    coefficients = Coefficients(0.010, 0.0, 0.0, 0.0, 0.0)
    batches = [[StepSample((), 1, 100, s) for s in steps] for steps in ((0.012, 0.010), (0.009, 0.009), (0.020, 0.010))]
    assert variation_of(coefficients, batches) == (0.9, 1.1, 1.5)
    assert variation_of(coefficients, []) == ()
