"""When speculative decoding pays, and where more load turns it into a loss.

With acceptance alpha and k drafts a step yields `E = (1 - alpha^(k+1)) / (1 - alpha)` tokens and costs
`C = 1 + k*c + k*v` plain steps: c is a draft's own step, v the extra cost of verifying one draft, both relative to
a plain step; the speed-up is E / C (Leviathan et al., Fast Inference from Transformers via Speculative Decoding,
2023, section 3). While decode is bound by memory reads v is near 0; with a growing batch the verified tokens become
arithmetic and v rises. Here v(B) and c(B) come from the step times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import UserError
from cluster.perf.times import StepTimes


def _check(alpha: float, k: int) -> None:
    if not 0 <= alpha <= 1:
        raise UserError(f"acceptance: {alpha} is outside [0, 1]")
    if k < 1:
        raise UserError(f"k: {k} drafts are less than 1")


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a verified step yields: the accepted drafts and the target's own next token."""
    _check(alpha, k)
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def step_cost(k: int, draft_cost: float, verify_cost: float) -> float:
    """In plain decode steps."""
    return 1 + k * draft_cost + k * verify_cost


def speedup(alpha: float, k: int, draft_cost: float, verify_cost: float = 0.0) -> float:
    return expected_tokens(alpha, k) / step_cost(k, draft_cost, verify_cost)


def rejected_share(alpha: float, k: int) -> float:
    """Share of the drafts that are computed and thrown away."""
    return 1 - (expected_tokens(alpha, k) - 1) / k


def best_k(alpha: float, draft_cost: float, verify_cost: float = 0.0, k_max: int = 16) -> int:
    """The k with the highest speed-up; the smallest of equals. 0 where every k loses."""
    k = max(range(1, k_max + 1), key=lambda k: (speedup(alpha, k, draft_cost, verify_cost), -k))
    return k if speedup(alpha, k, draft_cost, verify_cost) > 1 else 0


def break_even(k: int, cost: float) -> float | None:
    """The acceptance at which k drafts at `cost` plain steps neither win nor lose; None where even 1.0 loses."""
    if cost >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tokens(middle, k) < cost:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True)
class SpeculativePoint:
    """One batch size and k. `cost` is in plain steps of that batch."""

    batch: int
    k: int
    cost: float
    speedup: float
    break_even: float | None


@dataclass(frozen=True, slots=True)
class SpeculativePlan:
    """What to run.

    Attributes:
        points: every (batch, k).
        best: batch -> (k, speed-up); k = 0 is "off".
        loss_batch: k -> smallest batch at which that k is slower than plain decoding; None if at none.
        rejected_share: k -> share of drafts thrown away.
    """

    alpha: float
    points: list[SpeculativePoint]
    best: dict[int, tuple[int, float]]
    loss_batch: dict[int, int | None]
    rejected_share: dict[int, float]


def plan_speculative(
    times: StepTimes,
    alpha: float,
    context_tokens: int,
    draft_step_s: Callable[[int], float],
    k_max: int = 8,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
) -> SpeculativePlan:
    """Cost every (batch, k) with the step times.

    Args:
        draft_step_s: batch -> seconds of one step of the draft model (or head) for the whole batch.
    """
    _check(alpha, k_max)

    def cost(batch: int, k: int) -> float:
        kv_tokens = batch * context_tokens
        plain_s = times.step_s((), batch, kv_tokens)
        verified_s = times.step_s((), batch, kv_tokens, draft_tokens=k * batch)
        return (k * draft_step_s(batch) + verified_s) / plain_s

    ks = range(1, k_max + 1)
    points = [
        SpeculativePoint(b, k, c := cost(b, k), expected_tokens(alpha, k) / c, break_even(k, c))
        for b in batches
        for k in ks
    ]
    best: dict[int, tuple[int, float]] = {}
    for batch in batches:
        top = max((p for p in points if p.batch == batch), key=lambda p: p.speedup)
        best[batch] = (top.k, top.speedup) if top.speedup > 1 else (0, 1.0)
    return SpeculativePlan(
        alpha=alpha,
        points=points,
        best=best,
        loss_batch={k: _first_loss(k, alpha, cost, max(batches)) for k in ks},
        rejected_share={k: rejected_share(alpha, k) for k in ks},
    )


def _first_loss(k: int, alpha: float, cost: Callable[[int, int], float], limit: int) -> int | None:
    """Smallest batch up to `limit` where k loses and keeps losing at `limit`."""
    tokens = expected_tokens(alpha, k)
    if cost(limit, k) < tokens:
        return None
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if cost(middle, k) >= tokens:
            high = middle
        else:
            low = middle + 1
    return low
