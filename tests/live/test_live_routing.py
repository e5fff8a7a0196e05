"""Affinity with real engines: 2 prefill and 2 decode engines of the embedded model, 128-token blocks, real KV events.

Kinds: router key is not the engine's key (predicted against actual); affinity versus load (conversations spread);
index misses events or outlives the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.chaos.run import MODEL, Cluster, config

pytestmark = [pytest.mark.live, pytest.mark.slow]

PORT = 8194
BLOCK = 128
CONVERSATIONS, TURNS = 20, 5
SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 280, 160, 32


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("routing")
    settings = config("vllm", PORT, prefill=2, decode=2, routers=1)
    settings["router"]["openai_arguments"] = ["--enable-prompt-tokens-details"]
    settings["slo"] = {"ttft_ms": 4000, "tpot_ms": 500}
    settings["router"]["tenants"] = {"header": "x-tenant-id"}
    settings["router"]["placement"] |= {"shadow": True, "decision_log": str(folder / "decisions-{router}.jsonl")}
    running = Cluster(settings, folder, Console(stderr=True))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"x-tenant-id": "operator"}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, headers=headers) as client:
        for _ in range(600):
            status = await cluster.status(client)
            ready = [len(pool["replicas"]) for pool in status["pools"].values()] == [2, 2]
            if ready and all(pair["state"] == "ready" for pair in status["pairs"]):
                break
            await asyncio.sleep(0.25)
        yield client


async def turn(http: httpx.AsyncClient, prompt: list[int], name: str) -> tuple[int, list[int]]:
    """(cached tokens by the engine's own count, the answer's ids)."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await http.post("/v1/completions", json=body, headers={"x-request-id": name})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0), list(answer["choices"][0]["token_ids"])


async def placed(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Finished requests by the client's own id."""
    records = (await http.get("/pdserve/records")).json()
    records = records if isinstance(records, list) else records["records"]
    return {r["client_request_id"]: r for r in records if r.get("client_request_id")}


async def test_turns_find_their_blocks_and_conversations_spread(http: httpx.AsyncClient) -> None:
    rng = random.Random(1)
    system = [rng.randrange(300, 1999) for _ in range(SYSTEM_TOKENS)]
    histories = [list(system) for _ in range(CONVERSATIONS)]
    cached: dict[tuple[int, int], int] = {}
    lengths: dict[tuple[int, int], int] = {}
    slots = asyncio.Semaphore(3)

    async def converse(i: int) -> None:
        for t in range(TURNS):
            histories[i] += [rng.randrange(300, 1999) for _ in range(TURN_TOKENS)]
            lengths[i, t] = len(histories[i])
            async with slots:
                cached[i, t], answer = await turn(http, histories[i], f"c{i}-{t}")
            histories[i] += answer

    await asyncio.gather(*(converse(i) for i in range(CONVERSATIONS)))
    later = [(i, t) for i in range(CONVERSATIONS) for t in range(1, TURNS)]
    found = [cached[i, t] >= lengths[i, t - 1] // BLOCK * BLOCK for i, t in later]
    assert sum(found) / len(found) >= 0.95, Counter(found)
    records = await placed(http)
    first = Counter(records[f"c{i}-0"]["prefill_worker"] for i in range(CONVERSATIONS))
    assert max(first.values()) / (CONVERSATIONS / 2) <= 1.5, first
    stays = [records[f"c{i}-{t}"]["prefill_worker"] == records[f"c{i}-0"]["prefill_worker"] for i, t in later]
    assert sum(stays) / len(stays) >= 0.95, Counter(stays)
    mine = [r for name, r in records.items() if name.startswith("c")]
    right = [r["predicted_cached_tokens"] == r["cached_tokens"] for r in mine]
    assert sum(right) / len(right) >= 0.9, [(r["predicted_cached_tokens"], r["cached_tokens"]) for r in mine]


async def test_tenants_share_nothing_on_either_side(http: httpx.AsyncClient) -> None:
    """Whatever salt a client sends: its namespace is its tenant's. Prefill's reuse by the engine's count, decode's by
    the blocks that it need not pull."""
    rng = random.Random(2)
    prompt = [rng.randrange(300, 1999) for _ in range(640)]
    asked: list[str] = []

    async def ask(tenant: str, salt: str | None = None) -> tuple[int, int, str]:
        """(tokens cached by the prefill engine, blocks pulled, decode engine)."""
        asked.append(f"tenants-{len(asked)}")
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        headers = {"x-tenant-id": tenant, "x-request-id": asked[-1]}
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        await asyncio.sleep(0.5)  # events reach the index
        record = (await placed(http))[asked[-1]]
        assert record["path"] == "split"
        cached = int((response.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        assert cached == record["cached_tokens"]
        return cached, record["transfer_blocks"], record["decode_worker"]

    async def ask_until_reused(tenant: str, salt: str | None = None) -> None:
        """The second request finds everything on prefill; on decode too, once it meets the same engine."""
        cached, pulled, engine = await ask(tenant, salt)
        assert (cached, pulled) == (0, 640 // BLOCK)
        engines = {engine}
        for _ in range(6):
            cached, pulled, engine = await ask(tenant, salt)
            assert cached == 512  # the last token is always computed, and with it its block
            if engine in engines:
                assert pulled <= 1
                return
            assert pulled == 640 // BLOCK
            engines.add(engine)
        raise AssertionError("never the same decode engine again")

    await ask_until_reused("a")
    await ask_until_reused("b")
    await ask_until_reused("b", "a")
    await ask_until_reused("a", "narrower")
    await ask_until_reused("ab", "c")
    await ask_until_reused("a", "bc")
