"""Every metric that a rule or panel names comes out of a router's own exposition, without a cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import yaml

from cluster.config import parse
from cluster.goodput.metrics import Metrics
from cluster.kubernetes.rules.monitoring import expressions, metrics_of, panels
from cluster.messages import Outcome, RequestRecord, Role, Slo, Stage, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.messages import Path as ServedBy

MONITORING = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "monitoring"
CONFIG = parse({"autoscaling": {"policy": "goodput", "accelerators_max": 2}})
DECISION = {
    "at_s": 0.0,
    "pools": {role.value: {"ready": 1, "starting": 0, "draining": 0, "target": 1, "reason": "steady"} for role in Role},
    "warnings": [],
    "change_counts": {"decode.up": 1},
}


def record() -> RequestRecord:
    return RequestRecord(
        "r1",
        Outcome.DONE,
        Slo(0.1, 0.01),
        arrival_s=0.0,
        end_s=2.0,
        path=ServedBy.SPLIT,
        prompt_tokens=100,
        cached_tokens=20,
        predicted_cached_tokens=30,
        output_tokens=10,
        prefill_worker="prefill-1",
        decode_worker="decode-1",
        ttft_s=1.0,
        tpot_s=0.1,
        itl_s=[0.1] * 9,
        stage_s={Stage.ROUTER_QUEUE: 0.2, Stage.PREFILL_COMPUTE: 0.5, Stage.KV_TRANSFER: 0.1, Stage.DECODE_STEP: 0.2},
    )


def expose(config, roles) -> str:
    from router.app import Router
    from router.telemetry import Telemetry

    workers, loads = {}, {}
    for role in roles:
        name = f"{role.value}-1"
        workers[name] = WorkerInfo(name, "i", role, 16, 100, 1024, 8, 2048, 2048)
        loads[name] = WorkerSnapshot(name, "i", WorkerState.READY, steps=3, running=1)
    counters = SimpleNamespace(granted=2, pulled=1, released=1, expired=0, outlived=0)
    dispatcher = SimpleNamespace(
        workers=workers,
        loads=loads,
        runs=list,
        leg_workers=list,
        leases=SimpleNamespace(counters=lambda: counters),
    )
    placer = SimpleNamespace()
    router = SimpleNamespace(index=SimpleNamespace(stats=SimpleNamespace(blocks=7)), _events=None)
    metrics = Metrics(config.slo.to_slo(), clock=lambda: 0.0)
    metrics.start(prompt_tokens=100)
    metrics.observe(record())
    telemetry = Telemetry(
        config,
        metrics,
        dispatcher,
        placer,
        lambda: 0.0,
        lambda: Router._index_gauges(router),
    )

    async def known() -> None:
        telemetry.decision = DECISION if config.autoscaling.policy == "goodput" else None

    telemetry.refresh_decision = known
    text = asyncio.run(telemetry.render()).decode()
    assert metrics.errors == 0
    return text


def test_every_metric_of_rules_and_panels_is_exported():
    lines = expose(CONFIG, list(Role)).splitlines()
    exported = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    rule = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    board = json.loads((MONITORING / "dashboard.json").read_text())
    named = {m for _, expr in expressions(rule) for m in metrics_of(expr)}
    named |= {m for panel in panels(board) for target in panel.get("targets", []) for m in metrics_of(target["expr"])}
    assert len(named) > 40
    assert named - exported == set()


def test_a_pool_without_an_engine_is_a_zero():
    text = expose(parse({}), [Role.DECODE])
    assert 'pdserve_pool_replicas{pool="prefill",state="ready"} 0.0' in text
    assert 'pdserve_pool_replicas{pool="decode",state="ready"} 1.0' in text
