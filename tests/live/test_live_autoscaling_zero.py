"""Scale to zero and back, and a decode pool without KV, under Ray Serve with simulated engines.

Kinds: a request that meets nobody is lost; the wrong pool grows because TTFT is what misses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from autoscaled import MODEL, Watch, load, settings
from rich.console import Console

from tests.chaos.run import Cluster

pytestmark = [pytest.mark.live, pytest.mark.slow]

# Of 16 tokens: one engine holds three of the long requests below, from their first token to their last.
KV_BLOCKS = 128
PROMPT_TOKENS, OUTPUT_TOKENS = 560, 96


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = settings(8197, budget=4)
    for pool in made["pools"].values():
        pool["replicas"] = {"min": 0, "max": 3, "initial": 1}
    made["engine"]["simulated"] |= {"max_num_seqs": 64}
    made["pools"]["decode"]["simulated"] = {"kv_blocks": KV_BLOCKS}
    # Prompts are cheap, so that KV is all that is short.
    made["engine"]["simulated"]["linear"] |= {"per_prefill_token_us": 200}
    made["autoscaling"] |= {"downscale_delay_s": 10}
    folder: Path = tmp_path_factory.mktemp("zero")
    running = Cluster(made, folder, Console(stderr=True))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=150, limits=httpx.Limits(max_connections=300)) as client:
        yield client


async def test_both_pools_leave_and_the_next_request_is_served(cluster, http):
    body = {"model": MODEL, "prompt": list(range(400, 500)), "max_tokens": 20, "temperature": 0}
    first = (await http.post("/v1/completions", json=body)).json()
    watch = Watch(cluster, http)
    assert await watch.until(lambda t: t == {"prefill": 0, "decode": 0}, 120), watch.targets[-3:]
    deadline = time.monotonic() + 60
    while any(pool["replicas"] for pool in (await cluster.status(http))["pools"].values()):
        assert time.monotonic() < deadline, "replicas did not leave"
        await asyncio.sleep(0.5)
    began = time.monotonic()
    answer = await http.post("/v1/completions", json=body)
    print(f"from zero to an answer: {time.monotonic() - began:.1f} s")
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == first["choices"][0]["text"]
    await watch.look()
    # One request is worth one engine of each pool.
    assert watch.targets[-1] == {"prefill": 1, "decode": 1}


async def test_a_decode_pool_without_kv_grows_although_first_tokens_are_late(cluster, http):
    """A burst fills decode's KV before the policy can act, so that the first tokens of those behind it are missed."""
    stop, watch = asyncio.Event(), Watch(cluster, http)
    before = (await cluster.status(http))["goodput"]["missed_by_stage"]
    burst = [asyncio.create_task(load(http, 5, PROMPT_TOKENS, OUTPUT_TOKENS, stop))]
    await asyncio.sleep(2.5)
    stop.set()
    stop_steady = asyncio.Event()
    burst.append(asyncio.create_task(load(http, 0.5, PROMPT_TOKENS, OUTPUT_TOKENS, stop_steady)))
    reached = await watch.until(lambda t: t["decode"] >= 2, 90)
    await watch.until(lambda t: False, 10)
    stop_steady.set()
    statuses = [status for each in await asyncio.gather(*burst) for status in each]
    await watch.look()
    goodput = (await cluster.status(http))["goodput"]
    assert reached, watch.targets[-5:]
    assert watch.most("prefill") == 1
    assert set(statuses) == {200}
    missed = {stage: n - before.get(stage, 0) for stage, n in goodput["missed_by_stage"].items()}
    missed = {stage: n for stage, n in missed.items() if n}
    print(f"missed by stage: {missed}, reasons: {sorted(watch.reasons)}, targets {watch.targets[-1]}")
    assert set(missed) <= {"router_queue", "decode_queue"}, "only the first token was late, and by waiting for decode"
    assert sum(missed.values()) >= 2
    assert {reason for pool, reason in watch.reasons if pool == "decode"} & {"kv", "concurrency", "queue", "demand"}
