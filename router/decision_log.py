"""One JSON line per request: what was known when it was placed, what was chosen, and how it turned out.

`Watch` is what `Placer.watch` calls. It keeps the open decisions of unfinished requests (bounded by those), scores
shadow policies if asked to, and hands finished entries to a sink (`router/decision_file.py` writes them to a file).
Pure: entries are plain data, times are the router's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.messages import RequestRecord, Role
from router.choice import Choice, Question
from router.shadow import Accuracy, Shadow, workers_of

if TYPE_CHECKING:
    from router.placement import Placer

OPEN_MAX = 100_000
"""Decisions of requests whose end is never told (a bug elsewhere) must not fill the memory."""


class Watch:
    """Follows decisions and their outcomes.

    Args:
        shadow: score other policies on every request (costs about three more decisions).
        sink: takes one entry per finished request; None keeps none.
    """

    def __init__(self, *, shadow: bool = False, sink: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.shadow = Shadow() if shadow else None
        self.accuracy = Accuracy()
        self._sink = sink
        self._open: dict[str, list[dict[str, Any]]] = {}

    def on_choice(self, placer: Placer, q: Question, choice: Choice, now: float) -> None:
        """A request is about to be reserved as `choice`."""
        shadows = self.shadow.score(placer, q, choice, now) if self.shadow is not None else {}
        if self._sink is None:
            return
        if len(self._open) >= OPEN_MAX:
            del self._open[next(iter(self._open))]
        self._open.setdefault(q.request.request_id, []).append(_decision(placer, q, choice, shadows, now))

    def on_record(self, record: RequestRecord) -> None:
        """A request is over."""
        self.accuracy.add(record)
        decisions = self._open.pop(record.request_id, None)
        if decisions is not None and self._sink is not None:
            self._sink({**_outcome(record), "decisions": decisions})

    def summary(self) -> dict[str, Any]:
        """For status and metrics."""
        return {
            "accuracy": self.accuracy.summary(),
            "policies": {} if self.shadow is None else self.shadow.summary(),
        }


def _decision(placer: Placer, q: Question, choice: Choice, shadows: dict[str, Choice], now: float) -> dict[str, Any]:
    prefill, decode = workers_of(choice)
    request = q.request
    return {
        "at_s": now,
        "path": choice.path.value,
        "prefill": prefill,
        "decode": decode,
        "predicted": _predicted(choice),
        "inside_tpot": choice.inside_tpot,
        "inputs": {
            "prompt_tokens": request.prompt_tokens,
            "expected_output_tokens": q.output_tokens,
            "ttft_limit_s": request.slo.ttft_s,
            "tpot_limit_s": request.slo.tpot_s,
            "shared_tokens": q.shared_tokens,
            "fan_out": q.fan_out,
        },
        "prefill_candidates": placer.model.explain_prefill(q, placer.ready(Role.PREFILL), now),
        "decode_candidates": placer.model.explain_decode(q, placer.ready(Role.DECODE), now),
        "shadow": {name: [*workers_of(c), c.ttft_s] for name, c in shadows.items()},
    }


def _predicted(choice: Choice) -> dict[str, float]:
    return {"ttft_s": choice.ttft_s, "tpot_s": choice.tpot_s, "cached_tokens": choice.cached_tokens}


def _outcome(record: RequestRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "arrival_s": record.arrival_s,
        "outcome": record.outcome.value,
        "path": record.path.value if record.path else None,
        "prefill": record.prefill_worker,
        "decode": record.decode_worker,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "predicted_cached_tokens": record.predicted_cached_tokens,
        "cached_tokens": record.cached_tokens,
        "predicted_ttft_s": record.predicted_ttft_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "stage_s": {stage.value: seconds for stage, seconds in record.stage_s.items()},
    }
