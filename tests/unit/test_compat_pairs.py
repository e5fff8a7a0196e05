"""Pairs that must not exchange KV are refused from their configuration, both values named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.config import parse
from cluster.messages import Role
from cluster.models.resolve import embedded_path
from kv_transfer.compatibility import MUST_AGREE, Refusal, check_pair, configured

HF: dict[str, Any] = json.loads((embedded_path() / "config.json").read_text())


def refusals(prefill: dict[str, Any], decode: dict[str, Any], hf: dict[str, Any] = HF, **kv: Any) -> list[Refusal]:
    config = parse({"pools": {"prefill": prefill, "decode": decode}, "kv_transfer": kv})
    pair = (configured(config, role, hf) for role in (Role.PREFILL, Role.DECODE))
    return check_pair(*pair, tp_pairs=config.kv_transfer.tp_pairs)


def pool(tp: int = 1, pp: int = 1, **args: Any) -> dict[str, Any]:
    return {"layout": {"tp": tp, "pp": pp}, "engine_args": args}


@pytest.mark.parametrize(
    ("args", "field", "values"),
    [
        ({"dtype": "float32"}, "dtype", ("bfloat16", "float32")),
        ({"kv_cache_dtype": "fp8"}, "cache_dtype", ("auto", "fp8")),
        ({"block_size": 32}, "block_size", ("16", "32")),
        ({"block_size": 24}, "block_size", ("16", "24")),
        ({"revision": "abc"}, "revision", ("the default", "abc")),
        ({"model": "other/model"}, "model", ("embedded", "other/model")),
        ({"max_model_len": 512}, "max_model_len", ("2048", "512")),
        ({"attention_backend": "FLASHINFER"}, "attention_backend", ("the default", "FLASHINFER")),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, "attention_backend", ("the default", "TRITON_ATTN")),
        ({"speculative_config": {"method": "mtp"}}, "speculative", ("the default", '{"method": "mtp"}')),
    ],
)
def test_one_difference_is_one_refusal_with_both_values(
    args: dict[str, Any], field: str, values: tuple[str, str]
) -> None:
    base = {"block_size": 16}
    found = refusals(pool(**base), pool(**{**base, **args}))
    assert [r.field for r in found] == [field]
    line = str(found[0])
    assert "\n" not in line
    assert f"prefill has {values[0]}" in line
    assert f"decode has {values[1]}" in line


def test_auto_is_the_models_own_dtype() -> None:
    assert refusals(pool(), pool(dtype="bfloat16")) == []


@pytest.mark.parametrize(("total", "prefill", "decode", "tested", "connector"), [
    (4, 1, 1, True, True), (4, 1, 2, True, True), (4, 2, 2, True, True), (4, 4, 4, True, True), (4, 8, 8, True, True),
    (2, 1, 4, False, True), (4, 4, 8, False, True),   # decode copies heads, prefill does not
    (4, 2, 1, False, True), (8, 8, 2, False, True),   # prefill above decode: gathered from several ranks
    (4, 8, 4, False, False), (2, 4, 1, False, False), # ... which hold copies: the connector refuses
    (6, 2, 3, False, False), (4, 3, 6, False, False),
])  # fmt: skip
def test_tp_pairs(total: int, prefill: int, decode: int, tested: bool, connector: bool) -> None:
    hf = {**HF, "num_key_value_heads": total, "num_attention_heads": 24}
    for mode, allowed in (("tested", tested), ("connector", connector)):
        found = refusals(pool(prefill), pool(decode), hf, tp_pairs=mode)
        assert (found == []) is allowed, (mode, found)
        for refusal in found:
            assert refusal.field == "tp"
            assert f"prefill has {prefill}, decode has {decode}" in str(refusal)


def test_a_latent_cache_is_whole_on_every_rank_so_any_multiple_goes() -> None:
    hf = {**HF, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert refusals(pool(8), pool(1), hf) == []
    assert refusals(pool(1), pool(8), hf) == []
    assert [r.field for r in refusals(pool(2), pool(3), hf)] == ["tp"]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
def test_pipeline_stages_in_a_split_are_refused(prefill: int, decode: int) -> None:
    found = refusals(pool(pp=prefill), pool(pp=decode))
    assert [r.field for r in found] == ["pp"]
    assert f"prefill has {prefill}, decode has {decode}" in str(found[0])


@pytest.mark.parametrize("field", list(MUST_AGREE))
def test_a_value_that_one_side_does_not_report_is_a_difference(field: str) -> None:
    whole = dict.fromkeys(MUST_AGREE, 1) | {"latent": False, "tp": 1}
    partial = {name: value for name, value in whole.items() if name != field}
    for pair in ((whole, partial), (partial, whole)):
        assert [r.field for r in check_pair(*pair)] == [field]


def test_engines_that_report_nothing_are_not_compared() -> None:
    assert check_pair({}, {}) == []


def test_quantized_caches_need_one_source_of_scales() -> None:
    fp8 = {"kv_cache_dtype": "fp8"}
    assert refusals(pool(**fp8), pool(**fp8)) == []
    found = refusals(pool(**fp8), pool(**fp8, quantization="fp8"))
    assert [r.field for r in found] == ["cache_scales"]
    assert refusals(pool(), pool(quantization="fp8")) == []
