"""Least squares of step times: measured iterations in, coefficients and residuals out.

Non-negative least squares (Lawson & Hanson, 1974) on relative errors, so that a 2 ms decode step and a 2 s prompt
count alike; a few rounds of Huber weights (Huber, 1964) keep a hiccup of the machine from bending the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from cluster.perf.profile import Coefficients, ProfileTimes, Residuals

ROUNDS = 5
HUBER = 2.0


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured iteration, in the words of `StepTimes.step_s`."""

    prefill: tuple[tuple[int, int], ...]
    decode_batch: int
    decode_context_tokens: int
    duration_s: float

    @property
    def kind(self) -> str:
        if not self.prefill:
            return "decode"
        return "mixed" if self.decode_batch else "prefill"


@dataclass(frozen=True, slots=True)
class Fit:
    coefficients: Coefficients
    residuals: dict[str, Residuals]


def _row(sample: StepSample) -> list[float]:
    new = sum(n for n, _ in sample.prefill)
    pairs = sum(n * (c + 0.5 * n) for n, c in sample.prefill)
    return [1.0, new, pairs, sample.decode_batch, sample.decode_context_tokens, len(sample.prefill)]


def _coefficients(solution: Sequence[float]) -> Coefficients:
    """What a prompt's token and a decoding sequence cost, as a part that they share and what either costs beyond it."""
    fixed, prompt_token, pair, sequence, context, chunk = solution
    token = min(prompt_token, sequence)
    return Coefficients(
        fixed, token, pair, sequence - token, context, chunk_s=chunk, prompt_token_s=prompt_token - token
    )


def fit_steps(samples: Sequence[StepSample]) -> Fit:
    """Fit the six step coefficients.

    Raises:
        ValueError: fewer than six samples, or a duration that is not positive.
    """
    if len(samples) < 6:
        raise ValueError(f"{len(samples)} samples do not determine 6 coefficients")
    rows = np.array([_row(s) for s in samples], dtype=float)
    durations = np.array([s.duration_s for s in samples], dtype=float)
    if not (durations > 0).all():
        raise ValueError("every duration must be positive")
    relative = rows / durations[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(samples))
    for _ in range(ROUNDS):
        solution, _norm = nnls(relative / scale * weights[:, None], weights)
        residuals = np.abs(relative / scale @ solution - 1)
        spread = max(float(np.median(residuals)), 1e-3)
        weights = np.sqrt(np.minimum(1.0, HUBER * spread / np.maximum(residuals, 1e-12)))
    coefficients = _coefficients([float(v) for v in solution / scale])
    return Fit(coefficients, residuals_of(coefficients, samples))


def residuals_of(coefficients: Coefficients, samples: Sequence[StepSample]) -> dict[str, Residuals]:
    """Relative errors by kind of step and over all."""
    times = ProfileTimes(coefficients)
    by_kind: dict[str, list[float]] = {"all": []}
    for s in samples:
        error = abs(times.step_s(s.prefill, s.decode_batch, s.decode_context_tokens) / s.duration_s - 1)
        by_kind["all"].append(error)
        by_kind.setdefault(s.kind, []).append(error)
    return {
        kind: Residuals(len(e), float(np.median(e)), float(np.quantile(e, 0.9)), float(np.max(e)))
        for kind, e in by_kind.items()
        if e
    }


def variation_of(coefficients: Coefficients, batches: Sequence[Sequence[StepSample]]) -> tuple[float, ...]:
    """Quantiles of how many times as long as fitted each batch's decode steps took: one number for each batch, in
    ascending order, so they are evenly spaced. What the fit itself misses counts as variation too."""
    times = ProfileTimes(coefficients)
    factors = []
    for batch in batches:
        fitted_s = sum(times.step_s((), s.decode_batch, s.decode_context_tokens) for s in batch)
        factors.append(sum(s.duration_s for s in batch) / fitted_s)
    return tuple(round(f, 4) for f in sorted(factors))


def fit_transfer(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(bytes, seconds) -> (fixed seconds, seconds a byte), both at least 0."""
    if not samples:
        return 0.0, 0.0
    rows = np.array([[1.0 / t, size / t] for size, t in samples])
    scale = np.abs(rows).max(axis=0)
    solution, _norm = nnls(rows / scale, np.ones(len(samples)))
    fixed, per_byte = solution / scale
    return float(fixed), float(per_byte)
