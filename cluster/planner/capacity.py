"""How many sequences one replica holds, and which resource says so.

Memory of one GPU = reserve + weights + activations + runtime (context, communication buffers, captured graphs)
+ KV pool. A contiguous allocator reserves the longest context for every sequence; a paged one takes whole blocks
of what a sequence really holds (Kwon et al., PagedAttention, 2023). The latency SLO caps the batch at
`B <= (TPOT - a) / b` where a step takes `a + b * B`; here B is searched on the step times themselves, so that a
curve that is not a line is handled too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import UserError
from cluster.perf.hardware import Hardware
from cluster.perf.model_shape import ModelShape, dtype_bytes
from cluster.perf.times import StepTimes

GIB = 1 << 30
CONTEXT_BYTES = 600 << 20
"""Driver context and library workspaces of one process on a GPU."""
COMMUNICATOR_BYTES = 400 << 20
"""Buffers of a communicator, where ranks talk to one another."""
GRAPH_BYTES_PER_LAYER = 272_000
"""Captured CUDA graphs: bytes a layer and captured batch size (0.53 GiB for 32 layers at 67 sizes, vLLM's own log)."""
CAPTURED_SIZES = 51


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine is configured with; the defaults are vLLM's on a GPU."""

    utilization: float = 0.92
    block_tokens: int = 16
    max_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one GPU; the parts add up to `memory_bytes`."""

    memory_bytes: int
    reserve_bytes: int
    weights_bytes: int
    activation_bytes: int
    runtime_bytes: int
    kv_pool_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Concurrency of one replica. `kv_*` figures are one GPU's share of the fullest rank; tokens are the replica's.

    Attributes:
        pool_tokens: blocks * block_tokens, exactly.
        contiguous_sequences: each reserving `context_tokens`.
        paged_sequences: each holding `mean_tokens`, in whole blocks.
        slo_batch_cap: largest batch whose step meets the TPOT; None without one, 0 if one sequence already misses.
        concurrency: the smallest limit; `binding` names it.
    """

    budget: MemoryBudget
    kv_bytes_per_token: int
    pool_blocks: int
    pool_tokens: int
    context_tokens: int
    mean_tokens: int
    contiguous_sequences: int
    paged_sequences: int
    reservation_waste: float
    slo_batch_cap: int | None
    concurrency: int
    binding: str

    @property
    def paged_over_contiguous(self) -> float:
        return self.paged_sequences / self.contiguous_sequences if self.contiguous_sequences else math.inf


def activation_bytes(shape: ModelShape, tp: int, limits: EngineLimits) -> int:
    """Peak of one layer at the token budget, and of the sampler.

    A layer holds the residual stream twice, the MLP's two projections and their product, or queries, keys and
    values; the sampler holds one 16-bit and one 32-bit row of the vocabulary a sequence.
    """
    mlp_width = 3 * max(
        shape.intermediate if not shape.experts else 0,
        shape.expert_intermediate * shape.experts_per_token + shape.shared_intermediate,
    )
    qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = limits.max_batched_tokens * 2 * (2 * shape.hidden + max(mlp_width, qkv_width) // tp)
    return layer + min(limits.max_num_seqs, limits.max_batched_tokens) * shape.vocab * 6


def runtime_bytes(shape: ModelShape, tp: int, pp: int, limits: EngineLimits) -> int:
    graphs = GRAPH_BYTES_PER_LAYER * math.ceil(shape.layers / pp) * CAPTURED_SIZES if limits.cuda_graphs else 0
    return CONTEXT_BYTES + (COMMUNICATOR_BYTES if tp * pp > 1 else 0) + graphs


def memory_budget(
    shape: ModelShape,
    device: Hardware,
    tp: int = 1,
    pp: int = 1,
    weight_dtype: str | None = None,
    limits: EngineLimits | None = None,
) -> MemoryBudget:
    """Divide one GPU's memory. Weights are an even share: embeddings of the outer pipeline stages are spread.

    Raises:
        UserError: the layout cannot run this model, or nothing is left for KV; the line names what would help.
    """
    limits = limits or EngineLimits()
    shape.check_layout(tp, pp)
    weights = shape.weight_bytes(weight_dtype)
    reserve = round(device.memory_bytes * (1 - limits.utilization))
    usable = device.memory_bytes - reserve
    share = math.ceil(weights / (tp * pp))
    activations = activation_bytes(shape, tp, limits)
    runtime = runtime_bytes(shape, tp, pp, limits)
    pool = usable - share - activations - runtime
    if pool <= 0:
        dtype = weight_dtype or shape.dtype
        raise UserError(
            f"weights: {shape.name} in {dtype} takes {share / GIB:.1f} GiB a GPU at tp={tp} pp={pp}, with activations "
            f"and runtime {(share + activations + runtime) / GIB:.1f} GiB; {device.name} has {usable / GIB:.1f} GiB; "
            + _remedy(shape, device, weights, activations + runtime, usable, dtype)
        )
    return MemoryBudget(device.memory_bytes, reserve, share, activations, runtime, pool)


def _remedy(shape: ModelShape, device: Hardware, weights: int, other: int, usable: int, dtype: str) -> str:
    gpus = next((n for n in (2, 4, 8, 16, 32, 64) if weights / n + other < usable), None)
    if gpus is None:
        return "use a GPU with more memory"
    how = f"tp={gpus}" if gpus <= device.gpus_per_node and shape.heads % gpus == 0 else f"tp x pp = {gpus}"
    lighter = " or --weights fp8" if dtype_bytes(dtype) >= 2 and device.peak_flops("fp8") else ""
    return f"use {how} or more{lighter}"


def largest_batch(fits: Callable[[int], bool], limit: int) -> int:
    """The largest batch in [0, limit] that fits; `fits` must not become true again once false."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def slo_batch_cap(times: StepTimes, context_tokens: int, tpot_s: float, limit: int = 65536) -> int:
    """The largest decode batch, every sequence at `context_tokens`, whose step takes no longer than the TPOT."""
    return largest_batch(lambda b: times.step_s((), b, b * context_tokens) <= tpot_s, limit)


def capacity(
    shape: ModelShape,
    budget: MemoryBudget,
    context_tokens: int,
    mean_tokens: int,
    tp: int = 1,
    pp: int = 1,
    kv_dtype: str | None = None,
    limits: EngineLimits | None = None,
    times: StepTimes | None = None,
    tpot_s: float | None = None,
) -> Capacity:
    """Concurrency of a replica with this memory budget.

    Args:
        context_tokens: the longest sequence, prompt and output.
        mean_tokens: what a sequence holds on average while it runs.
        times, tpot_s: both or neither; with them the SLO's batch cap is known.

    Raises:
        UserError: a length that makes no sense, or not one sequence fits.
    """
    limits = limits or EngineLimits()
    if not 0 < mean_tokens <= context_tokens:
        raise UserError(f"mean-tokens: {mean_tokens} is outside [1, {context_tokens}], the longest context")
    if context_tokens > shape.max_context:
        raise UserError(f"context: {context_tokens} is above the {shape.max_context} tokens {shape.name} was made for")
    per_token = shape.kv_bytes_per_token(tp, pp, kv_dtype)
    pool = budget.kv_pool_bytes
    pool_blocks = pool // (limits.block_tokens * per_token)
    longest_bytes = shape.kv_bytes(context_tokens, limits.block_tokens, tp, pp, kv_dtype)
    mean_bytes = shape.kv_bytes(mean_tokens, limits.block_tokens, tp, pp, kv_dtype)
    contiguous, paged = pool // longest_bytes, pool // mean_bytes
    if contiguous < 1:
        raise UserError(
            f"context: one sequence of {context_tokens} tokens takes {longest_bytes / GIB:.1f} GiB of KV a GPU, "
            f"the pool has {pool / GIB:.1f} GiB; lower --context, raise --tp or --pp, or use --kv fp8"
        )
    cap = None if times is None or tpot_s is None else slo_batch_cap(times, mean_tokens, tpot_s)
    bounds = [(paged, "KV memory"), (limits.max_num_seqs, "max_num_seqs")]
    if cap is not None:
        bounds.append((cap, "TPOT"))
    concurrency, binding = min(bounds, key=lambda b: b[0])
    return Capacity(
        budget=budget,
        kv_bytes_per_token=per_token,
        pool_blocks=pool_blocks,
        pool_tokens=pool_blocks * limits.block_tokens,
        context_tokens=context_tokens,
        mean_tokens=mean_tokens,
        contiguous_sequences=contiguous,
        paged_sequences=paged,
        reservation_waste=1 - mean_tokens / context_tokens,
        slo_batch_cap=cap,
        concurrency=concurrency,
        binding=binding,
    )
