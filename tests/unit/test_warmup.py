"""First contact of pairs, before a client pays for it. Kind: caller-chosen request id: one id for one request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_cluster import Cluster
from virtual_pools import VirtualPools

from cluster.config import parse
from cluster.engine.simulation.sampling import PlainSampling
from cluster.engine.simulation.virtual_time import run_virtual as run
from cluster.messages import Role
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


@pytest.mark.parametrize("failing, state", [(0, "ready"), (1, "ready"), (99, "the KV was not pulled")])
def test_a_pair_is_ready_once_kv_has_gone_from_one_to_the_other(
    monkeypatch: pytest.MonkeyPatch, failing: int, state: str
) -> None:
    """An engine that cannot pull computes the prompt itself, and the request is answered all the same."""
    sampling = PlainSampling(max_tokens=2, ignore_eos=True)
    monkeypatch.setattr(_WarmJob, "leg", lambda self, choice, sent: (self._prompt, sampling))
    limits = {"silent_s": 3600, "stall_s": 3600}
    config = parse({"engine": {"kind": "simulated"}, "router": {"limits": limits}})

    async def main() -> str:
        pools = VirtualPools(config)
        pools.dispatcher._deliver = lambda batch: []
        await pools.start()
        pools.engines["decode-0"].faults.failing_transfers = failing
        warmup = Warmup(pools.dispatcher, "r1", 2048)
        for info in list(pools.dispatcher.workers.values()):
            if info.role is Role.DECODE:
                warmup.on_worker(info, True)
        while warmup.warming:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        pools.dispatcher.end_all("over")
        for engine in pools.engines.values():
            await engine.shutdown()
        (found,) = warmup.state.values()
        return found

    assert run(main()).startswith(state)
