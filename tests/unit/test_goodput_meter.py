"""Busy time starts with work and ends with a step that leaves nothing running."""

from __future__ import annotations

import pytest

from cluster.goodput.meter import LoadMeter
from cluster.messages import WorkerSnapshot, WorkerState


def after(steps: int, running: int) -> WorkerSnapshot:
    return WorkerSnapshot("w", "1", WorkerState.READY, steps=steps, running=running)


def test_idle_time_is_not_busy_time():
    meter = LoadMeter()
    meter.on_start(10.0)
    meter.on_output(output_tokens=1, computed_prompt_tokens=100)
    meter.on_step(after(1, 1), 10.5)
    meter.on_output(output_tokens=1)
    meter.on_step(after(2, 0), 10.7)
    meter.on_step(after(3, 0), 20.0)
    meter.on_start(30.0)
    meter.on_start(30.05)
    meter.on_step(after(5, 0), 30.1)
    values = meter.values()
    assert values["busy_s"] == pytest.approx(0.8)
    assert (values["steps"], values["sequence_steps"], values["prompt_tokens"]) == (5, 2, 100)


def test_totals_never_fall():
    meter = LoadMeter()
    meter.on_start(5.0)
    meter.on_step(after(4, 1), 4.0)
    meter.on_step(after(2, 1), 6.0)
    meter.on_output(output_tokens=-3, computed_prompt_tokens=-1)
    assert meter.values() == {"busy_s": 2.0, "steps": 4.0, "sequence_steps": 0.0, "prompt_tokens": 0.0}
