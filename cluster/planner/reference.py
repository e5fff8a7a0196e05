"""Figures that follow from a stated formula, computed by the planner's own functions.

`exact_figures()` lists each beside its published value. A figure matches within 0.5%, or where rounding ours to
the digits that were printed gives what was printed: 40.6 and 3.1 cannot both hold to 0.5%, since 128 / 40.6 = 3.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape, nominal
from cluster.perf.times import LinearTimes
from cluster.planner import speculative
from cluster.planner.capacity import GIB, Capacity, EngineLimits, MemoryBudget, capacity, slo_batch_cap

TOLERANCE = 0.005


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure. `expected` is text, so that its printed digits are known; `path` is where it stands."""

    path: str
    expected: str
    ours: float

    @property
    def value(self) -> float:
        return float(self.expected)

    @property
    def relative_error(self) -> float:
        return abs(self.ours - self.value) / abs(self.value)

    @property
    def within(self) -> bool:
        return self.relative_error <= TOLERANCE

    @property
    def rounds_to_it(self) -> bool:
        """Rounding ours to the printed digits gives the printed figure."""
        mantissa = self.expected.lstrip("-").replace(".", "").lstrip("0")
        digits = len(mantissa if "." in self.expected else mantissa.rstrip("0") or "0")
        return bool(self.ours) and math.isclose(float(f"{self.ours:.{digits - 1}e}"), self.value, rel_tol=1e-9)

    @property
    def ok(self) -> bool:
        return self.within or self.rounds_to_it


def _mi300x(context_tokens: int) -> Capacity:
    """A model of exactly 70e9 parameters in fp16; 4 GiB for activations, 5% of what is left against fragmentation."""
    shape = nominal(model_shape("llama-3.1-70b"), 70_000_000_000)
    memory = hardware("MI300X").memory_bytes
    weights, activations = shape.weight_bytes("float16"), 4 * GIB
    pool = math.floor(0.95 * (memory - weights - activations))
    reserve = memory - weights - activations - pool
    budget = MemoryBudget(memory, reserve, weights, activations, 0, pool)
    return capacity(shape, budget, context_tokens, 2050, limits=EngineLimits(block_tokens=16))


def _tp_capacity_gain() -> float:
    """KV tokens of one GPU of a tp 16 group over one of a tp 8 group: the heads do not divide further, weights do."""
    shape = nominal(model_shape("llama-3.1-70b"), 70_000_000_000)
    memory = hardware("MI300X").memory_bytes

    def tokens(tp: int) -> float:
        return (memory - shape.weight_bytes("float16") / tp) / shape.kv_bytes_per_token(tp)

    return tokens(16) / tokens(8) - 1


def exact_figures() -> list[Figure]:
    """Every figure with a formula: `expected` as published, `ours` from the planner."""
    times = LinearTimes()
    llama_70b, llama_7b = model_shape("llama-3.1-70b"), model_shape("llama-2-7b")

    def step_ms(batch: int) -> float:
        return 1e3 * times.step_s((), batch, batch * times.nominal_context_tokens)

    ratio = step_ms(128) / step_ms(1)
    outputs = [4, 8, 12, 20]
    occupied = len(outputs) * max(outputs)
    mi300x = _mi300x(8192)
    pool = mi300x.budget.kv_pool_bytes
    a100_40 = hardware("A100-40G").memory_bytes
    bandwidth_bytes_per_s, weights_7b = 2.0e12, 14e9
    low_k = speculative.best_k(0.3, 0.05)
    capacity_path = "capacity_gqa_70b_mi300x"

    return [
        Figure("batching_bargain.step_latency_ratio", "3.1", ratio),
        Figure("batching_bargain.throughput_ratio", "40.6", 128 / ratio),
        Figure("prefill_stall_ms.value", "193", 1e3 * times.step_s([(4000, 0)], 0, 0)),
        Figure("static_batch_waste.useful", "44", sum(outputs)),
        Figure("static_batch_waste.occupied", "80", occupied),
        Figure("static_batch_waste.waste_pct", "45", 100 * (1 - sum(outputs) / occupied)),
        Figure("tpot_hides_stall.tpot_shift_ms", "1.5", 250 / 165),
        Figure("kv_bytes_per_token.gqa_70b_fp16.KiB", "320", llama_70b.kv_bytes_per_token(kv_dtype="float16") / 1024),
        Figure("kv_bytes_per_token.llama2_7b_fp16.KiB", "512", llama_7b.kv_bytes_per_token(kv_dtype="float16") / 1024),
        Figure("kv_bytes_per_token.llama2_7b_fp16.GiB_at_4096", "2.0", llama_7b.kv_bytes(4096) / GIB),
        Figure(f"{capacity_path}.hbm_GiB", "178.8", mi300x.budget.memory_bytes / GIB),
        Figure(f"{capacity_path}.weights_GiB_fp16", "130", mi300x.budget.weights_bytes / GIB),
        Figure(
            f"{capacity_path}.weights_share_of_hbm_pct",
            "73",
            100 * mi300x.budget.weights_bytes / mi300x.budget.memory_bytes,
        ),
        Figure(f"{capacity_path}.kv_pool_GiB_about", "42", pool / GIB),
        Figure(f"{capacity_path}.kv_GiB_per_full_context", "2.5", llama_70b.kv_bytes(8192) / GIB),
        Figure(f"{capacity_path}.contiguous_sequences", "16", mi300x.contiguous_sequences),
        Figure(f"{capacity_path}.contiguous_sequences_at_131072", "1", _mi300x(131072).contiguous_sequences),
        Figure(f"{capacity_path}.paged_over_contiguous", "4.2", mi300x.paged_over_contiguous),
        Figure(f"{capacity_path}.reservation_waste_pct", "75", 100 * mi300x.reservation_waste),
        Figure(f"{capacity_path}.tp16_over_tp8_capacity_gain_pct", "5", 100 * _tp_capacity_gain()),
        Figure(
            f"{capacity_path}.fragmentation_headroom_pct",
            "5",
            100 * mi300x.budget.reserve_bytes / (mi300x.budget.reserve_bytes + pool),
        ),
        Figure("a100_7b_batch1_ceiling_tok_s.value", "140", bandwidth_bytes_per_s / weights_7b),
        Figure("a100_40gb_7b_4k_sequences", "13", (a100_40 - weights_7b) // llama_7b.kv_bytes(4096)),
        Figure("slo_batch_cap.value", "81", slo_batch_cap(times, times.nominal_context_tokens, 12e-3)),
        Figure("speculative.cases.0.speedup", "2.31", speculative.speedup(0.7, 4, 0.05)),
        Figure("speculative.cases.1.speedup", "0.87", speculative.speedup(0.7, 4, 0.05, 0.5)),
        Figure("speculative.cases.2.best_k", "2", low_k),
        Figure("speculative.cases.2.speedup", "1.26", speculative.speedup(0.3, low_k, 0.05)),
        Figure("speculative.cases.3.speedup", "4.66", speculative.speedup(0.9, 12, 0.05)),
        Figure("speculative.rejected_draft_share_pct.value", "55.7", 100 * speculative.rejected_share(0.7, 4)),
    ]
