"""Workloads and the simulated cluster of the autoscaling report."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ClusterConfig, parse
from cluster.workload.arrival import Arrival
from cluster.workload.processes import Diurnal, Poisson
from cluster.workload.traces import Replay

# A 70B-class model on one replica: about 4,300 prompt tokens/s; a decode step of 20 ms plus 0.25 ms per sequence of
# 2,000 tokens of context; 80 KB of KV per token and GPU at TP 4.
ENGINE = {
    "times": "linear",
    "linear": {
        "fixed_ms": 20.0,
        "per_sequence_ms": 0.25,
        "nominal_context_tokens": 2000,
        "per_prefill_token_us": 235.0,
        "transfer_gb_per_s": 50.0,
        "transfer_fixed_ms": 2.0,
    },
    "kv_bytes_per_token": 327_680,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
}
STARTUP_S = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload with the limits it is judged by.

    Attributes:
        first: replicas (prefill, decode) at the start, the same for every policy.
        most: bound of each pool.
        window_s: how long the oracle keeps one size.
    """

    name: str
    ttft_ms: float
    tpot_ms: float
    duration_s: float
    arrivals: Callable[[int], list[Arrival]]
    first: tuple[int, int]
    most: tuple[int, int]
    window_s: float = 300.0
    block_size_tokens: int = 64
    kv_tokens: int = 400_000
    burst_s: tuple[float, float] | None = None

    def config(self, prefill: int, decode: int, *, least: tuple[int, int] = (1, 1)) -> ClusterConfig:
        """The cluster with that many replicas at the start."""
        engine = ENGINE | {
            "block_size_tokens": self.block_size_tokens,
            "kv_blocks": self.kv_tokens // self.block_size_tokens,
        }
        return parse(
            {
                "slo": {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "attainment": 0.95},
                "engine": {"kind": "simulated", "simulated": engine},
                "pools": {
                    "prefill": {"replicas": {"min": least[0], "max": self.most[0], "initial": prefill}},
                    "decode": {"replicas": {"min": least[1], "max": self.most[1], "initial": decode}},
                },
                "autoscaling": {"policy": "goodput", "startup_s": STARTUP_S},
                "router": {"limits": {"queue_s": 600, "prefill_s": 3600, "first_token_s": 3600, "idle_s": 3600}},
            }
        )


def scenarios(traces: Path | None, *, quick: bool = False) -> list[Scenario]:
    """All six; without the folder of traces the two recorded ones are left out.

    Args:
        quick: 25 minutes of each trace instead of the whole hour.
    """
    recorded = []
    length_s = 1500.0 if quick else 3600.0
    if traces is not None:
        recorded = [
            Scenario(
                "mooncake",
                ttft_ms=15_000,
                tpot_ms=60,
                duration_s=length_s,
                arrivals=_replay(traces / "mooncake_conversation.jsonl.gz", length_s, spread_s=3.0),
                first=(10, 5),
                most=(24, 16),
                block_size_tokens=512,
                kv_tokens=900 * 512,
            ),
            Scenario(
                "azure",
                ttft_ms=2_000,
                tpot_ms=50,
                duration_s=length_s,
                arrivals=_replay(traces / "azure_llm_2023_conv.csv.gz", length_s),
                first=(4, 2),
                most=(16, 16),
            ),
        ]
    return [
        *recorded,
        Scenario(
            "diurnal",
            2_000,
            50,
            3600,
            lambda seed: _mixed(seed, 3600, [(_diurnal(), 0.0, 3600.0, 1500, 250)]),
            first=(2, 1),
            most=(20, 16),
        ),
        Scenario(
            "burst",
            2_000,
            50,
            2400,
            lambda seed: _mixed(
                seed, 2400, [(_poisson(1.0), 0.0, 2400.0, 1500, 250), (_poisson(9.0), 600.0, 1200.0, 1500, 250)]
            ),
            first=(1, 1),
            most=(20, 16),
            burst_s=(600.0, 1200.0),
        ),
        Scenario(
            "shift",
            4_000,
            50,
            2400,
            lambda seed: _mixed(
                seed, 2400, [(_poisson(4.0), 0.0, 1200.0, 4000, 100), (_poisson(4.0), 1200.0, 2400.0, 500, 800)]
            ),
            first=(6, 1),
            most=(20, 16),
        ),
        Scenario(
            "idle",
            2_000,
            50,
            3600,
            lambda seed: _mixed(seed, 3600, [(_poisson(0.01), 0.0, 3600.0, 1500, 250)]),
            first=(4, 4),
            most=(8, 8),
        ),
    ]


def _replay(path: Path, length_s: float, spread_s: float = 0.0) -> Callable[[int], list[Arrival]]:
    replay = Replay(path=str(path), length_s=length_s, spread_s=spread_s)
    return lambda seed: list(replay.arrivals(random.Random(seed), replay.load()))


def _poisson(rate_per_s: float) -> Callable[[random.Random], Iterator[float]]:
    return Poisson(process="poisson", rate_per_s=rate_per_s).times


def _diurnal() -> Callable[[random.Random], Iterator[float]]:
    return Diurnal(process="diurnal", rate_per_s=4.0, amplitude=0.85, period_s=3600, phase=0.75).times


Part = tuple[Callable[[random.Random], Iterator[float]], float, float, int, int]


def _mixed(seed: int, duration_s: float, parts: list[Part]) -> list[Arrival]:
    """Arrivals of several processes, each within its own time; lognormal lengths around the given means."""
    rng = random.Random(seed)
    out: list[Arrival] = []
    content = 0
    for times, start_s, end_s, prompt, output in parts:
        for at_s in times(rng):
            if start_s + at_s >= min(end_s, duration_s):
                break
            content += 1
            out.append(Arrival(start_s + at_s, ((content, _length(rng, prompt)),), _length(rng, output)))
    return sorted(out, key=lambda a: a.at_s)


def _length(rng: random.Random, mean: int, sigma: float = 0.6) -> int:
    return max(1, round(mean * rng.lognormvariate(-sigma * sigma / 2, sigma)))
