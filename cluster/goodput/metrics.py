"""The Prometheus endpoint of one process: counters, sketches and gauges, rendered on demand.

A router calls `start` and `observe`; every process hands over what its parts already count with `set_gauges`,
and serves `render()`. Each `Metrics` has its own registry, so several may live in one process. No method raises:
an error inside telemetry is counted in `pdserve_telemetry_errors_total` and serving goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.goodput.accounting import GoodputCounters, slo_limits_s, within_promise
from cluster.goodput.catalogue import CATALOGUE, Kind, MetricSpec
from cluster.goodput.sketch import Sketch, coarse_edges
from cluster.goodput.stats import RequestStats
from cluster.messages import Outcome, Path, RequestRecord, Role, Slo, Stage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_S = 60.0
TENANTS_MAX = 200
VERDICTS = ("good", "missed", "excused", "refused")

log = logging.getLogger(__name__)

# A metric's values: one number, or a number per label value (a tuple where there are several labels).
Values = float | Mapping[Any, float]


class Metrics:
    """Metrics of one process.

    Args:
        slo: limits that become bucket edges of the latency histograms.
        clock: monotonic seconds; only the one-minute gauges look at it.

    Attributes:
        stats: requests judged by their own limits: what is exported.
        promised: the same requests, none judged by a limit stricter than `slo`: what the autoscaler is told.
    """

    def __init__(self, slo: Slo, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = RequestStats(slo)
        self.promised = GoodputCounters()
        self.errors = 0
        self._clock = clock
        self._given: dict[str, Values] = {}
        self._window: deque[tuple[float, int, int]] = deque([(clock(), 0, 0)])
        self._serves_requests = False
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self._families))

    def start(self, *, prompt_tokens: int = 0, tenant: str = "default", priority: int = 0) -> None:
        """Count an arrival, before anything can refuse it."""
        self._guard(self._start, prompt_tokens, tenant, priority)

    def observe(self, record: RequestRecord) -> None:
        """Count the one end of a request whose arrival `start` has counted."""
        self._guard(self._observe, record)

    def set_gauges(self, values: Mapping[str, Values]) -> None:
        """Replace the values of metrics that another part counts: gauges, and totals of counters.

        `{"pdserve_leases_open": 3, "pdserve_leases_total": {"granted": 9}, "pdserve_pool_replicas": {("decode",
        "ready"): 2}}`. A mapping replaces all label values of that metric. Unknown names count as an error.
        """
        for name, value in values.items():
            self._guard(self._set, name, value)

    def render(self) -> bytes:
        """The text exposition (`CONTENT_TYPE`). After an error: what could be rendered, never an exception."""
        rendered = self._guard(generate_latest, self._registry)
        return rendered if isinstance(rendered, bytes) else b""

    def _guard(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception:
            self.errors += 1
            if self.errors in (1, 10, 100) or self.errors % 1000 == 0:
                log.exception("telemetry error %d (swallowed)", self.errors)
            return None

    def _start(self, prompt_tokens: int, tenant: str, priority: int) -> None:
        self._serves_requests = True
        for counters in (self.stats.counters, self.promised):
            counters.start(prompt_tokens=prompt_tokens, tenant=tenant, priority=priority)

    def _observe(self, record: RequestRecord) -> None:
        self._serves_requests = True
        self.promised.finish(within_promise(record, self.stats.slo))
        self.stats.finish(record)
        self._roll()

    def _set(self, name: str, value: Values) -> None:
        spec = CATALOGUE.get(name)
        if spec is None or spec.kind is Kind.HISTOGRAM:
            raise KeyError(f"{name} is no gauge or counter of the catalogue")
        if isinstance(value, Mapping) != bool(spec.labels):
            raise ValueError(f"{name} has labels {spec.labels}, got {value!r}")
        self._given[name] = dict(value) if isinstance(value, Mapping) else float(value)

    def _roll(self) -> tuple[float, int, int]:
        """Append the present counts at most once a second; return the oldest ones inside the window."""
        now, c = self._clock(), self.stats.counters
        if now - self._window[-1][0] >= 1.0:
            self._window.append((now, c.good, c.missed))
        while len(self._window) > 1 and now - self._window[1][0] >= WINDOW_S:
            self._window.popleft()
        return self._window[0]

    def _families(self) -> Iterator[Metric]:
        own: dict[str, Any] = {"pdserve_telemetry_errors_total": self.errors}
        if self._serves_requests:
            own |= self._request_values()
        for name, spec in CATALOGUE.items():
            if spec.kind is Kind.HISTOGRAM:
                if self._serves_requests:
                    yield self._histogram(spec)
                continue
            values = self._given.get(name, own.get(name))
            if values is not None:
                family = self._guard(_family, spec, values)
                if family is not None:
                    yield family

    def _request_values(self) -> dict[str, Values]:
        c, slo = self.stats.counters, self.stats.slo
        values: dict[str, Values] = {
            "pdserve_requests_started_total": c.started,
            "pdserve_requests_total": _zeros(Outcome) | c.labels("outcome"),
            "pdserve_requests_good_total": c.good,
            "pdserve_requests_missed_total": _zeros(Stage) | {s.value: n for s, n in c.missed_by_stage().items()},
            "pdserve_requests_excused_total": c.excused,
            "pdserve_requests_refused_total": c.refused,
            "pdserve_tenant_requests_total": _by_verdict(c, "tenant", TENANTS_MAX),
            "pdserve_priority_requests_total": _by_verdict(c, "priority", TENANTS_MAX),
            "pdserve_requests_running": c.running,
            "pdserve_cached_tokens_total": _zeros(Role) | c.labels("cached_tokens"),
            "pdserve_computed_tokens_total": _zeros(Role) | c.labels("computed_tokens"),
            "pdserve_decisions_total": {p: n for p, n in (_zeros(Path) | c.labels("path")).items() if p != "none"},
            "pdserve_slo_seconds": {
                limit: value
                for limit, value in zip(("ttft", "tpot", "itl_p99"), slo_limits_s(slo), strict=True)
                if value is not None
            },
        }
        for key in ("retries", "migrations", "prompt_tokens", "output_tokens", "good_output_tokens"):
            values[f"pdserve_{key}_total"] = c.get(key)
        for key in ("predicted_cached_tokens", "transfer_bytes", "transfer_blocks"):
            values[f"pdserve_{key}_total"] = c.get(key)
        since_s, good, missed = self._roll()
        recent_good, recent_missed = c.good - good, c.missed - missed
        values["pdserve_goodput"] = recent_good / max(1.0, self._clock() - since_s)
        if recent_good + recent_missed:
            values["pdserve_attainment"] = recent_good / (recent_good + recent_missed)
        return values

    def _histogram(self, spec: MetricSpec) -> Metric:
        stats = self.stats
        edges = coarse_edges(slo_limits_s(stats.slo))
        family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        sketches: dict[str, Sketch] = {
            "pdserve_ttft_seconds": stats.ttft_s,
            "pdserve_tpot_seconds": stats.tpot_s,
            "pdserve_itl_seconds": stats.itl_s,
            "pdserve_transfer_seconds": stats.stage_s[Stage.KV_TRANSFER],
        }
        if spec.labels:
            for stage, sketch in stats.stage_s.items():
                family.add_metric([stage.value], _buckets(sketch, edges), sketch.total)
        else:
            sketch = sketches[spec.name]
            family.add_metric([], _buckets(sketch, edges), sketch.total)
        return family


class _Collector(Collector):
    """What prometheus-client asks at every scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()

    def describe(self) -> Iterable[Metric]:
        return ()


