"""The asyncio client against a server whose behaviour is known: every kind of break and of framing, over sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest

from cluster.messages import Outcome
from loadtests.client import Client, Limits
from loadtests.endpoint import Endpoint
from loadtests.sample import UNFINISHED, Sample
from loadtests.scripted_server import (
    DONE,
    HEAD,
    PLAIN_HEAD,
    Step,
    event,
    final_usage,
    framed,
    refuse,
    serve,
    stream,
)

pytestmark = pytest.mark.live

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def exchange(*scripts: Iterable[Step], limits: Limits | None = None) -> list[Sample]:
    """One request after another on one client, each answered by its script."""

    async def run(url: str) -> list[Sample]:
        start = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - start

        client = Client(Endpoint(url, "m"), clock, limits)
        try:
            return [await client.send(Sample(i, clock()), REQUEST) for i in range(len(scripts))]
        finally:
            await client.close()

    with serve(lambda i, _: scripts[i]) as server:
        return asyncio.run(run(server.url))


ANSWER = event("é", 1) + event("🫠b", 3) + event("", 3) + event("cd", 5, "stop") + final_usage(5, 9, 4) + DONE


def bytewise(data: bytes) -> list[Step]:
    return [step for i in range(len(data)) for step in (data[i : i + 1], 0.0005)]


@pytest.mark.parametrize(
    "script",
    [
        [HEAD + framed(ANSWER) + b"0\r\n\r\n"],
        [HEAD, *bytewise(framed(ANSWER) + b"0\r\n\r\n")],
        [HEAD, *[framed(ANSWER[i : i + 7]) for i in range(0, len(ANSWER), 7)], b"0\r\n\r\n"],
        [HEAD + framed(ANSWER.replace(b"\n", b"\r\n")) + b"0\r\n\r\n"],
        [HEAD + framed(b": keep-alive\n\n" + ANSWER.replace(b"\n\n", b"\n\n: ping\n\n")) + b"0\r\n\r\n"],
        [PLAIN_HEAD, 0.01, ANSWER[:-2], None],
        [PLAIN_HEAD + ANSWER.removesuffix(b"\n\n")],
    ],
    ids=["one write", "byte by byte", "odd frames", "crlf", "comments", "abrupt end after done", "no blank line"],
)
def test_the_same_numbers_for_every_framing(script: list[Step]) -> None:
    (s,) = exchange(script)
    assert (s.outcome, s.error) == (Outcome.DONE, "")
    assert (s.times.tokens, s.output_tokens, s.prompt_tokens, s.cached_tokens) == (5, 5, 9, 4)
    assert s.finish_reason == "stop"
    assert s.counted == "usage"
    assert len(s.times.itl_s) == 4


def test_headers_at_once_first_token_late_cut_in_the_middle() -> None:
    (s,) = exchange([HEAD, 1.0, framed(event("x", 1)), 0.5, framed(event("x", 2)), 0.3, None])
    assert s.headers_s is not None
    assert s.headers_s < 0.5
    assert s.ttft_s == pytest.approx(1.0, abs=0.3)
    assert s.ttft_s > 0.95
    assert s.outcome is Outcome.FAILED
    assert "cut" in s.error
    assert s.end_s > 1.7


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (refuse(503, 7), Outcome.REJECTED, "HTTP 503"),
        (refuse(429, 7), Outcome.REJECTED, "HTTP 429"),
        (refuse(500), Outcome.FAILED, "HTTP 500: "),
        (
            [HEAD + framed(event("x", 1) + b'data: {"error": {"message": "worker lost"}}\n\n' + DONE) + b"0\r\n\r\n"],
            Outcome.FAILED,
            "error in the stream: worker lost",
        ),
        ([HEAD + framed(event("x", 1) + DONE) + b"0\r\n\r\n"], Outcome.FAILED, "cut: no finish reason"),
        ([HEAD + framed(event("x", 1, "stop")) + b"0\r\n\r\n"], Outcome.FAILED, "cut: no [DONE]"),
        ([None], Outcome.FAILED, "connection closed before the headers"),
        ([b"HTTP/1.1 2"], Outcome.FAILED, "connection closed before the headers"),
        ([b"nonsense\r\n\r\n"], Outcome.FAILED, "malformed response"),
    ],
)
def test_failures_are_failures(script: list[Step], outcome: Outcome, error: str) -> None:
    (s,) = exchange(script)
    assert s.outcome is outcome
    assert s.error.startswith(error)
    if outcome is Outcome.REJECTED:
        assert s.retry_after_s == 7


def test_nobody_listens() -> None:
    async def run() -> Sample:
        client = Client(Endpoint("http://127.0.0.1:1", "m"), time.perf_counter)
        sample = await client.send(Sample(0, time.perf_counter()), REQUEST)
        await client.close()
        return sample

    sample = asyncio.run(run())
    assert sample.outcome is Outcome.FAILED
    assert sample.error.startswith("connect:")


def test_silence_and_endlessness_end_in_time() -> None:
    (silent,) = exchange([HEAD, 30.0], limits=Limits(idle_s=0.5))
    assert "timed out: nothing for 0.5 s" in silent.error
    (endless,) = exchange(stream(10_000, gap_s=0.02), limits=Limits(total_s=0.6))
    assert "timed out after 0.6 s" in endless.error
    assert endless.times.tokens > 5


def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    kept = exchange(stream(2), stream(2), stream(2))
    assert [s.outcome for s in kept] == [Outcome.DONE] * 3
    assert [s.reconnects for s in kept] == [0, 0, 0]

    async def run(url: str) -> list[Sample]:
        client = Client(Endpoint(url, "m"), time.perf_counter)
        first = await client.send(Sample(0, time.perf_counter()), REQUEST)
        # The server closes without a word; the next request finds out, at the latest when it writes.
        await asyncio.sleep(0.2)
        second = await client.send(Sample(1, time.perf_counter()), REQUEST)
        await client.close()
        return [first, second]

    with serve(lambda i, _: [*stream(2), 0.05, None] if i == 0 else stream(2)) as server:
        samples = asyncio.run(run(server.url))
    assert [s.outcome for s in samples] == [Outcome.DONE, Outcome.DONE]


def test_a_cancelled_request_is_unfinished_and_closes_its_connection() -> None:
    async def run(url: str) -> Sample:
        client = Client(Endpoint(url, "m"), time.perf_counter)
        sample = Sample(0, time.perf_counter())
        task = asyncio.create_task(client.send(sample, REQUEST))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()
        return sample

    with serve(lambda *_: stream(100, gap_s=0.02)) as server:
        sample = asyncio.run(run(server.url))
    assert sample.error == UNFINISHED
    assert sample.times.tokens > 1
