"""The planner's topologies in the simulator: on its own memory, and the rate that the simulator gives them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.engine.simulation.settings import engine_spec
from cluster.messages import Role, Slo
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.perf.profile import Coefficients, Profile, write_profile
from cluster.planner import verify as verifying
from cluster.planner.capacity import capacity, memory_budget
from cluster.planner.layout import parse_topology
from cluster.planner.rates import Workload
from cluster.planner.topology import Planner, Question, Rated
from cluster.planner.verify import cluster_config, verify

QUESTION = Question(model_shape("llama-3.1-70b"), {"H100": 8, "H200": 8}, Workload(2000, 200), Slo(2.0, 0.04))
TOPOLOGY = parse_topology("P2tp4:H100+D1tp4:H200", list(QUESTION.gpus))


@pytest.mark.parametrize("times", ["roofline", "profile"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_a_simulated_engine_has_the_planners_memory(tmp_path: Path, times: str, kv_dtype: str | None) -> None:
    path = tmp_path / "p.json"
    write_profile(Profile(Coefficients(5e-3, 2e-5, 0.0, 1e-4, 1e-8), {"tp": 4, "pp": 1}), path)
    question = replace(QUESTION, times=times, profile=str(path), kv_dtype=kv_dtype)
    config = cluster_config(question, TOPOLOGY)
    shape = question.shape
    for role, gpu in ((Role.PREFILL, "H100"), (Role.DECODE, "H200")):
        scheduler = engine_spec(config, role).scheduler
        planned = capacity(shape, memory_budget(shape, hardware(gpu), 4), 2200, 2100, 4, kv_dtype=kv_dtype)
        assert scheduler.kv_blocks == planned.pool_blocks
        assert scheduler.kv_blocks * scheduler.block_size_tokens == planned.pool_tokens
        assert scheduler.kv_bytes_per_token == shape.kv_bytes_per_token(1, 1, kv_dtype)


def test_a_model_with_windows_holds_as_many_sequences_as_the_formulas_say() -> None:
    windowed = replace(QUESTION.shape, window_tokens=128, sliding_layers=QUESTION.shape.layers // 2)
    question = replace(QUESTION, shape=windowed, limits=replace(QUESTION.limits, max_num_seqs=8000))
    layout = TOPOLOGY.decode.layout
    blocks = engine_spec(cluster_config(question, TOPOLOGY), Role.DECODE).scheduler.kv_blocks
    assert blocks // math.ceil(2200 / question.limits.block_tokens) == Planner(question)._room(layout)
    whole = engine_spec(cluster_config(QUESTION, TOPOLOGY), Role.DECODE).scheduler.kv_blocks
    assert blocks > 1.7 * whole


@pytest.fixture
def rated() -> Rated:
    return Planner(QUESTION).rate(TOPOLOGY)


def _simulator(monkeypatch: pytest.MonkeyPatch, highest_rate: float) -> list[float]:
    """One that meets the SLO up to a rate; returns the rates that it is asked for."""
    asked: list[float] = []

    def workload(load: Workload, rate: float, duration_s: float) -> Any:
        assert rate * duration_s >= verifying.FEWEST_REQUESTS - 1e-9
        return SimpleNamespace(arrivals=lambda seed: rate)

    def simulate(config: Any, rate: float, *_: Any) -> float:
        asked.append(rate)
        return rate

    monkeypatch.setattr(verifying, "workload", workload)
    monkeypatch.setattr(verifying, "simulate", simulate)
    monkeypatch.setattr(verifying, "summary", lambda rate: {"attainment": 1.0 if rate <= highest_rate else 0.5})
    return asked


@pytest.mark.parametrize("factor", [0.02, 0.3, 0.8, 1.0, 1.25, 1.6, 5.0])
def test_the_highest_rate_is_found_within_three_percent(
    monkeypatch: pytest.MonkeyPatch, rated: Rated, factor: float
) -> None:
    highest = factor * rated.goodput_rps
    asked = _simulator(monkeypatch, highest)
    found = verify(QUESTION, rated)
    assert highest / 1.03 <= found.goodput_rps <= highest
    assert found.attainment == (1.0 if factor >= 1 else 0.5)
    assert len(asked) < 16


def test_a_topology_that_holds_at_no_rate_has_none(monkeypatch: pytest.MonkeyPatch, rated: Rated) -> None:
    asked = _simulator(monkeypatch, 0.0)
    assert verify(QUESTION, rated).goodput_rps == 0.0
    assert len(asked) < 10
