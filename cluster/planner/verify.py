"""The planner's best few, run in the simulator: queues, block tables, transfers and the router's own placement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import ClusterConfig, parse
from cluster.perf.hardware import hardware
from cluster.planner.capacity import memory_budget
from cluster.planner.layout import Pool, Topology
from cluster.planner.rates import Workload as Load
from cluster.planner.simulate import simulate, summary
from cluster.planner.topology import Question, Rated
from cluster.sim.fleet import Options
from cluster.workload.spec import Workload

PRECISION = 1.03
FEWEST_REQUESTS = 20
"""A share of fewer says little."""
LOWEST = 1 / 64
"""Of the formulas' goodput; below it is none."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What the simulator says of one topology.

    Attributes:
        attainment: at the goodput that the formulas gave.
        goodput_rps: the highest rate at which the simulator meets the wanted attainment, to 3%; 0 where it does not
            even at a 64th of the formulas' goodput.
        figures: of the run at the formulas' goodput.
    """

    rated: Rated
    attainment: float
    goodput_rps: float
    figures: dict[str, Any]

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.goodput_rps * self.rated.output_tokens / self.rated.gpus


def cluster_config(question: Question, topology: Topology) -> ClusterConfig:
    """The simulated cluster of a topology, with the planner's memory; the same shape of file describes a live one."""
    shape, limits, kv_dtype = question.shape, question.limits, question.kv_dtype
    longest = question.load.prompt_tokens + question.load.output_tokens

    def pool(content: Pool) -> dict[str, Any]:
        tp, pp = content.layout.tp, content.layout.pp
        budget = memory_budget(shape, hardware(content.layout.gpu), tp, pp, question.weight_dtype, limits)
        # As many sequences as the formulas: with windows or states a sequence takes less than its length in blocks.
        one = shape.kv_bytes(longest, limits.block_tokens, tp, pp, kv_dtype)
        return {
            "layout": {"tp": tp, "pp": pp},
            "replicas": {"min": content.replicas, "max": content.replicas},
            "simulated": {
                "hardware": content.layout.gpu,
                "kv_blocks": budget.kv_pool_bytes * math.ceil(longest / limits.block_tokens) // one,
                "kv_bytes_per_token": shape.kv_bytes_per_token(1, 1, kv_dtype),
            },
        }

    simulated = {
        "times": "roofline" if question.times != "profile" else question.profile,
        "model": question.model or question.shape.name,
        "hardware": next(iter(question.gpus)),
        "weight_dtype": question.weight_dtype,
        "kv_dtype": question.kv_dtype,
        "link": question.link,
        "max_num_seqs": question.limits.max_num_seqs,
        "max_num_batched_tokens": topology.chunk_tokens or max(8192, question.load.prompt_tokens + 1),
        "block_size_tokens": question.limits.block_tokens,
        "prefix_caching": question.load.cached_tokens > 0,
        "policy": "chunked" if topology.chunk_tokens or topology.prefill else "continuous",
    }
    if topology.chunk_tokens and topology.chunk_tokens < question.limits.max_num_seqs:
        simulated["max_num_seqs"] = topology.chunk_tokens
    decode = topology.decode or topology.colocated[0]
    return parse(
        {
            "engine": {"kind": "simulated", "simulated": simulated},
            "model": {"max_model_len": question.load.prompt_tokens + question.load.output_tokens + 16},
            "slo": {
                "ttft_ms": question.slo.ttft_s * 1e3,
                "tpot_ms": question.slo.tpot_s * 1e3,
                "attainment": question.attainment,
            },
            "pools": {"prefill": pool(topology.prefill) if topology.prefill else None, "decode": pool(decode)},
            "router": {"placement": {"conditional": False}},
        }
    )


def workload(load: Load, rate: float, duration_s: float) -> Workload:
    """Poisson arrivals of the planner's fixed lengths; each prompt shares its cached head with all others."""
    return Workload.model_validate(
        {
            "duration_s": duration_s,
            "arrivals": {"process": "poisson", "rate_per_s": rate},
            "prompts": {
                "kind": "plain",
                "prompt_tokens": {"dist": "fixed", "tokens": load.prompt_tokens},
                "output_tokens": {"dist": "fixed", "tokens": load.output_tokens},
                "shared_tokens": load.cached_tokens,
            },
        }
    )


def verify(
    question: Question,
    rated: Rated,
    duration_s: float = 60.0,
    seed: int = 1,
    progress: Callable[[str], None] = lambda _line: None,
) -> Verified:
    """Simulate a topology at its goodput, then search the rate that the simulator itself gives it.

    The run is at least four times the longest allowed stay of a request, so that the batch reaches its steady state.
    """
    config = cluster_config(question, rated.topology)
    stay_s = question.slo.ttft_s + question.load.output_tokens * question.slo.tpot_s
    span_s = max(duration_s, 4 * stay_s)

    def at(rate: float) -> tuple[float, dict[str, Any]]:
        progress(f"simulating {rated.topology} at {rate:.2f}/s")
        asked = workload(question.load, rate, max(span_s, FEWEST_REQUESTS / rate))
        run = simulate(config, asked.arrivals(seed=seed), seed, Options(seed=seed))
        figures = summary(run)
        return figures["attainment"], figures

    share, figures = at(rated.goodput_rps)

    def holds(rate: float) -> bool:
        return at(rate)[0] >= question.attainment

    low = high = rated.goodput_rps
    if share >= question.attainment:
        high = 2 * low
        while holds(high):
            low, high = high, 2 * high
    else:
        low = high / 2
        while not holds(low):
            low, high = low / 2, low
            if low < LOWEST * rated.goodput_rps:
                return Verified(rated, share, 0.0, figures)
    while high / low >= PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Verified(rated, share, low, figures)
