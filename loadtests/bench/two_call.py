"""The direct split: the client itself calls the prefill engine, then the decode engine with what it got.

This is what a router replaces, and so the yardstick of what a router costs.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from cluster.messages import Outcome
from kv_transfer.settings import TICKET_REQUEST
from loadtests.client import Client, Clock, Limits
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.exchange import Exchange
from loadtests.sample import Sample


class Reply(Exchange):
    """A plain JSON answer, read with the clock and connection handling of a streamed one."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)
        self.body = b""

    def on_headers_complete(self) -> None:
        self.sample.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def _conclude(self, now: float) -> None:
        ok = self.sample.status == 200
        self._end(now, Outcome.DONE if ok else Outcome.FAILED, "" if ok else f"prefill: HTTP {self.sample.status}")


class TwoCallClient:
    """`send` like a Client's, in two calls."""

    def __init__(self, prefill: Endpoint, decode: Endpoint, writer: RequestWriter, clock: Clock) -> None:
        self._prefill = Client(prefill, clock, Limits())
        self._decode = Client(decode, clock, Limits())
        self._writer, self._clock = writer, clock

    async def send(self, sample: Sample, body: bytes) -> Sample:
        """`body` is the client's own request; the prefill call is made from it."""
        asked: dict[str, Any] = msgspec.json.decode(body)
        first = {
            "model": asked["model"],
            "prompt": asked["prompt"],
            "max_tokens": 1,
            "stream": False,
            "temperature": asked["temperature"],
            "kv_transfer_params": TICKET_REQUEST,
        }
        probe = Sample(sample.index, sample.scheduled_s, request_id=f"{sample.request_id}-p")
        sample.sent_s = probe.sent_s = self._clock()
        reply = Reply(probe)
        await self._prefill.drive(reply, self._writer.request(msgspec.json.encode(first), request_id=probe.request_id))
        if probe.outcome is not Outcome.DONE:
            sample.outcome, sample.error, sample.end_s = probe.outcome, probe.error, probe.end_s
            return sample
        asked["kv_transfer_params"] = msgspec.json.decode(reply.body)["kv_transfer_params"]
        exchange = Exchange(sample)
        request = self._writer.request(msgspec.json.encode(asked), request_id=sample.request_id)
        await self._decode.drive(exchange, request)
        return sample

    async def close(self) -> None:
        await self._prefill.close()
        await self._decode.close()


def clock_from_now() -> Clock:
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
