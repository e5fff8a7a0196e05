"""The engine protocol: what a pool's worker asks of the engine it owns.

vLLM stands behind it in `cluster/engine/vllm/`; the simulated engine in `cluster/engine/simulated.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.errors import PdserveError
from cluster.messages import WorkerInfo, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One leg of a request on one engine.

    Attributes:
        request_id: unique on this engine; minted by the router, different for each leg, attempt and choice.
        prompt_token_ids: tokenized once, at the router.
        sampling: engine-specific sampling parameters (vLLM: `SamplingParams`); opaque to workers.
        kv_transfer_params: None, the request for a ticket (prefill leg) or a ticket's own (decode leg).
        cache_salt: namespace of the prefix cache, derived from the authenticated tenant.
        priority: lower is served first.
        predicted_cached_tokens: prompt tokens that this engine is expected to hold; for its report of queued work.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Any
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    lora: Any = None
    trace_headers: Mapping[str, str] | None = None
    predicted_cached_tokens: int = 0


@dataclass(slots=True)
class EngineDelta:
    """New tokens of one request in one engine step. Text is made at the router, which keeps the detokenizer.

    `logprobs` and `prompt_logprobs` are the engine's own arrays, opaque here. `cached_tokens` (prompt tokens not
    computed here, pulled ones included), `external_tokens` (pulled ones) and the durations are set on the first
    delta; `kv_transfer_params` on the last of a prefill leg; `transfer_s` and `transfer_bytes` are measured by the
    engine that pulled and set with the first delta where known. The durations are engine-side: arrival to first
    scheduling, first scheduling to first token. `finish_reason` (stop, length, abort, error) is set on the last.
    """

    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    external_tokens: int | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    kv_transfer_params: Mapping[str, Any] | None = None
    transfer_s: float | None = None
    transfer_bytes: int | None = None


Sink = Callable[[str, EngineDelta | PdserveError], None]
"""Receives (request_id, delta) in the engine's event loop; must not block. An error is the last item of a request."""


class Engine(Protocol):
    """One model replica. All methods may be called from one event loop; none blocks it."""

    @property
    def info(self) -> WorkerInfo: ...

    def snapshot(self) -> WorkerSnapshot:
        """The load after the latest engine step. Free: no call to another process."""
        ...

    def on_step(self, callback: Callable[[WorkerSnapshot], None]) -> None:
        """Call `callback` after every engine step, once all deltas of the step were given to their sinks."""
        ...

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        """Accept a request; its output goes to `sink` until a delta with a finish reason or an error.

        Raises:
            BadRequest: parameters that the engine refuses; nothing was scheduled.
            EngineFailed: the engine is dead.

        Errors given to the sink: TransferFailed, LeaseExpired (the ticket's KV could not be pulled), EngineFailed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is. Its sink gets nothing more. Unknown ids are ignored."""
        ...

    async def release(self, request_ids: list[str]) -> None:
        """On the engine that granted tickets: nobody will pull these; free their KV now. Idempotent."""
        ...

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine cannot make progress."""
        ...

    async def shutdown(self) -> None:
        """End the engine and every process it started. Idempotent."""
        ...
