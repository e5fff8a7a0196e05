"""What a router reports: queue, draining workers, engines without progress, and never an exception."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import parse
from cluster.goodput.catalogue import CATALOGUE
from cluster.goodput.metrics import Metrics
from cluster.messages import Outcome, RequestRecord, Role, Slo, WorkerInfo, WorkerSnapshot, WorkerState
from kv_transfer.ledger import LeaseLedger
from router import telemetry
from router.telemetry import STALL_S, Telemetry


def info(worker_id: str, role: Role) -> WorkerInfo:
    return WorkerInfo(worker_id, "1", role, 16, 100, 1, 8, 512, 1024, tp=2, accelerators=2)


class Fakes:
    def __init__(self) -> None:
        self.now = 100.0
        self.workers = {"p0": info("p0", Role.PREFILL), "d0": info("d0", Role.DECODE)}
        self.loads = {"d0": WorkerSnapshot("d0", "1", WorkerState.READY, 5, 2, 1, 64, 25, 3)}
        self.waiting = [90.0, 97.0]
        self.legs = [("d0", False), ("d1", False), ("d1", False), ("p7", True)]
        self.leases = LeaseLedger()
        self.metrics = Metrics(Slo(1.0, 0.1))
        placer = SimpleNamespace()
        config = parse({"autoscaling": {"accelerators_max": 8}})
        self.telemetry = Telemetry(config, self.metrics, self, placer, lambda: self.now)

    def runs(self):
        placed = SimpleNamespace(placement=object(), request=SimpleNamespace(arrival_s=0.0))
        return [placed, *(SimpleNamespace(placement=None, request=SimpleNamespace(arrival_s=a)) for a in self.waiting)]

    def leg_workers(self):
        return self.legs


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def test_the_autoscaler_is_told_what_the_cluster_promised_and_what_rules_refused(fakes):
    for status, own in ((None, Slo(0.001, 0.001)), (429, Slo(1.0, 0.1))):
        fakes.metrics.start(prompt_tokens=10)
        outcome = Outcome.DONE if status is None else Outcome.REJECTED
        first_s = 0.5 if status is None else None
        fakes.metrics.observe(
            RequestRecord("r", outcome, own, 0.0, 1.0, prompt_tokens=10, ttft_s=first_s, tpot_s=0.05, status=status)
        )
    stats = fakes.telemetry.autoscaling_stats()
    assert (stats["requests.started"], stats["requests.good"], stats["requests.refused"]) == (2, 1, 1)
    assert stats["requests.refused_prompt_tokens"] == 10
    assert "requests.missed" not in stats


def test_the_queue_is_what_has_no_place(fakes):
    assert fakes.telemetry.queue() == (2, 10.0)
    fakes.waiting = []
    assert fakes.telemetry.queue() == (0, 0.0)


def test_workers_that_left_and_still_run_legs_are_draining(fakes):
    assert fakes.telemetry.draining(Role.DECODE) == {"d1"}
    assert fakes.telemetry.draining(Role.PREFILL) == {"p7"}
    stats = fakes.telemetry.autoscaling_stats()
    assert (stats["draining_decode"], stats["draining_prefill"], stats["queue_depth"]) == (1, 1, 2)
    assert all(isinstance(value, float) for value in stats.values())


def test_gauges_are_in_the_catalogue(fakes):
    fakes.metrics.start(prompt_tokens=100)
    values = fakes.telemetry.gauges()
    assert set(values) <= set(CATALOGUE)
    assert values["pdserve_pool_replicas"]["decode", "draining"] == 1
    assert values["pdserve_worker_kv_used_ratio"]["decode", "d0"] == 0.25
    assert values["pdserve_pool_accelerators"] == {"prefill": 2, "decode": 2}
    assert values["pdserve_accelerators_max"] == 8
    fakes.metrics.set_gauges(values)
    assert fakes.metrics.errors == 0


def test_a_controller_that_has_fallen_silent_hides_no_empty_pool(fakes, monkeypatch):
    decode = {"ready": 3, "starting": 2, "draining": 0, "target": 5, "reason": "demand"}
    decided = {"at_s": 1000.0, "data_at_s": 1000.0, "warnings": [], "change_counts": {}}

    def replicas(pools: dict[str, Any], now: float) -> dict[tuple[str, str], float]:
        fakes.telemetry.decision = decided | {"pools": pools}
        monkeypatch.setattr(telemetry, "time", SimpleNamespace(time=lambda: now))
        return fakes.telemetry.gauges()["pdserve_pool_replicas"]

    said = replicas({"decode": decode}, 1010.0)
    assert (said["decode", "ready"], said["decode", "starting"], said["prefill", "ready"]) == (3, 2, 1)
    del fakes.workers["d0"]
    for seen in (replicas({"decode": decode}, 1100.0), replicas({}, 1010.0)):
        assert seen["decode", "ready"] == 0 and ("decode", "starting") not in seen


def test_an_engine_with_work_that_makes_no_step(fakes):
    def stalled() -> float:
        return fakes.telemetry.gauges()["pdserve_worker_no_progress"]["decode", "d0"]

    assert stalled() == 0
    fakes.now += STALL_S + 1
    assert stalled() == 1
    fakes.loads["d0"] = WorkerSnapshot("d0", "1", WorkerState.READY, 6, 2, 1, 64, 25, 3)
    assert stalled() == 0
    fakes.now += STALL_S + 1
    fakes.loads["d0"] = WorkerSnapshot("d0", "1", WorkerState.READY, 6, 0, 0, 0, 0, 0)
    assert stalled() == 0


async def test_rendering_survives_its_sources(fakes):
    fakes.leases = None
    assert b"pdserve_telemetry_errors_total 1.0" in await fakes.telemetry.render()
