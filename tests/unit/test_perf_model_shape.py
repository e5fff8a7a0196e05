"""KV bytes per token and parameter counts, for every kind of cache; impossible layouts are one line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import UserError
from cluster.perf.hardware import hardware, table
from cluster.perf.model_shape import ModelShape, from_config, known_models, model_shape
from cluster.perf.transfer import link_between, transfer_bytes, transfer_s

GQA = from_config(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    },
    "gqa",
)
LATENT = from_config(
    {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    },
    "latent",
)


@pytest.mark.parametrize(("tp", "expected"), [(1, 131072), (4, 32768), (8, 16384), (16, 16384)])
def test_a_rank_cannot_hold_half_a_kv_head(tp: int, expected: int) -> None:
    assert GQA.kv_bytes_per_token(tp) == expected


def test_a_latent_cache_is_whole_on_every_rank() -> None:
    assert {LATENT.kv_bytes_per_token(tp) for tp in (1, 2, 8, 16)} == {61 * (512 + 64) * 2}


def test_quantized_weights_leave_the_cache_at_16_bits_unless_asked() -> None:
    assert LATENT.dtype == "fp8"
    assert GQA.kv_bytes_per_token(kv_dtype="fp8") * 2 == GQA.kv_bytes_per_token()


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    qwen = model_shape("qwen3-32b")
    assert qwen.head_dim == 128 != qwen.hidden // qwen.heads
    assert qwen.kv_bytes_per_token() == 2 * 64 * 8 * 128 * 2


def test_a_request_takes_whole_blocks() -> None:
    assert GQA.kv_bytes(17, block_tokens=16) == 2 * 16 * 131072
    assert transfer_bytes(GQA, 17, 16) == 2 * 16 * 131072


def test_sliding_layers_stop_growing_at_the_window() -> None:
    kinds = ["sliding_attention", "full_attention"] * 12
    shape = from_config(
        {
            "num_hidden_layers": 24,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "vocab_size": 201088,
            "layer_types": kinds,
            "sliding_window": 128,
        }
    )
    per_layer = 2 * 8 * 64 * 2
    assert shape.kv_bytes(128) == 24 * per_layer * 128
    assert shape.kv_bytes(4096) == 12 * per_layer * (4096 + 128)


# What google/gemma-2-9b's config.json says; it has neither `layer_types` nor `tie_word_embeddings`.
GEMMA2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 14336,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}


def test_every_second_layer_of_gemma_2_attends_to_all_tokens() -> None:
    shape = from_config(GEMMA2_9B)
    per_layer = 2 * 8 * 256 * 2
    assert shape.kv_bytes(8192) == 21 * per_layer * (8192 + 4096)
    assert shape.tied_embeddings and shape.params == pytest.approx(9_241_705_984, rel=1e-4)
    assert not from_config({**GEMMA2_9B, "tie_word_embeddings": False}).tied_embeddings


@pytest.mark.parametrize(
    ("more", "windowed"),
    [
        ({"model_type": "gemma3_text"}, 35),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, 21),
        ({"model_type": "cohere2"}, 32),
        ({"model_type": "gpt_oss"}, 21),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, 32),
        ({"model_type": "mistral"}, 42),
        ({"model_type": "qwen2", "use_sliding_window": False}, 0),
        ({"model_type": "gemma2", "sliding_window": None}, 0),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"] * 42}, 42),
    ],
)
def test_windows_follow_what_a_config_leaves_out(more: dict[str, object], windowed: int) -> None:
    assert from_config({**GEMMA2_9B, **more}).sliding_layers == windowed


def test_unknown_structures_are_refused_rather_than_summed_wrongly() -> None:
    with pytest.raises(UserError, match="layer type 'mamba'"):
        from_config({**_minimal(), "layer_types": ["mamba", "full_attention"]})
    with pytest.raises(UserError, match="hybrid_override_pattern"):
        from_config({**_minimal(), "hybrid_override_pattern": "M*M-"})
    with pytest.raises(UserError, match="no `num_hidden_layers`"):
        from_config({"hidden_size": 8})


def _minimal() -> dict[str, object]:
    return {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    }


@pytest.mark.parametrize(
    ("model", "params"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("llama-2-7b", 6_738_415_616),
        ("Qwen/Qwen3-32B", 32_762_123_264),
    ],
)
def test_parameter_counts_equal_the_published_ones(model: str, params: int) -> None:
    assert model_shape(model).params == params


def test_a_mixture_of_experts_reads_only_active_parameters_for_one_token() -> None:
    assert LATENT.params == pytest.approx(671.0e9, rel=1e-3)
    assert LATENT.active_params == pytest.approx(37e9, rel=0.02)


def test_quantized_weights_keep_the_embeddings_at_16_bits() -> None:
    shape = model_shape("llama-3.1-8b")
    embeddings = 2 * shape.vocab * shape.hidden
    assert shape.weight_bytes("fp8") == shape.params - embeddings + 2 * embeddings
    assert shape.weight_bytes() == 2 * shape.params


def test_a_folder_or_file_with_a_config_is_a_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_minimal()))
    assert model_shape(str(tmp_path)).layers == model_shape(str(tmp_path / "config.json")).layers == 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not a readable config"):
        model_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("tp", "line"),
    [(3, "tp: 3 does not divide the 32 attention heads"), (64, "tp: 64 does not divide"), (0, "must be at least 1")],
)
def test_impossible_layouts_are_one_line(tp: int, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        GQA.check_layout(tp)
    assert "\n" not in str(caught.value)


def test_misspelt_names_get_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"did you mean llama-3\.1-70b\?"):
        model_shape("llama-3.1-7b0")
    with pytest.raises(UserError, match="did you mean H200"):
        hardware("h20")


def test_the_tables_are_complete_and_cite_their_sources() -> None:
    assert {"A100-40G", "A100-80G", "H100", "H200", "B200", "MI300X"} <= set(table())
    assert {"llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "llama-2-7b"} <= set(known_models())
    for device in table().values():
        assert device.source and device.price_source and device.price_date and device.efficiency.source
        assert 0 < device.efficiency.gemm <= 1 and 0 < device.efficiency.hbm <= 1 and 0 < device.efficiency.link <= 1


@given(
    layers=st.integers(1, 128),
    kv_power=st.integers(0, 6),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    tp_power=st.integers(0, 6),
    tokens=st.integers(1, 200_000),
    block=st.sampled_from([1, 16, 128]),
)
def test_sharding_never_loses_and_never_multiplies_kv(
    layers: int, kv_power: int, head_dim: int, tp_power: int, tokens: int, block: int
) -> None:
    kv_heads, tp = 2**kv_power, 2**tp_power
    shape = ModelShape("x", layers, 4096, 64, kv_heads, head_dim, 11008, 32000, 4096)
    whole, share = shape.kv_bytes(tokens, block), shape.kv_bytes(tokens, block, tp)
    assert whole <= share * tp <= whole * max(1, tp // kv_heads)
    assert shape.kv_bytes(tokens, block) % (shape.kv_bytes_per_token() * block) == 0


def test_transfers_take_latency_plus_bytes_over_bandwidth() -> None:
    device = hardware("H100")
    nvlink, rdma, tcp = (link_between(device, kind) for kind in ("nvlink", "rdma", "tcp"))
    size = transfer_bytes(model_shape("llama-3.1-70b"), 4000)
    assert size == 4000 * 320 * 1024
    assert transfer_s(size, nvlink) < transfer_s(size, rdma) < transfer_s(size, tcp)
    assert transfer_s(0, rdma) == rdma.latency_s
    assert transfer_s(size, rdma, ranks=8) == pytest.approx(rdma.latency_s + size / (8 * 50e9))
    with pytest.raises(UserError, match="link: 'pigeon'"):
        link_between(device, "pigeon")


def _group(**weights: object) -> dict[str, object]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": _group(num_bits=8, type="float")}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": _group(num_bits=8, type="int")}, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": _group(num_bits=4, type="int")}, "int4"),
        ({"quant_method": "x", "config_groups": _group(num_bits=4, type="float", group_size=16)}, "fp4"),
        ({"quant_method": "x", "config_groups": _group(num_bits=4, type="float", group_size=32)}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "bfloat16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, "bfloat16"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({}, "bfloat16"),
    ],
)  # fmt: skip
def test_weights_have_the_type_that_their_quantization_says(quantization: dict[str, object], dtype: str) -> None:
    assert from_config({**_minimal(), "quantization_config": quantization}).dtype == dtype


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "hqq"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {**_group(num_bits=8, type="float"), "group_1": {"weights": {"num_bits": 4}}},
        },
    ],
)
def test_weights_of_unknown_size_are_refused_where_their_size_is_asked(quantization: dict[str, object]) -> None:
    shape = from_config({**_minimal(), "quantization_config": quantization})
    with pytest.raises(
        UserError, match=rf"^dtype: '{quantization['quant_method']}.* has no known size; name one of"
    ) as e:
        shape.weight_bytes()
    assert "\n" not in str(e.value)
    assert shape.weight_bytes("fp8") < from_config(_minimal()).weight_bytes()
    assert shape.kv_bytes_per_token() == from_config(_minimal()).kv_bytes_per_token()
