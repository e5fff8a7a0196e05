"""Streaming client on asyncio: sockets and clocks around `Exchange`, and nothing between the socket and the time.

A callback per read stamps the time and parses; no task switch and no per-chunk object of an HTTP library lies
between. `make bench-client` compares its cost per token with httpx and aiohttp.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from loadtests.endpoint import Endpoint
from loadtests.exchange import Exchange
from loadtests.sample import UNFINISHED, Sample

Clock = Callable[[], float]
SWEEP_S = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """When the client gives up on one request: no connection, no byte for `idle_s`, or no end after `total_s`."""

    connect_s: float = 10.0
    idle_s: float = 120.0
    total_s: float = 900.0


class _Connection(asyncio.Protocol):
    """One socket; at most one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used = False
        self._ended: asyncio.Future[None] | None = None
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by behaviour, not by class.
        self.transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            self.close()  # bytes that nobody asked for: this connection cannot be trusted any more
            return
        self.exchange.feed(self._clock(), data)
        if self.exchange.finished:
            self._end()

    def eof_received(self) -> bool:
        self._lost()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _lost(self) -> None:
        self.open = False
        exchange = self.exchange
        # A kept-alive connection that was closed before it answered says nothing about this request.
        if exchange is not None and (exchange.answered or not self._used):
            exchange.eof(self._clock())
        self._end()

    def _end(self) -> None:
        self.exchange = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def give_up(self, why: str) -> None:
        if self.exchange is not None:
            self.exchange.fail(self._clock(), why)
        self.close()
        self._end()

    def close(self) -> None:
        self.open = False
        if self.transport is not None:
            self.transport.abort()

    async def run(self, exchange: Exchange, request: bytes) -> None:
        """Returns when the exchange is finished, or unfinished where a kept-alive connection was stale."""
        assert self.transport is not None
        self.exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        try:
            await self._ended
        finally:
            self.exchange = None
            self._used = True
            if not (exchange.finished and exchange.keep_alive):
                self.close()


class Client:
    """Keeps connections alive and runs exchanges on them. One per event loop; close it in the end."""

    def __init__(self, endpoint: Endpoint, clock: Clock, limits: Limits | None = None) -> None:
        self._endpoint, self._clock, self._limits = endpoint, clock, limits or Limits()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._ssl = ssl.create_default_context() if endpoint.tls else None

    async def send(self, sample: Sample, request: bytes, *, choices: int = 1) -> Sample:
        """Run one exchange to its end, whatever that is. Raises nothing for what a server or a network does."""
        sample.sent_s = self._clock()
        await self.drive(Exchange(sample, choices=choices), request)
        return sample

    async def drive(self, exchange: Exchange, request: bytes) -> None:
        """Run an exchange that was made elsewhere; it is finished afterwards."""
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
        try:
            while not exchange.finished:
                await self._attempt(exchange, request)
        except (OSError, TimeoutError) as e:
            exchange.fail(self._clock(), f"connect: {str(e) or type(e).__name__}")
        except asyncio.CancelledError:
            exchange.fail(self._clock(), UNFINISHED)
            raise

    async def _attempt(self, exchange: Exchange, request: bytes) -> None:
        connection = self._take()
        if connection is None:
            connection = await asyncio.wait_for(self._connect(), self._limits.connect_s)
        exchange.touched_s = self._clock()
        self._busy.add(connection)
        try:
            await connection.run(exchange, request)
        finally:
            self._busy.discard(connection)
        if not exchange.finished:
            exchange.sample.reconnects += 1
        elif connection.open:
            self._idle.append(connection)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        e = self._endpoint
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._clock), e.host, e.port, ssl=self._ssl)
        return connection

    async def _sweep(self) -> None:
        # One timer for all exchanges: a timer per request, moved at every token, would cost more than the parsing.
        limits = self._limits
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            for connection in list(self._busy):
                exchange = connection.exchange
                if exchange is None:
                    continue
                if now - exchange.touched_s > limits.idle_s:
                    connection.give_up(f"timed out: nothing for {limits.idle_s:g} s")
                elif now - (exchange.sample.sent_s or now) > limits.total_s:
                    connection.give_up(f"timed out after {limits.total_s:g} s")

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)
