"""Step times from first principles: a roofline with all-reduces, per model, device and layout.

Every matrix product takes the longer of its arithmetic and its reads (Williams et al., Roofline, 2009):
`max(2 * params * tokens / peak, bytes / bandwidth)`. Prompt attention is arithmetic,
`4 * heads * head_dim * (new * context + new^2 / 2)` a layer; decode attention is the read of the KV cache. Tensor
parallelism adds two all-reduces a layer (Shoeybi et al., Megatron-LM, 2019), each
`2 * (tp - 1) / tp * tokens * hidden * 2 bytes` over the link plus a latency (ring; Thakur et al., 2005).
The shares of the peaks that kernels reach come with the hardware table (`Efficiency`), with their source.

Pipeline parallelism: the batch runs as `pp` micro-batches, so in decode every GPU is busy and a token takes
`pp` stages; a prompt also fills the pipe once, `(pp - 1)` stages of bubble (Huang et al., GPipe, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import UserError
from cluster.perf.hardware import Hardware, Link
from cluster.perf.model_shape import ModelShape, dtype_bytes
from cluster.perf.times import StepTimes
from cluster.perf.transfer import transfer_s

ACTIVATION_BYTES = 2


class RooflineTimes(StepTimes):
    """`StepTimes` of one replica: a model on tp x pp GPUs of one type.

    Args:
        weight_dtype: of the matrices; formats below 8 bits without their own units only save reads.
        kv_dtype: of the cache; default the model's 16-bit type.
        transfer: link over which KV leaves a prefill replica; default the device's NIC.

    Raises:
        UserError: a layout the model cannot run in, or one wider than a node in tp.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: Hardware,
        tp: int = 1,
        pp: int = 1,
        weight_dtype: str | None = None,
        kv_dtype: str | None = None,
        transfer: Link | None = None,
    ) -> None:
        shape.check_layout(tp, pp)
        if tp > device.gpus_per_node:
            raise UserError(
                f"tp: {tp} is more than the {device.gpus_per_node} {device.name} of one node; use pp across"
            )
        self.shape, self.device, self.tp, self.pp = shape, device, tp, pp
        eff = device.efficiency
        dtype = weight_dtype or shape.dtype
        size = dtype_bytes(dtype)
        peak = device.peak_flops(dtype) * eff.gemm
        bandwidth = device.hbm_bytes_per_s * eff.hbm
        layers = shape.layers

        # Whole-model sums, on one GPU of the tp group: seconds a token and seconds a pass.
        dense_params = layers * shape.attention_params + round(layers * shape.common_mlp_params)
        self._dense_token_s = 2 * dense_params / tp / peak
        self._dense_read_s = dense_params * size / tp / bandwidth
        expert_params = layers * shape.expert_params
        self._expert_token_s = 2 * shape.experts_per_token * expert_params / tp / peak
        self._expert_read_s = shape.experts * expert_params * size / tp / bandwidth
        self._expert_miss = 1 - shape.experts_per_token / shape.experts if shape.experts else 0.0
        head_params = shape.embedding_params
        self._head_token_s = 2 * head_params / tp / (device.peak_flops("bfloat16") * eff.gemm)
        self._head_read_s = head_params * max(size, 2.0) / tp / bandwidth

        qk_dim = shape.head_dim + shape.rope_head_dim
        v_dim = shape.v_head_dim or shape.head_dim
        attention_peak = device.peak_flops("bfloat16") * eff.attention
        full_layers = shape.attention_layers - shape.sliding_layers
        self._pair_s = 2 * (qk_dim + v_dim) * shape.heads / tp / attention_peak
        self._full_layers, self._sliding_layers = full_layers, shape.sliding_layers
        self._window = shape.window_tokens
        layer_kv_bytes = shape.kv_bytes_per_token(tp, 1, kv_dtype) / max(1, shape.attention_layers)
        self._kv_read_s = layer_kv_bytes / bandwidth

        self._all_reduce_token_s = self._all_reduce_fixed_s = 0.0
        if tp > 1:
            message_bytes = shape.hidden * ACTIVATION_BYTES
            self._all_reduce_token_s = (
                2 * layers * 2 * (tp - 1) / tp * message_bytes / (device.link.bytes_per_s * eff.link)
            )
            self._all_reduce_fixed_s = 2 * layers * eff.all_reduce_s
        self._fixed_s = layers * eff.layer_s + eff.step_s
        hop = device.link if tp * pp <= device.gpus_per_node else device.nic
        self._hop_token_s = shape.hidden * ACTIVATION_BYTES / tp / hop.bytes_per_s
        self._hop_fixed_s = (hop.latency_s or eff.all_reduce_s) if pp > 1 else 0.0
        self._transfer = transfer or device.nic

    def _pass_s(self, tokens: float, sampled: float, pair_s: float, kv_read_s: float) -> float:
        """One pass of `tokens` through all layers on one tp group."""
        body = max(self._dense_token_s * tokens, self._dense_read_s)
        if self._expert_read_s:
            # Routed experts alone are read only where a token goes to them.
            touched = 1 - self._expert_miss**tokens
            body += max(self._expert_token_s * tokens, self._expert_read_s * touched)
        head = max(self._head_token_s * sampled, self._head_read_s)
        reduce = self._all_reduce_token_s * tokens + self._all_reduce_fixed_s
        return body + head + pair_s + kv_read_s + reduce + self._fixed_s

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        decode_batch: int,
        decode_context_tokens: int,
        draft_tokens: int = 0,
    ) -> float:
        new_tokens, pairs, sliding_pairs, prefill_context = 0, 0.0, 0.0, 0
        for new, context in prefill:
            new_tokens += new
            prefill_context += context
            pairs += new * (context + 0.5 * new)
            if self._sliding_layers:
                sliding_pairs += new * min(context + 0.5 * new, self._window)
        pair_s = self._pair_s * (self._full_layers * pairs + self._sliding_layers * sliding_pairs)
        read = decode_context_tokens + prefill_context
        sliding_read = min(read, (decode_batch + len(prefill)) * self._window)
        kv_read_s = self._kv_read_s * (self._full_layers * read + self._sliding_layers * sliding_read)
        tokens = new_tokens + decode_batch + draft_tokens
        sampled = decode_batch + draft_tokens + len(prefill)
        pp = self.pp
        if pp == 1:
            return self._pass_s(tokens, sampled, pair_s, kv_read_s)
        # Shares of one micro-batch; `pp` of them are under way, each takes a full pass.
        one = self._pass_s(tokens / pp, sampled / pp, pair_s / pp, kv_read_s / pp)
        hops_s = pp * self._hop_fixed_s + self._hop_token_s * tokens
        bubble_s = one * (pp - 1) / pp if new_tokens else 0.0
        return one + hops_s + bubble_s

    def decode_run_s(self, decode_batch: int, decode_context_tokens: int, steps: int) -> list[float]:
        if self._sliding_layers:
            return [self.step_s((), decode_batch, decode_context_tokens + i * decode_batch) for i in range(steps)]
        first = self.step_s((), decode_batch, decode_context_tokens)
        growth = self._kv_read_s * self._full_layers * decode_batch / self.pp
        return [first + i * growth for i in range(steps)]

    def transfer_s(self, kv_bytes: int) -> float:
        return transfer_s(kv_bytes, self._transfer, self.tp)
