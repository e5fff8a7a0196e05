"""A served cluster whose pools follow the goodput policy, open-loop load, and a look at its decisions."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx

from tests.chaos.run import MODEL, Cluster, config

__all__ = ["MODEL", "Watch", "load", "settings"]

TARGETS = re.compile(r'pdserve_autoscaling_target_replicas\{pool="(\w+)"\} ([0-9.]+)')
REASONS = re.compile(r'pdserve_autoscaling_reason\{pool="(\w+)",reason="([^"]+)"\}')


def settings(port: int, budget: int, most: int = 3) -> dict[str, Any]:
    """1P1D of slow engines: a second for 1,000 prompt tokens, six sequences within the TPOT limit."""
    made = config("simulated", port, prefill=1, decode=1, routers=1)
    for pool in made["pools"].values():
        pool["replicas"] = {"min": 1, "max": most, "initial": 1}
    made["engine"]["simulated"]["linear"] = {
        "fixed_ms": 15,
        "per_sequence_ms": 6,
        "nominal_context_tokens": 500,
        "per_prefill_token_us": 1000,
    }
    # Late requests wait for room as long as the overload lasts; none of them shall run out of time here.
    made["router"]["limits"] = {**made["router"]["limits"], "queue_s": 200}
    made["slo"] = {"ttft_ms": 4000, "tpot_ms": 60}
    made["autoscaling"] = {
        "policy": "goodput",
        "accelerators_max": budget,
        "interval_s": 1,
        "look_back_s": 8,
        "upscale_delay_s": 2,
        "downscale_delay_s": 20,
        "min_samples": 5,
        "startup_s": 10,
    }
    return made


class Watch:
    """Targets, reasons and running replicas, looked at twice a second while a load runs."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        self._cluster, self._http = cluster, http
        self.targets: list[dict[str, float]] = []
        self.reasons: set[tuple[str, str]] = set()
        self.held: list[int] = []

    async def look(self) -> None:
        text = (await self._http.get("/metrics")).text
        targets = {pool: float(n) for pool, n in TARGETS.findall(text)}
        if targets:
            self.targets.append(targets)
            self.reasons |= set(REASONS.findall(text))
        pools = (await self._cluster.status(self._http))["pools"]
        self.held.append(sum(len(pool["replicas"]) for pool in pools.values()))

    async def until(self, done: Any, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            await self.look()
            if self.targets and done(self.targets[-1]):
                return True
            await asyncio.sleep(0.5)
        return False

    def most(self, pool: str) -> float:
        return max(t[pool] for t in self.targets)


async def load(
    http: httpx.AsyncClient, rate_per_s: float, prompt_tokens: int, max_tokens: int, stop: asyncio.Event
) -> list[int]:
    """Open loop: nobody waits for an answer. Returns the statuses."""
    asks: list[asyncio.Task[int]] = []
    number = 0

    async def ask(seed: int) -> int:
        prompt = [300 + (seed * 7919 + 13 * i) % 1600 for i in range(prompt_tokens)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return (await http.post("/v1/completions", json=body)).status_code

    while not stop.is_set():
        number += 1
        asks.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(1 / rate_per_s)
    return await asyncio.gather(*asks)
