"""What other policies would have done with the same requests, by the same predictions: how good the running one is.

Each shadow policy is asked for every placed request. Its choice is valued by the cost model on the loads and the index
of that moment, so the comparison needs no second cluster. The regret of a decision is its predicted TTFT less the
smallest one that any policy here chose; a policy's regret is the mean over decisions. It measures choices, not the
model: whether predictions come true is measured apart (`Accuracy`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.messages import Outcome, Path, RequestRecord, Role
from router.choice import Choice, Question
from router.load import WorkerLoad
from router.policies import BASELINES, Baseline

if TYPE_CHECKING:
    from router.placement import Placer

EXACT = "cost"
RUNNING = "running"


@dataclass(slots=True)
class PolicyScore:
    """Sums over the decisions that a policy was asked for; divide by `decisions`.

    Attributes:
        agreed: decisions in which it chose the workers that were really used.
        ttft_s, tpot_s, cached_tokens: predicted for its choices.
        regret_s: predicted TTFT beyond the best choice of all policies.
    """

    decisions: int = 0
    agreed: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    cached_tokens: int = 0
    regret_s: float = 0.0

    def add(self, choice: Choice, running: Choice, best_s: float) -> None:
        self.decisions += 1
        self.agreed += choice.prefill is running.prefill and choice.decode is running.decode
        self.ttft_s += choice.ttft_s
        self.tpot_s += choice.tpot_s
        self.cached_tokens += choice.cached_tokens
        self.regret_s += max(0.0, choice.ttft_s - best_s)

    def means(self) -> dict[str, float]:
        n = max(1, self.decisions)
        return {
            "decisions": self.decisions,
            "agreed": self.agreed / n,
            "ttft_s": self.ttft_s / n,
            "tpot_s": self.tpot_s / n,
            "cached_tokens": self.cached_tokens / n,
            "regret_s": self.regret_s / n,
        }


class Shadow:
    """Scores the running policy and the others.

    Args:
        seed: of the shadow policies' own draws; the running policy's are not touched.
    """

    def __init__(self, seed: int = 0) -> None:
        self.scores: dict[str, PolicyScore] = {name: PolicyScore() for name in (RUNNING, EXACT, *BASELINES)}
        self._policies: dict[str, Baseline] = {name: make() for name, make in BASELINES.items()}
        self._rng = random.Random(seed)

    def score(self, placer: Placer, q: Question, running: Choice, now: float) -> dict[str, Choice]:
        """Ask every policy about a request that is being placed as `running`; call it before the reservation."""
        prefills, decodes = placer.ready(Role.PREFILL), placer.ready(Role.DECODE)
        choices = {RUNNING: running}
        exact = placer.best(q, now, self._rng)
        if isinstance(exact, Choice):
            choices[EXACT] = exact
        for name, policy in self._policies.items():
            choices[name] = self._choose(policy, placer, q, prefills, decodes, now)
        best = min(c.ttft_s for c in choices.values())
        for name, choice in choices.items():
            self.scores[name].add(choice, running, best)
        for policy in self._policies.values():
            policy.placed(q.request, running.prefill, running.decode)  # the engines follow the running policy
        return choices

    def _choose(
        self,
        policy: Baseline,
        placer: Placer,
        q: Question,
        prefills: Sequence[WorkerLoad],
        decodes: Sequence[WorkerLoad],
        now: float,
    ) -> Choice:
        d = policy.decode(decodes, q.request, self._rng)
        if not prefills:
            path = Path.COLOCATED if placer.colocated else Path.LOCAL_NO_PREFILL
            return placer.model.predict(q, None, d, now, path)
        return placer.model.predict(q, policy.prefill(prefills, q.request, self._rng), d, now, Path.SPLIT)

    def summary(self) -> dict[str, dict[str, float]]:
        return {name: score.means() for name, score in self.scores.items()}


@dataclass(slots=True)
class Accuracy:
    """Whether predictions came true, over finished requests: sums, and absolute errors as shares of the truth."""

    requests: int = 0
    predicted_cached_tokens: int = 0
    actual_cached_tokens: int = 0
    exact_hits: int = 0
    ttft_error_s: float = 0.0
    ttft_ratios: list[float] = field(default_factory=list)
    ratios_kept: int = 512

    def add(self, record: RequestRecord) -> None:
        if record.outcome is not Outcome.DONE or record.predicted_ttft_s is None or record.ttft_s is None:
            return
        self.requests += 1
        self.predicted_cached_tokens += record.predicted_cached_tokens
        self.actual_cached_tokens += record.cached_tokens
        self.exact_hits += record.predicted_cached_tokens == record.cached_tokens
        self.ttft_error_s += record.ttft_s - record.predicted_ttft_s
        if record.ttft_s > 0:
            if len(self.ttft_ratios) >= self.ratios_kept:
                del self.ttft_ratios[: self.ratios_kept // 2]
            self.ttft_ratios.append(record.predicted_ttft_s / record.ttft_s)

    def summary(self) -> dict[str, float]:
        n = max(1, self.requests)
        ratios = sorted(self.ttft_ratios)
        return {
            "requests": self.requests,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "actual_cached_tokens": self.actual_cached_tokens,
            "exact_hits": self.exact_hits / n,
            "ttft_error_s": self.ttft_error_s / n,
            "ttft_predicted_over_actual_p50": ratios[len(ratios) // 2] if ratios else 1.0,
        }


def workers_of(choice: Choice) -> tuple[str | None, str]:
    """(prefill, decode) of a choice by name."""
    return (choice.prefill.name if choice.prefill else None), choice.decode.name
