"""`pdserve check`: mismatches are found from the files alone, and the topology adds up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import main
from cluster.config import parse
from cluster.errors import ConfigError, UserError
from cluster.messages import Role
from cluster.models.resolve import embedded_path
from cluster.preflight import Incompatible, preflight
from cluster.topology import Machine, topology

H100 = {"layout": {"tp": 4}, "replicas": {"min": 2, "max": 6}, "accelerator": "H100"}
H200 = {"layout": {"tp": 8}, "replicas": {"min": 1, "max": 4}, "accelerator": "H200"}
LARGE: dict[str, Any] = {
    "model": {"id": "meta-llama/Llama-3.1-70B-Instruct", "max_model_len": 32768},
    "engine": {"device": "gpu"},
    "pools": {"prefill": H100, "decode": H200},
}


def run(tmp_path: Path, config: dict[str, Any], *options: str) -> int:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    try:
        main(["check", str(path), *options])
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def four_kv_heads(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    hf = json.loads((embedded_path() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "num_attention_heads": 8, "num_key_value_heads": 4}))
    return str(folder)


def pools(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    return {"pools": {"prefill": prefill, "decode": decode}}


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float16"}, ("dtype", "bfloat16", "float16")),
        ({"block_size": 16}, {"block_size": 32}, ("block_size", "16", "32")),
        ({"revision": "v1"}, {"revision": "v2"}, ("revision", "v1", "v2")),
        ({"max_model_len": 2048}, {"max_model_len": 1024}, ("max_model_len", "2048", "1024")),
        ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8"}, ("cache_dtype", "auto", "fp8")),
    ],
)
def test_one_difference_fails_with_both_values(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prefill: dict[str, Any],
    decode: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    assert run(tmp_path, pools({"engine_args": prefill}, {"engine_args": decode})) == 2
    captured = capsys.readouterr()
    first = captured.err.splitlines()[0]
    assert all(word in first for word in words), first
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (4, 2), (8, 4)])
def test_tp_pairs_that_cannot_transfer_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefill: int, decode: int
) -> None:
    config = {"model": {"id": four_kv_heads(tmp_path)}}
    config |= pools({"layout": {"tp": prefill}}, {"layout": {"tp": decode}})
    assert run(tmp_path, config, "--json") == 2
    captured = capsys.readouterr()
    assert f"tp: prefill has {prefill}, decode has {decode}" in captured.err
    answer = json.loads(captured.out)
    assert answer["ok"] is False
    assert [(r["field"], r["prefill"], r["decode"]) for r in answer["refusals"]] == [("tp", prefill, decode)]


def test_check_imports_neither_ray_nor_vllm_nor_torch(tmp_path: Path) -> None:
    """That, and no timer, is why it answers at once."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(LARGE))
    code = (
        "import sys; from cluster.cli import main\n"
        f"try: main(['check', {str(path)!r}, '--json'])\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print([m for m in ('ray', 'vllm', 'torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ok"] is True
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_large_topology_adds_up() -> None:
    facts = preflight(parse(LARGE))
    found = topology(facts, Machine())
    prefill, decode = found.pools[Role.PREFILL], found.pools[Role.DECODE]
    # 2 x 80 layers x 8 KV heads x 128 x 2 bytes
    assert facts.shape.kv_bytes_per_token(kv_dtype=facts.kv_dtype) == 2 * 80 * 8 * 128 * 2
    for pool, tp in ((prefill, 4), (decode, 8)):
        assert pool.memory.bytes_per_token_per_rank == 2 * 80 * (8 // tp) * 128 * 2
        assert pool.memory.bytes_per_token == 2 * 80 * 8 * 128 * 2
        assert pool.memory.tokens == (pool.memory.blocks or 0) * facts.block_size
        assert pool.memory.sequences == (pool.memory.tokens or 0) // 32768
        assert pool.memory.concurrency is not None
    assert decode.memory.slo_sequences is not None
    assert found.accelerators == {"H100": (8, 24), "H200": (8, 32)}
    assert found.pairs == (2, 24)
    assert found.sources == {rank: {rank // 2: [rank]} for rank in range(8)}


def test_copies_of_a_kv_head_are_counted_as_memory() -> None:
    config = parse(pools({"layout": {"tp": 4}}, {"layout": {"tp": 4}}))
    memory = topology(preflight(config), Machine()).pools[Role.DECODE].memory
    # 2 KV heads on 4 ranks: every rank holds one, the replica holds each twice.
    assert memory.bytes_per_token_per_rank == 2 * 4 * 1 * 64 * 2
    assert memory.bytes_per_token == 2 * (2 * 4 * 2 * 64 * 2)


def test_warnings_name_what_is_short() -> None:
    config = parse({**LARGE, "autoscaling": {"accelerators_max": 32}})
    found = topology(preflight(config), Machine(accelerators={"H100": 16, "H200": 4}))
    text = " | ".join(found.warnings)
    assert "maxima need 56 accelerators, autoscaling.accelerators_max is 32" in text
    assert "maxima need 24 x H100, the cluster has 16" in text
    assert "minima need 8 x H200, the cluster has 4" in text
    assert topology(preflight(parse(LARGE)), Machine(accelerators={"H100": 24, "H200": 32})).warnings == []


def test_cpu_engines_are_compared_with_this_machine() -> None:
    config = parse({"engine": {"device": "cpu", "cpu": {"kvcache_gib": 4}}, **pools({}, {"replicas": {"max": 3}})})
    found = topology(preflight(config), Machine(cores=2, memory_bytes=8 << 30))
    assert any("16.0 GiB, this machine has 8.0 GiB" in w for w in found.warnings)
    assert any("4 threads, this machine has 2 cores" in w for w in found.warnings)


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"model": {"id": "/nowhere/model"}}, "model.id", ("/nowhere/model", "does not exist")),
        ({"model": {"id": "embeded"}}, "model.id", ("did you mean `embedded`",)),
        ({"model": {"max_model_len": 4096}}, "model.max_model_len", ("4096", "2048")),
        ({"model": {"id": "smollm2"}, **pools({"layout": {"tp": 2}}, {"layout": {"tp": 2}})},
         "pools.prefill.layout.tp", ("9 attention heads", "smollm2-padded")),
        ({"engine": {"device": "cpu", "args": {"block_size": 16}}}, "engine.args.block_size", ("16", "32")),
        ({"engine": {"args": {"model": "x"}}}, "engine.args.model", ("set by pdserve",)),
        ({"engine": {"device": "cpu", "cpu": {"kvcache_gib": 0.001}}}, "engine.cpu.kvcache_gib", ("one sequence",)),
        ({"autoscaling": {"accelerators_max": 1}}, "autoscaling.accelerators_max", ("1 is below the 2",)),
        ({**LARGE, **pools({**H100, "layout": {"tp": 1}}, {**H200, "layout": {"tp": 1}})},
         "pools.prefill.layout", ("weights", "tp=2")),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_their_path(config: dict[str, Any], path: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        topology(preflight(parse(config)), Machine())
    assert refused.value.path == path
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_every_reason_is_in_the_one_line() -> None:
    config = parse(pools({"engine_args": {"block_size": 64}}, {"engine_args": {"kv_cache_dtype": "fp8"}}))
    with pytest.raises(Incompatible) as refused:
        preflight(config)
    assert isinstance(refused.value, UserError)
    line = str(refused.value)
    assert "\n" not in line
    assert "cache_dtype: prefill has auto, decode has fp8" in line
    assert "block_size: prefill has 64, decode has the default" in line


def test_a_colocated_cluster_has_no_pairs() -> None:
    config = parse({"pools": {"prefill": None, "decode": {"layout": {"pp": 2}}}})
    found = topology(preflight(config), Machine())
    assert list(found.pools) == [Role.DECODE]
    assert found.pairs == (0, 0)


def test_gpus_option_says_what_it_wants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {}, "--gpus", "H100") == 2
    assert "TYPE=COUNT" in capsys.readouterr().err


def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {}) == 0
    shown = capsys.readouterr().out
    for word in ("prefill", "decode", "KV tokens", "NIXL pairs", "STRICT_PACK"):
        assert word in shown