def _zeros(values: Iterable[StrEnum]) -> dict[str, float]:
    """A counter whose first sample is not zero hides its first increase from `rate`."""
    return {value.value: 0.0 for value in values}


def _family(spec: MetricSpec, values: Values) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily
    if spec.kind is Kind.COUNTER:
        family = CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
    else:
        family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    rows = values if isinstance(values, Mapping) else {(): values}
    for key, value in rows.items():
        labels = [str(part) for part in (key if isinstance(key, tuple) else (key,))]
        if len(labels) != len(spec.labels):
            raise ValueError(f"{spec.name}: {labels} does not fit the labels {spec.labels}")
        family.add_metric(labels, float(value))
    return family


def _buckets(sketch: Sketch, edges: tuple[float, ...]) -> list[tuple[str, float]]:
    counts = sketch.cumulative(edges)
    return [(f"{edge:.6g}", float(n)) for edge, n in zip(edges, counts, strict=True)] + [("+Inf", float(sketch.count))]


def _by_verdict(counters: GoodputCounters, kind: str, at_most: int) -> dict[tuple[str, str], float]:
    """Rows of (name, verdict); names beyond the first `at_most` share the row `(other)`, to bound a scrape."""
    names = sorted(counters.labels(f"{kind}_started"))
    kept = set(names[:at_most])
    rows: dict[tuple[str, str], float] = {}
    for verdict in VERDICTS:
        for name, n in counters.labels(f"{kind}_{verdict}").items():
            row = (name if name in kept else "(other)", verdict)
            rows[row] = rows.get(row, 0.0) + n
    return rows
