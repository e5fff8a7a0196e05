"""First contact of pairs, before a client pays for it. Kind: caller-chosen request id: one id for one request."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import Cluster

from cluster.engine.simulation.virtual_time import run_virtual as run
from router.warmup import Warmup, _WarmJob


def test_every_pair_meets_and_routers_that_share_workers_never_share_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routers that met the same pair used one id: the engine took the second for the first."""
    monkeypatch.setattr(_WarmJob, "leg", lambda self, choice, sent: (self._prompt, {"max_tokens": 2}))
    opened: list[str] = []

    async def main() -> None:
        for name in ("r1", "r2"):
            c = Cluster(prefill=2, decode=2)
            c.pools.open = lambda worker, kind, request: opened.append(request.request_id)  # type: ignore[method-assign]
            warmup = Warmup(c.dispatcher, name, 2048)
            met: list[Any] = list(c.dispatcher.workers.values())
            for info in met:
                warmup.on_worker(info, True)
            assert len(warmup.state) == 4
            c.dispatcher.end_all("over")

    run(main())
    assert len(opened) >= 8
    assert len(set(opened)) == len(opened)
