"""What is asked of placement, and what it answers: plain data of one decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cluster.messages import Path, Request
from router.load import WorkerLoad


class Distance(StrEnum):
    """How far a transfer goes; its factor over the modelled time is learned for each."""

    NODE = "node"
    RACK = "rack"
    FAR = "far"


@dataclass(slots=True)
class Question:
    """One request with what is known of its prompt; computed once a decision.

    Attributes:
        matched: tokens that each worker holds now; workers with none are absent.
        cached: the same, with prefixes that are being computed there now: it will hold them by the time it gets to
            this request.
        output_tokens, context_tokens: expected length of the answer; prompt plus half of it.
        shared_tokens, fan_out: the prefix that others go on from differently, 0 if there is none; in how many ways.
        ahead_s: prefill work before it on engines for which others wait in the router, those included; None elsewhere.
    """

    request: Request
    matched: dict[str, int]
    cached: dict[str, int]
    output_tokens: float
    context_tokens: float
    shared_tokens: int = 0
    fan_out: int = 0
    ahead_s: Mapping[str, float] | None = None

    @property
    def one_token(self) -> bool:
        """A prefill engine serves it whole: the step that ends the prompt samples its only token."""
        return self.request.max_output_tokens == 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision before it is reserved. `ttft_s` counts from now; `cached_tokens` are the prefilling engine's."""

    path: Path
    decode: WorkerLoad
    prefill: WorkerLoad | None
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    prefill_s: float
    inside_tpot: bool


def distance(a: WorkerLoad, b: WorkerLoad) -> Distance:
    if a.info.node and a.info.node == b.info.node:
        return Distance.NODE
    if a.info.rack and a.info.rack == b.info.rack:
        return Distance.RACK
    return Distance.FAR
