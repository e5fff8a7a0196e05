"""The goodput policy under Ray Serve with simulated engines: the right pool grows, the budget holds, it shrinks again.

Kinds: wrong bottleneck; runaway; budget exceeded; decisions without a reason.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.chaos.run import MODEL, Cluster, config

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.slow]

PORT = 8196
BUDGET = 4
TARGETS = re.compile(r'pdserve_autoscaling_target_replicas\{pool="(\w+)"\} ([0-9.]+)')
REASONS = re.compile(r'pdserve_autoscaling_reason\{pool="(\w+)",reason="([^"]+)"\}')


def settings() -> dict[str, Any]:
    made = config("simulated", PORT, prefill=1, decode=1, routers=1)
    for pool in made["pools"].values():
        pool["replicas"] = {"min": 1, "max": 3, "initial": 1}
    made["engine"]["simulated"]["linear"] = {
        "fixed_ms": 15,
        "per_sequence_ms": 2,
        "nominal_context_tokens": 500,
        "per_prefill_token_us": 400,
    }
    made["slo"] = {"ttft_ms": 1500, "tpot_ms": 45}
    made["autoscaling"] = {
        "policy": "goodput",
        "accelerators_max": BUDGET,
        "interval_s": 1,
        "look_back_s": 8,
        "upscale_delay_s": 2,
        "downscale_delay_s": 20,
        "min_samples": 5,
        "startup_s": 10,
    }
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("autoscaling")
    running = Cluster(settings(), folder, Console(stderr=True))
    try:
        running.start()
        yield running
    finally:
        running.stop()
        if running.process is not None and running.process.stdout is not None:
            running.process.stdout.close()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=500)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
        yield client


class Watch:
    """Targets and running replicas, looked at twice a second while a load runs."""

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


async def load(http: httpx.AsyncClient, rate_per_s: float, prompt_tokens: int, max_tokens: int, stop: asyncio.Event):
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


async def under_load(cluster, http, done, within_s: float, **shape) -> tuple[Watch, list[int], bool]:
    watch, stop = Watch(cluster, http), asyncio.Event()
    running = asyncio.create_task(load(http, stop=stop, **shape))
    reached = await watch.until(done, within_s)
    stop.set()
    return watch, await running, reached


async def back_to_one(cluster, http) -> None:
    assert await Watch(cluster, http).until(lambda t: t == {"prefill": 1, "decode": 1}, 120)
    for _ in range(120):
        pools = (await cluster.status(http))["pools"]
        if all(len(pool["replicas"]) == 1 for pool in pools.values()):
            return
        await asyncio.sleep(0.5)
    raise AssertionError("replicas did not leave")


async def test_a_prompt_heavy_burst_grows_prefill_and_not_decode(cluster, http):
    watch, statuses, reached = await under_load(
        cluster, http, lambda t: t["prefill"] >= 2, 60, rate_per_s=2.5, prompt_tokens=1500, max_tokens=2
    )
    assert reached, watch.targets[-5:]
    assert watch.most("decode") == 1
    assert set(statuses) == {200}
    assert max(watch.held) <= BUDGET
    assert {reason for pool, reason in watch.reasons if pool == "prefill"} & {"demand", "queue", "steady", "misses"}
    await back_to_one(cluster, http)


async def test_output_heavy_traffic_grows_decode_and_not_prefill(cluster, http):
    watch, statuses, reached = await under_load(
        cluster, http, lambda t: t["decode"] >= 2, 90, rate_per_s=3, prompt_tokens=50, max_tokens=300
    )
    assert reached, watch.targets[-5:]
    assert watch.most("prefill") == 1
    assert set(statuses) == {200}
    assert max(watch.held) <= BUDGET
    await back_to_one(cluster, http)


async def test_the_budget_holds_when_both_pools_want_more(cluster, http):
    watch, stop = Watch(cluster, http), asyncio.Event()
    loads = [
        asyncio.create_task(load(http, 2.5, 1500, 2, stop)),
        asyncio.create_task(load(http, 3, 50, 300, stop)),
    ]
    await watch.until(lambda t: False, 30)
    stop.set()
    statuses = [status for many in await asyncio.gather(*loads) for status in many]
    assert set(statuses) == {200}
    assert max(t["prefill"] + t["decode"] for t in watch.targets) == BUDGET
    assert max(watch.held) <= BUDGET
