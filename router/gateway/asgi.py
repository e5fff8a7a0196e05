"""The shapes of ASGI, and errors in the form that OpenAI clients know."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class HttpError(Exception):
    """An answer that ends the request here.

    Args:
        status: HTTP status.
        message: one line for the client: field, value, bound, remedy. Holds no secret.
        param: the field of the body or the header that is wrong.
        headers: further response headers.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.message, self.param, self.headers = status, message, param, headers or {}
        super().__init__(message)

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`, as vLLM's own server writes it."""
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()


async def answer(send: Send, error: HttpError) -> None:
    """Send an error as the whole response."""
    body = error.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a header, None without one.

    Raises:
        HttpError: it is given more than once, so that two readers could see two values.
    """
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise HttpError(400, f"header {name.decode()} is given {len(values)} times", param=name.decode())
    return values[0].decode("latin-1").strip() if values else None
