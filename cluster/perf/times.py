"""Seconds of one engine step: the seam between a scheduler and whatever knows the hardware.

The scheduler (cluster/engine/scheduler/), the simulator and the router's cost model ask a `StepTimes`; the linear
model below, the roofline and fitted profiles answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StepTimes(Protocol):
    """What an engine's iteration and a KV transfer cost, in seconds. Called once per simulated event: keep it cheap.

    Subclass it explicitly to inherit `decode_run_s`.
    """

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        decode_batch: int,
        decode_context_tokens: int,
        draft_tokens: int = 0,
    ) -> float:
        """One iteration of a mixed batch.

        Args:
            prefill: one (new_tokens, context_tokens) a prompt chunk; context_tokens are already in the KV cache.
            decode_batch: sequences that generate in this step.
            decode_context_tokens: KV tokens these sequences read, summed over the batch.
            draft_tokens: proposed tokens verified in this step beyond one a sequence (speculative decoding).
        """
        ...

    def decode_run_s(self, decode_batch: int, decode_context_tokens: int, steps: int) -> list[float]:
        """Durations of `steps` successive decode-only iterations of one unchanged batch.

        Every iteration adds one token to each context. Override where a closed form is cheaper.
        """
        return [self.step_s((), decode_batch, decode_context_tokens + i * decode_batch) for i in range(steps)]

    def transfer_s(self, kv_bytes: int) -> float:
        """Moving a prompt's KV from a prefill to a decode engine, from the first to the last byte."""
        ...


@dataclass(frozen=True, slots=True)
class LinearTimes(StepTimes):
    """t = fixed + per_sequence * sum(context) / nominal_context + per_prefill_token * tokens.

    The weights pass and the launch are in `fixed_s`, independent of the batch; a sequence adds the read of its KV,
    `per_sequence_s` at `nominal_context_tokens`; a prompt token (or a verified draft token) adds its compute.
    The defaults describe a 7B-class model on one accelerator.
    """

    fixed_s: float = 5.0e-3
    per_sequence_s: float = 0.086e-3
    nominal_context_tokens: int = 2000
    per_prefill_token_s: float = 47e-6
    transfer_bytes_per_s: float = 25e9
    transfer_fixed_s: float = 1e-3

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        decode_batch: int,
        decode_context_tokens: int,
        draft_tokens: int = 0,
    ) -> float:
        tokens = draft_tokens
        for new, _ in prefill:
            tokens += new
        kv_read_s = self.per_sequence_s * decode_context_tokens / self.nominal_context_tokens
        return self.fixed_s + kv_read_s + self.per_prefill_token_s * tokens

    def decode_run_s(self, decode_batch: int, decode_context_tokens: int, steps: int) -> list[float]:
        per_token_s = self.per_sequence_s / self.nominal_context_tokens
        first = self.fixed_s + per_token_s * decode_context_tokens
        growth = per_token_s * decode_batch
        return [first + i * growth for i in range(steps)]

    def transfer_s(self, kv_bytes: int) -> float:
        return self.transfer_fixed_s + kv_bytes / self.transfer_bytes_per_s
