"""Moving KV between two engines: how many bytes, over which link, in how many seconds.

Bytes are whole blocks of every layer. A transfer takes `latency + bytes / bandwidth`; ranks of a tensor-parallel
group send their shares side by side, each over its own adapter.
"""

from __future__ import annotations

import math

from cluster.errors import UserError
from cluster.perf.hardware import Hardware, Link
from cluster.perf.model_shape import ModelShape

TCP = Link("TCP, 25 GbE", 25e9 / 8 * 0.9, 50e-6)
"""Where no RDMA adapter exists: 25 Gbit/s Ethernet at 90% after framing."""


def transfer_bytes(shape: ModelShape, tokens: int, block_tokens: int = 16, kv_dtype: str | None = None) -> int:
    """Bytes of a prompt's KV over all ranks: whole blocks, each KV head once (replicas need no second copy)."""
    return shape.kv_bytes(tokens, block_tokens, tp=1, pp=1, kv_dtype=kv_dtype)


def transfer_s(kv_bytes: int, link: Link, ranks: int = 1) -> float:
    """Seconds from the first to the last byte with `ranks` adapters side by side."""
    if kv_bytes < 0 or ranks < 1:
        raise ValueError(f"kv_bytes {kv_bytes} and ranks {ranks} must be positive")
    return link.latency_s + kv_bytes / (link.bytes_per_s * ranks)


def link_between(device: Hardware, kind: str) -> Link:
    """`nvlink` (same node), `rdma` (the device's adapter) or `tcp`."""
    links = {"nvlink": device.link, "rdma": device.nic, "tcp": TCP}
    if kind not in links:
        raise UserError(f"link: {kind!r} is not known; use one of {', '.join(links)}")
    return links[kind]


def blocks(tokens: int, block_tokens: int) -> int:
    """Whole blocks that hold `tokens`."""
    return math.ceil(tokens / block_tokens)
