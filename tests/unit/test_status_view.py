"""`pdserve status`: what a person sees of a cluster, from the JSON that a router answers with."""

from __future__ import annotations

import io
import json
import time

from rich.console import Console

from cluster.autoscaling.messages import Decision, Observation, PoolDecision, PoolLoad
from cluster.autoscaling.serve_policy import summary
from cluster.commands.status import render
from cluster.messages import Role

QUANTILES = {"p50": 0.1, "p99": None}
GOODPUT = {
    "good": 8,
    "offered": 10,
    "attainment": 0.8,
    "failed": 0,
    "rejected": 1,
    "missed_by_stage": {"prefill_queue": 1, "router_queue": 1, "decode_step": 0},
    "ttft_s": QUANTILES,
    "tpot_s": QUANTILES,
}
ROUTER = {"id": "r0", "policy": "cost", "running_requests": 3, "retries": 0, "migrations": 0}


def shown(autoscaling: dict | None) -> str:
    console = Console(width=150, record=True, file=io.StringIO())
    status = {"name": "c", "model": "m", "engine": "vllm", "router": ROUTER, "goodput": GOODPUT}
    console.print(
        render(status | {"pools": {"prefill": {"layout": {"tp": 1}, "replicas": []}}, "autoscaling": autoscaling})
    )
    return console.export_text()


def test_goodput_and_misses_by_stage():
    text = shown(None)
    assert "8 good of 10 offered, attainment 80.0%" in text
    assert "prefill queue 1, router queue 1" in text
    assert "autoscaling" not in text
    assert "no replica" in text


def test_the_last_decisions_with_their_reasons():
    now = time.time()
    pools = {
        Role.PREFILL: PoolDecision(3, "queue", "6.4 s of prefill work waits", 2.9),
        Role.DECODE: PoolDecision(1, "steady", "200 output tokens/s", None),
    }
    seen = Observation(decode=PoolLoad(1), prefill=PoolLoad(1, starting=2))
    decision = summary(Decision(pools, ("unattainable: 12% of requests",), {}), seen, now - 3, now - 3)
    change = {"at_s": now - 60, "pool": "prefill", "from": 1, "to": 3, "reason": "queue", "why": "6.4 s waits"}
    text = shown(json.loads(json.dumps(decision | {"changes": [change] * 9, "change_counts": {"prefill.up": 9}})))
    assert "decided 3 s ago" in text
    assert "queue: 6.4 s of prefill work waits" in text
    assert text.count("prefill 1 -> 3: queue") == 5
    assert "warning: unattainable" in text
