"""A part of the vLLM plugin: engines bind the address of their KV events, also where it names a host.

vLLM's publisher binds an address with a wildcard and connects to any other. A wildcard would offer the token ids of
every prompt on all interfaces; connecting reaches nobody, because routers connect too. With this part the host that the
configuration names is bound, and only that.
"""

from __future__ import annotations

BIND_KV_EVENTS = "PDSERVE_BIND_KV_EVENTS"


def bind_kv_events() -> None:
    """Raises AttributeError or ImportError where vLLM moved what this changes."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    if not callable(ZmqEventPublisher._is_bind_endpoint):
        raise AttributeError("ZmqEventPublisher._is_bind_endpoint is not a function")
    ZmqEventPublisher._is_bind_endpoint = staticmethod(_always)  # type: ignore[method-assign]


def _always(endpoint: str) -> bool:
    del endpoint
    return True
