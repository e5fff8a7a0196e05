"""Counters and latency sketches of one place (a router, a run, a load generator), and their summary.

Latency percentiles describe requests that finished; `*_adjusted` ones count every failed or rejected request as
infinitely late, so that a server that refuses does not look fast. Error rate and attainment stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.goodput.accounting import GoodputCounters, slo_limits_s
from cluster.goodput.sketch import Sketch, latency_edges
from cluster.messages import Outcome, RequestRecord, Slo, Stage

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class RequestStats:
    """What one place knows of its requests. `observe` is all that has to be called for finished requests.

    Args:
        slo: its limits become bucket edges. Requests may carry other limits; they are judged by their own.
    """

    def __init__(self, slo: Slo) -> None:
        edges = latency_edges(slo_limits_s(slo))
        self.slo = slo
        self.counters = GoodputCounters()
        self.ttft_s = Sketch(edges)
        self.tpot_s = Sketch(edges)
        self.itl_s = Sketch(edges)
        self.stage_s: dict[Stage, Sketch] = {stage: Sketch(edges) for stage in Stage}

    def finish(self, record: RequestRecord) -> None:
        """Account for the end of a request whose arrival `counters.start` has counted."""
        self.counters.finish(record)
        if record.outcome is Outcome.DONE:
            self._latencies(record)

    def observe(self, record: RequestRecord) -> None:
        """Arrival and end at once."""
        self.counters.count(record)
        if record.outcome is Outcome.DONE:
            self._latencies(record)

    def merge(self, other: RequestStats) -> None:
        self.counters.merge(other.counters)
        for mine, theirs in zip(self._sketches(), other._sketches(), strict=True):
            mine.merge(theirs)

    def _latencies(self, record: RequestRecord) -> None:
        if record.ttft_s is not None:
            self.ttft_s.add(record.ttft_s)
            for stage, spent_s in record.stage_s.items():
                self.stage_s[stage].add(max(0.0, spent_s))
        if record.tpot_s is not None and record.output_tokens >= 2:
            self.tpot_s.add(record.tpot_s)
        self.itl_s.extend(record.itl_s)

    def _sketches(self) -> Iterable[Sketch]:
        return (self.ttft_s, self.tpot_s, self.itl_s, *(self.stage_s[stage] for stage in Stage))

    def summary(self, duration_s: float, accelerators: float | None = None) -> dict[str, Any]:
        """The key figures of `duration_s` seconds, ready for JSON (`inf` where a quantile is beyond the finished)."""
        c = self.counters
        unserved = int(c.get("outcome", Outcome.FAILED) + c.get("outcome", Outcome.REJECTED))
        done = int(c.get("outcome", Outcome.DONE))
        out: dict[str, Any] = {
            "offered": c.started,
            "done": done,
            "failed": int(c.get("outcome", Outcome.FAILED)),
            "rejected": int(c.get("outcome", Outcome.REJECTED)),
            "cancelled": int(c.get("outcome", Outcome.CANCELLED)),
            "running": c.running,
            "good": c.good,
            "missed": c.missed,
            "excused": c.excused,
            "refused": c.refused,
            "attainment": c.attainment,
            "error_rate": unserved / c.ended if c.ended else None,
            "missed_by_stage": {stage.value: c.missed_by_stage().get(stage, 0) for stage in Stage},
            "goodput_per_s": c.goodput_per_s(duration_s),
            "throughput_per_s": done / duration_s,
            "output_tokens_per_s": c.get("output_tokens") / duration_s,
            "good_output_tokens_per_s": c.get("good_output_tokens") / duration_s,
        }
        if accelerators is not None:
            out["goodput_per_s_per_accelerator"] = c.goodput_per_s(duration_s, accelerators)
        for name, sketch in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("itl_s", self.itl_s)):
            out[name] = {f"p{100 * q:g}": sketch.quantile(q) for q in QUANTILES} | {"mean": sketch.mean}
        out["ttft_adjusted_s"] = {f"p{100 * q:g}": self.ttft_s.quantile(q, infinite=unserved) for q in QUANTILES}
        return out
