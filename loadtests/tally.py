"""Figures of a load test that many processes make: counters and sketches that merge without loss.

A worker sends its whole tally each time, so a report that is lost or repeated changes nothing. Merged percentiles
are those of the pooled samples, because buckets add; Locust's own are rounded to two digits before they merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.errors import UserError
from cluster.goodput.accounting import is_good
from cluster.goodput.sketch import Sketch, latency_edges
from cluster.goodput.stats import RequestStats
from cluster.messages import Outcome, Slo
from loadtests.sample import Sample

EXTRA = ("e2e_s", "schedule_lag_s", "loop_lag_s")


class Tally:
    """`RequestStats` of all requests, and of each name; end-to-end times and the generator's own lags beside it."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.all = RequestStats(slo)
        self.by_name: dict[str, RequestStats] = {}
        edges = latency_edges((slo.ttft_s, slo.tpot_s, slo.itl_p99_s))
        self.extra = {name: Sketch(edges) for name in EXTRA}
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.errors: dict[str, int] = {}
        self.done_prompt_tokens = 0
        self.done_cached_tokens: int | None = None
        """None where no server said how much came from a cache: silence is not zero."""

    def add(self, name: str, sample: Sample) -> bool:
        """Count a finished request; whether it was good."""
        record = sample.record(self.slo)
        self.all.observe(record)
        self.by_name.setdefault(name, RequestStats(self.slo)).observe(record)
        if sample.outcome is Outcome.DONE and sample.e2e_s is not None:
            self.extra["e2e_s"].add(max(0.0, sample.e2e_s))
            self._count_tokens(sample.prompt_tokens or 0, sample.cached_tokens)
        if sample.lag_s is not None:
            self.extra["schedule_lag_s"].add(max(0.0, sample.lag_s))
        if sample.error:
            self.errors[sample.error] = self.errors.get(sample.error, 0) + 1
        self._span(sample.scheduled_s, sample.end_s)
        return is_good(record)

    def _count_tokens(self, prompt: int, cached: int | None) -> None:
        self.done_prompt_tokens += prompt
        if cached is not None:
            self.done_cached_tokens = (self.done_cached_tokens or 0) + cached

    def _span(self, first_s: float | None, last_s: float | None) -> None:
        if first_s is not None:
            self.first_s = first_s if self.first_s is None else min(self.first_s, first_s)
        if last_s is not None:
            self.last_s = last_s if self.last_s is None else max(self.last_s, last_s)

    @property
    def length_s(self) -> float:
        return 0.0 if self.first_s is None or self.last_s is None else self.last_s - self.first_s

    def merge(self, other: Tally) -> None:
        self.all.merge(other.all)
        for name, stats in other.by_name.items():
            self.by_name.setdefault(name, RequestStats(self.slo)).merge(stats)
        for name, sketch in other.extra.items():
            self.extra[name].merge(sketch)
        for error, times in other.errors.items():
            self.errors[error] = self.errors.get(error, 0) + times
        self._count_tokens(other.done_prompt_tokens, other.done_cached_tokens)
        self._span(other.first_s, other.last_s)

    def summary(self) -> dict[str, Any]:
        """Key figures, ready for JSON."""
        length_s = max(self.length_s, 1e-9)
        quantiles = {
            name: {f"p{100 * q:g}": sketch.quantile(q) for q in (0.5, 0.9, 0.99)} for name, sketch in self.extra.items()
        }
        prompt, cached = self.done_prompt_tokens, self.done_cached_tokens
        return (
            self.all.summary(length_s)
            | quantiles
            | {
                "length_s": self.length_s,
                "cached_share": cached / prompt if prompt and cached is not None else None,
                "by_name": {name: stats.summary(length_s) for name, stats in sorted(self.by_name.items())},
                "errors": dict(sorted(self.errors.items(), key=lambda e: -e[1])[:8]),
            }
        )

    def to_wire(self) -> dict[str, Any]:
        return {
            "slo": [self.slo.ttft_s, self.slo.tpot_s, self.slo.itl_p99_s],
            "all": _stats_out(self.all),
            "by_name": {name: _stats_out(stats) for name, stats in self.by_name.items()},
            "extra": {name: _sketch_out(sketch) for name, sketch in self.extra.items()},
            "first_s": self.first_s,
            "last_s": self.last_s,
            "errors": self.errors,
            "done_tokens": [self.done_prompt_tokens, self.done_cached_tokens],
        }

    @classmethod
    def from_wire(cls, slo: Slo, raw: Mapping[str, Any]) -> Tally:
        """A tally as it travels. Raises UserError where it was judged by other limits: its buckets are others too."""
        theirs = Slo(*raw["slo"])
        if theirs != slo:
            raise UserError(
                f"SLO: a worker judges by {_limits(theirs)}, the master by {_limits(slo)}; start both from one version"
            )
        tally = cls(slo)
        _stats_in(tally.all, raw["all"])
        for name, stats in raw["by_name"].items():
            _stats_in(tally.by_name.setdefault(name, RequestStats(slo)), stats)
        for name, sketch in raw["extra"].items():
            _sketch_in(tally.extra[name], sketch)
        tally.first_s, tally.last_s, tally.errors = raw["first_s"], raw["last_s"], dict(raw["errors"])
        tally.done_prompt_tokens, tally.done_cached_tokens = raw["done_tokens"]
        return tally


def _limits(slo: Slo) -> str:
    itl = "" if slo.itl_p99_s is None else f" and ITL p99 {1e3 * slo.itl_p99_s:g} ms"
    return f"TTFT {1e3 * slo.ttft_s:g} ms, TPOT {1e3 * slo.tpot_s:g} ms{itl}"


def merged(slo: Slo, tallies: Iterable[Tally]) -> Tally:
    total = Tally(slo)
    for tally in tallies:
        total.merge(tally)
    return total


def _sketch_out(sketch: Sketch) -> dict[str, Any]:
    # Lists, not a mapping with integer keys: those do not survive every serializer.
    return {
        "buckets": list(sketch.counts),
        "counts": list(sketch.counts.values()),
        "total": sketch.total,
        "low": sketch.low if sketch.count else None,
        "high": sketch.high if sketch.count else None,
    }


def _sketch_in(sketch: Sketch, raw: Mapping[str, Any]) -> None:
    sketch.counts = dict(zip(raw["buckets"], raw["counts"], strict=True))
    sketch.count, sketch.total = sum(raw["counts"]), raw["total"]
    if sketch.count:
        sketch.low, sketch.high = raw["low"], raw["high"]


def _stats_out(stats: RequestStats) -> dict[str, Any]:
    return {
        "counters": stats.counters.values,
        "ttft_s": _sketch_out(stats.ttft_s),
        "tpot_s": _sketch_out(stats.tpot_s),
        "itl_s": _sketch_out(stats.itl_s),
    }


def _stats_in(stats: RequestStats, raw: Mapping[str, Any]) -> None:
    stats.counters.values.update(raw["counters"])
    _sketch_in(stats.ttft_s, raw["ttft_s"])
    _sketch_in(stats.tpot_s, raw["tpot_s"])
    _sketch_in(stats.itl_s, raw["itl_s"])
