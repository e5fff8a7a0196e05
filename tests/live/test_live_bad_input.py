"""Every bad request of the table against real engines: always 4xx, soon, and the cluster goes on as if nothing was.

Kinds: one out-of-range number kills the engine; empty prompt; malformed bodies give 500; context-limit arithmetic
and message; caller-chosen request id; stream ends silently (d).
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from bad_bodies import CHAT, COMPLETION, TABLE, Bad

pytestmark = pytest.mark.live

PORT = 8191
URL = f"http://127.0.0.1:{PORT}"
MODEL = "bad-input"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    folder: Path = tmp_path_factory.mktemp("bad-input")
    file = folder / "cluster.yaml"
    settings = {
        "name": "bad-input",
        "model": {"id": "embedded", "served_name": MODEL},
        "router": {"http": {"port": PORT}},
    }
    file.write_text(yaml.safe_dump(settings))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "cluster.cli", "serve", str(file), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline(), (folder / "log").read_text()[-2000:]
                yield psutil.Process(process.pid)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(120)


@pytest.fixture(scope="module")
def http(server: psutil.Process) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=URL, timeout=60) as client:
        yield client


def good(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 4}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 4


def engines(server: psutil.Process) -> dict[int, float]:
    """Replicas and engine processes: pid -> start."""
    found = {}
    for process in server.children(recursive=True):
        title = " ".join(process.cmdline())
        if "ServeReplica" in title or "EngineCore" in title or "VLLM" in title:
            found[process.pid] = process.create_time()
    return found


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def send(http: httpx.Client, bad: Bad) -> httpx.Response:
    return http.request(bad.method, bad.path, content=bad.body.replace(b"MODEL", MODEL.encode()), headers=bad.headers)


def test_bad_requests_get_4xx_and_break_nothing(server: psutil.Process, http: httpx.Client) -> None:
    assert len(TABLE) >= 150
    good(http)
    before = engines(server)
    assert len(before) >= 3
    problems = []
    for bad in TABLE:
        start = time.monotonic()
        response = send(http, bad)
        took_s = time.monotonic() - start
        wanted = bad.status or 400
        right = response.status_code == wanted if bad.status else 400 <= response.status_code < 500
        try:
            error = strict(response.text)["error"]
            right = right and set(error) >= {"message", "type", "param", "code"} and bool(error["message"])
            right = right and error["code"] == response.status_code
        except (ValueError, KeyError, TypeError):
            right = False
        if not right or took_s > 1.0:
            problems.append(f"{bad.name}: {response.status_code} in {took_s:.2f} s: {response.text[:200]}")
        if bad.by != "gateway":
            good(http)
    assert not problems, "\n".join(problems)
    good(http)
    assert engines(server) == before, "a process was restarted"


def test_a_bad_request_costs_no_block_and_no_retry(http: httpx.Client) -> None:
    """Kind: context-limit arithmetic. Rejects touch neither pool."""

    def figures() -> tuple[int, ...]:
        status = http.get("/pdserve/status").json()
        pools = [replica for pool in status["pools"].values() for replica in pool["replicas"]]
        return (status["router"]["retries"], status["router"]["open_legs"], *(r["open_leases"] for r in pools))

    before = figures()
    for bad in TABLE:
        if bad.by == "vllm" or "max_tokens" in bad.name:
            send(http, bad)
    assert figures() == before


def test_the_context_limit_is_exact_and_named(http: httpx.Client) -> None:
    def ask(prompt_tokens: int, **more: object) -> httpx.Response:
        return http.post(COMPLETION, json={"model": MODEL, "prompt": [5] * prompt_tokens, "temperature": 0} | more)

    assert ask(2047, max_tokens=1).status_code == 200
    assert ask(2044, max_tokens=4).status_code == 200
    assert ask(2044, max_tokens=5, ignore_eos=True).json()["usage"]["completion_tokens"] == 4  # vLLM gives what fits
    assert ask(2048, max_tokens=1).status_code == 400
    for response in (ask(2049), ask(3000, stream=True)):
        assert response.status_code == 400, response.text
        assert "2048" in response.json()["error"]["message"]
        assert response.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "' + MODEL.encode() + b'", "prompt": ["a", ""]}'])
def test_empty_and_cut_bodies_do_not_hold_a_connection(http: httpx.Client, body: bytes) -> None:
    for _ in range(20):
        assert http.post(COMPLETION, content=body, headers={"content-type": "application/json"}).status_code < 500
    good(http)


def test_ten_streams_with_one_request_id_each_get_their_own_text(server: psutil.Process) -> None:
    """Kind: caller-chosen request id."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=60) as http:

            async def ask(index: int, headers: dict[str, str]) -> str:
                body = {"model": MODEL, "prompt": [300 + index] * (20 + index), "max_tokens": 12, "temperature": 0,
                        "stream": True, "ignore_eos": True}  # fmt: skip
                text = ""
                async with http.stream("POST", COMPLETION, json=body, headers=headers) as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
                return text

            alone = [await ask(i, {}) for i in range(10)]
            same = await asyncio.gather(*(ask(i, {"x-request-id": "same"}) for i in range(10)))
            assert list(same) == alone

    asyncio.run(main())


def test_control_paths_are_not_there(http: httpx.Client) -> None:
    """Internal endpoints are unreachable from outside."""
    for path in (
        "/inference/v1/generate",
        "/scale_elastic_ep",
        "/v1/load_lora_adapter",
        "/sleep",
        "/docs",
        "/openapi.json",
    ):
        for method in ("GET", "POST"):
            assert http.request(method, path, json={}).status_code == 404
