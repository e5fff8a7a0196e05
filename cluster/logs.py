"""Logs of a replica: ours beside Serve's own, in the replica's log file."""

from __future__ import annotations

import logging

OURS = ("cluster", "router", "prefill_pool", "decode_pool", "kv_transfer")


def use_serve_log(level: str) -> None:
    """Send our loggers to the handlers of Serve's replica log; Serve's own handlers decide where they go."""
    serve = logging.getLogger("ray.serve")
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        for handler in serve.handlers:
            if handler not in logger.handlers:
                logger.addHandler(handler)
    access = logging.getLogger("asyncio")
    access.handlers = list(serve.handlers) or access.handlers
