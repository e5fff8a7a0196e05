"""KV events on the wire as vLLM publishes them: `[topic, sequence number, msgpack batch]`, with a replay socket.

A batch is the array `[timestamp, events, rank]`; an event is a map with its kind under `type`. A replay request is an
8-byte number; the answer is every buffered batch from there on, then the number -1 with an empty body.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from cluster.engine.scheduler.kv import KvEvent, Removed, Stored
from cluster.engine.simulation.faults import Batch, Faults

BUFFER_BATCHES = 10_000
_END = (-1).to_bytes(8, "big", signed=True)


class Blocks:
    """Token ids behind block keys, as long as an event may need them. The lists are their owners' and may grow."""

    def __init__(self, block_size_tokens: int) -> None:
        self._size = block_size_tokens
        self._tokens: dict[str, list[int]] = {}
        self._salts: dict[str, str | None] = {}

    def add(self, owner: str, token_ids: list[int], salt: str | None) -> None:
        self._tokens[owner], self._salts[owner] = token_ids, salt

    def drop(self, owner: str) -> None:
        self._tokens.pop(owner, None)
        self._salts.pop(owner, None)

    def encode(self, event: KvEvent) -> dict[str, Any] | None:
        """The event as vLLM's msgpack map; None where its owner is not known any more."""
        if isinstance(event, Stored):
            tokens = self._tokens.get(event.owner)
            if tokens is None:
                return None
            size, start = self._size, event.first * self._size
            salt = self._salts.get(event.owner)
            extra: list[list[str] | None] | None = None
            if salt is not None:
                # The salt is hashed into a prompt's first block; the chain carries it on.
                extra = [[salt] if event.first + i == 0 else None for i in range(len(event.keys))]
            encoded: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": event.keys,
                "parent_block_hash": event.parent,
                "token_ids": tokens[start : start + size * len(event.keys)],
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            if extra is not None:
                encoded["extra_keys"] = extra
            return encoded
        if isinstance(event, Removed):
            return {"type": "BlockRemoved", "block_hashes": event.keys, "medium": "GPU"}
        return {"type": "AllBlocksCleared"}


class KvPublisher:
    """Publishes batches and answers replay requests, on two free ports of `ports`.

    Attributes:
        faults: what becomes of batches on their way to subscribers; replays are not touched.
    """

    def __init__(self, host: str, ports: range) -> None:
        self.faults: Faults | None = None
        self._late: list[Batch] = []
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        address = f"tcp://{host}"
        self.endpoint = f"{address}:{self._pub.bind_to_random_port(address, ports.start, ports.stop)}"
        self.replay_endpoint = f"{address}:{self._replay.bind_to_random_port(address, ports.start, ports.stop)}"
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFER_BATCHES)
        self._server = asyncio.get_running_loop().create_task(self._answer(), name="KV event replay")

    def publish(self, events: list[dict[str, Any]], now: float) -> None:
        """Send one batch; a slow subscriber loses it and asks for a replay."""
        body = msgspec.msgpack.encode([now, events, 0])
        number, self._next = self._next, self._next + 1
        self._buffer.append((number, body))
        sent = [(number, body)]
        if self.faults is not None:
            sent = self.faults.events_on_the_wire((number, body), self._late)
        for number, body in sent:
            self._pub.send_multipart([b"", number.to_bytes(8, "big"), body], flags=zmq.NOBLOCK)

    async def _answer(self) -> None:
        while True:
            identity, _, first = await self._replay.recv_multipart()
            start = int.from_bytes(first, "big")
            for number, body in list(self._buffer):
                if number >= start:
                    await self._replay.send_multipart([identity, b"", number.to_bytes(8, "big"), body])
            await self._replay.send_multipart([identity, b"", _END, b""])

    async def close(self) -> None:
        self._server.cancel()
        self._context.destroy(linger=0)
