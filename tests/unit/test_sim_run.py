"""A simulated run from first arrival to last end: refused clients, accelerators, clusters of nothing."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig, parse
from cluster.errors import ConfigError
from cluster.messages import Outcome
from cluster.planner import simulate as planned
from cluster.sim.run import simulate
from cluster.workload.arrival import Arrival
from cluster.workload.spec import parse as parse_workload

SIMULATED = {"kv_blocks": 4000, "max_num_seqs": 4, "max_num_batched_tokens": 2048}


def config(replicas: dict[str, Any], **more: Any) -> ClusterConfig:
    return parse(
        {
            "engine": {"kind": "simulated", "simulated": SIMULATED},
            "pools": {"prefill": {"replicas": replicas}, "decode": {"replicas": replicas}},
            **more,
        }
    )


@pytest.mark.parametrize(("think_s", "retry_after_s"), [(0, 2.0), (0.1, 2.0)])
def test_a_user_who_is_refused_waits_before_asking_again(think_s: float, retry_after_s: float) -> None:
    workload = parse_workload(
        {
            "duration_s": 9,
            "arrivals": {"process": "closed", "users": 3, "think_s": think_s},
            "prompts": {"kind": "plain", "prompt_tokens": 3000, "output_tokens": 4},
        }
    )
    cluster = config(
        {"min": 1, "max": 1},
        model={"max_model_len": 2048},
        router={"admission": {"retry_after_s": retry_after_s}},
    )
    result = simulate(cluster, workload)
    assert not any(r.outcome is Outcome.DONE for r in result.records)
    assert sorted({r.arrival_s for r in result.records}) == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert len(result.records) == 15


def test_a_pool_of_fixed_size_costs_the_same_with_and_without_autoscaling() -> None:
    workload = parse_workload(
        {
            "duration_s": 20,
            "arrivals": {"process": "poisson", "rate_per_s": 10},
            "prompts": {"kind": "plain", "prompt_tokens": 500, "output_tokens": 100},
        }
    )
    off = simulate(config({"min": 1, "max": 1}), workload)
    scaled = simulate(config({"min": 1, "max": 1}, autoscaling={"policy": "goodput", "interval_s": 5}), workload)
    assert off.duration_s > 25, "the overload must outlast the workload"
    assert scaled.duration_s == off.duration_s
    assert scaled.accelerators == pytest.approx(off.accelerators) == 2
    assert scaled.summary()["goodput_per_s_per_accelerator"] == pytest.approx(
        off.summary()["goodput_per_s_per_accelerator"]
    )


def test_a_cluster_that_starts_with_nothing_and_stays_so_is_refused_before_it_runs() -> None:
    nothing, arrivals = config({"min": 0, "max": 1, "initial": 0}), [Arrival(0.0, ((1, 100),), 2)]
    line = r"^pools\.decode\.replicas\.initial: 0: no engine would ever serve; start with at least 1"
    for run in (simulate, planned.simulate):
        with pytest.raises(ConfigError, match=line):
            run(nothing, arrivals)
    growing = config({"min": 0, "max": 1, "initial": 0}, autoscaling={"policy": "goodput"})
    with pytest.raises(ConfigError, match=line):
        planned.simulate(growing, arrivals)
