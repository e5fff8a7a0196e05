"""vLLM behind the engine protocol: its engine core runs in processes of its own, this is the client of it.

Only the core is used. vLLM's front end (detokenizer, stop strings, logprob texts) runs once, at the router, so
that a token costs this process no more than handing it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.base import EngineDelta, EngineRequest, Sink
from cluster.engine.vllm.arguments import EngineSettings, engine_arguments
from cluster.engine.vllm.transfers import Transfers
from cluster.errors import BadRequest, EngineFailed, TransferFailed
from cluster.messages import Role, WorkerInfo, WorkerSnapshot, WorkerState


@dataclass(slots=True)
class _Rank:
    """Statistics of one attention-DP rank as it last spoke; each speaks for itself."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class VllmEngine:
    """One vLLM engine core and its ranks."""

    def __init__(self, core: Any, info: WorkerInfo) -> None:
        self._core = core
        self._info = info
        self._ports: Any = None
        self._sinks: dict[str, tuple[Sink, Any]] = {}
        self._pulls: dict[str, tuple[float, int]] = {}  # since when, prompt tokens
        self._transfers = Transfers(info.kv_bytes_per_token)
        self._queued_tokens: dict[str, int] = {}
        self._callbacks: list[Callable[[WorkerSnapshot], None]] = []
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._steps = 0
        self._stepped: set[int] = set()  # ranks whose step is counted in the latest of `_steps`
        self._dp = max(1, info.accelerators // (info.tp * info.pp))
        self._dead: str | None = None
        self._reader = asyncio.get_running_loop().create_task(self._read(), name="engine outputs")

    @classmethod
    async def create(
        cls, config: ClusterConfig, role: Role, settings: EngineSettings, worker_id: str, incarnation: str, node: str
    ) -> VllmEngine:
        """Start the engine core; returns when it can serve.

        Raises:
            ConfigError: engine arguments that cannot be used.
            EngineFailed: the core did not start; the message is vLLM's first cause.
        """
        os.environ.update(settings.environment)
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        from cluster.engine.vllm.describe import worker_info

        try:
            vllm_config = engine_arguments(config, role, settings).create_engine_config()
            core = EngineCoreClient.make_async_mp_client(vllm_config, Executor.get_class(vllm_config), log_stats=True)
        except (RuntimeError, ValueError, OSError) as e:
            raise EngineFailed(f"the {role} engine did not start: {_first_line(e)}") from e
        info = worker_info(config, role, settings, vllm_config, worker_id, incarnation, node)
        engine = cls(core, info)
        engine._ports = settings.ports
        return engine

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def snapshot(self) -> WorkerSnapshot:
        ranks = self._ranks.values()
        return WorkerSnapshot(
            worker_id=self._info.worker_id,
            incarnation=self._info.incarnation,
            state=WorkerState.DEAD if self._dead else WorkerState.READY,
            steps=self._steps,
            # An engine that has nothing left makes no step, so its last statistics still count what was aborted.
            running=sum(rank.running for rank in ranks) if self._sinks else 0,
            waiting=sum(rank.waiting for rank in ranks) if self._sinks else 0,
            queued_prefill_tokens=sum(self._queued_tokens.values()),
            kv_used_blocks=round(sum(rank.kv_usage for rank in ranks) / self._dp * self._info.kv_total_blocks),
        )

    def on_step(self, callback: Callable[[WorkerSnapshot], None]) -> None:
        self._callbacks.append(callback)

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        if self._dead:
            raise EngineFailed(self._dead, worker_id=self._info.worker_id)
        if request.request_id in self._sinks:
            raise BadRequest(f"request id {request.request_id} is in use on this engine")
        from vllm.v1.engine import EngineCoreRequest

        from cluster.engine.vllm.outputs import Timing
        from cluster.engine.vllm.sampling import leg_sampling

        self._sinks[request.request_id] = (sink, Timing())
        # The last token of a prompt is always computed here; of one that is pulled, it alone.
        queued_tokens = max(1, len(request.prompt_token_ids) - request.predicted_cached_tokens)
        if request.kv_transfer_params is not None and request.kv_transfer_params.get("do_remote_prefill"):
            queued_tokens = 1
            self._pulls[request.request_id] = time.monotonic(), len(request.prompt_token_ids)
            prefill_tp = int(request.kv_transfer_params.get("tp_size") or 1)
            self._transfers.reads_per_request = max(self._info.tp, prefill_tp)
        self._queued_tokens[request.request_id] = queued_tokens
        try:
            await self._core.add_request_async(
                EngineCoreRequest(
                    request_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    mm_features=None,
                    sampling_params=leg_sampling(request),
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=request.lora,
                    cache_salt=request.cache_salt,
                    data_parallel_rank=None,
                    priority=request.priority,
                    trace_headers=request.trace_headers,
                    external_req_id=request.request_id,
                )
            )
        except (OverflowError, TypeError, ValueError) as e:
            # It cannot be sent to the engine's process: the request's own fault, on every engine.
            self._forget(request.request_id)
            raise BadRequest(f"a parameter is none that the engine can take: {e}") from e
        except BaseException:
            self._forget(request.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        if self._forget(request_id) and not self._dead:
            await self._core.abort_requests_async([request_id])

    async def release(self, request_ids: list[str]) -> None:
        if request_ids and not self._dead:
            await self._core.collective_rpc_async("pdserve_release_kv", None, (request_ids,))

    async def pinned_leases(self) -> int:
        """Finished prefills that the connector still keeps for a decode engine."""
        counts = await self._core.collective_rpc_async("pdserve_pinned_kv", None, ())
        return max(counts, default=0)

    async def check_health(self) -> None:
        if self._dead:
            raise EngineFailed(self._dead, worker_id=self._info.worker_id)
        if self._reader.done():
            raise EngineFailed("the output reader has ended", worker_id=self._info.worker_id)

    async def shutdown(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._dead = self._dead or "shut down"
        await asyncio.get_running_loop().run_in_executor(None, self._core.shutdown, 5.0)

    async def _read(self) -> None:
        from cluster.engine.vllm.outputs import to_delta

        try:
            while True:
                outputs = await self._core.get_output_async()
                self._transfers.on_stats(outputs.scheduler_stats, time.monotonic())
                for output in outputs.outputs:
                    entry = self._sinks.get(output.request_id)
                    if entry is None:
                        continue
                    sink, timing = entry
                    delta = to_delta(output, timing, outputs.timestamp)
                    self._queued_tokens.pop(output.request_id, None)
                    if delta.external_tokens and (pull := self._pulls.get(output.request_id)) is not None:
                        since_s, prompt_tokens = pull
                        block = self._info.block_size_tokens
                        held = (delta.cached_tokens or 0) - delta.external_tokens
                        pulled_tokens = -(-prompt_tokens // block) * block - held // block * block
                        delta.transfer_s, delta.transfer_bytes = self._transfers.take(
                            since_s, delta.queue_s or 0.0, pulled_tokens
                        )
                    failed_pull = delta.finish_reason == "error" and output.request_id in self._pulls
                    if delta.finish_reason is not None:
                        self._forget(output.request_id)
                    if failed_pull:
                        sink(
                            output.request_id,
                            TransferFailed("the KV could not be pulled", worker_id=self._info.worker_id),
                        )
                    else:
                        sink(output.request_id, delta)
                self._count_step(outputs.engine_index)
                rank, stats = self._ranks[outputs.engine_index], outputs.scheduler_stats
                if stats is not None:
                    rank.running = stats.num_running_reqs
                    rank.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
                    rank.kv_usage = stats.kv_cache_usage
                snapshot = self.snapshot() if self._callbacks else None
                for callback in self._callbacks:
                    callback(snapshot)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            raise
        except Exception as e:
            self._dead = f"the engine core ended: {_first_line(e)}"
            error = EngineFailed(self._dead, worker_id=self._info.worker_id)
            error.retryable = True
            for request_id, (sink, _) in list(self._sinks.items()):
                self._forget(request_id)
                sink(request_id, error)
            for callback in self._callbacks:
                callback(self.snapshot())

    def _count_step(self, rank: int) -> None:
        """Ranks step side by side, so a second one's output is no further step; any rank's next one is."""
        if not self._stepped or rank in self._stepped:
            self._steps += 1
            self._stepped.clear()
        self._stepped.add(rank)

    def _forget(self, request_id: str) -> bool:
        self._queued_tokens.pop(request_id, None)
        self._pulls.pop(request_id, None)
        return self._sinks.pop(request_id, None) is not None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


__all__ = ["EngineDelta", "VllmEngine"]
