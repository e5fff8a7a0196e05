"""Thousands of requests with random cancels through dispatcher, links, workers and simulated engines of one process.

Kinds: Ray Serve cancellation holes; cancel before the first token; the gap between prefill done and decode knows;
in-flight counters leak; disconnect does not stop generation. No Ray: what is tried is our own bookkeeping.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from in_process import Cluster, until

from cluster.messages import Outcome, Role

pytestmark = pytest.mark.live


async def test_ten_thousand_requests_with_random_cancels_leave_nothing_within_two_seconds() -> None:
    cluster = Cluster(seed=3)
    await cluster.start(prefill=3, decode=3)
    loop = asyncio.get_running_loop()
    start = cluster.open()
    for _ in range(10_000):
        client = cluster.send(
            cluster.rng.choice((5, 40, 300)),
            cluster.rng.choice((1, 3, 12)),
            n=cluster.rng.choice((1, 1, 1, 1, 1, 1, 2)),
        )
        if cluster.rng.random() < 0.6:
            loop.call_later(cluster.rng.random() * 0.12, cluster.dispatcher.client_left, client.request.request_id)
        await asyncio.sleep(0.003 * cluster.rng.random())
    await asyncio.wait_for(asyncio.gather(*(c.ended.wait() for c in cluster.clients)), 120)
    await until(lambda: cluster.open() == start, 2.0)
    assert cluster.open() == start == dict.fromkeys(start, 0)
    for client in cluster.clients:
        client.check()
    ends = Counter(client.ends[0] for client in cluster.clients)
    assert set(ends) == {Outcome.DONE, Outcome.CANCELLED}
    assert min(ends.values()) > 1000
    counters = [w.leases.counters() for w in cluster.transport.workers.values()]
    assert sum(c.granted for c in counters) > 1000
    assert sum(c.released for c in counters) > 50
    assert sum(c.expired for c in counters) == 0
    assert cluster.dispatcher.leases.counters().outlived == 0
    assert cluster.dispatcher.retries == cluster.dispatcher.migrations == 0
    await cluster.stop()


async def test_a_cancel_between_the_legs_frees_the_prefill_side_at_once() -> None:
    """Kind: the gap between prefill done and decode knows; 50 times, not after the lease."""
    cluster = Cluster(seed=4)
    await cluster.start(prefill=1, decode=1)
    decode = cluster.transport.workers["decode1"]
    decode.engine.stall()  # type: ignore[attr-defined]
    for _ in range(50):
        client = cluster.send(200, 5)
        await until(lambda lease=f"{client.request.request_id}-1p": cluster.dispatcher.leases.holds(lease), 10.0)
        cluster.dispatcher.client_left(client.request.request_id)
    await until(lambda: not any(cluster.open().values()), 1.0)
    assert not any(cluster.open().values()), cluster.open()
    await cluster.stop()


async def test_ten_cancelled_prefills_of_20k_tokens_do_not_delay_the_next_short_prompt() -> None:
    """Kind: cancel before the first token. What runs on is the one chunk that an engine step has begun."""
    long = {"max_model_len": 32_768, "kv_blocks": 20_000, "max_num_batched_tokens": 256}
    cluster = Cluster(seed=5, simulated=long)
    await cluster.start(prefill=1, decode=1)

    async def ttft_s() -> float:
        client = cluster.send(10, 3)
        await client.ended.wait()
        assert client.first_s is not None
        return client.first_s - client.request.arrival_s

    idle = sorted([await ttft_s() for _ in range(15)])[7]
    after = []
    for _ in range(9):
        prompts = [cluster.send(20_000, 1) for _ in range(10)]
        await asyncio.sleep(0.2)
        for client in prompts:
            cluster.dispatcher.client_left(client.request.request_id)
        after.append(await ttft_s())
        await until(lambda: not any(cluster.open().values()), 1.0)
        assert not any(cluster.open().values()), cluster.open()
    print(f"idle TTFT {1e3 * idle:.1f} ms, behind ten cancelled prefills {1e3 * sorted(after)[4]:.1f} ms")
    assert sorted(after)[4] < 2 * idle
    assert sum(w.counts["cancelled"] + w.counts["released"] for w in cluster.workers(Role.PREFILL)) >= 80
    await cluster.stop()


async def test_the_router_hears_of_the_last_change_and_not_only_with_the_next_heartbeat() -> None:
    """Kind: in-flight counters leak: an engine that has nothing left makes no step that would tell of it."""
    cluster = Cluster(seed=8)
    await cluster.start(prefill=1, decode=1)
    loads = cluster.dispatcher.loads
    for _ in range(5):
        clients = [cluster.send(300, 200) for _ in range(20)]
        await until(lambda: sum(load.running for load in cluster.dispatcher.loads.values()) >= 20, 2.0)
        for client in clients:
            cluster.dispatcher.client_left(client.request.request_id)
        await until(lambda: not any(v.running + v.kv_used_blocks + v.open_leases for v in loads.values()), 0.5)
        assert not any(v.running + v.kv_used_blocks + v.open_leases for v in loads.values()), loads
    await cluster.stop()


async def test_a_router_that_dies_takes_its_legs_and_leases_along() -> None:
    cluster = Cluster(seed=6)
    await cluster.start(prefill=2, decode=2)
    for _ in range(40):
        cluster.send(300, 200)
    await until(lambda: cluster.open()["blocks"] > 100, 5.0)
    workers = cluster.transport.workers.values()
    await cluster.transport.links.close()
    await until(lambda: not any(w.snapshot().kv_used_blocks or w.snapshot().open_leases for w in workers), 2.0)
    assert [(w.snapshot().kv_used_blocks, w.snapshot().open_leases) for w in workers] == [(0, 0)] * 4
    await cluster.stop()


async def test_a_lease_that_nobody_settles_expires_and_is_counted() -> None:
    """Kind: lease ran out. A router that was stopped keeps its connection; the backstop frees the KV."""
    cluster = Cluster(seed=7)
    await cluster.start(prefill=1, decode=1)
    prefill = cluster.transport.workers["prefill0"]
    prefill._lease_s = 0.3
    cluster.dispatcher.on_outputs = lambda *_: None  # type: ignore[method-assign]
    cluster.send(300, 5)
    await until(lambda: prefill.leases.counters().expired >= 1, 5.0)
    await until(lambda: prefill.snapshot().kv_used_blocks == 0, 5.0)
    assert prefill.snapshot().kv_used_blocks == 0
    counters = prefill.leases.counters()
    assert counters.expired >= 1
    assert (counters.pulled, counters.granted) == (0, counters.expired + len(prefill.leases))
    await cluster.stop()
