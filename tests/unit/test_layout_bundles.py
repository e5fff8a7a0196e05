"""A layout as Ray sees it: what one replica asks for, and where its ranks go."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig, parse
from cluster.errors import ConfigError
from cluster.layout import IN_PROCESS, RAY_ACCELERATOR_TYPES, Rank, ReplicaLayout, replica_layout
from cluster.messages import Role


def config(decode: dict[str, Any]) -> ClusterConfig:
    return parse({"pools": {"prefill": None, "decode": decode}})


def layout(*, on_cpu: bool = False, accelerator: str | None = None, **sizes: int) -> ReplicaLayout:
    pool = {"layout": sizes, "accelerator": accelerator, "num_cpus": 0.5}
    return replica_layout(config(pool), Role.DECODE, on_cpu=on_cpu)


def test_tensor_parallel_ranks_share_one_bundle_so_they_share_a_node() -> None:
    found = layout(tp=4, accelerator="H100")
    assert found.bundles == ({"CPU": 0.5, "GPU": 4.0, "accelerator_type:H100": 0.001},)
    assert found.strategy == "STRICT_PACK"
    assert found.executor == "mp"
    assert found.ranks == tuple(Rank(0, 0, tp, 0) for tp in range(4))
    assert found.gpus == 4
    assert found.actor_resources == found.bundles[0]


def test_one_rank_computes_in_the_process_of_its_engine() -> None:
    assert layout(tp=1).executor is None
    assert layout(tp=1, on_cpu=True).executor == IN_PROCESS
    assert layout(tp=2, on_cpu=True).executor == layout(dp=2, on_cpu=True).executor == "mp"
    assert layout(tp=1).bundles == ({"CPU": 0.5, "GPU": 1.0},)


def test_pipeline_stages_get_a_bundle_per_rank_and_may_span_nodes() -> None:
    found = layout(tp=8, pp=2, accelerator="H100")
    assert len(found.bundles) == 16
    assert all(bundle["GPU"] == 1 for bundle in found.bundles)
    assert found.bundles[0]["CPU"] == 0.5
    assert "CPU" not in found.bundles[1]
    assert (found.strategy, found.executor) == ("PACK", "ray")
    assert [rank.bundle for rank in found.ranks] == list(range(16))
    # Ranks of one stage are neighbours.
    assert [(r.pp, r.tp) for r in found.ranks[:9]] == [(0, t) for t in range(8)] + [(1, 0)]
    assert found.actor_resources == {"CPU": 0.5}


def test_pipeline_stages_that_fit_a_node_stay_on_it() -> None:
    assert layout(tp=2, pp=2, accelerator="H100").strategy == "STRICT_PACK"
    assert layout(tp=2, pp=2).strategy == "PACK", "the node's size is not known without a type"


def test_attention_dp_ranks_live_inside_the_replica() -> None:
    found = layout(tp=2, dp=4, accelerator="H200")
    assert found.accelerators == 8
    assert found.bundles[0]["GPU"] == 8
    assert {(r.dp, r.tp) for r in found.ranks} == {(d, t) for d in range(4) for t in range(2)}


def test_cpu_engines_ask_for_no_gpu_unless_the_type_is_named() -> None:
    assert layout(tp=2, on_cpu=True).bundles == ({"CPU": 0.5},)
    assert layout(tp=2, on_cpu=True).gpus == 0
    # Simulated engines on fake GPU resources land on the type they are named for.
    assert layout(tp=2, on_cpu=True, accelerator="A100").bundles[0] == {
        "CPU": 0.5, "GPU": 2.0, "accelerator_type:A100": 0.001,
    }  # fmt: skip


def test_a_custom_resource_is_asked_for_once_per_rank() -> None:
    assert layout(tp=4, on_cpu=True, accelerator="decode-card").bundles == ({"CPU": 0.5, "decode-card": 4.0},)
    assert layout(tp=2, accelerator="decode-card").bundles == ({"CPU": 0.5, "GPU": 2.0, "decode-card": 2.0},)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 16, "accelerator": "H100"}, ("tp 16", "8 GPUs of a H100 node")),
        ({"tp": 4, "dp": 4, "accelerator": "H100"}, ("tp 4 x dp 4", "8 GPUs")),
        ({"pp": 2, "dp": 2}, ("pp 2 with dp 2",)),
    ],
)
def test_layouts_that_no_node_holds_are_refused(sizes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        layout(**sizes)
    assert refused.value.path == "pools.decode.layout"
    assert all(word in str(refused.value) for word in words)


def test_the_list_of_accelerator_types_is_rays() -> None:
    from ray.util.accelerators import accelerators as rays

    assert {value for name, value in vars(rays).items() if name.isupper()} == RAY_ACCELERATOR_TYPES
