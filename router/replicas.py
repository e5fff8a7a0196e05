"""Several routers over one set of engines, as one placer: for measuring what placement loses by it.

Every router sees the same index (events) and the same snapshots, but only its own reservations. Requests are dealt out
in turn. The interface is that of `Placer` as far as a driver uses it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import cycle

from cluster.messages import Placement, Rejection, Request, RequestRecord, WorkerInfo, WorkerSnapshot
from router.admission import Forecast
from router.placement import Placer


class PlacerReplicas:
    """`placers` share their index object; each request belongs to the one that placed it first, until it ends."""

    def __init__(self, placers: Sequence[Placer]) -> None:
        if not placers:
            raise ValueError("placers: at least one is needed")
        self.placers = list(placers)
        self._turn = cycle(self.placers)
        self._owner: dict[str, Placer] = {}

    @property
    def key_block_tokens(self) -> int:
        return self.placers[0].key_block_tokens

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        for placer in self.placers:
            placer.add_worker(info, now)

    def remove_worker(self, worker_id: str, now: float) -> None:
        for placer in self.placers:
            placer.remove_worker(worker_id, now)

    def set_index_exact(self, worker_id: str, exact: bool) -> None:
        for placer in self.placers:
            placer.set_index_exact(worker_id, exact)

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float) -> None:
        for placer in self.placers:
            placer.on_snapshot(snapshot, now)

    def place(
        self,
        request: Request,
        now: float,
        rng: random.Random,
        *,
        exclude: frozenset[str] = frozenset(),
        local_only: bool = False,
    ) -> Placement | Rejection:
        placer = self._owner.get(request.request_id)
        if placer is None:
            placer = self._owner[request.request_id] = next(self._turn)
        return placer.place(request, now, rng, exclude=exclude, local_only=local_only)

    def forecast(
        self, request: Request, now: float, ahead_s: Mapping[str, float] | None = None
    ) -> Forecast | Rejection:
        placer = self._owner.get(request.request_id)
        if placer is None:
            placer = self._owner[request.request_id] = next(self._turn)
        return placer.forecast(request, now, ahead_s)

    def on_prefilled(self, request_id: str, now: float, cached_tokens: int) -> None:
        if (placer := self._owner.get(request_id)) is not None:
            placer.on_prefilled(request_id, now, cached_tokens)

    def on_first_token(self, request_id: str, now: float) -> None:
        if (placer := self._owner.get(request_id)) is not None:
            placer.on_first_token(request_id, now)

    def on_end(self, request_id: str, now: float) -> None:
        if (placer := self._owner.get(request_id)) is not None:
            placer.on_end(request_id, now)

    def observe(self, record: RequestRecord) -> None:
        if (placer := self._owner.pop(record.request_id, None)) is not None:
            placer.observe(record)
