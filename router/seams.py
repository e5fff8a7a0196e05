"""What the dispatcher asks of its neighbours: placement on one side, a client's request on the other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from cluster.engine.base import EngineDelta
from cluster.errors import PdserveError
from cluster.messages import Outcome, Placement, Rejection, Request, RequestRecord, WorkerInfo, WorkerSnapshot


class Placing(Protocol):
    """What the dispatcher asks of placement; `router.placement.Placer` is one."""

    def add_worker(self, info: WorkerInfo, now: float) -> None: ...

    def remove_worker(self, worker_id: str, now: float) -> None: ...

    def pause_worker(self, worker_id: str, now: float) -> None: ...

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float) -> None: ...

    def place(
        self, request: Request, now: float, rng: random.Random, *, exclude: frozenset[str], local_only: bool
    ) -> Placement | Rejection: ...

    def on_prefilled(self, request_id: str, now: float, cached_tokens: int) -> None: ...

    def on_first_token(self, request_id: str, now: float) -> None: ...

    def on_end(self, request_id: str, now: float) -> None: ...

    def observe(self, record: RequestRecord) -> None: ...


class Job(Protocol):
    """One client request, as the layer above describes it."""

    request: Request
    streaming: bool
    cache_salt: str | None
    priority: int
    lora: Any
    trace_headers: Any
    local_only: bool
    forced: Placement | None

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], Any]: ...

    def restart(self, choice: int) -> None: ...

    def end(
        self, outcome: Outcome, error: PdserveError | None, finish_reason: str | None, record: RequestRecord
    ) -> None: ...


Deliver = Callable[[list[tuple[Any, int, EngineDelta, int | None]]], list[tuple[Any, int]]]
"""(job, choice, delta, cached tokens with the first delta) -> choices that have ended by a stop string."""
