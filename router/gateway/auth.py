"""Who is asking: API keys, or a header that your own gateway sets."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.config import TenantsConfig
from router.gateway.asgi import App, HttpError, Receive, Scope, Send, answer, header
from router.gateway.context import DEFAULT_TENANT
from router.gateway.keys import TENANT, KeyRing

# Probes and scrapers of the cluster's own network carry no key; these paths tell nothing of any request.
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/-/healthz", "/-/routes"})

# These show every tenant's requests.
OPERATOR_PATHS = frozenset({"/pdserve/status", "/pdserve/records"})


class Authenticate:
    """Puts `tenant` into the scope's state, and takes the credentials out of the headers.

    The key is `Authorization: Bearer KEY` or `x-api-key: KEY`. Nothing behind this sees or can log it.
    """

    def __init__(
        self, app: App, config: TenantsConfig, keys: KeyRing | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._keys = keys
        self._header = config.header.lower().encode("latin-1") if config.header else None
        self._operators = frozenset(config.operators)
        self._clock = clock

    @property
    def separates_tenants(self) -> bool:
        return self._keys is not None or self._header is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            tenant = self._tenant(scope)
            if scope["path"] in OPERATOR_PATHS and self.separates_tenants and tenant not in self._operators:
                raise HttpError(403, f"{scope['path']} is for operators (router.tenants.operators)")
        except HttpError as error:
            return await answer(send, error)
        scope.setdefault("state", {})["tenant"] = tenant
        secret = (b"authorization", b"x-api-key", b"proxy-authorization")
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in secret]
        return await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        if scope["path"] in OPEN_PATHS:
            return DEFAULT_TENANT
        if self._keys is not None:
            return self._tenant_of_key(scope, self._keys)
        if self._header is None:
            return DEFAULT_TENANT
        name = header(scope, self._header)
        if name is None or not TENANT.fullmatch(name):
            wrong = "is missing" if name is None else "is not a tenant's name"
            raise HttpError(401, f"header {self._header.decode()} {wrong}", param=self._header.decode())
        return name

    def _tenant_of_key(self, scope: Scope, keys: KeyRing) -> str:
        presented = header(scope, b"authorization")
        if presented is not None:
            kind, _, presented = presented.partition(" ")
            if kind.lower() != "bearer":
                presented = None
        else:
            presented = header(scope, b"x-api-key")
        tenant = keys.tenant(presented.strip(), self._clock()) if presented else None
        if tenant is None:
            message = "the API key is unknown" if presented else "an API key is needed: `Authorization: Bearer KEY`"
            raise HttpError(401, message, headers={"www-authenticate": "Bearer"})
        return tenant
