"""The event reader against vLLM's own publisher over real sockets (no engine): history, loss, restart, shutdown."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest

from cluster.messages import Role, WorkerInfo
from kv_transfer.kv_events_plugin import bind_kv_events
from router.block_keys import block_keys, namespace
from router.kv_event_reader import KvEventReader
from router.kv_events import Quality
from router.prefix_index import PrefixIndex

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLOCK = 4


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class Engine:
    """vLLM's publisher with a made-up cache: prompts are stored whole, one hash per block."""

    def __init__(self, ports: list[int], buffer_steps: int = 10_000) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher

        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        self._publisher = ZmqEventPublisher(
            0, endpoint=self.endpoints[0], replay_endpoint=self.endpoints[1], buffer_steps=buffer_steps
        )

    def store(self, tokens: list[int], salt: str | None = None) -> None:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        count = len(tokens) // BLOCK
        event = BlockStored(
            block_hashes=[self._hash(tokens, i, salt) for i in range(count)],
            parent_block_hash=None,
            token_ids=tokens[: count * BLOCK],
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[(salt,) if salt and i == 0 else None for i in range(count)],
            group_idx=0,
        )
        self._publisher.publish(KVEventBatch(ts=time.time(), events=[event]))

    def evict(self, tokens: list[int], block: int) -> None:
        from vllm.distributed.kv_events import BlockRemoved, KVEventBatch

        event = BlockRemoved(block_hashes=[self._hash(tokens, block, None)], medium="GPU", group_idx=0)
        self._publisher.publish(KVEventBatch(ts=time.time(), events=[event]))

    def stop(self) -> None:
        self._publisher.shutdown()

    @staticmethod
    def _hash(tokens: list[int], block: int, salt: str | None) -> bytes:
        import hashlib

        return hashlib.sha256(repr((tokens[: (block + 1) * BLOCK], salt)).encode()).digest()

    def info(self, incarnation: str = "1") -> WorkerInfo:
        return WorkerInfo(
            "w", incarnation, Role.PREFILL, BLOCK, 1000, 1024, 16, 2048, 2048,
            kv_events_endpoint=self.endpoints[0], kv_replay_endpoint=self.endpoints[1],
        )  # fmt: skip


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every engine process of ours: the plugin binds the host that the configuration names."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    monkeypatch.setattr(ZmqEventPublisher, "_is_bind_endpoint", ZmqEventPublisher._is_bind_endpoint)
    bind_kv_events()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "not within five seconds"
        await asyncio.sleep(0.02)


async def test_history_live_events_loss_restart_and_close() -> None:
    index, seen = PrefixIndex(), []
    ports = free_ports(2)
    engine = Engine(ports)
    reader = KvEventReader(index, BLOCK, lambda worker, quality: seen.append((worker, quality)))

    def held(tokens: list[int], salt: str | None = None) -> int:
        space = namespace(salt)
        return index.longest_match(block_keys(tokens, BLOCK, space)).get("w", 0)

    try:
        # What the engine cached before this router started comes from the replay endpoint.
        for i in range(20):
            engine.store([i] * 40)
        await asyncio.sleep(0.3)
        reader.add(engine.info())
        await until(lambda: all(held([i] * 40) == 10 for i in range(20)))
        assert seen == [("w", Quality.EXACT)]

        engine.store([77] * 40, salt="tenant")
        engine.evict([3] * 40, 9)
        await until(lambda: held([77] * 40, "tenant") == 10 and held([3] * 40) == 9)
        assert held([77] * 40) == 0

        # A subscription that misses messages: the stream sees the gap or the silence and asks.
        stream = reader.streams["w"]
        deliver, lost = stream.on_batch, []

        def drop(seq: int, payload: bytes, now: float) -> None:
            if len(lost) < 3:
                lost.append(seq)
            else:
                deliver(seq, payload, now)

        stream.on_batch = drop  # type: ignore[method-assign]
        for i in range(100, 106):
            engine.store([i] * 40)
        await until(lambda: all(held([i] * 40) == 10 for i in range(100, 106)))
        assert len(lost) == 3
        lost.clear()
        engine.store([200] * 40)  # the last one lost: only silence tells
        await until(lambda: held([200] * 40) == 10)
        stream.on_batch = deliver  # type: ignore[method-assign]

        # The engine restarts on the same ports: it is empty, and the stream starts at 0 again.
        engine.stop()
        await asyncio.sleep(0.2)
        engine = Engine(ports)
        await asyncio.sleep(0.5)
        engine.store([5] * 40)
        await until(lambda: held([200] * 40) == 0 and held([5] * 40) == 10)
        assert stream.counts.epochs == 1
        assert stream.counts.malformed == stream.counts.unresolved_blocks == 0

        reader.remove("w")
        index.clear("w")
        engine.store([6] * 40)
        await asyncio.sleep(0.3)
        assert held([6] * 40) == 0
    finally:
        engine.stop()
        await reader.close()


async def test_a_buffer_that_no_longer_holds_the_start_is_partial_and_never_too_much() -> None:
    index, seen = PrefixIndex(), []
    engine = Engine(free_ports(2), buffer_steps=5)
    reader = KvEventReader(index, BLOCK, lambda _, quality: seen.append(quality))
    try:
        for i in range(50):
            engine.store([i] * 40)
        await asyncio.sleep(0.5)
        reader.add(engine.info())
        await until(lambda: seen[-1:] == [Quality.PARTIAL])
        known = [i for i in range(50) if index.longest_match(block_keys([i] * 40, BLOCK))]
        assert known == [45, 46, 47, 48, 49]
        engine.store([60] * 40)
        await until(lambda: index.longest_match(block_keys([60] * 40, BLOCK)) == {"w": 10})
    finally:
        engine.stop()
        await reader.close()


async def test_without_the_plugin_nothing_is_bound_and_asking_replaces_the_subscription(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    monkeypatch.setattr(ZmqEventPublisher, "_is_bind_endpoint", staticmethod(lambda endpoint: "*" in endpoint))
    index = PrefixIndex()
    engine = Engine(free_ports(2))
    reader = KvEventReader(index, BLOCK, lambda worker, quality: None)
    reader.add(engine.info())
    try:
        for i in range(8):
            engine.store([i] * 40)
            await until(lambda i=i: index.longest_match(block_keys([i] * 40, BLOCK)) == {"w": 10})
        assert reader.streams["w"].deaf
    finally:
        engine.stop()
        await reader.close()


async def test_an_engine_without_events_is_approximate() -> None:
    seen: list[tuple[str, Quality]] = []
    reader = KvEventReader(PrefixIndex(), BLOCK, lambda worker, quality: seen.append((worker, quality)))
    reader.add(WorkerInfo("w", "1", Role.DECODE, BLOCK, 1000, 1024, 16, 2048, 2048))
    assert seen == [("w", Quality.APPROXIMATE)]
    await reader.close()
