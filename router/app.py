"""The router deployment: HTTP in, OpenAI's API by vLLM's own layer, the pools behind it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import ClusterConfig, parse
from cluster.engine.simulation.sampling import plain
from cluster.engine.vllm.arguments import served_name, shared_arguments
from cluster.engine.vllm.environment import base_environment
from cluster.goodput import tracing
from cluster.goodput.metrics import CONTENT_TYPE, Metrics
from cluster.heap import settle_heap
from cluster.logs import use_serve_log
from cluster.messages import RequestRecord, Role, WorkerInfo
from cluster.models.resolve import resolve
from cluster.node import node_ip
from kv_transfer.settings import TICKET_REQUEST
from router.admission import Admission, share_of
from router.decision_file import watch
from router.dispatcher import Dispatcher
from router.gateway.auth import OPERATOR_PATHS
from router.gateway.context import current
from router.gateway.intake import Intake
from router.gateway.stack import guard
from router.kv_event_reader import KvEventReader
from router.kv_events import Quality
from router.placement import Placer
from router.prefix_index import PrefixIndex
from router.status import finite, router_status
from router.telemetry import Telemetry
from router.times import WorkerTimes
from router.transport import ServeTransport
from router.warmup import Warmup

if TYPE_CHECKING:
    from router.engine_client import ClientJob

log = logging.getLogger(__name__)

RECORDS_KEPT = 8192
DEPLOYMENTS = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
ROUTER = "router"


@serve.ingress()
class Router:
    """One router replica. Knows every worker, holds no KV and no weights."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], decode: DeploymentHandle[Any], prefill: DeploymentHandle[Any] | None = None
    ) -> None:
        self._config: ClusterConfig = parse(config)
        self._started_s = time.monotonic()
        self._draining = False
        use_serve_log(self._config.engine.log_level)
        model = resolve(self._config.model)
        os.environ.update(base_environment(self._config, model.is_folder))
        # Imported late: the environment above must be set before vLLM is.
        from cluster.engine.vllm.serving import build_openai_app, describe_model
        from router.engine_client import ClusterEngineClient

        context = serve.get_replica_context()
        self._router_id = context.replica_id.unique_id
        slo = self._config.slo.to_slo()
        self._records: deque[dict[str, Any]] = deque(maxlen=RECORDS_KEPT)
        self._client_ids: dict[str, str] = {}
        self.metrics = Metrics(slo)
        self.index = PrefixIndex(self._config.router.placement.index_max_blocks)
        self.times = WorkerTimes()
        tp_pairs = self._config.kv_transfer.tp_pairs
        self.placer = Placer(
            self._config.router.placement,
            self.times.of,
            self.index,
            colocated=self._config.colocated,
            tp_pairs=tp_pairs,
            promised_tpot_s=slo.tpot_s,
        )
        self.placer.watch = watch(self._config.router.placement, self._router_id)
        vllm_config = describe_model(shared_arguments(self._config, model.path))
        self.client = ClusterEngineClient(vllm_config, self._router_id, slo, lambda: self.placer.key_block_tokens)
        handles = {Role.DECODE: decode} if prefill is None else {Role.PREFILL: prefill, Role.DECODE: decode}
        for_engine = {"sampling_for_engine": plain} if self._config.engine.kind == "simulated" else {}
        self.transport = ServeTransport(context.app_name, handles, DEPLOYMENTS, **for_engine)
        self.dispatcher = self.client.dispatcher = Dispatcher(
            self.transport,
            self.placer,
            self._config.router.limits,
            deliver=self.client.deliver_jobs,
            ticket_request=TICKET_REQUEST,
            on_record=self._on_record,
            clock=time.monotonic,
            rng=random.Random(),
            admission=Admission(
                share_of(self._config.router.admission, self._config.router.replicas), self.placer, slo.ttft_s
            ),
        )
        self.telemetry = Telemetry(
            self._config, self.metrics, self.dispatcher, self.placer, time.monotonic, self._index_gauges
        )
        self.client.on_arrival = self._on_arrival
        self._tracing = tracing.create(self._config.tracing, self._config.name)
        self._events: KvEventReader | None = None
        self.warmup = Warmup(self.dispatcher, self._router_id, vllm_config.model_config.get_vocab_size(), tp_pairs)
        self.dispatcher.members.listeners += [self._follow_events, self.warmup.on_worker]
        host = self._config.network.host or node_ip()
        await self.transport.start(self.dispatcher, self._router_id, host)
        self._openai = await build_openai_app(self.client, self._server_arguments(model.path))
        settle_heap()

    def __serve_build_asgi_app__(self) -> Any:
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route

        async def metrics(_: Any) -> Response:
            return Response(await self.telemetry.render(), media_type=CONTENT_TYPE)

        async def health(_: Any) -> Response:
            ready = [w for w in self.dispatcher.workers.values() if w.role is Role.DECODE]
            return JSONResponse({"status": "ok" if ready else "no decode worker"}, 200 if ready else 503)

        async def status(_: Any) -> Response:
            await self.telemetry.refresh_decision()
            return JSONResponse(self.status())

        async def records(_: Any) -> Response:
            return JSONResponse(self.records())

        app = self._openai
        app.router.routes[:0] = [
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/pdserve/status", status),
            Route("/pdserve/records", records),
        ]
        return guard(
            Intake(app, lambda: self._draining),
            self._config.router,
            vocab_size=self.client.model_config.get_vocab_size(),
            environ=os.environ,
            slo=self._config.slo.to_slo(),
            extra_paths=OPERATOR_PATHS,
        )

    def status(self) -> dict[str, Any]:
        """What `pdserve status` shows."""
        status = router_status(
            self._router_id, self._config, self.dispatcher, self.placer, self.warmup, self.metrics, self._started_s
        )
        # The latest decision with the changes before it (cluster/goodput/decisions.py); None without autoscaling.
        return status | {"autoscaling": finite(self.telemetry.decision)}

    async def drain(self) -> int:
        """Take no more requests and return when the running ones have ended: how many were waited for."""
        self._draining = True
        self.warmup.stop()
        waited_for = self.dispatcher.running
        while self.dispatcher.running:  # noqa: ASYNC110 - once in a router's life; an event would cost every request
            await asyncio.sleep(0.05)
        return waited_for

    def records(self, after: int = 0) -> list[dict[str, Any]]:
        """The latest finished requests, oldest first, without their ITL samples.

        `client_request_id` is what the client called it (X-Request-Id), for joining with a client's own figures.
        """
        return list(self._records)[after:]

    async def check_health(self) -> None:
        """A router that answers is healthy."""

    async def __del__(self) -> None:
        if hasattr(self, "dispatcher"):
            self.dispatcher.end_all("the router is shutting down")
            if self._events is not None:
                await self._events.close()
            await self.transport.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.shutdown)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve pushes this to its controller, where the autoscaling policy reads it."""
        return self.telemetry.autoscaling_stats()

    def _on_arrival(self, job: ClientJob) -> None:
        request = job.request
        if (client_id := current().client_request_id) is not None:
            self._client_ids[request.request_id] = client_id
        self.metrics.start(prompt_tokens=request.prompt_tokens, tenant=request.tenant, priority=request.priority)
        if self._tracing is not None:
            job.trace_headers = self._tracing.start(request, job.trace_headers) or job.trace_headers

    def _on_record(self, record: RequestRecord) -> None:
        client_id = self._client_ids.pop(record.request_id, None)
        if record.tenant != Warmup.TENANT:
            slim = asdict(replace(record, itl_s=[]))
            self._records.append({**slim, "itl_s": None, "client_request_id": client_id})
            self.metrics.observe(record)
            if self._tracing is not None:
                self._tracing.finish(record)
        # Last: what is learnt from a request never costs its record.
        self.times.observe(record)

    def _index_gauges(self) -> dict[str, Any]:
        streams = [] if self._events is None else list(self._events.streams.values())
        return {
            "pdserve_index_blocks": float(self.index.stats.blocks),
            "pdserve_index_gaps_total": float(sum(stream.counts.gaps for stream in streams)),
        }

    def _follow_events(self, info: WorkerInfo, up: bool) -> None:
        if not up:
            if self._events is not None:
                self._events.remove(info.worker_id)
            return
        if self._events is None:
            self._events = KvEventReader(self.index, self.placer.key_block_tokens, self._on_quality)
        self._events.add(info)

    def _on_quality(self, worker_id: str, quality: Quality) -> None:
        mark = getattr(self.placer, "set_index_exact", None)
        if mark is not None:
            mark(worker_id, quality is Quality.EXACT)

    def _server_arguments(self, model_path: str) -> list[str]:
        arguments = [
            "--model",
            model_path,
            "--served-model-name",
            served_name(self._config),
            "--no-enable-log-requests",
        ]
        arguments.append("--enable-prompt-tokens-details")
        if self._config.model.max_model_len is not None:
            arguments += ["--max-model-len", str(self._config.model.max_model_len)]
        if self._config.router.http.allow_chat_template:
            arguments.append("--trust-request-chat-template")
        return arguments + self._config.router.openai_arguments
