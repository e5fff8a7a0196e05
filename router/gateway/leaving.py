"""A client that leaves is heard of inside the application, and not cancelled over its head.

Ray Serve tells the application that its client has left by cancelling it. vLLM's handlers run in tasks of their own and
listen for ASGI's disconnect message; a cancellation ends the listener alone, and whoever computes the answer goes on
for a client that is not there any more.
"""

from __future__ import annotations

import asyncio

from router.gateway.asgi import App, Message, Receive, Scope, Send

# A handler that listens ends within a few turns of the event loop; one that does not is cancelled after both of these.
GRACE_S = 1.0
TURNS = 16


class ClientLeft:
    """Turns a cancellation from outside into a disconnect message; once an answer has begun, into a cancellation of
    whatever sends it."""

    def __init__(self, app: App, grace_s: float = GRACE_S) -> None:
        self._app, self._grace_s = app, grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        client = _Client(receive, send)
        task = asyncio.ensure_future(self._app(scope, client.receive, client.send))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            client.leave()
            try:
                if not client.answered:
                    await asyncio.wait({task}, timeout=self._grace_s)
                    # The message takes some turns of the event loop, however long ago it was sent by the clock: a loop
                    # that was held up for longer than the grace has not passed it on yet.
                    for _ in range(TURNS):
                        if not task.done():
                            await asyncio.sleep(0)
            finally:
                task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # nobody is left to hear of it
            raise


class _Client:
    """One connection. `answered` once something of the answer was sent."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._left = asyncio.Event()
        self._whole = False
        self.answered = False

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> Message:
        if not self._whole:
            message = await self._receive()
            self._whole = not message.get("more_body", False)
            return message
        more, left = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait({more, left}, return_when=asyncio.FIRST_COMPLETED)
            return more.result() if more.done() else {"type": "http.disconnect"}
        finally:
            more.cancel()
            left.cancel()

    async def send(self, message: Message) -> None:
        self.answered = True
        if not self._left.is_set():
            await self._send(message)
