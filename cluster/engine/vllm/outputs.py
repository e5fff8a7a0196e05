"""Token deltas to and from vLLM's own output structs. Both ends of the wire are in this file."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from cluster.engine.base import EngineDelta

_REASON_TO_VLLM = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "repetition": getattr(FinishReason, "REPETITION", FinishReason.STOP),
}


class Timing:
    """Queue and compute time of one request on one engine, from the engine core's events."""

    __slots__ = ("compute_s", "queue_s", "queued", "scheduled")

    def __init__(self) -> None:
        self.queued = self.scheduled = 0.0
        self.queue_s: float | None = None
        self.compute_s: float | None = None

    def on_events(self, events: list[Any] | None) -> None:
        for event in events or ():
            if event.type == EngineCoreEventType.QUEUED:
                self.queued = self.queued or event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED and not self.scheduled:
                self.scheduled = event.timestamp
                self.queue_s = max(0.0, event.timestamp - self.queued)


def to_delta(output: EngineCoreOutput, timing: Timing, step_at_s: float) -> EngineDelta:
    """One request's share of one engine step."""
    timing.on_events(output.events)
    delta = EngineDelta(
        token_ids=output.new_token_ids,
        finish_reason=str(output.finish_reason) if output.finish_reason is not None else None,
        stop_reason=output.stop_reason,
        kv_transfer_params=output.kv_transfer_params,
    )
    if output.prefill_stats is not None:
        delta.cached_tokens = output.prefill_stats.num_cached_tokens
        delta.external_tokens = output.prefill_stats.num_external_cached_tokens
        if timing.scheduled:
            timing.compute_s = max(0.0, step_at_s - timing.scheduled)
        delta.queue_s, delta.compute_s = timing.queue_s, timing.compute_s
    if output.new_logprobs is not None:
        lists = output.new_logprobs
        delta.logprobs = _pack(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)
    if output.new_prompt_logprobs_tensors is not None:
        tensors = output.new_prompt_logprobs_tensors
        delta.prompt_logprobs = _pack(
            tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy(), tensors.selected_token_ranks.numpy()
        )
    return delta


def from_delta(request_id: str, delta: EngineDelta, prompt_tokens: int, cached_tokens: int | None) -> EngineCoreOutput:
    """What vLLM's output processor reads at the router.

    Args:
        cached_tokens: prompt tokens that the prefilling engine did not compute; set with the first delta.
    """
    stats = None
    if cached_tokens is not None:
        stats = PrefillStats()
        stats.set(prompt_tokens, min(cached_tokens, prompt_tokens), 0)
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=delta.token_ids,
        new_logprobs=LogprobsLists(*_unpack(delta.logprobs)) if delta.logprobs is not None else None,
        new_prompt_logprobs_tensors=_prompt_logprobs(delta.prompt_logprobs),
        finish_reason=_REASON_TO_VLLM[delta.finish_reason] if delta.finish_reason is not None else None,
        stop_reason=delta.stop_reason,
        prefill_stats=stats,
    )


def _pack(token_ids: Any, logprobs: Any, ranks: Any) -> tuple[int, int, bytes, bytes, bytes]:
    ids = np.ascontiguousarray(token_ids, dtype=np.int32)
    rows, columns = ids.shape
    return (
        rows,
        columns,
        ids.tobytes(),
        np.ascontiguousarray(logprobs, dtype=np.float32).tobytes(),
        np.ascontiguousarray(ranks, dtype=np.int32).tobytes(),
    )


def _unpack(packed: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns, ids, logprobs, ranks = packed
    return (
        np.frombuffer(ids, np.int32).reshape(rows, columns),
        np.frombuffer(logprobs, np.float32).reshape(rows, columns),
        np.frombuffer(ranks, np.int32),
    )


def _prompt_logprobs(packed: Any) -> LogprobsTensors | None:
    if packed is None:
        return None
    import torch

    ids, logprobs, ranks = (torch.from_numpy(a.copy()) for a in _unpack(packed))
    return LogprobsTensors(ids, logprobs, ranks)
