"""This node's address as Ray sees it."""

from __future__ import annotations

import ray.util


def node_ip() -> str:
    """An address that other nodes of the cluster reach."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
