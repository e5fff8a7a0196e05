"""The start of a stream: an honest status before the first event, comments while a prompt is computed."""

from __future__ import annotations

import asyncio
import json

import pytest

from cluster.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    RequestError,
    TenantOverBudget,
    WorkerLost,
)
from router.gateway.context import Reply, RequestContext, enter
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


# The other two APIs, as vLLM's layer streams them: /v1/responses raises, /v1/messages tells of a chunk it cannot read.

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CREATED = chunk(b'event: response.created\ndata: {"type": "response.created", "sequence_number": 0}\n\n')
IN_PROGRESS = chunk(b'event: response.in_progress\ndata: {"type": "response.in_progress", "sequence_number": 1}\n\n')
DELTA = chunk(b'event: response.output_text.delta\ndata: {"delta": "x", "sequence_number": 2}\n\n')
MESSAGE_START = chunk(b'event: message_start\ndata: {"type": "message_start"}\n\n')
CONTENT = chunk(b'event: content_block_delta\ndata: {"index": 0}\n\n')
UNREADABLE = chunk(
    b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"3 validation errors"}}\n\n'
)
END = chunk(b"", False)
STARTED = RuntimeError("Caught handled exception, but response already started.")
ERRORS = [
    (Overloaded("20 requests wait already"), 503, "overloaded_error"),
    (TenantOverBudget("tenant 'a' is beyond its tokens"), 429, "rate_limit_error"),
    (DeadlineExceeded("prefill limit of 20 s passed"), 504, "timeout_error"),
    (WorkerLost("the worker died"), 502, "api_error"),
    (EngineFailed("the engine died"), 500, "api_error"),
    (BadRequest("images are not supported"), 400, "invalid_request_error"),
]


async def ended(path: str, *steps: dict | Exception, keep_alive_s: float | None = None) -> list[dict]:
    """What a client gets of an application that sends messages. Errors of ours end its request, others are raised."""
    client, reply = Client(), Reply(retry_after_s=6.2)

    async def app(scope, receive, send) -> None:
        for step in steps:
            if isinstance(step, RequestError):
                reply.fail(step)
            elif isinstance(step, Exception):
                raise step
            else:
                await send(step)

    async def serve() -> None:
        enter(RequestContext(reply=reply))
        await StreamStart(app, keep_alive_s)({**SCOPE, "path": path}, nothing, client.send)

    await asyncio.create_task(serve())
    return client.messages


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
@pytest.mark.parametrize("error, status, kind", ERRORS)
async def test_responses_that_fail_before_a_token_have_their_status(
    error: RequestError, status: int, kind: str, keep_alive_s: float | None
) -> None:
    """Two events come before the request is even admitted: they are no reason for a 200."""
    start, body = await ended(RESPONSES, START, CREATED, IN_PROGRESS, error, STARTED, keep_alive_s=keep_alive_s)
    headers = dict(start["headers"])
    assert start["status"] == status
    assert headers.get(b"retry-after") == (b"7" if status in (429, 503) else None)
    told = json.loads(body["body"])["error"]
    assert (told["code"], told["message"]) == (status, str(error))
    assert not body.get("more_body", False)


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
async def test_responses_that_succeed_pass_as_they_are(keep_alive_s: float | None) -> None:
    messages = [START, CREATED, IN_PROGRESS, DELTA, DELTA, END]
    assert await ended(RESPONSES, *messages, keep_alive_s=keep_alive_s) == messages
    assert await ended(RESPONSES, START, CREATED, END, keep_alive_s=keep_alive_s) == [START, CREATED, END]


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
async def test_responses_that_fail_after_a_token_end_with_one_error_event(keep_alive_s: float | None) -> None:
    error = WorkerLost("the worker died")
    steps = (START, CREATED, IN_PROGRESS, DELTA)
    *before, last = await ended(RESPONSES, *steps, error, STARTED, keep_alive_s=keep_alive_s)
    assert before == list(steps)
    name, data = last["body"].decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert (event["type"], event["message"], event["code"]) == ("error", str(error), "BadGatewayError")
    assert isinstance(event["sequence_number"], int) and event["sequence_number"] > 2
    assert not last["more_body"]


async def test_responses_after_a_sign_of_life_fail_with_an_event() -> None:
    client, reply = Client(), Reply()

    async def app(scope, receive, send) -> None:
        await send(START)
        await send(CREATED)
        await client.reached(3)
        reply.fail(Overloaded("no worker was free"))
        raise STARTED

    async def serve() -> None:
        enter(RequestContext(reply=reply))
        await StreamStart(app, 0.001)({**SCOPE, "path": RESPONSES}, nothing, client.send)

    await asyncio.create_task(serve())
    assert client.messages[:2] == [START, CREATED]
    assert client.messages[2]["body"] == b": keep-alive\n\n"
    assert b"no worker was free" in client.messages[-1]["body"]
    assert not client.messages[-1]["more_body"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, SCOPE["path"]])
@pytest.mark.parametrize("steps", [(), (START,), (START, CREATED)])
async def test_what_nobody_knows_of_is_raised_and_nothing_was_said(path: str, steps: tuple[dict, ...]) -> None:
    client = Client()

    async def app(scope, receive, send) -> None:
        for step in steps:
            await send(step)
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        await StreamStart(app)({**SCOPE, "path": path}, nothing, client.send)
    assert client.messages == [] or (path != RESPONSES and len(steps) == 2)


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
@pytest.mark.parametrize("error, status, kind", ERRORS)
async def test_messages_that_fail_before_a_token_have_their_status(
    error: RequestError, status: int, kind: str, keep_alive_s: float | None
) -> None:
    start, body = await ended(MESSAGES, START, error, UNREADABLE, END, keep_alive_s=keep_alive_s)
    assert start["status"] == status
    assert dict(start["headers"]).get(b"retry-after") == (b"7" if status in (429, 503) else None)
    assert json.loads(body["body"]) == {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert not body.get("more_body", False)


async def test_messages_that_cannot_be_converted_are_no_success_either() -> None:
    start, body = await ended(MESSAGES, START, UNREADABLE, END)
    assert start["status"] == 500
    assert json.loads(body["body"])["error"] == {"type": "api_error", "message": "3 validation errors"}


@pytest.mark.parametrize("keep_alive_s", [None, 60.0])
async def test_messages_that_fail_after_a_token_end_with_one_error_event(keep_alive_s: float | None) -> None:
    """The layer's own event tells of a validation error inside it."""
    error, steps = WorkerLost("the worker died"), (START, MESSAGE_START, CONTENT)
    # What was under way when it failed still comes.
    sent = (*steps, error, CONTENT, UNREADABLE, END)
    *before, last = await ended(MESSAGES, *sent, keep_alive_s=keep_alive_s)
    assert before == [*steps, CONTENT]
    told = {"type": "error", "error": {"type": "api_error", "message": str(error)}}
    assert last["body"] == b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    assert not last["more_body"]


async def test_messages_that_succeed_pass_as_they_are() -> None:
    messages = [START, MESSAGE_START, CONTENT, CONTENT, END]
    assert await ended(MESSAGES, *messages) == messages


async def test_an_error_in_mid_stream_costs_the_chunks_before_it_nothing() -> None:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def app(scope, receive, send_up) -> None:
        await send_up(START)
        await send_up(MESSAGE_START)
        with pytest.raises(StopIteration):
            send_up(CONTENT).send(None)
        assert sent[-1] is CONTENT

    await StreamStart(app)({**SCOPE, "path": MESSAGES}, nothing, send)
