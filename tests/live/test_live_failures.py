"""Processes of a cluster die, hang and come back; what each client sees. Simulated engines under Ray Serve.

Kinds: stream ends silently; retry in mid-stream; dead worker stays attractive; prefill failure is not told to anyone;
peer restarted on the same address; disconnect does not stop generation; no ready prefill.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster.engine.simulation.tokens import TokenStream
from tests.chaos.faults import Processes
from tests.chaos.run import MODEL, VOCAB_HIGH, VOCAB_LOW, Cluster, config, settled

pytestmark = [pytest.mark.live, pytest.mark.slow]

PORT = 8192
PROMPT = list(range(400, 500))
SILENT_S = 2.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("failures")
    settings = config("simulated", PORT, prefill=2, decode=2, routers=1)
    settings["engine"]["simulated"]["linear"]["fixed_ms"] = 25
    running = Cluster(settings, folder, Console(stderr=True))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        await whole(cluster, client)
        yield client


@pytest.fixture
def processes(cluster: Cluster) -> Processes:
    assert cluster.process is not None
    return Processes(cluster.process.pid, "chaos")


async def whole(cluster: Cluster, client: httpx.AsyncClient, within_s: float = 60.0) -> None:
    """Wait until all replicas are there and every pair has met."""
    for _ in range(round(within_s / 0.25)):
        status = await cluster.status(client)
        sizes = [len(pool["replicas"]) for pool in status["pools"].values()]
        if sizes == [2, 2] and all(pair["state"] == "ready" for pair in status["pairs"]):
            return
        await asyncio.sleep(0.25)
    raise AssertionError(f"the cluster did not become whole: {status['pools']} {status['pairs']}")


def right(max_tokens: int) -> list[int]:
    return TokenStream(PROMPT, VOCAB_LOW, VOCAB_HIGH).take(max_tokens)


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    } | more  # fmt: skip


class Stream:
    """What a client sees of one streamed answer."""

    def __init__(self) -> None:
        self.status = 0
        self.tokens: list[int] = []
        self.reasons: list[str] = []
        self.errors: list[dict] = []
        self.usage: dict | None = None
        self.done = False
        self.times: list[float] = []
        self.answer: dict | None = None
        self.headers: httpx.Headers = httpx.Headers()

    async def read(self, client: httpx.AsyncClient, request: dict[str, Any]) -> Stream:
        request = request | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            self.status, self.headers = response.status_code, response.headers
            if response.status_code != 200:
                self.answer = json.loads(await response.aread())
                return self
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))
        return self

    def _take(self, event: dict) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.times.append(time.monotonic())
            if choice.get("finish_reason"):
                self.reasons.append(choice["finish_reason"])

    async def reached(self, tokens: int) -> None:
        for _ in range(4000):
            if len(self.tokens) >= tokens:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"only {len(self.tokens)} of {tokens} tokens came")


async def busy(cluster: Cluster, client: httpx.AsyncClient, processes: Processes, deployment: str) -> int:
    """The process of the replica that runs the only request: the order of replicas and processes is not the same."""
    for _ in range(100):
        status = await cluster.status(client)
        running = [r["id"] for r in status["pools"][deployment]["replicas"] if r["running"]]
        if len(running) == 1:
            break
        await asyncio.sleep(0.01)  # a replica that has just come serves the router's warm-up
    assert len(running) == 1, status["pools"][deployment]
    pids = {replica["id"]: replica["pid"] for replica in status["pools"][deployment]["replicas"]}
    assert pids[running[0]] in [p.pid for p in processes.replicas(deployment)]
    return int(pids[running[0]])


async def test_a_stream_survives_the_death_of_its_decode_worker(cluster, http, processes) -> None:
    """Kind: retry in mid-stream. Equal to an undisturbed run: tokens, usage, one finish reason, [DONE]."""
    stream = Stream()
    task = asyncio.create_task(stream.read(http, body(60)))
    await stream.reached(10)
    os.kill(await busy(cluster, http, processes, "decode"), signal.SIGKILL)
    await task
    assert stream.tokens == right(60)
    assert (stream.reasons, stream.errors, stream.done) == (["length"], [], True)
    assert stream.usage is not None
    assert (stream.usage["prompt_tokens"], stream.usage["completion_tokens"]) == (100, 60)
    assert max(b - a for a, b in zip(stream.times, stream.times[1:], strict=False)) < 2.0


async def test_a_stream_survives_a_decode_worker_that_hangs(cluster, http, processes) -> None:
    stream = Stream()
    task = asyncio.create_task(stream.read(http, body(60)))
    await stream.reached(10)
    pid = await busy(cluster, http, processes, "decode")
    os.kill(pid, signal.SIGSTOP)
    try:
        await task
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stream.tokens == right(60)
    assert (stream.reasons, stream.errors, stream.done) == (["length"], [], True)
    assert max(b - a for a, b in zip(stream.times, stream.times[1:], strict=False)) < SILENT_S + 2.0


async def test_what_cannot_be_moved_ends_with_an_error_event_and_no_finish_reason(cluster, http, processes) -> None:
    """Kinds: stream ends silently (a); retry in mid-stream (seeded sampling)."""
    stream = Stream()
    task = asyncio.create_task(stream.read(http, body(60, seed=5, temperature=1.0)))
    await stream.reached(10)
    os.kill(await busy(cluster, http, processes, "decode"), signal.SIGKILL)
    await task
    assert stream.status == 200
    assert stream.tokens == right(len(stream.tokens))
    assert len(stream.tokens) < 60
    assert stream.reasons == []
    assert len(stream.errors) == 1
    assert stream.errors[0]["code"] == 502


async def test_an_answer_that_is_not_streamed_is_computed_again(cluster, http, processes) -> None:
    task = asyncio.create_task(http.post("/v1/completions", json=body(60, seed=5, n=2, temperature=1.0)))
    await asyncio.sleep(0.7)
    os.kill(await busy(cluster, http, processes, "decode"), signal.SIGKILL)
    response = await task
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [c["token_ids"] for c in answer["choices"]] == [right(60)] * 2
    assert answer["usage"]["completion_tokens"] == 120
    assert answer["usage"]["prompt_tokens"] == 100


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_worker_that_dies_or_hangs_costs_a_retry(cluster, http, processes, how) -> None:
    """Kind: prefill failure is not told to anyone."""
    pid = processes.replicas("prefill")[0].pid
    os.kill(pid, how)
    try:
        started = time.monotonic()
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body(5)) for _ in range(8)))
        took_s = time.monotonic() - started
    finally:
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert [a.status_code for a in answers] == [200] * 8
    assert all(a.json()["choices"][0]["token_ids"] == right(5) for a in answers)
    assert took_s < (1.0 if how == signal.SIGKILL else SILENT_S + 2.0) + 2.0


async def test_without_a_decode_worker_streams_get_a_status_not_a_200(cluster, http, processes) -> None:
    """Kind: stream ends silently (b). Then the replacements serve without a restart of anything else."""
    for replica in processes.replicas("decode"):
        os.kill(replica.pid, signal.SIGKILL)
    # A request that was accepted before would wait for the replacements; one that comes now is told at once.
    while (await cluster.status(http))["pools"]["decode"]["replicas"]:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    stream, plain = await asyncio.gather(Stream().read(http, body(5)), http.post("/v1/completions", json=body(5)))
    assert stream.answer is not None
    for status, headers, answer in (
        (stream.status, stream.headers, stream.answer),
        (plain.status_code, plain.headers, plain.json()),
    ):
        assert status == 503, answer
        assert headers["content-type"].startswith("application/json")
        assert answer["error"]["code"] == status
    await whole(cluster, http)
    assert (await http.post("/v1/completions", json=body(5))).json()["choices"][0]["token_ids"] == right(5)


async def test_a_replacement_is_a_new_peer_for_every_pair(cluster, http, processes) -> None:
    """Kind: peer restarted on the same address."""

    async def replicas() -> set[str]:
        return {r["id"] for pool in (await cluster.status(http))["pools"].values() for r in pool["replicas"]}

    before = await replicas()
    os.kill(processes.replicas("decode")[0].pid, signal.SIGKILL)
    # Idle, so that nothing but Serve tells of it; requests are sent elsewhere at once.
    while await replicas() == before:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await whole(cluster, http)
    assert len(await replicas() - before) == 1
    status = await cluster.status(http)
    assert len(status["pairs"]) == 4
    assert {pair["state"] for pair in status["pairs"]} == {"ready"}


@pytest.mark.parametrize("moment", ["before the first token", "in mid-stream", "of a whole answer"])
async def test_a_client_that_leaves_stops_its_work_within_a_second(cluster, http, moment) -> None:
    """Kind: disconnect does not stop generation. An answer of 1,500 tokens takes 20 s to end by itself."""
    for _ in range(5):
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as leaving:
            stream = Stream()
            whole = moment == "of a whole answer"
            ask = leaving.post("/v1/completions", json=body(1500)) if whole else stream.read(leaving, body(1500))
            task = asyncio.create_task(ask)
            await (stream.reached(5) if moment == "in mid-stream" else asyncio.sleep(0.3 if whole else 0.02))
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    left = await settled(cluster, http, 2.0)
    assert left == {"leases_open": 0, "blocks_leaked": 0, "running": 0}
