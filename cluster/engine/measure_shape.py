"""Times of a model's layers with random weights, by torch alone: a profile for a host without an engine.

One rank's share of a layer (queries, KV and MLP divided by tp; all-reduces left out) and the output matrix are run
eagerly; a step's time is `layers * layer + head`. Only `sampled` layers are held in memory and run one after
the other, so that caches are as cold as in the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from cluster.errors import UserError
from cluster.perf.fitting import StepSample
from cluster.perf.model_shape import ModelShape

CPU_PROMPTS, GPU_PROMPTS = (16, 64, 192, 512), (64, 256, 1024, 2048, 4096, 8192)
CPU_BATCHES, GPU_BATCHES = (1, 4, 16), (1, 8, 32, 64, 128, 256)
CPU_CONTEXTS, GPU_CONTEXTS = (128, 1024), (512, 2048, 8192)
KV_LIMIT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """Samples of whole steps, and how they were scaled."""

    samples: list[StepSample]
    device: str
    dtype: str
    sampled_layers: int
    layers: int


class _Layer:
    """One decoder layer's matrices on one rank."""

    def __init__(self, torch: Any, shape: ModelShape, tp: int, device: str, dtype: Any) -> None:
        self.torch = torch
        self.q_heads, self.kv_heads, self.head_dim = shape.heads // tp, shape.kv_heads_per_gpu(tp), shape.head_dim
        inter = shape.intermediate // tp

        def matrix(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, device=device, dtype=dtype) * 0.02

        self.qkv = matrix((self.q_heads + 2 * self.kv_heads) * self.head_dim, shape.hidden)
        self.o = matrix(shape.hidden, self.q_heads * self.head_dim)
        self.gate_up = matrix(2 * inter, shape.hidden)
        self.down = matrix(shape.hidden, inter)
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self.inter = inter

    def __call__(self, x: Any, keys: Any, values: Any, batch: int, causal: bool) -> Any:
        """x: (batch * new, hidden); keys, values: (batch, kv_heads, context, head_dim) already cached, or None."""
        f = self.torch.nn.functional
        new = x.shape[0] // batch
        qkv = f.linear(f.rms_norm(x, (x.shape[1],), self.norm), self.qkv)
        q, k, v = qkv.split(
            [self.q_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim], dim=1
        )
        q = q.view(batch, new, self.q_heads, self.head_dim).transpose(1, 2)
        if keys is None:
            keys = k.reshape(batch, new, self.kv_heads, self.head_dim).transpose(1, 2)
            values = v.reshape(batch, new, self.kv_heads, self.head_dim).transpose(1, 2)
        attended = f.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)
        x = x + f.linear(attended.transpose(1, 2).reshape(batch * new, -1), self.o)
        gate, up = f.linear(f.rms_norm(x, (x.shape[1],), self.norm), self.gate_up).split(self.inter, dim=1)
        return x + f.linear(f.silu(gate) * up, self.down)


def measure_shape(
    shape: ModelShape,
    tp: int = 1,
    sampled: int = 2,
    device: str | None = None,
    dtype: str = "bfloat16",
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _line: None,
) -> ShapeRun:
    """Time prompts and decode batches of a dense, grouped-query shape.

    Raises:
        UserError: a shape that this bench does not build (mixture of experts, latent cache), or no memory for it.
    """
    if shape.experts or shape.latent or shape.linear_layers:
        raise UserError(
            f"shape: {shape.name} has experts, a latent or a linear cache; this bench builds dense layers only"
        )
    shape.check_layout(tp)
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    sampled = min(sampled, shape.layers)
    kind = getattr(torch, dtype)
    prompts, batches, contexts = (
        (GPU_PROMPTS, GPU_BATCHES, GPU_CONTEXTS) if on_gpu else (CPU_PROMPTS, CPU_BATCHES, CPU_CONTEXTS)
    )
    samples: list[StepSample] = []
    with torch.inference_mode():
        try:
            layers = [_Layer(torch, shape, tp, device, kind) for _ in range(sampled)]
            head = torch.randn(shape.vocab // tp, shape.hidden, device=device, dtype=kind) * 0.02
        except (RuntimeError, MemoryError) as e:
            raise UserError(
                f"shape: no memory for {sampled} layers of {shape.name}: {str(e).splitlines()[0]}"
            ) from None

        def timed(work: Callable[[], Any]) -> float:
            work()
            durations = []
            for _ in range(repeats):
                if on_gpu:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                work()
                if on_gpu:
                    torch.cuda.synchronize()
                durations.append(time.perf_counter() - begin)
            return median(durations)

        def step_s(tokens: int, batch: int, cache: Any, causal: bool) -> float:
            x = torch.randn(tokens, shape.hidden, device=device, dtype=kind)

            def body() -> Any:
                y = x
                for layer in layers:
                    y = layer(y, cache, cache, batch, causal)
                return y

            last = torch.randn(batch, shape.hidden, device=device, dtype=kind)
            return timed(body) / sampled * shape.layers + timed(lambda: (last @ head.T).argmax(dim=1))

        for tokens in [p for p in prompts if p <= shape.max_context]:
            progress(f"prompt of {tokens} tokens")
            samples.append(StepSample(((tokens, 0),), 0, 0, step_s(tokens, 1, None, True)))
        for batch in batches:
            for context in [c for c in contexts if c < shape.max_context]:
                heads, width = shape.kv_heads_per_gpu(tp), shape.head_dim
                if 4 * batch * heads * context * width > KV_LIMIT_BYTES:
                    continue
                progress(f"decode of {batch} sequences with {context} tokens of context")
                cache = torch.randn(batch, heads, context, width, device=device, dtype=kind)
                samples.append(StepSample((), batch, batch * context, step_s(batch, batch, cache, False)))
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return ShapeRun(samples, name, dtype, sampled, shape.layers)
