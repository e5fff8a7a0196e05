"""What the gateway knows of the request that is being served; set before vLLM's layer runs.

The layer's own objects carry no tenant. A context variable reaches every coroutine and task that serves the
request, so `current()` may be called wherever the request is handled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from cluster.errors import PdserveError
from cluster.messages import Slo

DEFAULT_TENANT = "default"


@dataclass(slots=True)
class Reply:
    """What is learnt while a request is served and its answer has to say.

    Attributes:
        retry_after_s: for the head of the answer.
        error: the first that ended it.
        on_error: called when it did.
    """

    retry_after_s: float | None = None
    error: PdserveError | None = None
    on_error: Callable[[], None] | None = None

    def fail(self, error: PdserveError) -> None:
        if self.error is None:
            self.error = error
            if self.on_error is not None:
                self.on_error()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Facts that no client can claim for itself, and its checked wishes.

    Attributes:
        tenant: authenticated identity.
        cache_salt: namespace of the prefix cache, from the tenant and the client's salt; None = the shared one.
            It replaces any salt of the body.
        slo: limits of this request where its headers set any; None = the cluster's.
        arrival_s: when its first byte was read, on the router's monotonic clock; None outside of a request.
        client_request_id: only to be echoed and logged; never a key.
    """

    tenant: str = DEFAULT_TENANT
    cache_salt: str | None = None
    slo: Slo | None = None
    arrival_s: float | None = None
    client_request_id: str | None = None
    reply: Reply = field(default_factory=Reply)


_current: ContextVar[RequestContext | None] = ContextVar("pdserve_request", default=None)


def current() -> RequestContext:
    """The context of the running request; defaults outside of one."""
    return _current.get() or RequestContext()


def enter(context: RequestContext) -> None:
    _current.set(context)
