"""Every figure per accelerator counts all ranks of a replica: tp x pp x dp, live and simulated, as `check` does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster.autoscaling.messages import Settings
from cluster.config import ClusterConfig, parse
from cluster.engine.simulation.settings import engine_spec
from cluster.engine.vllm import describe, environment
from cluster.engine.vllm.arguments import EngineSettings
from cluster.errors import ConfigError, UserError
from cluster.layout import replica_layout
from cluster.messages import Role
from cluster.planner import simulate as planned
from cluster.runtime.local import check_memory
from cluster.sim.run import simulate
from cluster.workload.spec import parse as parse_workload

WORKLOAD = parse_workload(
    {
        "duration_s": 20,
        "arrivals": {"process": "poisson", "rate_per_s": 2},
        "prompts": {"kind": "plain", "prompt_tokens": 200, "output_tokens": 20},
    }
)


def config(**more: Any) -> ClusterConfig:
    pool = {"layout": {"tp": 2, "dp": 4}, "replicas": {"min": 1, "max": 1}, "simulated": {"hardware": "H100"}}
    return parse({"engine": {"kind": "simulated"}, "pools": {"prefill": None, "decode": pool}} | more)


def test_planned_and_simulated_replicas_hold_all_their_ranks() -> None:
    assert replica_layout(config(), Role.DECODE, on_cpu=True).accelerators == 8
    assert planned.accelerators(config()) == (8, pytest.approx(24.0))
    assert engine_spec(config(), Role.DECODE).info("decode-0", "1").accelerators == 8
    assert simulate(config(), WORKLOAD).accelerators == 8


@pytest.mark.parametrize(
    ("simulated", "pool", "price"),
    [
        ({"hardware": "a100"}, {}, 1.3),
        ({"hardware": "H100-SXM"}, {}, 3.0),
        ({"times": "roofline"}, {}, 3.0),
        ({"times": "roofline"}, {"accelerator": "A100"}, 1.3),
        ({"times": "roofline"}, {"simulated": {"hardware": "a100_80g"}}, 1.3),
        ({}, {}, None),
        ({"hardware": "my card"}, {}, None),
    ],
)
def test_a_price_is_of_the_accelerator_that_is_simulated(
    simulated: dict[str, Any], pool: dict[str, Any], price: float | None
) -> None:
    one = {"replicas": {"min": 1, "max": 1}, **pool}
    cluster = parse(
        {"engine": {"kind": "simulated", "simulated": simulated}, "pools": {"prefill": None, "decode": one}}
    )
    assert planned.accelerators(cluster) == (1, price)


def test_the_roofline_does_not_price_ranks_that_it_does_not_know() -> None:
    with pytest.raises(
        ConfigError, match=r"^pools.decode.layout.dp: 4: the roofline knows no data-parallel ranks; use"
    ):
        engine_spec(config(engine={"kind": "simulated", "simulated": {"times": "roofline"}}), Role.DECODE)


def test_memory_of_all_ranks_is_asked_for_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "runs_on_cpu", lambda _: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * 2**30))
    with pytest.raises(UserError, match=r"^engine.cpu.kvcache_gib: .* 8 engines need about"):
        check_memory(config(engine={"kind": "vllm"}))


def test_autoscaling_pays_for_all_ranks() -> None:
    scaled = simulate(config(autoscaling={"policy": "goodput", "interval_s": 5}), WORKLOAD)
    assert scaled.accelerators == pytest.approx(8)
    assert scaled.scaler is not None and scaled.scaler.log.peak_accelerators == 8


def test_sequences_of_all_ranks_are_what_a_replica_runs() -> None:
    args = {"kind": "vllm", "args": {"max_num_seqs": 16}}
    assert Settings.from_config(config(engine=args)).decode.max_num_seqs == 64
    assert Settings.from_config(config(engine={"kind": "vllm"})).decode.max_num_seqs is None
    assert Settings.from_config(config(engine=args | {"kind": "simulated"})).decode.max_num_seqs == 16


def test_a_vllm_engine_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "fingerprint", lambda _: {})
    monkeypatch.setattr(describe, "kv_bytes_per_token", lambda _: 1)
    # vLLM's world_size leaves data parallelism out.
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, world_size=2, data_parallel_size=4)
    resolved = SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=100),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        model_config=SimpleNamespace(max_model_len=2048),
    )
    info = describe.worker_info(config(), Role.DECODE, EngineSettings("path"), resolved, "decode-0", "1", "node")
    assert info.accelerators == 8
    assert info.max_num_seqs == 4 * 8, "vLLM's bound is a rank's, its count of KV blocks is not"
