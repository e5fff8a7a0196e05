"""Calls of a transport without Serve. Kind: Ray Serve cancellation holes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from cluster.engine.base import EngineRequest
from cluster.errors import WorkerLost
from cluster.messages import Role, WorkerInfo
from cluster.wire import RouterAddress

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own, when it is imported
    from router.transport import ServeTransport


class Call:
    """Serve's response to a call that has not ended."""

    def __init__(self) -> None:
        self._end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._end.__await__()

    def cancel(self) -> None:
        self._end.cancel()

    @property
    def cancelled(self) -> bool:
        return self._end.cancelled()


class Events:
    def __init__(self) -> None:
        self.ends: list[tuple[str, Any]] = []
        self.links_lost: list[str] = []

    def on_leg_end(self, leg_id: str, end: Any) -> None:
        self.ends.append((leg_id, end))

    def on_link_lost(self, worker_id: str) -> None:
        self.links_lost.append(worker_id)


async def test_calls_to_a_worker_whose_link_broke_do_not_arrive_later() -> None:
    """One that is on its way would make a new link and run for nobody."""
    calls: dict[str, Call] = {}

    def remote(call: Any) -> Call:
        return calls.setdefault(call.request.request_id, Call())

    handle: Any = SimpleNamespace(run=SimpleNamespace(remote=remote))
    transport = ServeTransport("app", {Role.DECODE: handle}, {Role.DECODE: "decode"})
    events: Any = Events()
    transport._events, transport._loop = events, asyncio.get_running_loop()
    transport._links._address = RouterAddress("router", "here", 1, "secret")
    for name in ("d0", "d1"):
        info = WorkerInfo(name, "i", Role.DECODE, 16, 100, 1, 8, 512, 1024)
        transport.open(info, "serve", EngineRequest(f"r-{name}", [1, 2, 3], None))
    transport._on_link_lost("d0", "i")
    await asyncio.sleep(0)
    leg_id, end = events.ends[0]
    assert (leg_id, type(end)) == ("r-d0", WorkerLost)
    assert {leg_id for leg_id, _ in events.ends} == {"r-d0"}
    assert events.links_lost == ["d0"]
    assert (calls["r-d0"].cancelled, calls["r-d1"].cancelled) == (True, False)
    left = [task for _, task, _ in transport._calls.values()]
    await transport.close()
    await asyncio.gather(*left)
