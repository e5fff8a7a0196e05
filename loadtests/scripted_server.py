"""A server that does exactly what a script says: the known truth that a load generator is measured against.

A script is a list of steps per request: bytes to write, pauses, an abrupt end. It runs in a thread of its own, so
tests of asyncio and gevent clients, and of other tools, use the same one. `stream()` builds ordinary answers.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Step = bytes | float | None
"""Bytes are written, a number is slept, None closes the connection at once."""


@dataclass(slots=True)
class Seen:
    """A request as the server saw it: when (seconds from the server's start), headers, JSON body."""

    at_s: float
    headers: dict[str, str]
    body: dict[str, Any]


Script = Callable[[int, Seen], Iterable[Step]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def framed(data: bytes) -> bytes:
    """One HTTP chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str, total: int | None = None, reason: str | None = None, prompt_tokens: int = 0) -> bytes:
    """One token event in the shape of chat completions and completions at once."""
    body: dict[str, Any] = {
        "id": "scripted",
        "choices": [{"index": 0, "text": text, "delta": {"content": text}, "finish_reason": reason}],
    }
    if total is not None:
        body["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": total}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def final_usage(total: int, prompt_tokens: int = 0, cached: int = 0) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": total,
        "total_tokens": total + prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return b"data: " + json.dumps({"id": "scripted", "choices": [], "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def stream(
    tokens: int, *, first_s: float = 0.0, gap_s: float = 0.0, prompt_tokens: int = 0, cached: int = 0
) -> Iterator[Step]:
    """An answer of `tokens` tokens: headers at once, the first token after `first_s`, then one every `gap_s`."""
    yield HEAD
    yield first_s
    for i in range(tokens):
        if i:
            yield gap_s
        yield framed(event("x", i + 1, "length" if i == tokens - 1 else None))
    yield framed(final_usage(tokens, prompt_tokens, cached)) + framed(DONE) + b"0\r\n\r\n"


def refuse(status: int = 503, retry_after_s: int = 1) -> list[Step]:
    body = b'{"error": {"message": "no room"}}'
    head = f"HTTP/1.1 {status} X\r\nretry-after: {retry_after_s}\r\ncontent-length: {len(body)}\r\n\r\n"
    return [head.encode() + body]


@dataclass(slots=True)
class ScriptedServer:
    """Running server. `seen` grows with every request."""

    script: Script
    port: int = 0
    seen: list[Seen] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        if first.startswith("GET"):
            body = json.dumps({"object": "list", "data": [{"id": "scripted", "max_model_len": 4096}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            return True
        seen = Seen(asyncio.get_running_loop().time(), headers, json.loads(raw or b"{}"))
        self.seen.append(seen)
        steps = self.script(len(self.seen) - 1, seen)
        framed_answer = False
        for step in steps:
            if step is None:
                writer.transport.abort()
                return False
            if isinstance(step, bytes):
                framed_answer = framed_answer or b"transfer-encoding" in step or b"content-length" in step
                writer.write(step)
            elif step > 0:
                await writer.drain()
                await asyncio.sleep(step)
        await writer.drain()
        return framed_answer


@contextmanager
def serve(script: Script) -> Iterator[ScriptedServer]:
    """Run a scripted server on a free port of 127.0.0.1 in a thread."""
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop: asyncio.Event = asyncio.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=1024)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listener.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed transports let go of their sockets a turn later

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
