"""The engine protocol: what a pool's worker asks of the engine it owns.

vLLM stands behind it in `cluster/engine/vllm.py`; the simulated engine in `cluster/engine/simulated.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Any
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    lora: Any = None
    trace_headers: Mapping[str, str] | None = None


@dataclass(slots=True)
class EngineDelta:
    """New output of one request in one engine step.

    `logprobs` holds the engine's own per-token entries. `cached_tokens` (prompt tokens not computed here) and
    the durations are set on the first delta; `kv_transfer_params` on the last of a prefill leg. The durations
    are engine-side: arrival to first scheduling, first scheduling to first token.
    """

    token_ids: list[int]
    text: str
    logprobs: Any = None
    cumulative_logprob: float | None = None
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    external_tokens: int | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


class Engine(Protocol):
    """One model replica. All methods may be called from one event loop; none blocks it."""

    @property
    def info(self) -> WorkerInfo: ...

    def snapshot(self) -> WorkerSnapshot:
        """The load after the latest engine step. Free: no call to another process."""
        ...

    def on_step(self, callback: Callable[[WorkerSnapshot], None]) -> None:
        """Call `callback` after every engine step."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """Stream the output. Closing the iterator aborts the request.

        Raises:
            BadRequest: parameters that the engine refuses; nothing was scheduled.
            TransferFailed, LeaseExpired: the ticket's KV could not be pulled.
            EngineFailed: the engine is dead.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is; unknown ids are ignored."""
        ...

    async def release_ticket(self, request_id: str, kv_transfer_params: Mapping[str, Any]) -> None:
        """Tell the engine that granted a ticket that nobody will pull it."""
        ...

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine cannot make progress."""
        ...

    async def shutdown(self) -> None:
        """End the engine and every process it started. Idempotent."""
        ...
