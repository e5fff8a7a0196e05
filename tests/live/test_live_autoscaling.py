"""The goodput policy under Ray Serve with simulated engines: the right pool grows, the budget holds, it shrinks again.

Kinds: wrong bottleneck; runaway; budget exceeded; decisions without a reason.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from autoscaled import Watch, load, settings
from rich.console import Console

from cluster.goodput.catalogue import CATALOGUE
from tests.chaos.run import Cluster

pytestmark = [pytest.mark.live, pytest.mark.slow]

BUDGET = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("autoscaling")
    running = Cluster(settings(8196, BUDGET, most=7), folder, Console(stderr=True))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=500)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
        yield client


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
        cluster, http, lambda t: t["prefill"] >= 2, 60, rate_per_s=2, prompt_tokens=1000, max_tokens=2
    )
    assert reached, watch.targets[-5:]
    assert watch.most("decode") == 1
    assert set(statuses) == {200}
    assert max(watch.held) <= BUDGET
    assert {reason for pool, reason in watch.reasons if pool == "prefill"} & {"demand", "queue", "steady", "misses"}
    await back_to_one(cluster, http)


async def test_output_heavy_traffic_grows_decode_and_not_prefill(cluster, http):
    watch, statuses, reached = await under_load(
        cluster, http, lambda t: t["decode"] >= 2, 90, rate_per_s=4, prompt_tokens=50, max_tokens=200
    )
    assert reached, watch.targets[-5:]
    assert watch.most("prefill") == 1
    assert set(statuses) == {200}
    assert max(watch.held) <= BUDGET
    await back_to_one(cluster, http)


async def test_the_budget_holds_when_both_pools_want_more(cluster, http):
    """Demand is for about twelve replicas."""
    watch, stop = Watch(cluster, http), asyncio.Event()
    loads = [
        asyncio.create_task(load(http, 5, 1000, 2, stop)),
        asyncio.create_task(load(http, 6, 50, 200, stop)),
    ]
    await watch.until(lambda t: sum(t.values()) >= BUDGET, 60)
    await watch.until(lambda t: False, 20)
    stop.set()
    statuses = [status for many in await asyncio.gather(*loads) for status in many]
    print(f"targets {watch.targets[-1]}, most held {max(watch.held)}, reasons {sorted(watch.reasons)}")
    assert set(statuses) == {200}
    assert max(t["prefill"] + t["decode"] for t in watch.targets) == BUDGET
    assert max(watch.held) <= BUDGET
    assert "budget" in {reason for _, reason in watch.reasons}
    assert min(watch.targets[-1].values()) >= 2, "both pools have a share"


def watched(url: str, seconds: float) -> tuple[int, str]:
    """What `pdserve status --watch` writes to a terminal in that time, ended by Ctrl-C, with its exit status."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "cluster.cli", "status", "--url", url, "--watch", "--interval-s", "0.5"]
    terminal = os.environ | {"COLUMNS": "160", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=terminal)
    os.close(slave)
    seen, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.2)[0]:
            if not seen:
                deadline = time.monotonic() + seconds
            seen += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    status = process.wait(20)
    os.close(master)
    return status, seen.decode(errors="replace")


async def test_one_endpoint_shows_everything_and_status_watch_follows(cluster, http):
    text = (await http.get("/metrics")).text
    shown = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    # Regret needs `placement.shadow`; everything else is there after the loads above.
    assert set(CATALOGUE) - shown - {"pdserve_regret_seconds_total"} == set()
    status, seen = await asyncio.to_thread(watched, cluster.url, 6.0)
    print(seen[-3000:])
    assert status == 0
    assert len(re.findall(r"autoscaling, decided \d+ s ago", seen)) >= 3
    for word in ("goodput", "missed", "prefill", "decode", "->"):
        assert word in seen
