"""Demand at the entrance: rates of arrivals and tokens from counters, over windows of a bounded history.

Demand is never read from completions per second: at the exit of a saturated system those stay flat however many
requests wait. What a rule turns away (4xx) is none: replicas would not serve it. Completions only tell what a request
is made of (its uncached prompt, its output), and of these only the requests that were served: those that were rejected
or gave up would make all look cheap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from cluster.autoscaling.messages import Settings
from cluster.goodput.accounting import GoodputCounters
from cluster.goodput.feed import needed_values

# Windows reach back this many look-backs where traffic is steady or thin.
REACH = 5
# Multiples of `min_samples` that make a good estimate of means.
ENOUGH = 5


@dataclass(frozen=True, slots=True)
class History:
    """Counters of the last `REACH` look-backs, oldest first."""

    samples: tuple[tuple[float, GoodputCounters], ...] = ()

    def add(self, now: float, values: Mapping[str, float], reach_s: float) -> History:
        kept = tuple(s for s in self.samples if s[0] >= now - reach_s)
        return History((*kept, (now, GoodputCounters(needed_values(values)))))

    def window(self, seconds: float) -> tuple[float, GoodputCounters]:
        """Length and counts of about the last `seconds` (the whole history where that is shorter)."""
        if len(self.samples) < 2:
            return 0.0, GoodputCounters()
        now, latest = self.samples[-1]
        start = next((s for s in reversed(self.samples[:-1]) if now - s[0] >= seconds - 1e-6), self.samples[0])
        return now - start[0], latest.since(start[1])

    def since(self, at_s: float) -> GoodputCounters:
        """Counts after the first sample at or after `at_s`."""
        inside = [s for s in self.samples if s[0] >= at_s]
        return inside[-1][1].since(inside[0][1]) if len(inside) >= 2 else GoodputCounters()

    def dispersion(self, skip_s: float = 0.0) -> float:
        """Variance over mean of arrivals per tick (1 for Poisson), from successive differences without the largest,
        so that neither a trend nor one jump counts. Between 1 and 8. The last `skip_s` seconds are left out."""
        until_s = self.samples[-1][0] - skip_s if self.samples else 0.0
        points = [(at_s, c.to_serve) for at_s, c in self.samples if at_s <= until_s]
        counts = [b[1] - a[1] for a, b in pairwise(points)]
        mean = sum(counts) / len(counts) if counts else 0.0
        if len(counts) < 6 or mean <= 0:
            return 1.0
        squares = sorted((b - a) ** 2 for a, b in pairwise(counts))[:-1]
        return min(8.0, max(1.0, sum(squares) / len(squares) / 2 / mean))


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives per second and what one request is made of.

    Attributes:
        prefill_tokens_per_s: uncached prompt tokens for the prefill pool.
        decode_prompt_tokens_per_s: prompt tokens that decode engines compute themselves.
        output_tokens_per_s: None while nothing was served yet, so that an output is unknown.
        leg_tokens: mean uncached prompt tokens of one prefill leg; `leg_cv2` their squared variation.
        dispersion: of arrivals, 1 for Poisson.
        uncertainty: standard deviation of `arrivals_per_s` as a share of it.
    """

    arrivals_per_s: float
    prefill_tokens_per_s: float
    decode_prompt_tokens_per_s: float
    output_tokens_per_s: float | None
    output_tokens: float | None
    leg_tokens: float
    leg_cv2: float
    dispersion: float
    uncertainty: float


def measure(history: History, settings: Settings) -> Demand:
    """Demand now: rates from the longest window that the shorter ones do not contradict."""
    dispersion = history.dispersion()
    # A change is judged by the noise before it, not by the jump itself.
    arrivals, uncertainty = _arrivals_per_s(history, settings, history.dispersion(settings.look_back_s / 2))
    made_of = _composition(history, settings)
    came, served_prompts = made_of.to_serve, made_of.get("served_prompt_tokens")
    prompts = arrivals * made_of.prompt_tokens_to_serve / came if came else 0.0
    by_prefill = by_decode = 0.0
    if served_prompts > 0:
        by_prefill = made_of.get("computed_tokens", "prefill") / served_prompts
        by_decode = made_of.get("computed_tokens", "decode") / served_prompts
    elif settings.prefill is not None:
        by_prefill = 1.0
    else:
        by_decode = 1.0
    served = made_of.get("served")
    output = made_of.get("output_tokens") / served if served else None
    legs, computed = made_of.get("prefill_legs"), made_of.get("computed_tokens", "prefill")
    leg = computed / legs if legs else (prompts / arrivals if arrivals else 0.0)
    squares = made_of.get("prefill_computed_tokens_squared")
    cv2 = max(0.0, squares * legs / computed**2 - 1) if computed else 1.0
    return Demand(
        arrivals_per_s=arrivals,
        prefill_tokens_per_s=prompts * by_prefill,
        decode_prompt_tokens_per_s=prompts * by_decode,
        output_tokens_per_s=None if output is None else arrivals * output,
        output_tokens=output,
        leg_tokens=leg,
        leg_cv2=min(cv2, 20.0),
        dispersion=dispersion,
        uncertainty=uncertainty,
    )


def _arrivals_per_s(history: History, settings: Settings, dispersion: float) -> tuple[float, float]:
    """The rate and its relative standard deviation.

    A long window has little noise and much lag, a short one the reverse: shorten only where arrivals in the shorter
    window differ from the longer one's rate by more than chance.
    """
    lengths_s = (
        (REACH * settings.look_back_s, 0.0),
        (settings.look_back_s, 2.5),
        (max(2 * settings.interval_s, settings.look_back_s / 4), 3.0),
        (settings.interval_s, 4.0),
    )
    rate, uncertainty, known = 0.0, 0.0, False
    for length_s, sigmas in lengths_s:
        window_s, counts = history.window(length_s)
        if not window_s:
            continue
        came = counts.to_serve
        expected = rate * window_s
        if not known or abs(came - expected) > sigmas * math.sqrt(max(1.0, dispersion * expected)):
            rate, known = came / window_s, True
            uncertainty = math.sqrt(dispersion / came) if came else 0.0
    return rate, min(1.0, uncertainty)


def _composition(history: History, settings: Settings) -> GoodputCounters:
    """Counts of the shortest window, from one look-back up, with enough requests to tell what one is made of."""
    for look_backs in range(1, REACH):
        _, counts = history.window(look_backs * settings.look_back_s)
        if min(counts.get("served"), counts.to_serve) >= ENOUGH * settings.min_samples:
            return counts
    return history.window(REACH * settings.look_back_s)[1]
