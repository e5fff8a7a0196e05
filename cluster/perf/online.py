"""Step times that learn from served requests: a prior model, corrected by what was measured.

For each stage the measured seconds y are explained by the prior's x as `y = a + b * x`, a line that can turn any
linear prior into any other. It is fitted to the last `WINDOW` samples by iteratively reweighted least squares on
relative errors (Holland & Welsch, 1977), so that short and long requests count alike: a sample's weight is
`age * huber / expected^2`, where `age` halves every `half_life_s`, and `huber` falls with residuals beyond three
median residuals (Huber, 1964). a and b are bounded, and a small ridge holds the prior where requests look alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from cluster.messages import Outcome, Path, RequestRecord, Stage
from cluster.perf.times import StepTimes

WINDOW = 96
REFIT_EVERY = 8
ITERATIONS = 6
SCALE_BOUND = 1000.0
OFFSET_BOUND_S = 10.0
SHORTEST_S, LONGEST_S = 1e-7, 86_400.0
HUBER = 3.0
OUTLIER = 10.0
"""Residuals beyond this many medians have no weight at all (a redescending tail)."""
RIDGE = 0.05


class Correction:
    """One stage's line `a + b * x` over the prior's seconds x. Starts as the identity.

    Attributes:
        error: median of |log(measured / corrected)| over the window.
    """

    def __init__(self, half_life_s: float = 120.0) -> None:
        self.offset_s, self.scale = 0.0, 1.0
        self.samples = 0
        self.error = 0.0
        self._half_life_s = half_life_s
        self._window: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)

    def __call__(self, prior_s: float) -> float:
        return self.offset_s + self.scale * prior_s

    def observe(self, prior_s: float, measured_s: float, now: float) -> None:
        """Learn one pair. Values outside [0.1 us, a day] are ignored."""
        if not (SHORTEST_S < prior_s < LONGEST_S and SHORTEST_S < measured_s < LONGEST_S):
            return
        self._window.append((now, prior_s, measured_s))
        self.samples += 1
        if self.samples < 2 * REFIT_EVERY or self.samples % REFIT_EVERY == 0:
            self._fit(now)

    def _fit(self, now: float) -> None:
        window = self._window
        ages = [0.5 ** (max(0.0, now - at) / self._half_life_s) for at, _, _ in window]
        a, b = _first_guess(window)
        # With few samples the prior counts as one of them.
        ridge = max(RIDGE, 1.0 / len(window) ** 2)
        for _ in range(ITERATIONS):
            residuals = [abs(math.log(y / (a + b * x))) for _, x, y in window]
            spread = max(median(residuals), 0.005)
            w = pp = px = xx = py = xy = 0.0
            for (_, x, y), age, residual in zip(window, ages, residuals, strict=True):
                distance = residual / spread
                if distance > OUTLIER:
                    continue
                expected = a + b * x
                weight = age if distance <= HUBER else age * HUBER / distance
                p, q, r = 1.0 / expected, x / expected, y / expected
                w += weight
                pp += weight * p * p
                px += weight * p * q
                xx += weight * q * q
                py += weight * p * r
                xy += weight * q * r
            if w < ridge:
                # All that is recent is an outlier to what is old, as after a change during a long silence: what is left
                # weighs too little to bend the line by.
                a, b = self.offset_s, self.scale
                break
            # The ridge pulls the offset alone: a line without one is the prior's own shape.
            pp += ridge * pp / w
            determinant = pp * xx - px * px
            a = (py * xx - xy * px) / determinant
            b = (xy * pp - py * px) / determinant
            if a < 0:
                a, b = 0.0, xy / xx
            elif b < 1 / SCALE_BOUND:
                b = 1 / SCALE_BOUND
                a = max(0.0, (py - px * b) / pp)
            a, b = min(a, OFFSET_BOUND_S), min(max(b, 1 / SCALE_BOUND), SCALE_BOUND)
        self.offset_s, self.scale = a, b
        self.error = median(abs(math.log(y / (a + b * x))) for _, x, y in window)


def _first_guess(window: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """A line that a quarter of wild samples cannot move: the median of slopes of far pairs (Theil, 1950)."""
    by_x = sorted((x, y) for _, x, y in window)
    half = (len(by_x) + 1) // 2
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in zip(by_x, by_x[half:], strict=False) if x2 > 1.2 * x1]
    slope = median(slopes) if len(slopes) >= 4 else 0.0
    if not 1 / SCALE_BOUND <= slope <= SCALE_BOUND:
        slope = median(y / x for x, y in by_x)
        return 0.0, min(max(slope, 1 / SCALE_BOUND), SCALE_BOUND)
    offset = median(y - slope * x for x, y in by_x)
    return min(max(offset, 0.0), OFFSET_BOUND_S), slope


class OnlineTimes(StepTimes):
    """A `StepTimes` whose prompts, transfers and decode steps are corrected by measurements.

    One object per pool of equal engines; placement asks it, finished requests and step samples teach it.
    """

    def __init__(self, prior: StepTimes, half_life_s: float = 120.0) -> None:
        self.prior = prior
        self.prefill = Correction(half_life_s)
        self.transfer = Correction(half_life_s)
        self.decode = Correction(half_life_s)

    def observe_prompt(self, record: RequestRecord, now: float) -> None:
        """Learn from a finished request whose prompt one of these engines computed."""
        computed = record.prompt_tokens - record.cached_tokens
        compute_s = record.stage_s.get(Stage.PREFILL_COMPUTE)
        if record.outcome is Outcome.DONE and compute_s is not None and computed > 0:
            self.prefill.observe(self.prior.step_s([(computed, record.cached_tokens)], 0, 0), compute_s, now)

    def observe_transfer(self, record: RequestRecord, now: float) -> None:
        """Learn from a finished request whose KV one of these engines pulled."""
        if record.outcome is not Outcome.DONE or record.path is not Path.SPLIT:
            return
        transfer_s = record.stage_s.get(Stage.KV_TRANSFER)
        if transfer_s is not None and record.transfer_bytes > 0:
            self.transfer.observe(self.prior.transfer_s(record.transfer_bytes), transfer_s, now)

    def observe_decode(self, batch: int, context_tokens: int, step_s: float, now: float) -> None:
        """Learn from a decode step (or the mean of several) of a known batch."""
        if batch > 0:
            self.decode.observe(self.prior.step_s((), batch, context_tokens), step_s, now)

    def prefill_s(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Seconds to compute `new_tokens` of a prompt behind `context_tokens` that are in the cache."""
        return self.prefill(self.prior.step_s([(new_tokens, context_tokens)], 0, 0)) if new_tokens > 0 else 0.0

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        decode_batch: int,
        decode_context_tokens: int,
        draft_tokens: int = 0,
    ) -> float:
        prior_s = self.prior.step_s(prefill, decode_batch, decode_context_tokens, draft_tokens)
        return self.prefill(prior_s) if prefill else self.decode(prior_s)

    def decode_run_s(self, decode_batch: int, decode_context_tokens: int, steps: int) -> list[float]:
        return [self.decode(s) for s in self.prior.decode_run_s(decode_batch, decode_context_tokens, steps)]

    def transfer_s(self, kv_bytes: int) -> float:
        return self.transfer(self.prior.transfer_s(kv_bytes))
