"""What a router and a worker say to each other over their link: msgpack arrays, decoded into structs.

A leg is opened by a Serve call (`LegCall`), which stays open until the leg has ended: it is what Serve counts and
drains. What the leg produces travels over the link, all requests of one engine step in one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cluster.engine.base import EngineDelta, EngineRequest

LegKind = Literal["prefill", "serve"]
"""`prefill` ends in a ticket and keeps its KV until it is settled; `serve` generates."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """Where a worker connects its link. `secret` proves that the worker learnt the address from a Serve call."""

    router_id: str
    host: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True)
class LegCall:
    """The argument of the Serve call that opens a leg. `worker_id` is checked: a call never runs elsewhere."""

    worker_id: str
    incarnation: str
    kind: LegKind
    request: EngineRequest
    router: RouterAddress


@dataclass(frozen=True, slots=True)
class LegEnd:
    """The answer of that call: how the leg ended and how many tokens it gave."""

    outcome: Literal["done", "pulled", "released", "cancelled", "failed"]
    tokens: int = 0


class Output(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request's share of one engine step, or its error. `offset_tokens` counts what was sent before."""

    request_id: str
    offset_tokens: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    external_tokens: int | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    transfer_s: float | None = None
    transfer_bytes: int | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    error: tuple[str, str] | None = None

    def delta(self) -> EngineDelta:
        return EngineDelta(
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            self.cached_tokens,
            self.external_tokens,
            self.queue_s,
            self.compute_s,
            self.logprobs,
            self.prompt_logprobs,
            self.kv_transfer_params,
            self.transfer_s,
            self.transfer_bytes,
        )


class Load(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The load of a worker after a step; becomes a WorkerSnapshot."""

    state: str
    steps: int
    running: int
    waiting: int
    queued_prefill_tokens: int
    kv_used_blocks: int
    open_leases: int


class Hello(msgspec.Struct, tag=0, array_like=True):
    """First message of a worker."""

    secret: str
    worker_id: str
    incarnation: str


class Step(msgspec.Struct, tag=1, array_like=True):
    """Worker to router: what one engine step gave this router's requests, and the load after it."""

    outputs: list[Output]
    load: Load | None = None


class Settle(msgspec.Struct, tag=2, array_like=True):
    """Router to worker: these leases are over. With `pulled` the decode side holds the KV; else free it now."""

    request_ids: list[str]
    pulled: bool


class Cancel(msgspec.Struct, tag=3, array_like=True):
    """Router to worker: stop these legs, also those whose call has not arrived yet."""

    request_ids: list[str]


Message = Hello | Step | Settle | Cancel

encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Message)
