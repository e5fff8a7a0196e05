"""The start of a stream: an honest status before the first event, comments while a prompt is computed."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.gateway.stream import StreamStart

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
JSON_START = {"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]}


def chunk(data: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Client:
    """Collects what is sent; `reached(n)` waits for that many messages."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self._changed = asyncio.Event()

    async def send(self, message: dict) -> None:
        self.messages.append(message)
        self._changed.set()

    async def reached(self, count: int) -> None:
        while len(self.messages) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 5)


async def nothing() -> dict:
    raise AssertionError("the gateway reads nothing here")


async def played(*messages: dict, keep_alive_s: float | None = None) -> list[dict]:
    client = Client()

    async def app(scope, receive, send) -> None:
        for message in messages:
            await send(message)

    await StreamStart(app, keep_alive_s)(dict(SCOPE), nothing, client.send)
    return client.messages


ERROR = {"error": {"message": "no worker is ready", "type": "ServiceUnavailableError", "param": None, "code": 503}}
EVENT = b"data: " + json.dumps(ERROR).encode() + b"\n\n"


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
async def test_a_stream_passes_as_it_is(keep_alive_s: float | None) -> None:
    messages = [START, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), chunk(b"data: [DONE]\n\n"), chunk(b"", False)]
    assert await played(*messages, keep_alive_s=keep_alive_s) == messages


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
async def test_an_answer_that_is_no_stream_passes_as_it_is(keep_alive_s: float | None) -> None:
    messages = [JSON_START, chunk(b'{"error": 1}', False)]
    assert await played(*messages, keep_alive_s=keep_alive_s) == messages


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
async def test_a_failure_before_the_first_event_has_its_own_status(keep_alive_s: float | None) -> None:
    """Kind: stream ends silently (b): a transfer that fails before the first delta is not a 200."""
    start, body = await played(
        START, chunk(EVENT), chunk(b"data: [DONE]\n\n"), chunk(b"", False), keep_alive_s=keep_alive_s
    )
    headers = dict(start["headers"])
    assert start["status"] == 503
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"retry-after"] == b"1"
    assert json.loads(body["body"]) == ERROR
    assert not body.get("more_body", False)


@pytest.mark.parametrize(
    "code, status", [(400, 400), (429, 429), (504, 504), (None, 500), ("502", 500), (200, 500), (9999, 500)]
)
async def test_only_an_error_status_is_taken_over(code: object, status: int) -> None:
    event = b"data: " + json.dumps({"error": {"message": "m", "code": code}}).encode() + b"\n\n"
    start, _ = await played(START, chunk(event, False))
    assert start["status"] == status


async def test_an_error_after_the_first_event_stays_an_event() -> None:
    messages = [START, chunk(b"data: 1\n\n"), chunk(EVENT), chunk(b"", False)]
    assert await played(*messages) == messages


@pytest.mark.parametrize("body", [b'data: {"error"', b'data: {"error": null}\n\n', b'data: {"error": {}}\n\n'])
async def test_what_only_looks_like_an_error_passes(body: bytes) -> None:
    assert await played(START, chunk(body), chunk(b"", False)) == [START, chunk(body), chunk(b"", False)]


async def test_a_stream_that_ends_without_an_event_still_starts() -> None:
    assert await played(START, chunk(b"", False)) == [START, chunk(b"", False)]
    assert await played(START, chunk(b""), chunk(b"x"), chunk(b"", False)) == [START, chunk(b"x"), chunk(b"", False)]


async def test_comments_keep_a_long_prefill_alive_until_the_end() -> None:
    client = Client()

    async def app(scope, receive, send) -> None:
        await send(START)
        await client.reached(4)
        await send(chunk(b"data: 1\n\n"))
        await client.reached(7)
        await send(chunk(b"data: [DONE]\n\n", False))

    await StreamStart(app, 0.001)(dict(SCOPE), nothing, client.send)
    messages = client.messages
    assert messages[0] == START
    assert messages[1:4] == [chunk(b": keep-alive\n\n")] * 3
    events = [m for m in messages[1:] if m["body"] != b": keep-alive\n\n"]
    assert events == [chunk(b"data: 1\n\n"), chunk(b"data: [DONE]\n\n", False)]
    assert messages[-1] == events[-1]
    await asyncio.sleep(0.01)
    assert client.messages is messages
    assert messages[-1] == events[-1]


async def test_an_error_after_a_comment_is_an_event() -> None:
    client = Client()

    async def app(scope, receive, send) -> None:
        await send(START)
        await client.reached(2)
        await send(chunk(EVENT))
        await send(chunk(b"data: [DONE]\n\n", False))

    await StreamStart(app, 0.001)(dict(SCOPE), nothing, client.send)
    assert client.messages[0] == START
    assert chunk(EVENT) in client.messages


@pytest.mark.parametrize("how", ["raises", "is cancelled", "returns early"])
async def test_the_ticker_ends_with_the_application(how: str) -> None:
    client = Client()
    before = len(asyncio.all_tasks())

    async def app(scope, receive, send) -> None:
        await send(START)
        if how == "raises":
            raise RuntimeError("lost")
        if how == "is cancelled":
            await asyncio.Event().wait()

    task = asyncio.create_task(StreamStart(app, 60.0)(dict(SCOPE), nothing, client.send))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(asyncio.all_tasks()) == before
    assert client.messages == []


async def test_a_chunk_costs_one_call_without_keep_alive() -> None:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def app(scope, receive, send_up) -> None:
        await send_up(START)
        await send_up(chunk(b"data: 1\n\n"))
        message = chunk(b"data: 2\n\n")
        coroutine = send_up(message)
        with pytest.raises(StopIteration):
            coroutine.send(None)  # it never suspends and creates nothing
        assert sent[-1] is message

    await StreamStart(app)(dict(SCOPE), nothing, send)
