"""The start of a streamed answer: an honest status, and signs of life while a long prompt is computed.

A server-sent-event response announces 200 before the first token exists. Here its start waits for the first event that
says something of the answer: if that is an error, the client gets the error's status and body instead of a 200. With
keep-alive on, the start goes out after `keep_alive_s`, followed by comments that clients ignore and proxies see, until
the next event; an error after that can only be an event. Without it, a chunk that follows the first costs one call and
no work.

What vLLM's layer makes of an error depends on the API. `/v1/completions` and `/v1/chat/completions` have an event for
it. `/v1/responses` raises, after two events that only say that the request was read. `/v1/messages` has an event that
tells of a chunk it could not read. For these two the error comes from whoever ended the request (`Reply.error`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any

from cluster.errors import PdserveError
from router.gateway.asgi import TYPES, App, HttpError, Message, Receive, Scope, Send, answer
from router.gateway.context import current

_COMMENT: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
_ERROR_EVENT = b'data: {"error"'
_NAMED_ERROR = b"event: error\n"
_OPENING = (b"event: response.created\n", b"event: response.in_progress\n")
_RETRY_AFTER_S = 1
_RETRIED = frozenset({429, 503})
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
_MESSAGES_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LAST = 2**31 - 1
"""Number of an error event of `/v1/responses`: above all before it, which nobody counts here."""


class MessagesError(HttpError):
    """An error in the form that clients of `/v1/messages` know."""

    def body(self) -> bytes:
        error = {"type": _MESSAGES_TYPES.get(self.status, "api_error"), "message": self.message}
        return json.dumps({"type": "error", "error": error}).encode()


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
        stream = _Stream(send, self._keep_alive_s, scope["path"])
        try:
            return await self._app(scope, receive, stream.send)
        except Exception:
            await stream.close()
            if not await stream.tell():
                raise
        finally:
            await stream.close()


class _Stream:
    """One response.

    Attributes:
        _held: the start of an event stream, with events that say nothing of the answer, while it waits.
        _streams: it is an event stream.
        _passing: everything goes to the client as it is.
        _ending: the request has failed, the application has not said so yet.
        _replaced: the client has been told; what else the application sends is dropped.
        _silent: cleared by every event.
    """

    def __init__(self, send: Send, keep_alive_s: float | None, path: str) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._path = path
        self._reply = current().reply
        self._held: list[Message] = []
        self._streams = self._passing = self._ending = self._replaced = False
        self._silent = True
        self._ticker: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # the ticker and the application send to one client
        if path == _MESSAGES:
            self._reply.on_error = self._look_again

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

    async def tell(self) -> bool:
        """Tell the client what ended its request where the application raised; False where there is nothing to tell."""
        error = self._reply.error
        if error is None or not self._streams or self._replaced:
            return False
        if self._held:
            await self._answer(self._as_http(error))
        else:
            await self._end(self._as_http(error))
        return True

    async def _forward(self, message: Message) -> None:
        if self._passing:
            await self._send(message)
        elif self._held:
            await self._first_event(message)
        elif self._replaced:
            pass  # the answer was sent; what the application adds to its stream has no reader
        elif self._ending:
            await self._last_events(message)
        elif message["type"] == "http.response.start" and _is_event_stream(message):
            self._held, self._streams = [message], True
            if self._keep_alive_s is not None:
                self._ticker = asyncio.create_task(self._tick(self._keep_alive_s))
        else:
            self._passing = message["type"] == "http.response.start"
            await self._send(_with_retry_after(message) if self._passing else message)

    async def _first_event(self, message: Message) -> None:
        body = message.get("body", b"")
        if message.get("more_body", False):
            if not body:
                return
            if body.startswith(_OPENING):
                self._held.append(message)
                return
        error = self._error_of(body)
        if error is not None:
            await self._answer(error)
            return
        await self._release()
        await self._send(message)

    async def _last_events(self, message: Message) -> None:
        """What the application still says after its request has failed; its own error event is replaced."""
        error = self._reply.error
        if error is not None and message.get("body", b"").startswith(_NAMED_ERROR):
            await self._end(self._as_http(error))
        else:
            await self._send(message)

    async def _release(self) -> None:
        held, self._held = self._held, []
        self._passing = True
        for message in held:
            await self._send(message)
        if self._reply.error is not None and self._path == _MESSAGES:
            self._look_again()

    async def _answer(self, error: HttpError) -> None:
        """The error is the whole response."""
        self._held, self._replaced = [], True
        await answer(self._send, error)

    async def _end(self, error: HttpError) -> None:
        """The error is the last event of a response that has begun."""
        self._passing = self._ending = False
        self._replaced = True
        body = _event(self._path, error)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _look_again(self) -> None:
        """The request has failed: from now on every event is looked at."""
        if self._passing:
            self._passing, self._ending = False, True

    async def _tick(self, every_s: float) -> None:
        while not self._replaced:
            await asyncio.sleep(every_s)
            async with self._turn:
                if self._held:
                    await self._release()
                if self._silent and self._passing:
                    await self._send(_COMMENT)
                self._silent = True

    async def close(self) -> None:
        self._reply.on_error = None
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await ticker

    def _error_of(self, body: bytes) -> HttpError | None:
        """The error that an event is; None where it is none."""
        if body.startswith(_ERROR_EVENT):
            return _error_in(body.split(b"\n", 1)[0], HttpError)
        if not body.startswith(_NAMED_ERROR):
            return None
        if self._reply.error is not None:
            return self._as_http(self._reply.error)
        return _error_in(body.removeprefix(_NAMED_ERROR).split(b"\n", 1)[0], self._kind)

    def _as_http(self, error: PdserveError) -> HttpError:
        return _http_error(self._kind, error.status, str(error))

    @property
    def _kind(self) -> type[HttpError]:
        return MessagesError if self._path == _MESSAGES else HttpError


def _is_event_stream(message: Message) -> bool:
    headers: list[tuple[bytes, bytes]] = message.get("headers", [])
    return any(k.lower() == b"content-type" and v.lower().startswith(b"text/event-stream") for k, v in headers)


def _error_in(line: bytes, kind: type[HttpError]) -> HttpError | None:
    """The error of `data: {"error": {...}}`, None if it is not one."""
    try:
        event: Any = json.loads(line.removeprefix(b"data: "))
        given = event["error"]
        code = given.get("code")
        message = str(given["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return _http_error(kind, code, message, given.get("param"))


def _http_error(kind: type[HttpError], code: Any, message: str, param: str | None = None) -> HttpError:
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    retry = {"retry-after": _retry_after()} if status in _RETRIED else None
    return kind(status, message, param=param, headers=retry)


def _event(path: str, error: HttpError) -> bytes:
    """An error as an event, in the form that clients of the path know."""
    if path == _RESPONSES:
        code = TYPES.get(error.status, "InternalServerError")
        event = {"type": "error", "code": code, "message": error.message, "param": None, "sequence_number": _LAST}
        return _NAMED_ERROR + b"data: " + json.dumps(event).encode() + b"\n\n"
    named = _NAMED_ERROR if path == _MESSAGES else b""
    return named + b"data: " + error.body() + b"\n\n"


def _with_retry_after(start: Message) -> Message:
    """vLLM's layer turns our errors into answers, and has no place for this header."""
    headers: list[tuple[bytes, bytes]] = start.get("headers", [])
    if start["status"] not in _RETRIED or any(name.lower() == b"retry-after" for name, _ in headers):
        return start
    return {**start, "headers": [*headers, (b"retry-after", _retry_after().encode())]}


def _retry_after() -> str:
    seconds = current().reply.retry_after_s
    return str(_RETRY_AFTER_S if seconds is None else max(_RETRY_AFTER_S, math.ceil(seconds)))
