"""Which paths exist for the outside. vLLM's app has more, and they are not for clients.

Its control paths (sleep, pause, LoRA loading, elastic scaling, weight updates, profiling) and those that take raw
sampling parameters or transfer parameters (`/inference/v1/generate`) are answered like any unknown path.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.gateway.asgi import App, HttpError, Receive, Scope, Send, answer

PUBLIC: dict[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset({"POST"}),
    "/v1/completions": frozenset({"POST"}),
    "/v1/responses": frozenset({"POST"}),
    "/v1/messages": frozenset({"POST"}),
    "/v1/messages/count_tokens": frozenset({"POST"}),
    "/v1/models": frozenset({"GET"}),
    "/tokenize": frozenset({"POST"}),
    "/detokenize": frozenset({"POST"}),
    "/health": frozenset({"GET"}),
    "/ping": frozenset({"GET", "POST"}),
    "/version": frozenset({"GET"}),
    "/metrics": frozenset({"GET"}),
}


class PublicRoutes:
    """Refuses everything that is not public: 404, or 405 for a known path with another method.

    Args:
        extra: further paths of the application, for GET.
    """

    def __init__(self, app: App, extra: Iterable[str] = ()) -> None:
        self._app = app
        self._routes = PUBLIC | {path: frozenset({"GET"}) for path in extra}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        path, method = scope["path"], scope["method"]
        allowed = self._routes.get(path)
        if allowed is None:
            return await answer(send, HttpError(404, f"there is no path {path[:200]!r}"))
        if method not in allowed and not (method == "HEAD" and "GET" in allowed):
            listed = ", ".join(sorted(allowed))
            error = HttpError(405, f"{path} takes {listed}, not {method[:20]}", headers={"allow": listed})
            return await answer(send, error)
        return await self._app(scope, receive, send)
