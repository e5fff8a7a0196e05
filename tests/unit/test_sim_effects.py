"""Effects that the field has published, with the right sign and order of magnitude; conditions beside each."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from cluster.config import parse
from cluster.engine.scheduler.config import Policy, Reservation, SchedulerConfig, Speculation
from cluster.messages import Slo
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.perf.roofline import RooflineTimes
from cluster.perf.times import LinearTimes, StepTimes
from cluster.planner.reference import exact_figures
from cluster.sim import shapes
from cluster.sim.run import simulate
from cluster.sim.single import EngineRun, run_engine
from cluster.workload.arrival import Arrival

SLO = Slo(1.0, 0.05)


def requests(
    number: int, rate_per_s: float, prompt: int, output: int, *, shared: int = 0, sigma: float = 0.7
) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(7), 0.0, []
    for i in range(number):
        at_s += rng.expovariate(rate_per_s)
        head = ((rng.randrange(3), shared),) if shared else ()
        tail = ((1000 + i, 1 + int(rng.lognormvariate(math.log(prompt), sigma))),)
        arrivals.append(Arrival(at_s, head + tail, 1 + int(rng.lognormvariate(math.log(output), sigma))))
    return arrivals


def run(arrivals: list[Arrival], times: StepTimes | None = None, **config: Any) -> EngineRun:
    config = {"kv_blocks": 100_000, "max_num_seqs": 64, "max_num_batched_tokens": 2048, **config}
    return run_engine(arrivals, SchedulerConfig(**config), times or LinearTimes(), SLO)


def test_published_figures_and_bands() -> None:
    """Continuous over static, chunked prefill's tail, the goodput peak below the throughput peak."""
    assert all(figure.ok for figure in exact_figures())
    caps = shapes.published()["batch_caps"]["workload"]["caps"]
    bands = shapes.policy_bands(shapes.policies())
    bands += shapes.batch_cap_bands(caps, shapes.batch_caps(caps), shapes.batch_caps(caps, 0.008), 81)
    assert [band.statement for band in bands if not band.ok] == []
    assert len(bands) == 11


def test_paging_serves_two_to_four_times_as_much() -> None:
    """PagedAttention: 2-4x throughput. Llama-3.1-8B on an H100, memory for 32k tokens, 2,048 reserved a sequence."""
    arrivals = requests(300, 1000, 150, 300)
    times = RooflineTimes(model_shape("llama-3.1-8b"), hardware("H100"))
    ends = {}
    for how in Reservation:
        result = run(
            arrivals, times, kv_blocks=2048, reservation=how, max_model_len=2048, max_num_seqs=256, prefix_caching=False
        )
        ends[how] = result.end_s
    assert 2.0 <= ends[Reservation.CONTIGUOUS] / ends[Reservation.PAGED] <= 4.0


def test_prefix_caching_multiplies_the_throughput_of_prefix_heavy_prompts() -> None:
    """RadixAttention: up to 6.4x. Prompts of 4,000 tokens, 3,900 of them shared, 16 tokens out."""
    arrivals = requests(200, 1000, 80, 16, shared=3900)
    ends = {on: run(arrivals, prefix_caching=on).end_s for on in (False, True)}
    assert 3.0 <= ends[False] / ends[True] <= 20.0


@pytest.mark.parametrize("acceptance", [0.7])
def test_speculation_wins_alone_and_loses_in_a_full_batch(acceptance: float) -> None:
    """Leviathan et al.: 2-3x, at batch 1. In a full batch the verified drafts cost compute that nobody has left."""
    shape, device = model_shape("llama-3.1-8b"), hardware("H100")
    times = RooflineTimes(shape, device)
    speedup = {}
    for batch in (1, 512):
        arrivals = [Arrival(0.0, ((i, 64),), 200) for i in range(batch)]
        tpot = {}
        for on in (False, True):
            speculation = Speculation(4, acceptance, 0.1) if on else None
            result = run(arrivals, times, max_num_seqs=512, max_num_batched_tokens=40_000, speculation=speculation)
            tpot[on] = np.mean([r.tpot_s for r in result.records])
        speedup[batch] = tpot[False] / tpot[True]
    assert 1.7 <= speedup[1] <= 3.0
    assert speedup[512] < 1.0


def _attainment(
    prefill: int, decode: int, arrivals: list[Arrival], ttft_ms: float, tpot_ms: float, **more: Any
) -> float:
    def pool(n: int) -> dict[str, Any]:
        return {"replicas": {"min": n, "max": n}}

    simulated = {
        "times": "roofline",
        "hardware": "H100",
        "model": "llama-3.1-8b",
        "max_num_batched_tokens": 8192,
        **more,
    }
    config = parse(
        {
            "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms},
            "engine": {"kind": "simulated", "simulated": simulated},
            "pools": {"prefill": pool(prefill) if prefill else None, "decode": pool(decode)},
        }
    )
    return simulate(config, arrivals).stats.counters.attainment or 0.0


def test_the_split_wins_under_a_tight_tpot_and_loses_under_a_loose_one() -> None:
    """DistServe. Four H100, Llama-3.1-8B, prompts about 4,000 tokens, outputs about 200; 2P2D against 4 colocated."""
    arrivals = requests(200, 14.0, 4000, 200, sigma=0.3)
    assert _attainment(2, 2, arrivals, 1500, 12) > _attainment(0, 4, arrivals, 1500, 12) + 0.2
    # Short prompts, long outputs, 32 sequences an engine: the batch slots of two engines that only prefill are missed.
    arrivals = requests(400, 30.0, 100, 400, sigma=0.3)
    split, together = (_attainment(*pools, arrivals, 1500, 40, max_num_seqs=32) for pools in ((2, 2), (0, 4)))
    assert split < together - 0.2


def test_static_batching_wastes_what_its_longest_request_leaves() -> None:
    """Orca: iteration-level scheduling. One batch of 32 outputs between 10 and 400 tokens."""
    arrivals = requests(96, 1000, 100, 100, sigma=0.9)
    ends = {p: run(arrivals, policy=p, max_num_seqs=32).end_s for p in (Policy.STATIC, Policy.CONTINUOUS)}
    assert ends[Policy.STATIC] > 1.4 * ends[Policy.CONTINUOUS]