SIMULATED: dict[str, Any] = {
    "engine": {"kind": "simulated", "simulated": {"times": "roofline", "max_model_len": 8192}},
    "pools": {
        "prefill": {"layout": {"tp": 2}, "replicas": {"min": 3, "max": 3}, "accelerator": "H100"},
        "decode": {"layout": {"tp": 4}, "replicas": {"min": 5, "max": 5}, "accelerator": "A100"},
    },
}


def test_simulated_engines_are_described_by_what_they_stand_for() -> None:
    facts = preflight(parse(SIMULATED))
    found = topology(facts, Machine())
    assert found.accelerators == {"H100": (6, 6), "A100": (20, 20)}
    assert found.pairs == (15, 15)
    decode = found.pools[Role.DECODE]
    assert decode.layout.bundles[0] == {"CPU": 0.1, "GPU": 4.0, "accelerator_type:A100": 0.001}
    assert decode.memory.blocks == facts.specs[Role.DECODE].scheduler.kv_blocks
    assert found.sources[3] == {1: [6, 7]}, "8 KV heads of the model they stand for, not 2 of the embedded one"


def test_simulated_pools_that_differ_are_refused_too() -> None:
    raw = {"engine": {"kind": "simulated"}, "pools": {"prefill": {"simulated": {"block_size_tokens": 32}}}}
    with pytest.raises(Incompatible, match="block_size: prefill has 32, decode has 16"):
        preflight(parse(raw))


