"""A lease at its worker, in virtual time: who ends it, and when."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.config import parse
from cluster.engine.base import EngineRequest
from cluster.engine.simulated import create
from cluster.engine.simulation.leases import LocalPeers
from cluster.engine.simulation.virtual_time import run_virtual
from cluster.messages import Role
from cluster.wire import LegCall, LegEnd, Output, RouterAddress, Settle, Step
from cluster.worker import Worker
from kv_transfer.settings import TICKET_REQUEST

CONFIG = parse({"engine": {"kind": "simulated"}, "router": {"limits": {"first_token_s": 60}}})


class Link:
    """A router that listens."""

    def __init__(self) -> None:
        self.heard: list[Output] = []

    def send(self, message: Any) -> None:
        if isinstance(message, Step):
            self.heard += message.outputs

    def close(self) -> None: ...


async def leased() -> tuple[Worker, Link, asyncio.Task[LegEnd]]:
    """A prefill worker that has just given a ticket."""
    where = {"worker_id": "p0", "incarnation": "i", "host": "here", "node": "n"}
    engine = await create(CONFIG, Role.PREFILL, **where, peers=LocalPeers({}), publish=False)
    worker, link = Worker(engine, lease_s=CONFIG.lease_backstop_s), Link()
    worker._links["router"] = link  # type: ignore[assignment]
    request = EngineRequest("r", list(range(100)), None, TICKET_REQUEST)
    call = LegCall("p0", "i", "prefill", request, RouterAddress("router", "here", 1, ""))
    leg = asyncio.get_running_loop().create_task(worker.run(call))
    while not len(worker.leases):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return worker, link, leg


def test_a_worker_waits_as_long_as_its_routers_may() -> None:
    """Kind: lease ran out. A request that is 35 s in a decode engine's queue was prefilled three times."""

    async def main() -> None:
        worker, link, leg = await leased()
        await asyncio.sleep(CONFIG.router.limits.first_token_s)
        assert not leg.done()
        worker._on_message("router", Settle(["r"], pulled=True))
        assert await leg == LegEnd("pulled", 1)
        assert (worker.leases.counters().pulled, worker.leases.counters().expired) == (1, 0)
        assert link.heard[-1].kv_transfer_params is not None
        await worker.shutdown()

    run_virtual(main())


def test_what_a_stopped_router_never_settles_ends_all_the_same() -> None:
    async def main() -> None:
        worker, _, leg = await leased()
        await asyncio.sleep(CONFIG.lease_backstop_s)
        assert await leg == LegEnd("released", 1)
        assert worker.leases.counters().expired == 1
        await worker.shutdown()

    run_virtual(main())


def test_the_connectors_own_lease_may_be_longer() -> None:
    assert parse({"kv_transfer": {"lease_s": 300}}).lease_backstop_s == 300
