"""How a decode engine asks a prefill engine for KV: is the lease alive, and later, it was read.

    begin(ticket, after_s, duration_s) -> s   the KV is there; the transfer may start in so many seconds, which is when
                                              this engine's network adapter is free. None: the KV is not there.
    end(ticket) -> bool                       the KV was there the whole time; with its last reader it is released

The generation is checked at the end again, so KV that was given up and computed anew in between is never taken for
the old. Over ZMQ between processes; directly inside one process, where time may be virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

REPLY_TIMEOUT_S = 5.0
# Verb, request id, generation, after_s, duration_s.
_Question = tuple[str, str, int, float, float]


@dataclass(slots=True)
class _Entry:
    generation: int
    readers: int = 0


@dataclass(slots=True)
class LeaseBook:
    """The granting side: which requests' KV is held, by generation."""

    on_pulled: Callable[[str], None]
    clock: Callable[[], float]
    _adapter_free_s: float = 0.0
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _generations: int = 0

    def grant(self, request_id: str) -> int:
        self._generations += 1
        self._entries[request_id] = _Entry(self._generations)
        return self._generations

    def drop(self, request_id: str) -> bool:
        """Released or expired; whoever reads now will be told at the end."""
        return self._entries.pop(request_id, None) is not None

    def begin(self, request_id: str, generation: int, after_s: float, duration_s: float) -> float | None:
        """Reserve the adapter for a transfer that the reader could start in `after_s`."""
        entry = self._entries.get(request_id)
        if entry is None or entry.generation != generation:
            return None
        entry.readers += 1
        if not duration_s:
            return 0.0
        now = self.clock()
        start_s = max(now + after_s, self._adapter_free_s)
        self._adapter_free_s = start_s + duration_s
        return start_s - now

    def end(self, request_id: str, generation: int) -> bool:
        entry = self._entries.get(request_id)
        if entry is None or entry.generation != generation:
            return False
        entry.readers -= 1
        if entry.readers <= 0:
            del self._entries[request_id]
            self.on_pulled(request_id)
        return True

    def __len__(self) -> int:
        return len(self._entries)


class Peers(Protocol):
    """How an engine reaches the engines that granted its tickets."""

    async def serve(self, host: str, book: LeaseBook) -> tuple[str, int]:
        """Answer for this engine's leases; returns the address for its tickets."""
        ...

    async def begin(self, ticket: Mapping[str, Any], after_s: float, duration_s: float) -> float | None: ...

    async def end(self, ticket: Mapping[str, Any]) -> bool: ...

    async def close(self) -> None: ...


class LocalPeers:
    """Engines of one process and event loop; `network` is the dictionary they share."""

    def __init__(self, network: dict[int, LeaseBook]) -> None:
        self._network = network
        self._port = 0

    async def serve(self, host: str, book: LeaseBook) -> tuple[str, int]:
        self._port = len(self._network) + 1
        self._network[self._port] = book
        return host, self._port

    async def begin(self, ticket: Mapping[str, Any], after_s: float, duration_s: float) -> float | None:
        book = self._network.get(ticket["remote_port"])
        if book is None:
            return None
        return book.begin(ticket["remote_request_id"], ticket["generation"], after_s, duration_s)

    async def end(self, ticket: Mapping[str, Any]) -> bool:
        book = self._network.get(ticket["remote_port"])
        return book is not None and book.end(ticket["remote_request_id"], ticket["generation"])

    async def close(self) -> None:
        self._network.pop(self._port, None)


class ZmqPeers:
    """Engines in different processes or on different nodes."""

    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._server: asyncio.Task[None] | None = None

    async def serve(self, host: str, book: LeaseBook) -> tuple[str, int]:
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port(f"tcp://{host}", self._ports.start, self._ports.stop)
        self._server = asyncio.get_running_loop().create_task(self._answer(book), name="KV leases")
        return host, port

    async def _answer(self, book: LeaseBook) -> None:
        assert self._socket is not None
        while True:
            identity, _, body = await self._socket.recv_multipart()
            try:
                verb, request_id, generation, after_s, duration_s = msgspec.msgpack.decode(body, type=_Question)
            except msgspec.DecodeError:
                continue
            answer: float | bool | None
            if verb == "begin":
                answer = book.begin(request_id, generation, after_s, duration_s)
            else:
                answer = book.end(request_id, generation)
            await self._socket.send_multipart([identity, b"", msgspec.msgpack.encode(answer)])

    async def begin(self, ticket: Mapping[str, Any], after_s: float, duration_s: float) -> float | None:
        return await self._ask(
            ("begin", ticket["remote_request_id"], ticket["generation"], after_s, duration_s), ticket
        )

    async def end(self, ticket: Mapping[str, Any]) -> bool:
        return bool(await self._ask(("end", ticket["remote_request_id"], ticket["generation"], 0.0, 0.0), ticket))

    async def _ask(self, question: _Question, ticket: Mapping[str, Any]) -> float | None:
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0
        try:
            socket.connect(f"tcp://{ticket['remote_host']}:{ticket['remote_port']}")
            await socket.send(msgspec.msgpack.encode(question))
            if not await socket.poll(REPLY_TIMEOUT_S * 1e3):
                return None
            return msgspec.msgpack.decode(await socket.recv(), type=float | bool | None)
        finally:
            socket.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
        self._context.destroy(linger=0)
