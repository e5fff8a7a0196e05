"""Serve's own routing loop with our class in it: a call goes to its replica, or its owner hears that it cannot.

Kind: dead worker stays attractive; a call to a replica that has left must not hold the router's event loop.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve's own, when it is imported
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest

    from router.pinning import PinnedRequestRouter, ReplicaWatch

DEPLOYMENT = DeploymentID("decode", "app")


class Replica:
    """As much of a running replica as Serve's routing loop looks at."""

    max_ongoing_requests = 100

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.replica_metadata = {"worker": name}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Side:
    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[str] = []
        self.missed: list[str] = []
        self.watch = ReplicaWatch("app", "decode", lambda i, _: self.up.append(i), self.down.append, self._missed)
        self.router = PinnedRequestRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)

    def _missed(self, call: Any) -> None:
        self.missed.append(call.worker_id)

    def call(self, worker_id: str) -> asyncio.Task[Any]:
        metadata = RequestMetadata(f"r-{worker_id}", f"i-{worker_id}-{len(self.missed)}")
        pending = PendingRequest([SimpleNamespace(worker_id=worker_id)], {}, metadata)
        return asyncio.get_running_loop().create_task(self.router._choose_replica_for_request(pending))


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side()
    yield side
    side.watch.close()


async def test_a_call_goes_to_the_replica_it_names(side: Side) -> None:
    side.router.update_replicas([Replica("a"), Replica("b"), Replica("c")])
    for name in "abcabc":
        assert (await asyncio.wait_for(side.call(name), 1)).replica_id.unique_id == name
    assert side.missed == []


async def test_a_call_to_a_replica_that_has_left_does_not_hold_the_loop(side: Side) -> None:
    side.router.update_replicas([Replica("a"), Replica("b")])
    side.router.update_replicas([Replica("a")])
    lost = side.call("b")
    # Serve's loop turned without a pause here: neither this call nor anything else would have come to its end.
    assert (await asyncio.wait_for(side.call("a"), 1)).replica_id.unique_id == "a"
    assert "b" in side.missed
    lost.cancel()


async def test_calls_hear_of_it_when_the_last_replica_leaves(side: Side) -> None:
    """Serve waits for any replica at all then, and asks nobody."""
    side.router.update_replicas([Replica("a")])
    side.router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    lost = side.call("a")
    await asyncio.sleep(0)
    side.router.update_replicas([])
    await asyncio.sleep(0)
    assert "a" in side.missed
    lost.cancel()


async def test_a_dead_replica_does_not_come_back_with_the_next_list(side: Side) -> None:
    """Kind: dead worker stays attractive: Serve lists it until its controller has noticed."""
    side.router.update_replicas([Replica("a"), Replica("b")])
    side.router.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    side.router.update_replicas([Replica("a"), Replica("b"), Replica("c")])
    assert sorted(side.up) == ["a", "b", "c"]
    assert side.down == ["a"]
    assert side.watch.replicas == {"b", "c"}
