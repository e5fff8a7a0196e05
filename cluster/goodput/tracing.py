"""W3C trace context and OpenTelemetry spans of requests. Off unless `tracing.otlp_endpoint` is set.

A request's span starts at its arrival, as a child of the client's `traceparent` where there is one. Both legs carry
the span's own context on, so whatever an engine records joins the same trace. When the request has ended, its
`RequestRecord` becomes child spans: one per stage up to the first token, laid end to end, and one for decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from cluster.config import TracingConfig
from cluster.goodput.accounting import is_good, miss_stage
from cluster.messages import Outcome, Request, RequestRecord, Stage

# Worker that a stage is spent on: (prefill, decode) of the record.
_ON_PREFILL = (Stage.PREFILL_QUEUE, Stage.PREFILL_COMPUTE)


class Tracing:
    """Spans of one router. No method raises; what goes wrong is counted in `errors`.

    Args:
        provider: an OpenTelemetry TracerProvider of this router alone; nothing global is set.
        wall_ns: wall-clock time in nanoseconds.
    """

    def __init__(self, provider: Any, wall_ns: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.errors = 0
        self._provider, self._wall_ns = provider, wall_ns
        self._tracer = provider.get_tracer("pdserve")
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[str, tuple[Any, int]] = {}

    def start(self, request: Request, headers: Mapping[str, str] | None) -> dict[str, str] | None:
        """Open a request's span; returns the headers that both legs carry."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        try:
            now_ns = self._wall_ns()
            parent = self._propagator.extract({k.lower(): v for k, v in (headers or {}).items()})
            span = self._tracer.start_span("request", parent, SpanKind.SERVER, start_time=now_ns)
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, set_span_in_context(span))
            self._open[request.request_id] = (span, now_ns)
            return carrier
        except Exception:
            self.errors += 1
            return None

    def finish(self, record: RequestRecord) -> None:
        """Close a request's span, with its stages below it. Unknown requests are ignored."""
        opened = self._open.pop(record.request_id, None)
        if opened is None:
            return
        try:
            self._close(record, *opened)
        except Exception:
            self.errors += 1

    def shutdown(self) -> None:
        """Send what is left. Blocks for at most a few seconds."""
        try:
            self._provider.shutdown()
        except Exception:
            self.errors += 1

    def _close(self, record: RequestRecord, span: Any, start_ns: int) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        context = set_span_in_context(span)
        end_ns = start_ns + _ns(record.end_s - record.arrival_s)
        at_ns = start_ns
        for stage in Stage:
            spent_s = record.stage_s.get(stage)
            if spent_s is None:
                continue
            until_ns = min(end_ns, at_ns + _ns(spent_s))
            child = self._tracer.start_span(stage.value, context, start_time=at_ns)
            worker = record.prefill_worker if stage in _ON_PREFILL else record.decode_worker
            if worker is not None and stage is not Stage.ROUTER_QUEUE:
                child.set_attribute("pdserve.worker", worker)
            child.end(until_ns)
            at_ns = until_ns
        if record.ttft_s is not None:
            first_ns = start_ns + _ns(record.ttft_s)
            span.add_event("first token", timestamp=first_ns)
            child = self._tracer.start_span("decode", context, start_time=min(first_ns, end_ns))
            if record.decode_worker is not None:
                child.set_attribute("pdserve.worker", record.decode_worker)
            child.end(end_ns)
        span.set_attributes(_attributes(record))
        if record.outcome in (Outcome.FAILED, Outcome.REJECTED):
            span.set_status(Status(StatusCode.ERROR, record.error or record.outcome.value))
        span.end(end_ns)


def create(config: TracingConfig, service: str) -> Tracing | None:
    """Tracing to the configured OTLP/HTTP endpoint; None where none is set.

    An endpoint without a path gets OTLP's own, `/v1/traces`. Spans are sent in batches by a thread.
    """
    if config.otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=_with_path(config.otlp_endpoint))))
    return Tracing(provider)


def _with_path(endpoint: str) -> str:
    rest = endpoint.split("://", 1)[-1]
    return endpoint if "/" in rest.rstrip("/") else endpoint.rstrip("/") + "/v1/traces"


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Figures of the record; names of OpenTelemetry's GenAI conventions where they have one."""
    missed = miss_stage(record)
    values = {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "pdserve.request_id": record.request_id,
        "pdserve.tenant": record.tenant,
        "pdserve.outcome": record.outcome.value,
        "pdserve.path": record.path.value if record.path else None,
        "pdserve.good": is_good(record),
        "pdserve.missed_stage": missed.value if missed else None,
        "pdserve.cached_tokens": record.cached_tokens,
        "pdserve.transfer_bytes": record.transfer_bytes,
        "pdserve.ttft_s": record.ttft_s,
        "pdserve.tpot_s": record.tpot_s,
        "pdserve.attempts": record.attempts,
        "pdserve.migrations": record.migrations,
        "pdserve.finish_reason": record.finish_reason,
    }
    return {name: value for name, value in values.items() if value is not None}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