def fp8_on_one_gpu(tmp_path: Path, quantization: dict[str, Any]) -> dict[str, Any]:
    """40 B parameters: 80 GB at 16 bits, more than an H100 has."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    pool = {"accelerator": "H100", "replicas": {"min": 1, "max": 1}}
    return {"model": {"id": str(folder)}, "engine": {"device": "gpu"}, **pools(pool, pool)}


def test_quantized_weights_are_sized_as_such(tmp_path: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}
    config = fp8_on_one_gpu(tmp_path, {"quant_method": "compressed-tensors", "config_groups": groups})
    found = topology(preflight(parse(config)), Machine())
    assert 38e9 < (found.pools[Role.DECODE].memory.weights_bytes_per_rank or 0) < 43e9
    assert (found.pools[Role.DECODE].memory.sequences or 0) > 1


def test_weights_of_unknown_size_leave_memory_to_the_engine(tmp_path: Path) -> None:
    facts = preflight(parse(fp8_on_one_gpu(tmp_path, {"quant_method": "hqq"})))
    found = topology(facts, Machine())
    assert found.pools[Role.DECODE].memory.weights_bytes_per_rank is None
    assert found.pools[Role.DECODE].memory.concurrency is None
    assert any("(hqq) are not sized here" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"engine": {"args": {"max_num_seqs": "many"}}}, "engine.args.max_num_seqs", ("'many'", "no whole number")),
        ({"engine": {"args": {"block_size": "big"}}}, "engine.args.block_size", ("'big'", "no whole number")),
        ({"engine": {"args": {"kv_cache_memory_bytes": "4GiB"}}}, "engine.args.kv_cache_memory_bytes", ("'4GiB'",)),
        ({"engine": {"args": {"num_gpu_blocks_override": [1]}}}, "engine.args.num_gpu_blocks_override", ("[1]",)),
        ({"engine": {"args": {"max_num_batched_tokens": 2.5}}}, "engine.args.max_num_batched_tokens", ("2.5",)),
        ({"engine": {"args": {"max_num_seqs": 0}}}, "engine.args.max_num_seqs", ("0 is below the minimum 1",)),
        ({"engine": {"args": {"gpu_memory_utilization": 90}}}, "engine.args.gpu_memory_utilization", ("(0, 1]",)),
        (pools({"engine_args": {"max_num_seqs": True}}, {}), "pools.prefill.engine_args.max_num_seqs", ("True",)),
        ({"engine": {"device": "cpu"}, **pools(*[{"engine_args": {"block_size": 48}}] * 2)},
         "pools.decode.engine_args.block_size", ("48", "32")),
    ],
)  # fmt: skip
def test_arguments_that_are_no_numbers_are_one_line(config: dict[str, Any], path: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight(parse(config))
    assert refused.value.path == path and "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_numbers_may_be_written_as_text() -> None:
    args = {"max_num_seqs": "8", "gpu_memory_utilization": "0.5", "block_size": 32.0}
    facts = preflight(parse({**LARGE, "engine": {"device": "gpu", "args": args}}))
    memory = topology(facts, Machine()).pools[Role.DECODE].memory
    assert (facts.block_size, memory.max_num_seqs) == (32, 8)


def test_a_count_in_other_digits_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {}, "--gpus", "H100=²") == 2
    assert "TYPE=COUNT" in capsys.readouterr().err
