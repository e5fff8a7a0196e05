"""Step times: monotone, bounded by the hardware, consistent between their two forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import UserError
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import ModelShape, model_shape
from cluster.perf.roofline import RooflineTimes

MODELS = [model_shape(name) for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "llama-2-7b")]
H100 = hardware("H100")
MIXTURE = ModelShape(
    "mixture",
    layers=60,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    vocab=128_000,
    max_context=8192,
    experts=128,
    experts_per_token=8,
    expert_intermediate=1536,
    shared_intermediate=1536,
    dense_layers=3,
)


@settings(max_examples=60)
@given(
    shape=st.sampled_from(MODELS),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2]),
    new=st.integers(1, 8192),
    context=st.integers(0, 32768),
    batch=st.integers(1, 256),
    more=st.integers(1, 1000),
)
def test_more_work_never_takes_less_time(shape, tp, pp, new, context, batch, more) -> None:
    times = RooflineTimes(shape, H100, tp, pp)
    kv = batch * 1000
    base = times.step_s([(new, context)], batch, kv)
    assert base <= times.step_s([(new + more, context)], batch, kv)
    assert base <= times.step_s([(new, context + more)], batch, kv)
    assert base <= times.step_s([(new, context)], batch + more, kv)
    assert base <= times.step_s([(new, context)], batch, kv + more)
    assert base <= times.step_s([(new, context)], batch, kv, draft_tokens=more)
    assert base <= times.step_s([(new, context), (more, 0)], batch, kv)


@settings(max_examples=40)
@given(shape=st.sampled_from(MODELS), tp=st.sampled_from([2, 4, 8]), tokens=st.integers(512, 16384))
def test_tensor_parallelism_helps_a_prompt_by_at_most_its_degree(shape, tp, tokens) -> None:
    one = RooflineTimes(shape, H100).step_s([(tokens, 0)], 0, 0)
    many = RooflineTimes(shape, H100, tp).step_s([(tokens, 0)], 0, 0)
    assert one / tp <= many <= one


def test_kv_reads_stop_shrinking_beyond_the_kv_heads() -> None:
    device = hardware("H100")
    shape = model_shape("llama-3.1-8b")

    def growth(tp: int) -> float:
        times = RooflineTimes(shape, device, tp)
        return times.step_s((), 8, 800_000) - times.step_s((), 8, 0)

    assert growth(8) == pytest.approx(growth(1) / 8)
    narrow = model_shape("qwen3-32b")
    with pytest.raises(UserError, match="tp: 16 is more than the 8 H100 of one node"):
        RooflineTimes(narrow, device, 16)


def test_a_decode_step_of_one_sequence_reads_the_weights_once() -> None:
    shape = model_shape("llama-3.1-70b")
    floor_s = shape.weight_bytes() / 4 / H100.hbm_bytes_per_s
    step_s = RooflineTimes(shape, H100, 4).step_s((), 1, 4096)
    assert floor_s < step_s < 1.6 * floor_s


@pytest.mark.parametrize("batch", [1, 8])
def test_a_mixture_reads_what_every_token_passes_whatever_the_experts(batch: int) -> None:
    more = replace(MIXTURE, shared_intermediate=MIXTURE.shared_intermediate + 2048)
    step_s, more_s = (RooflineTimes(shape, H100, 8).step_s((), batch, 0) for shape in (MIXTURE, more))
    added_bytes = (more.params - MIXTURE.params) * 2
    assert more_s - step_s == pytest.approx(added_bytes / 8 / (H100.hbm_bytes_per_s * H100.efficiency.hbm))


def test_a_mixture_reads_all_its_experts_once_many_tokens_pass() -> None:
    more = replace(MIXTURE, experts=2 * MIXTURE.experts, experts_per_token=2 * MIXTURE.experts_per_token)
    step_s, more_s = (RooflineTimes(shape, H100, 8).step_s((), 300, 0) for shape in (MIXTURE, more))
    added_bytes = (more.params - MIXTURE.params) * 2
    read_s = added_bytes / 8 / (H100.hbm_bytes_per_s * H100.efficiency.hbm)
    assert more_s - step_s == pytest.approx(read_s, rel=0.01)


def test_a_long_prompt_stays_below_the_compute_peak() -> None:
    shape = model_shape("llama-3.1-70b")
    tokens = 8192
    floor_s = 2 * shape.active_params * tokens / 8 / H100.peak_flops("bfloat16")
    step_s = RooflineTimes(shape, H100, 8).step_s([(tokens, 0)], 0, 0)
    assert floor_s < step_s < 3 * floor_s


@pytest.mark.parametrize(
    ("kind", "size", "context", "measured_s"),
    [
        ("prefill", 512, 0, 0.0219),
        ("prefill", 2048, 0, 0.0655),
        ("prefill", 8192, 0, 0.2736),
        ("decode", 1, 4096, 0.0083),
        ("decode", 16, 4096, 0.0105),
        ("decode", 64, 4096, 0.0155),
        ("decode", 256, 4096, 0.0360),
    ],
)
def test_qwen3_32b_on_four_h100_is_near_published_measurements(kind, size, context, measured_s) -> None:
    """Against AIConfigurator's measured tables (vLLM, tp 4)."""
    times = RooflineTimes(model_shape("qwen3-32b"), H100, 4)
    ours = times.step_s([(size, 0)], 0, 0) if kind == "prefill" else times.step_s((), size, size * context)
    assert ours == pytest.approx(measured_s, rel=0.15)


def test_quantized_weights_and_cache_shorten_decode() -> None:
    shape = model_shape("llama-3.1-70b")
    step = {
        (w, kv): RooflineTimes(shape, H100, 4, weight_dtype=w, kv_dtype=kv).step_s((), 32, 32 * 4096)
        for w in (None, "fp8", "int4")
        for kv in (None, "fp8")
    }
    assert step["int4", None] < step["fp8", None] < step[None, None]
    assert step["fp8", "fp8"] < step["fp8", None]


def test_a_pipeline_bubbles_on_a_prompt_and_not_on_decode() -> None:
    shape = model_shape("llama-3.1-70b")
    flat, piped = RooflineTimes(shape, H100, 4), RooflineTimes(shape, H100, 4, pp=2)
    prompt = [(4096, 0)]
    assert flat.step_s(prompt, 0, 0) / 2 < piped.step_s(prompt, 0, 0) < flat.step_s(prompt, 0, 0)
    # Decode at small batches reads all weights once whatever the depth, plus the hops.
    assert flat.step_s((), 2, 8192) <= piped.step_s((), 2, 8192) * 1.01


@settings(max_examples=30)
@given(
    shape=st.sampled_from(MODELS), batch=st.integers(1, 128), context=st.integers(1, 100_000), steps=st.integers(1, 50)
)
def test_the_closed_form_of_a_decode_run_equals_its_steps(shape, batch, context, steps) -> None:
    times = RooflineTimes(shape, H100, 2)
    expected = [times.step_s((), batch, context + i * batch) for i in range(steps)]
    assert times.decode_run_s(batch, context, steps) == pytest.approx(expected)


def test_more_bandwidth_never_hurts() -> None:
    shape = model_shape("llama-3.1-70b")
    for field in ("hbm_bytes_per_s",):
        faster = replace(H100, **{field: 2 * getattr(H100, field)})
        for load in (([(4000, 0)], 0, 0), ((), 32, 100_000), ([(512, 0)], 32, 100_000)):
            assert RooflineTimes(shape, faster, 4).step_s(*load) <= RooflineTimes(shape, H100, 4).step_s(*load)
