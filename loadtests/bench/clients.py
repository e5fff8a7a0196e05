"""`make bench-client`: what measuring costs. CPU per streamed token of our two clients, httpx and aiohttp.

A scripted server in another process answers with a fixed stream; each client reads it with 16 streams at a time,
parses the events and stamps every token. CPU is this process's own, so the server's share is not in it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from loadtests.chunks import decode_chunk
from loadtests.client import Client
from loadtests.endpoint import Endpoint
from loadtests.sample import Sample
from loadtests.scripted_server import serve, stream
from loadtests.sse import SseParser

TOKENS, STREAMS, ROUNDS = 256, 16, 3
BODY = b'{"model": "scripted", "stream": true}'

Read = Callable[[str], Awaitable[int]]


async def ours(url: str) -> int:
    client = Client(Endpoint(url, "scripted"), time.perf_counter)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
    try:
        many = [client.send(Sample(i, time.perf_counter()), head + BODY) for i in range(STREAMS)]
        return sum(s.times.tokens for s in await asyncio.gather(*many))
    finally:
        await client.close()


def _tokens(parser: SseParser, data: bytes, stamps: list[float]) -> int:
    found = 0
    for event in parser.feed(data):
        if event.data != b"[DONE]" and decode_chunk(event.data).choices:
            stamps.append(time.perf_counter())
            found += 1
    return found


async def with_httpx(url: str) -> int:
    async with httpx.AsyncClient(timeout=60) as client:

        async def one() -> int:
            parser, stamps, found = SseParser(), [0.0], 0
            async with client.stream("POST", url + "/v1/chat/completions", content=BODY) as response:
                async for data in response.aiter_raw():
                    found += _tokens(parser, data, stamps)
            return found

        return sum(await asyncio.gather(*(one() for _ in range(STREAMS))))


async def with_aiohttp(url: str) -> int:
    async with aiohttp.ClientSession() as client:

        async def one() -> int:
            parser, stamps, found = SseParser(), [0.0], 0
            async with client.post(url + "/v1/chat/completions", data=BODY) as response:
                async for data in response.content.iter_any():
                    found += _tokens(parser, data, stamps)
            return found

        return sum(await asyncio.gather(*(one() for _ in range(STREAMS))))


def measure(read: Read, url: str) -> float:
    """CPU microseconds per token; the best round, the others carry imports and other people's caches."""
    best = float("inf")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        for _ in range(ROUNDS):
            before = time.process_time()
            tokens = loop.run(_run(read, url))
            if tokens != TOKENS * STREAMS:
                raise RuntimeError(f"{tokens} tokens instead of {TOKENS * STREAMS}")
            best = min(best, (time.process_time() - before) / tokens)
    return 1e6 * best


async def _run(read: Read, url: str) -> int:
    return await read(url)


def measure_gevent(url: str) -> float:
    """The Locust side runs in a process of its own: gevent and asyncio do not share one."""
    done = subprocess.run(
        [sys.executable, "-m", "loadtests.bench.clients", url], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def _gevent_main(url: str) -> None:
    import gevent

    from loadtests.locust_client import GeventClient

    best = float("inf")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
    for _ in range(ROUNDS):
        client = GeventClient(Endpoint(url, "scripted"))
        before = time.process_time()
        jobs = [gevent.spawn(client.send, Sample(i, time.perf_counter()), head + BODY) for i in range(STREAMS)]
        gevent.joinall(jobs)
        best = min(best, (time.process_time() - before) / sum(j.value.times.tokens for j in jobs))
        client.close()
    print(1e6 * best)


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        with serve(lambda *_: stream(TOKENS, gap_s=0.001)) as server:
            print(server.url, flush=True)
            sys.stdin.read()
        return 0
    if len(sys.argv) > 1:
        _gevent_main(sys.argv[1])
        return 0
    command = [sys.executable, "-m", "loadtests.bench.clients", "--serve"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    try:
        url = child.stdout.readline().strip()
        readers: dict[str, Read] = {"pdserve": ours, "aiohttp": with_aiohttp, "httpx": with_httpx}
        cost = {name: measure(read, url) for name, read in readers.items()}
        cost["pdserve under gevent (Locust)"] = measure_gevent(url)
    finally:
        child.stdin.close()
        child.wait(10)
    table = Table("client", "CPU us per token", "tokens/s on one core")
    for name, us in sorted(cost.items(), key=lambda row: row[1]):
        table.add_row(name, f"{us:.1f}", f"{1e6 / us:,.0f}")
    Console().print(table)
    print(
        json.dumps({f"{name.split()[-1].strip('()').lower()}_us_per_token": round(us, 2) for name, us in cost.items()})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
