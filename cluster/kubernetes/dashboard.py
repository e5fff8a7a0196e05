"""The Grafana dashboard as data: goodput first, then stages, pools, KV transfer and cache.

`dashboard()` makes the JSON model; the table below is all there is to edit. A test checks every query against the
metrics that exist and against Prometheus' own parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT = 24, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `queries` are (PromQL, legend); `unit` is Grafana's name of it."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    help: str = ""
    stacked: bool = False
    most: float | None = None


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    name = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))",
            f"{name}p{int(q * 100)}",
        )
        for q in ((0.5, 0.95, 0.99) if not by else (0.95,))
    )


def _rate(metric: str, by: str = "", match: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{match}[$__rate_interval]))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Goodput",
        (
            Panel(
                "Attainment",
                (("pdserve:attainment:ratio5m", "within the SLO"), ("pdserve:attainment:target", "target")),
                "percentunit",
                "Good requests over good plus missed ones, five minutes.",
                most=1.0,
            ),
            Panel(
                "Offered and good requests",
                (
                    (_rate("pdserve_requests_started_total"), "offered"),
                    (_rate("pdserve_requests_good_total"), "good"),
                    (_rate("pdserve_requests_refused_total"), "refused"),
                ),
                "reqps",
                "Refused: answered 4xx, as beyond a tenant's budget. Neither attainment nor the pools count them.",
            ),
            Panel(
                "Misses by stage",
                ((_rate("pdserve_requests_missed_total", "stage"), "{{stage}}"),),
                "reqps",
                "Each miss is charged to one stage: the one that took more than its share.",
                stacked=True,
            ),
            Panel(
                "Requests by outcome",
                ((_rate("pdserve_requests_total", "outcome"), "{{outcome}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Good requests per accelerator",
                (
                    (
                        f"{_rate('pdserve_requests_good_total')} / sum(max by (pool) (pdserve_pool_accelerators))",
                        "good/s",
                    ),
                ),
                "reqps",
            ),
            Panel(
                "Output tokens",
                (
                    (_rate("pdserve_output_tokens_total"), "sent"),
                    (_rate("pdserve_good_output_tokens_total"), "of good requests"),
                ),
                "short",
            ),
        ),
    ),
    (
        "Latency and stages",
        (
            Panel(
                "Time to first token",
                (*_quantiles("pdserve_ttft_seconds"), ('max(pdserve_slo_seconds{limit="ttft"})', "limit")),
                "s",
            ),
            Panel(
                "Time per output token",
                (*_quantiles("pdserve_tpot_seconds"), ('max(pdserve_slo_seconds{limit="tpot"})', "limit")),
                "s",
            ),
            Panel("Gap between tokens", _quantiles("pdserve_itl_seconds"), "s"),
            Panel(
                "Stages before the first token, p95",
                _quantiles("pdserve_stage_seconds", "stage"),
                "s",
                "Which wait or work makes the first token late.",
            ),
            Panel(
                "Mean time by stage",
                (
                    (
                        f"{_rate('pdserve_stage_seconds_sum', 'stage')}"
                        f" / {_rate('pdserve_stage_seconds_count', 'stage')}",
                        "{{stage}}",
                    ),
                ),
                "s",
                stacked=True,
            ),
            Panel(
                "Router queue",
                (
                    ("sum(pdserve_router_queue_depth)", "waiting"),
                    ("max(pdserve_router_queue_oldest_wait_seconds)", "oldest wait, s"),
                ),
            ),
        ),
    ),
    (
        "Pools",
        (
            Panel(
                "Replicas",
                (
                    ("max by (pool, state) (pdserve_pool_replicas)", "{{pool}} {{state}}"),
                    ("max by (pool) (pdserve_autoscaling_target_replicas)", "{{pool}} target"),
                ),
            ),
            Panel(
                "Accelerators",
                (
                    ("max by (pool) (pdserve_pool_accelerators)", "{{pool}}"),
                    ("max(pdserve_accelerators_max)", "budget"),
                ),
            ),
            Panel(
                "Why the autoscaler decided",
                (("max by (pool, reason) (pdserve_autoscaling_reason) > 0", "{{pool}}: {{reason}}"),),
            ),
            Panel("Running sequences", (("max by (pool, worker) (pdserve_worker_running)", "{{pool}} {{worker}}"),)),
            Panel("Waiting sequences", (("max by (pool, worker) (pdserve_worker_waiting)", "{{pool}} {{worker}}"),)),
            Panel(
                "Prompt tokens not computed yet",
                (("max by (pool, worker) (pdserve_worker_queued_prefill_tokens)", "{{pool}} {{worker}}"),),
            ),
            Panel(
                "Engine steps",
                (
                    (
                        "max by (pool, worker) (rate(pdserve_worker_steps_total[$__rate_interval]))",
                        "{{pool}} {{worker}}",
                    ),
                ),
                "ops",
            ),
            Panel(
                "Engines without progress",
                (("sum by (pool) (max by (pool, worker) (pdserve_worker_no_progress))", "{{pool}}"),),
            ),
            Panel(
                "Age of the autoscaler's data",
                (("max(pdserve_autoscaling_data_age_seconds)", "age"),),
                "s",
            ),
        ),
    ),
    (
        "KV transfer",
        (
            Panel("Bytes moved", ((_rate("pdserve_transfer_bytes_total"), "prefill to decode"),), "Bps"),
            Panel("Transfer time", _quantiles("pdserve_transfer_seconds"), "s"),
            Panel(
                "Leases",
                (
                    ("max(pdserve_leases_open)", "open"),
                    (_rate("pdserve_leases_total", "event"), "{{event}}/s"),
                ),
                help="Expired ones were given up by nobody. Open ones without a running request are a leak.",
            ),
            Panel(
                "Placements by path", ((_rate("pdserve_decisions_total", "path"), "{{path}}"),), "reqps", stacked=True
            ),
            Panel(
                "Second attempts",
                (
                    (_rate("pdserve_retries_total"), "retries before the first token"),
                    (_rate("pdserve_migrations_total"), "migrations after it"),
                ),
                "ops",
            ),
        ),
    ),
    (
        "Prefix cache",
        (
            Panel(
                "Cached share of prompt tokens",
                (
                    (f"{_rate('pdserve_cached_tokens_total')} / {_rate('pdserve_prompt_tokens_total')}", "found"),
                    (
                        f"{_rate('pdserve_predicted_cached_tokens_total')} / {_rate('pdserve_prompt_tokens_total')}",
                        "expected",
                    ),
                ),
                "percentunit",
                most=1.0,
            ),
            Panel(
                "Prompt tokens computed", ((_rate("pdserve_computed_tokens_total", "leg"), "{{leg}}"),), stacked=True
            ),
            Panel(
                "Used share of KV blocks",
                (("max by (pool, worker) (pdserve_worker_kv_used_ratio)", "{{pool}} {{worker}}"),),
                "percentunit",
                most=1.0,
            ),
            Panel(
                "Router index",
                (
                    ("pdserve:index_drift:ratio15m", "drift {{instance}}"),
                    (_rate("pdserve_index_gaps_total"), "gaps/s"),
                ),
            ),
            Panel("Indexed blocks", (("max by (instance) (pdserve_index_blocks)", "{{instance}}"),)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model, for schema version 39 and later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, graphs in ROWS:
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
            | {"gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}}
        )
        y += 1
        for start in range(0, len(graphs), 3):
            row = graphs[start : start + 3]
            width = _WIDTH // len(row)
            for column, graph in enumerate(row):
                place = {"x": column * width, "y": y, "w": width, "h": _HEIGHT}
                panels.append(_graph(len(panels) + 1, graph, place))
            y += _HEIGHT
    return {
        "title": "pdserve",
        "uid": "pdserve",
        "schemaVersion": 39,
        "tags": ["pdserve"],
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "hide": 0}
            ]
        },
        "panels": panels,
    }


def _graph(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 25 if panel.stacked else 8, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": source}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }
