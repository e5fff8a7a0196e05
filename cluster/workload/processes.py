"""When requests arrive: open-loop processes as endless iterators of seconds, and closed loops as a description.

In an open loop nobody waits for the server: times are drawn before the run and stay, however slow it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.config import Section

# At an infinite rate time stands still; one that is no number gives no request.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Constant(Section):
    """Equal gaps of 1/rate."""

    process: Literal["constant"]
    rate_per_s: Positive

    def times(self, rng: Random) -> Iterator[float]:
        return (i / self.rate_per_s for i in count())

    def scaled(self, factor: float) -> Constant:
        return self.model_copy(update={"rate_per_s": self.rate_per_s * factor})


class Poisson(Section):
    """Exponential gaps: many independent clients."""

    process: Literal["poisson"]
    rate_per_s: Positive

    def times(self, rng: Random) -> Iterator[float]:
        t, rate = 0.0, self.rate_per_s
        while True:
            t += rng.expovariate(rate)
            yield t

    def scaled(self, factor: float) -> Poisson:
        return self.model_copy(update={"rate_per_s": self.rate_per_s * factor})


class Gamma(Section):
    """Gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, above 1 comes in bursts."""

    process: Literal["gamma"]
    rate_per_s: Positive
    cv: Positive = Field(3.0, le=100)

    def times(self, rng: Random) -> Iterator[float]:
        shape = 1 / self.cv**2
        scale = 1 / (self.rate_per_s * shape)
        t = 0.0
        while True:
            t += rng.gammavariate(shape, scale)
            yield t

    def scaled(self, factor: float) -> Gamma:
        return self.model_copy(update={"rate_per_s": self.rate_per_s * factor})


class Diurnal(Section):
    """A Poisson process whose rate follows a sine: rate * (1 + amplitude * sin(2 pi (t / period + phase)))."""

    process: Literal["diurnal"]
    rate_per_s: Positive = Field(description="mean over a period")
    amplitude: float = Field(0.8, ge=0, le=1)
    period_s: Positive = 86_400
    phase: float = Field(0.0, ge=0, lt=1, description="share of a period; 0.75 starts in the valley")

    def rate_at(self, t: float) -> float:
        return self.rate_per_s * (1 + self.amplitude * math.sin(2 * math.pi * (t / self.period_s + self.phase)))

    def times(self, rng: Random) -> Iterator[float]:
        # Thinning: draw at the peak rate, keep each time with probability rate(t) / peak.
        peak = self.rate_per_s * (1 + self.amplitude)
        t = 0.0
        while True:
            t += rng.expovariate(peak)
            if rng.random() * peak <= self.rate_at(t):
                yield t

    def scaled(self, factor: float) -> Diurnal:
        return self.model_copy(update={"rate_per_s": self.rate_per_s * factor})


class Step(Section):
    rate_per_s: float = Field(ge=0, allow_inf_nan=False)
    for_s: Positive


class Steps(Section):
    """Poisson arrivals whose rate changes at set times; the list is repeated."""

    process: Literal["steps"]
    steps: tuple[Step, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _somebody_comes(self) -> Steps:
        if not any(step.rate_per_s for step in self.steps):
            raise ValueError("every step has rate_per_s 0: nobody would ever arrive")
        return self

    @property
    def rate_per_s(self) -> float:
        return sum(s.rate_per_s * s.for_s for s in self.steps) / sum(s.for_s for s in self.steps)

    def times(self, rng: Random) -> Iterator[float]:
        start = 0.0
        while True:
            for step in self.steps:
                t = start
                while step.rate_per_s:
                    t += rng.expovariate(step.rate_per_s)
                    if t >= start + step.for_s:
                        break  # memoryless: the draw may be thrown away at the border
                    yield t
                start += step.for_s

    def scaled(self, factor: float) -> Steps:
        steps = tuple(s.model_copy(update={"rate_per_s": s.rate_per_s * factor}) for s in self.steps)
        return self.model_copy(update={"steps": steps})


class Closed(Section):
    """A closed loop: `users` who each wait for an answer, think, and ask again. The rate follows the server."""

    process: Literal["closed"]
    users: int = Field(ge=1, le=100_000)
    think_s: float = Field(0.0, ge=0, description="mean of an exponential pause between answer and next request")


SteadyProcess = Constant | Poisson | Gamma
OpenProcess = SteadyProcess | Diurnal | Steps
Process = Annotated[OpenProcess | Closed, Field(discriminator="process")]
