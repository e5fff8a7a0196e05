"""A link: one TCP connection between a router and a worker, length-prefixed msgpack messages both ways.

TCP keeps the order and says at once when the other end is gone: a worker ends a dead router's legs, a router
treats a lost link like a lost worker. Nothing on it can carry code: messages decode into fixed structs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from cluster.wire import Hello, Message, RouterAddress, decoder, encoder

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_HEADER_BYTES = 4
# How long sent bytes may stay unacknowledged.
PEER_GONE_MS = 30_000


class _Frames(asyncio.Protocol):
    """Cuts the byte stream into messages and hands each to `_on_message`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's interface without its base class, so this cannot be asserted.
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # A host that vanishes says nothing: without this its legs run on for a quarter of an hour.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_GONE_MS)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + _HEADER_BYTES], "big")
            if size > MAX_MESSAGE_BYTES:
                self._refuse(f"a message of {size} bytes")
                return
            end = start + _HEADER_BYTES + size
            if len(buffer) < end:
                break
            try:
                message = decoder.decode(memoryview(buffer)[start + _HEADER_BYTES : end])
            except msgspec.DecodeError as e:
                self._refuse(str(e))
                return
            start = end
            self._on_message(message)
        if start:
            del buffer[:start]

    def send(self, message: Message) -> None:
        if self.transport is not None and not self.transport.is_closing():
            body = encoder.encode(message)
            self.transport.write(len(body).to_bytes(_HEADER_BYTES, "big") + body)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _refuse(self, why: str) -> None:
        log.warning("link closed: %s", why)
        self._buffer.clear()
        if self.transport is not None:
            self.transport.abort()

    def _on_message(self, message: Message) -> None:
        raise NotImplementedError


class _Accepted(_Frames):
    """The router's end. Nothing is believed before a Hello with the right secret."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__()
        self._server = server
        self.worker_id: str | None = None
        self.incarnation = ""

    def _on_message(self, message: Message) -> None:
        if self.worker_id is not None:
            try:
                self._server.on_message(self.worker_id, self.incarnation, message)
            except Exception:
                # Without this, asyncio would close the link for a fault of ours, and with it every leg on it.
                log.exception("a message of worker %s was not handled", self.worker_id)
        elif isinstance(message, Hello) and hmac.compare_digest(message.secret, self._server.address.secret):
            self.worker_id, self.incarnation = message.worker_id, message.incarnation
            self._server._joined(self)
        else:
            self._refuse("no valid hello")

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._left(self)


class LinkServer:
    """The router's side: workers connect, after a call told them the address."""

    def __init__(self, on_message: Callable[[str, str, Message], None], on_lost: Callable[[str, str], None]) -> None:
        self.on_message = on_message
        self._on_lost = on_lost
        self._links: dict[str, _Accepted] = {}
        self._open: set[_Accepted] = set()
        self._server: asyncio.Server | None = None
        self._address: RouterAddress | None = None

    @property
    def address(self) -> RouterAddress:
        assert self._address is not None, "start() comes first"
        return self._address

    async def start(self, router_id: str, host: str) -> RouterAddress:
        """Listen on any free port of `host`."""
        loop = asyncio.get_running_loop()

        def accept() -> _Accepted:
            link = _Accepted(self)
            self._open.add(link)
            return link

        self._server = await loop.create_server(accept, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._address = RouterAddress(router_id, host, port, secrets.token_hex(16))
        return self._address

    def send(self, worker_id: str, message: Message) -> bool:
        """False where that worker has no link."""
        link = self._links.get(worker_id)
        if link is None:
            return False
        link.send(message)
        return True

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._open):
            link.close()

    def _joined(self, link: _Accepted) -> None:
        assert link.worker_id is not None
        self._links[link.worker_id] = link

    def _left(self, link: _Accepted) -> None:
        self._open.discard(link)
        if link.worker_id is not None and self._links.get(link.worker_id) is link:
            del self._links[link.worker_id]
            self._on_lost(link.worker_id, link.incarnation)


class LinkClient(_Frames):
    """The worker's side of the link to one router."""

    def __init__(
        self, router_id: str, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._router_id = router_id
        self._deliver = on_message
        self._lost = on_lost

    @classmethod
    async def connect(
        cls,
        address: RouterAddress,
        worker_id: str,
        incarnation: str,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[str], None],
    ) -> LinkClient:
        """Raises OSError where the router cannot be reached."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(
            lambda: cls(address.router_id, on_message, on_lost), address.host, address.port
        )
        link.send(Hello(address.secret, worker_id, incarnation))
        return link

    def _on_message(self, message: Message) -> None:
        self._deliver(self._router_id, message)

    def connection_lost(self, exc: Exception | None) -> None:
        with contextlib.suppress(Exception):
            self._lost(self._router_id)
