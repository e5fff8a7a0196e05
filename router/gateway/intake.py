"""Closes the door of a router that is about to end: new requests are sent elsewhere, running ones go on."""

from __future__ import annotations

from collections.abc import Callable

from router.gateway.asgi import App, HttpError, Receive, Scope, Send, answer
from router.gateway.auth import OPERATOR_PATHS

_ANSWERED = OPERATOR_PATHS | {"/metrics", "/health"}


class Intake:
    """503 with Retry-After for everything but the router's own pages once `closed()` is true."""

    def __init__(self, app: App, closed: Callable[[], bool]) -> None:
        self._app = app
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._closed() and scope["path"] not in _ANSWERED:
            headers = {"retry-after": "1", "connection": "close"}
            return await answer(send, HttpError(503, "this router is shutting down", headers=headers))
        return await self._app(scope, receive, send)
