"""The request as it comes in: sizes, content type, strict JSON, checked fields, and the request's context.

Reads the whole body once, before anything else runs, and hands it on unread. Nothing here sees the response.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from cluster.messages import Slo
from router.gateway.asgi import App, HttpError, Message, Receive, Scope, Send, answer, header
from router.gateway.checks import DROPPED, DROPPED_HEADERS, check_body, check_integers, clamp_priority
from router.gateway.context import DEFAULT_TENANT, RequestContext, enter
from router.gateway.fields import BodyLimits
from router.gateway.salt import namespace_salt
from router.gateway.strict_json import parse_object

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_SLO_MS = 24 * 3600 * 1000.0
_JSON = re.compile(r"application/(json|[a-z0-9.+-]+\+json)(\s*;.*)?", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]{1,18}")
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_NOT_PASSED_ON = DROPPED_HEADERS | {b"content-length", b"transfer-encoding"}
_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class CheckBody:
    """Checks every request before vLLM sees it.

    Args:
        limits: caps on the fields of a body.
        max_body_bytes: cap on its size, whatever it claims.
        slo: the cluster's limits; a request may set its own with `x-slo-ttft-ms` and `x-slo-tpot-ms`.
        separate_tenants: whether each tenant has its own namespace in the prefix cache, and its share of the engines.
        priority_min: with `separate_tenants`, the least priority of a request of any but `operators`.
        body_timeout_s: how long a client may take to send its body.
    """

    def __init__(
        self,
        app: App,
        limits: BodyLimits,
        max_body_bytes: int,
        *,
        slo: Slo,
        separate_tenants: bool,
        priority_min: int = 0,
        operators: Iterable[str] = (),
        body_timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._slo = slo
        self._clock = clock
        self._separate_tenants = separate_tenants
        self._priority_min, self._operators = priority_min, frozenset(operators)
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        arrival_s = self._clock()
        try:
            _check_headers(scope["headers"])
            salt = None
            raw: bytes | None = None
            if scope["method"] in ("POST", "PUT", "PATCH"):
                _check_content(scope)
                raw = await self._read(scope, receive)
                if raw is None:
                    return None
                raw, salt = self._check(scope, raw)
            enter(self._context(scope, salt, arrival_s))
        except HttpError as error:
            return await answer(send, error)
        if raw is None:
            return await self._app(scope, receive, send)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _NOT_PASSED_ON]
        scope["headers"] = [*headers, (b"content-length", str(len(raw)).encode())]
        return await self._app(scope, _replay(raw, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None if the client left."""
        claimed = header(scope, b"content-length")
        if claimed is not None:
            if not _DIGITS.fullmatch(claimed):
                raise HttpError(400, "content-length is not a number", param="content-length")
            if int(claimed) > self._max_body_bytes:
                raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self._max_body_bytes:
                        raise self._too_large()
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {self._body_timeout_s:g} s") from None

    def _check(self, scope: Scope, raw: bytes) -> tuple[bytes, str | None]:
        """The body to hand on, and the client's salt."""
        path = scope["path"]
        if path == "/ping" and not raw:
            return raw, None
        body = parse_object(raw)
        check_body(path, body, self._limits)
        if _LONG_NUMBER.search(raw):
            check_integers(body)
        client_salt = body.pop("cache_salt", None)
        changed = client_salt is not None
        for name in DROPPED:
            if name in body:
                del body[name]
                changed = True
        if self._separate_tenants and _tenant(scope) not in self._operators:
            changed |= clamp_priority(body, self._priority_min)
        salt = self._salt(scope, client_salt)
        if salt is not None and path in _SALTED:
            body["cache_salt"] = salt
            changed = True
        return (json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() if changed else raw), client_salt

    def _salt(self, scope: Scope, client_salt: str | None) -> str | None:
        if not self._separate_tenants and client_salt is None:
            return None
        return namespace_salt(_tenant(scope), client_salt)

    def _slo_of(self, scope: Scope) -> Slo | None:
        ttft_s, tpot_s = _slo_s(scope, b"x-slo-ttft-ms"), _slo_s(scope, b"x-slo-tpot-ms")
        if ttft_s is None and tpot_s is None:
            return None
        default = self._slo
        return Slo(ttft_s or default.ttft_s, tpot_s or default.tpot_s, default.itl_p99_s)

    def _context(self, scope: Scope, client_salt: str | None, arrival_s: float) -> RequestContext:
        request_id = header(scope, b"x-request-id") or None
        if request_id is not None and not (
            len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()
        ):
            raise HttpError(400, "x-request-id is not up to 128 printable ASCII characters", param="x-request-id")
        return RequestContext(
            tenant=_tenant(scope),
            cache_salt=self._salt(scope, client_salt),
            slo=self._slo_of(scope),
            arrival_s=arrival_s,
            client_request_id=request_id,
        )

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._max_body_bytes} bytes", headers={"connection": "close"})


def _check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    sizes = [len(name) + len(value) for name, value in headers]
    if len(sizes) > MAX_HEADERS or sum(sizes) > MAX_HEADER_BYTES:
        raise HttpError(
            431,
            f"{len(sizes)} headers of {sum(sizes)} bytes are more than {MAX_HEADERS} or {MAX_HEADER_BYTES} bytes",
        )


def _check_content(scope: Scope) -> None:
    if scope["path"] == "/ping":
        return
    coding = header(scope, b"content-encoding")
    if coding is not None and coding.lower() != "identity":
        raise HttpError(415, "content-encoding is not accepted: send the body as it is", param="content-encoding")
    kind = header(scope, b"content-type")
    if kind is None or not _JSON.fullmatch(kind):
        what = "missing" if kind is None else f"{kind[:80]!r}"
        raise HttpError(415, f"content-type is {what}; send application/json", param="content-type")


def _slo_s(scope: Scope, name: bytes) -> float | None:
    given = header(scope, name)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS or "_" in given:
        label = name.decode()
        raise HttpError(
            400, f"{label} is {given[:40]!r}, not milliseconds above 0 and up to {MAX_SLO_MS:g}", param=label
        )
    return value / 1e3


def _tenant(scope: Scope) -> str:
    tenant: str = scope.get("state", {}).get("tenant", DEFAULT_TENANT)
    return tenant


def _replay(raw: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Any:
        return first.pop() if first else await receive()

    return replay
