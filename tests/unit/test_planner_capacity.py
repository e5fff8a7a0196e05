"""Memory budgets add up, concurrency is consistent, and what cannot fit is one clear line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import UserError
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.perf.roofline import RooflineTimes
from cluster.perf.times import LinearTimes
from cluster.planner.capacity import EngineLimits, capacity, largest_batch, memory_budget, slo_batch_cap
from cluster.planner.reference import TOLERANCE, exact_figures


@pytest.mark.parametrize("figure", exact_figures(), ids=lambda f: f.path)
def test_every_figure_with_a_formula_is_reproduced(figure) -> None:
    assert figure.ok, f"{figure.path}: published {figure.expected}, ours {figure.ours}"


def test_only_figures_printed_with_two_digits_lean_on_rounding() -> None:
    leaning = {f.path for f in exact_figures() if f.relative_error > TOLERANCE}
    assert leaning == {
        "batching_bargain.step_latency_ratio",
        "tpot_hides_stall.tpot_shift_ms",
        "a100_7b_batch1_ceiling_tok_s.value",
    }


def test_the_published_figures_are_those_of_the_reference_file(shared_dir: Path) -> None:
    import json

    exact = json.loads((shared_dir / "reference" / "seed_figures.json").read_text())["exact"]
    for figure in exact_figures():
        value = exact
        for part in figure.path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert value == figure.value, figure.path


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_parts_of_a_budget_add_up_and_capacity_agrees_with_itself(tp: int) -> None:
    shape, device = model_shape("llama-3.1-70b"), hardware("H200")
    limits = EngineLimits()
    budget = memory_budget(shape, device, tp, limits=limits)
    assert budget.memory_bytes == (
        budget.reserve_bytes
        + budget.weights_bytes
        + budget.activation_bytes
        + budget.runtime_bytes
        + budget.kv_pool_bytes
    )
    plan = capacity(shape, budget, 8192, 2050, tp, limits=limits)
    assert plan.pool_tokens == plan.pool_blocks * limits.block_tokens
    assert plan.paged_sequences == plan.pool_blocks // math.ceil(2050 / limits.block_tokens)
    assert plan.paged_sequences * math.ceil(2050 / 16) * 16 * plan.kv_bytes_per_token <= budget.kv_pool_bytes


def test_overheads_grow_with_the_model() -> None:
    device = hardware("H200")
    small = memory_budget(model_shape("llama-3.1-8b"), device)
    large = memory_budget(model_shape("llama-3.1-70b"), device, tp=2)
    assert large.activation_bytes > small.activation_bytes and large.runtime_bytes > small.runtime_bytes


def test_weights_that_do_not_fit_are_named_with_a_remedy_and_never_negative() -> None:
    with pytest.raises(UserError) as caught:
        memory_budget(model_shape("llama-3.1-70b"), hardware("H100"))
    line = str(caught.value)
    assert line.startswith("weights: meta-llama/Llama-3.1-70B in bfloat16 takes 131.4 GiB a GPU at tp=1 pp=1")
    assert "use tp=2 or more or --weights fp8" in line and "\n" not in line


def test_the_binding_resource_is_named() -> None:
    shape, device = model_shape("llama-3.1-70b"), hardware("H100")
    budget, times = memory_budget(shape, device, 4), RooflineTimes(shape, device, 4)
    memory = capacity(shape, budget, 8192, 4250, 4, times=times, tpot_s=1.0)
    assert memory.binding == "KV memory" and memory.concurrency == memory.paged_sequences
    latency = capacity(shape, budget, 8192, 4250, 4, times=times, tpot_s=0.015)
    assert latency.binding == "TPOT" and latency.concurrency == latency.slo_batch_cap
    flags = capacity(shape, budget, 8192, 100, 4, limits=EngineLimits(max_num_seqs=4), times=times, tpot_s=1.0)
    assert flags.binding == "max_num_seqs" and flags.concurrency == 4


def test_lengths_that_make_no_sense_are_one_line() -> None:
    shape, device = model_shape("llama-2-7b"), hardware("A100-40G")
    budget = memory_budget(shape, device)
    with pytest.raises(UserError, match="mean-tokens: 5000 is outside"):
        capacity(shape, budget, 4096, 5000)
    with pytest.raises(UserError, match="context: 8192 is above the 4096 tokens"):
        capacity(shape, budget, 8192, 100)


@given(fixed=st.floats(1e-4, 0.1), slope=st.floats(1e-6, 1e-3), tpot=st.floats(1e-4, 1))
def test_the_cap_is_the_line_solved_for_the_batch(fixed: float, slope: float, tpot: float) -> None:
    times = LinearTimes(fixed_s=fixed, per_sequence_s=slope)
    cap = slo_batch_cap(times, 2000, tpot)
    exact = (tpot - fixed) / slope
    assert cap == 0 if exact < 1 else abs(cap - min(65536, exact)) <= 1


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_largest_batch_finds_the_edge(edge: int, limit: int) -> None:
    assert largest_batch(lambda b: b <= edge, limit) == min(edge, limit)
