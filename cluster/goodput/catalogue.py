"""Every Prometheus metric of pdserve as data: name, kind, help and labels.

The exporter refuses what is not in this table; alert rules and dashboards are checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family. A counter's name ends `_total`; `labels` are in the order of their values."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a scrape shows and a query may use."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "count", "sum"))
        return (self.name,)


def _counter(name: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"pdserve_{name}_total", Kind.COUNTER, help_, labels)


def _gauge(name: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"pdserve_{name}", Kind.GAUGE, help_, labels)


def _histogram(name: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"pdserve_{name}", Kind.HISTOGRAM, help_, labels)


_SPECS = (
    # Requests: started == the sum of requests_total over outcomes + requests_running.
    _counter("requests_started", "Requests that arrived, before anything could refuse them (offered load)"),
    _counter("requests", "Requests that ended, by outcome", "outcome"),
    _counter("requests_good", "Requests that finished without error within every limit of their SLO"),
    _counter("requests_missed", "Requests that missed their SLO, by the one stage charged with it", "stage"),
    _counter("requests_excused", "Requests whose client left before any deadline had passed: neither good nor missed"),
    _counter("requests_refused", "Requests answered 4xx before a token, by a rule: neither good nor missed"),
    _counter("tenant_requests", "Requests that ended, by tenant and verdict", "tenant", "verdict"),
    _counter("priority_requests", "Requests that ended, by priority class and verdict", "priority", "verdict"),
    _gauge("requests_running", "Requests that have arrived and not ended"),
    _gauge("attainment", "Good over good plus missed, of the last minute; absent without a request"),
    _gauge("goodput", "Good requests per second of the last minute"),
    _gauge("slo_seconds", "Latency limits of the cluster", "limit"),
    _counter("retries", "Further attempts before the first token"),
    _counter("migrations", "Moves of a request to another decode engine after its first token"),
    # Latencies. The SLO values are bucket edges, so shares within the limit are exact.
    _histogram("ttft_seconds", "Arrival at the router to first token sent, of finished requests"),
    _histogram("tpot_seconds", "Mean time per output token after the first, of finished requests"),
    _histogram("itl_seconds", "Gap between two consecutive output tokens, every one"),
    _histogram("stage_seconds", "Time before the first token by stage; the stages add up to TTFT", "stage"),
    # Tokens and the prefix cache.
    _counter("prompt_tokens", "Prompt tokens of requests that ended"),
    _counter("output_tokens", "Output tokens sent"),
    _counter("good_output_tokens", "Output tokens of good requests"),
    _counter("cached_tokens", "Prompt tokens that the prefilling engine found in its cache, by leg", "leg"),
    _counter("computed_tokens", "Prompt tokens computed, by leg", "leg"),
    _counter("predicted_cached_tokens", "Prompt tokens that placement expected to be cached"),
    # Routing.
    _counter("decisions", "Placements by path (split, or why the decode engine prefilled)", "path"),
    _counter("regret_seconds", "Time lost to placements against the best candidate in hindsight"),
    _gauge("router_queue_depth", "Requests that wait in the router for a place"),
    _gauge("router_queue_oldest_wait_seconds", "Longest wait among them"),
    _gauge("index_blocks", "Blocks in the router's prefix index"),
    _counter("index_gaps", "Gaps in the engines' KV event streams, each followed by a resync"),
    # KV transfer.
    _counter("transfer_bytes", "KV bytes moved from prefill to decode engines"),
    _counter("transfer_blocks", "KV blocks moved from prefill to decode engines"),
    _histogram("transfer_seconds", "Duration of a KV transfer, per request"),
    _gauge("leases_open", "KV leases that are granted and neither pulled nor given up"),
    _counter("leases", "KV leases by event; outlived: open although its request has ended", "event"),
    # Pools and their engines.
    _gauge("pool_replicas", "Replicas by pool and state", "pool", "state"),
    _gauge("pool_accelerators", "Accelerators held by a pool", "pool"),
    _gauge("accelerators_max", "Accelerator budget that both pools share"),
    _gauge("worker_running", "Sequences that the engine runs", "pool", "worker"),
    _gauge("worker_waiting", "Sequences that wait in the engine", "pool", "worker"),
    _gauge("worker_kv_used_ratio", "Used share of the engine's KV blocks", "pool", "worker"),
    _gauge("worker_queued_prefill_tokens", "Prompt tokens accepted and not computed yet", "pool", "worker"),
    _gauge("worker_no_progress", "1 while an engine has work and its step counter stands still", "pool", "worker"),
    _counter("worker_steps", "Engine steps", "pool", "worker"),
    # Autoscaling.
    _gauge("autoscaling_target_replicas", "Replicas that the autoscaler asks for", "pool"),
    _gauge("autoscaling_reason", "1 for the reason of the latest decision", "pool", "reason"),
    _counter("autoscaling_changes", "Changes of a pool's target", "pool", "direction"),
    _gauge("autoscaling_unattainable", "1 while an idle cluster already misses the SLO: replicas cannot fix it"),
    _gauge("autoscaling_data_age_seconds", "Age of the newest data the autoscaler has"),
    # The exporter itself.
    _counter("telemetry_errors", "Errors inside telemetry, swallowed so that serving goes on"),
)

CATALOGUE: dict[str, MetricSpec] = {spec.name: spec for spec in _SPECS}
