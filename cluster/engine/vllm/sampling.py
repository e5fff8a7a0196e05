"""Sampling parameters of the legs. The prefill leg is built from nothing; the decode leg keeps the client's."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams

from cluster.engine.base import EngineRequest

# What a prefill leg asks its connector for; the answer comes back with the last output.
TICKET_REQUEST: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def leg_sampling(request: EngineRequest) -> SamplingParams:
    """vLLM's parameters of one leg.

    Stop strings and text stay at the router, which sees all choices; the engine stops on token ids and lengths.
    """
    if request.sampling is None:
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    else:
        params = request.sampling
    extra = {k: v for k, v in (params.extra_args or {}).items() if k != "kv_transfer_params"}
    if request.kv_transfer_params is not None:
        extra["kv_transfer_params"] = dict(request.kv_transfer_params)
    params.extra_args = extra or None
    return params


def continued(params: SamplingParams, tokens_sent: int) -> SamplingParams:
    """Parameters for going on after `tokens_sent` output tokens, which are part of the prompt now."""
    rest = params.clone()
    if rest.max_tokens is not None:
        rest.max_tokens = max(1, rest.max_tokens - tokens_sent)
    rest.min_tokens = max(0, rest.min_tokens - tokens_sent)
    return rest


def greedy(max_tokens: int) -> SamplingParams:
    """Plain greedy decoding of exactly that many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
