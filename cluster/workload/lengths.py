"""How many tokens: fixed, uniform, lognormal or empirical lengths, each a sampler on a seeded `Random`."""

from __future__ import annotations

import math
from random import Random
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cluster.config import Section


class Fixed(Section):
    dist: Literal["fixed"]
    tokens: int = Field(ge=1)

    def sample(self, rng: Random) -> int:
        return self.tokens

    @property
    def mean(self) -> float:
        return float(self.tokens)


class Uniform(Section):
    """Every length from `min` to `max`, both included."""

    dist: Literal["uniform"]
    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    def sample(self, rng: Random) -> int:
        return rng.randint(self.min, self.max)

    @property
    def mean(self) -> float:
        return (self.min + self.max) / 2


class LogNormal(Section):
    """Lognormal with the given mean; `sigma` is the deviation of the logarithm. Draws are clamped to [min, max]."""

    dist: Literal["lognormal"]
    mean: float = Field(gt=0)
    sigma: float = Field(0.8, ge=0, le=4)
    min: int = Field(1, ge=1)
    max: int = Field(1_000_000, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> LogNormal:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    def sample(self, rng: Random) -> int:
        # E[exp(N(mu, sigma))] = exp(mu + sigma^2 / 2)
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), self.min), self.max)


class Empirical(Section):
    """Draws from a list of observed lengths, each equally likely."""

    dist: Literal["empirical"]
    values: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _positive(self) -> Empirical:
        if min(self.values) < 1:
            raise ValueError(f"{min(self.values)} is below the minimum 1")
        return self

    def sample(self, rng: Random) -> int:
        return rng.choice(self.values)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def _shorthand(value: Any) -> Any:
    return {"dist": "fixed", "tokens": value} if isinstance(value, int) else value


Length = Annotated[
    Annotated[Fixed | Uniform | LogNormal | Empirical, Field(discriminator="dist")], BeforeValidator(_shorthand)
]
"""A length in YAML: a bare integer is fixed; otherwise `{dist: fixed|uniform|lognormal|empirical, ...}`."""


def fixed(tokens: int) -> Fixed:
    return Fixed(dist="fixed", tokens=tokens)
