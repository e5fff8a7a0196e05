"""The start of a streamed answer: an honest status, and signs of life while a long prompt is computed.

A server-sent-event response announces 200 before the first token exists. Here its start waits for the first event:
if that is an error, the client gets the error's status and body instead of a 200. With keep-alive on, the start
goes out after `keep_alive_s`, followed by comments that clients ignore and proxies see, until the next event; an
error after that can only be an event. Without it, a chunk that follows the first costs one call and no work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any

from router.gateway.asgi import App, HttpError, Message, Receive, Scope, Send, answer
from router.gateway.context import current

_COMMENT: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
_ERROR_EVENT = b'data: {"error"'
_RETRY_AFTER_S = 1
_RETRIED = frozenset({429, 503})


class StreamStart:
    """Holds the start of an event stream until its first event.

    Args:
        keep_alive_s: silence after which a comment is sent; None = never.
    """

    def __init__(self, app: App, keep_alive_s: float | None = None) -> None:
        self._app = app
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        stream = _Stream(send, self._keep_alive_s)
        try:
            return await self._app(scope, receive, stream.send)
        finally:
            await stream.close()


class _Stream:
    """One response. `_held` is its start while that waits; `_silent` is cleared by every event."""

    def __init__(self, send: Send, keep_alive_s: float | None) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._held: Message | None = None
        self._passing = False
        self._replaced = False
        self._silent = True
        self._ticker: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # the ticker and the application send to one client

    async def send(self, message: Message) -> None:
        if self._ticker is not None:
            async with self._turn:
                self._silent = False
                await self._forward(message)
            if not message.get("more_body", False):
                await self.close()
        elif self._passing:
            await self._send(message)
        else:
            await self._forward(message)

    async def _forward(self, message: Message) -> None:
        if self._passing:
            await self._send(message)
        elif self._held is not None:
            await self._first_event(self._held, message)
        elif self._replaced:
            pass  # the answer was sent; what the application adds to its stream has no reader
        elif message["type"] == "http.response.start" and _is_event_stream(message):
            self._held = message
            if self._keep_alive_s is not None:
                self._ticker = asyncio.create_task(self._tick(self._keep_alive_s))
        else:
            self._passing = message["type"] == "http.response.start"
            await self._send(_with_retry_after(message) if self._passing else message)

    async def _first_event(self, start: Message, message: Message) -> None:
        body = message.get("body", b"")
        if not body and message.get("more_body", False):
            return
        self._held = None
        error = _error_of(body) if body.startswith(_ERROR_EVENT) else None
        if error is not None:
            self._replaced = True
            await answer(self._send, error)
            return
        self._passing = True
        await self._send(start)
        await self._send(message)

    async def _tick(self, every_s: float) -> None:
        while not self._replaced:
            await asyncio.sleep(every_s)
            async with self._turn:
                if self._held is not None:
                    start, self._held = self._held, None
                    self._passing = True
                    await self._send(start)
                if self._silent and self._passing:
                    await self._send(_COMMENT)
                self._silent = True

    async def close(self) -> None:
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await ticker


def _is_event_stream(message: Message) -> bool:
    headers: list[tuple[bytes, bytes]] = message.get("headers", [])
    return any(k.lower() == b"content-type" and v.lower().startswith(b"text/event-stream") for k, v in headers)


def _error_of(body: bytes) -> HttpError | None:
    """The error of an event `data: {"error": {...}}`, None if it is not one."""
    try:
        event: Any = json.loads(body.split(b"\n", 1)[0].removeprefix(b"data: "))
        given = event["error"]
        code = given.get("code")
        message = str(given["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    retry = {"retry-after": _retry_after()} if status in _RETRIED else None
    return HttpError(status, message, param=given.get("param"), headers=retry)


def _with_retry_after(start: Message) -> Message:
    """vLLM's layer turns our errors into answers, and has no place for this header."""
    headers: list[tuple[bytes, bytes]] = start.get("headers", [])
    if start["status"] not in _RETRIED or any(name.lower() == b"retry-after" for name, _ in headers):
        return start
    return {**start, "headers": [*headers, (b"retry-after", _retry_after().encode())]}


def _retry_after() -> str:
    seconds = current().reply.retry_after_s
    return str(_RETRY_AFTER_S if seconds is None else max(_RETRY_AFTER_S, math.ceil(seconds)))
