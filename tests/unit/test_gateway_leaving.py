"""A client that leaves ends its work, in both stream modes, although Ray Serve cancels over the application's head.

Kinds: disconnect does not stop generation; Ray Serve cancellation holes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from router.gateway.asgi import App
from router.gateway.leaving import ClientLeft

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
BODY = {"type": "http.request", "body": b"{}", "more_body": False}
START = {"type": "http.response.start", "status": 200, "headers": []}


class Connection:
    """A client as Serve shows it: its body, then nothing; it leaves by a cancellation, of which `tells` says whether
    the disconnect message comes too."""

    def __init__(self, app: App, tells: bool) -> None:
        self._messages, self._gone, self._tells = [BODY], asyncio.Event(), tells
        self.sent: list[Any] = []
        self.task = asyncio.ensure_future(ClientLeft(app, grace_s=0.2)(SCOPE, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def leave(self) -> None:
        if self._tells:
            self._gone.set()
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


class Work:
    """What computes the answer, in a task of its own as vLLM's handlers are."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.ended.set()


def listening(work: Work) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        answer = asyncio.create_task(work.run())

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        left = asyncio.create_task(listen())
        _, pending = await asyncio.wait([answer, left], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await send(START)

    return app


@pytest.mark.parametrize("tells", [True, False], ids=["with a disconnect message", "by cancellation alone"])
async def test_whoever_computes_a_whole_answer_is_stopped(tells: bool) -> None:
    work = Work()
    connection = Connection(listening(work), tells)
    await work.began.wait()
    await connection.leave()
    await asyncio.wait_for(work.ended.wait(), 1)
    assert connection.sent == []


async def test_a_stream_that_has_begun_is_cancelled_at_once() -> None:
    work = Work()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await work.run()

    connection = Connection(app, True)
    await work.began.wait()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await connection.leave()
    assert work.ended.is_set()
    assert loop.time() - began_s < 0.15
    assert connection.sent == [START]


async def test_an_application_that_does_not_listen_is_cancelled_after_a_moment() -> None:
    work = Work()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await work.run()

    connection = Connection(app, True)
    await work.began.wait()
    await connection.leave()
    assert work.ended.is_set()


def _work_for(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


async def test_a_loop_that_is_held_up_as_the_client_leaves_still_passes_the_message_on() -> None:
    """Longer than the grace: the clock says that it is over before anybody had a turn."""
    work = Work()
    connection = Connection(listening(work), True)
    await work.began.wait()
    await asyncio.sleep(0.01)  # the listener listens
    connection.task.cancel()
    asyncio.get_running_loop().call_soon(_work_for, 0.4)
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    await asyncio.sleep(0.01)
    assert work.ended.is_set()


async def test_an_application_that_fails_as_its_client_leaves_troubles_nobody() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()
        raise RuntimeError("too late")

    connection = Connection(app, True)
    await asyncio.sleep(0)
    await connection.leave()


async def test_answers_and_errors_pass_as_they_are() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == BODY
        await send(START)

    connection = Connection(app, True)
    await connection.task
    assert connection.sent == [START]

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await Connection(failing, True).task
