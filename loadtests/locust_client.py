"""Streaming client under gevent: the same `Exchange` as the asyncio client, behind blocking-looking sockets.

Locust's own clients stop the clock at the headers of a stream or at its end. This one stamps every read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gevent import Timeout, socket, ssl

from loadtests.client import Limits
from loadtests.endpoint import Endpoint
from loadtests.exchange import Exchange
from loadtests.sample import UNFINISHED, Sample

READ_BYTES = 65536


class GeventClient:
    """Kept-alive connections to one endpoint, shared by all users of a process."""

    def __init__(
        self, endpoint: Endpoint, clock: Callable[[], float] = time.perf_counter, limits: Limits | None = None
    ):
        self._endpoint, self._clock, self._limits = endpoint, clock, limits or Limits()
        self._idle: list[socket.socket] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None

    def send(self, sample: Sample, request: bytes) -> Sample:
        """Run one exchange to its end, whatever that is. A killed greenlet leaves an unfinished sample."""
        sample.sent_s = self._clock()
        exchange = Exchange(sample)
        try:
            with Timeout(self._limits.total_s, exception=False):
                while not exchange.finished:
                    self._attempt(exchange, request)
            exchange.fail(self._clock(), f"timed out after {self._limits.total_s:g} s")
        except OSError as e:
            exchange.fail(self._clock(), f"connect: {str(e) or type(e).__name__}")
        except BaseException:
            exchange.fail(self._clock(), UNFINISHED)
            raise
        return sample

    def _attempt(self, exchange: Exchange, request: bytes) -> None:
        reused = bool(self._idle)
        connection = self._idle.pop() if reused else self._connect()
        try:
            connection.sendall(request)
            self._read(connection, exchange, reused)
        except TimeoutError:
            exchange.fail(self._clock(), f"timed out: nothing for {self._limits.idle_s:g} s")
        except OSError as e:
            # A reset is an end like any other, judged by what arrived. Before an answer, on a kept-alive connection, it
            # says nothing about this request.
            if exchange.answered or not reused:
                if isinstance(e, ssl.SSLError) and exchange.sample.status is None:
                    exchange.fail(self._clock(), f"TLS: {getattr(e, 'reason', None) or e}")
                exchange.eof(self._clock())
        finally:
            if exchange.finished and exchange.keep_alive:
                self._idle.append(connection)
            else:
                connection.close()
        if not exchange.finished:
            exchange.sample.reconnects += 1

    def _read(self, connection: socket.socket, exchange: Exchange, reused: bool) -> None:
        while not exchange.finished:
            data = connection.recv(READ_BYTES)
            now = self._clock()
            if data:
                exchange.feed(now, data)
            elif reused and not exchange.answered:
                return  # the server had closed this kept-alive connection: says nothing about the request
            else:
                exchange.eof(now)

    def _connect(self) -> socket.socket:
        e = self._endpoint
        connection = socket.create_connection((e.host, e.port), timeout=self._limits.connect_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_hostname=e.host)
            except OSError:
                connection.close()
                raise
        connection.settimeout(self._limits.idle_s)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
