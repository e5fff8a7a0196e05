"""Clients of the chaos run: each request's tokens are known beforehand, and every moment a client noticed is kept."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

HANG_S = 90.0
RETRIES = 3


@dataclass
class Ask:
    """One request. `expected` are the right tokens of every choice; streams must be a prefix of them at any moment."""

    prompt: list[int]
    expected: list[int]
    streaming: bool
    n: int = 1
    sent_s: float = 0.0
    noticed_s: list[float] = field(default_factory=list)
    end: str = ""
    detail: str = ""
    retried: int = 0
    wrong: bool = False


class Clients:
    """Keeps `concurrency` requests in flight, one after the other, like a patient SDK.

    A request is sent again where nothing of its answer has been seen (connection refused or lost, 502 and 503), as
    the openai SDK does.

    Args:
        make: the next request.
        hang_s: a request that has not ended by then counts as hung.
    """

    def __init__(
        self,
        url: str,
        model: str,
        concurrency: int,
        make: Callable[[random.Random], Ask],
        seed: int,
        hang_s: float = HANG_S,
    ) -> None:
        self._hang_s = hang_s
        self._url, self._model, self._make = url, model, make
        self._concurrency = concurrency
        self._rng = random.Random(seed)
        self.asks: list[Ask] = []
        self.stopping = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self._concurrency * 2)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=None) as http:
            await asyncio.gather(*(self._client(http) for _ in range(self._concurrency)))

    def in_flight(self) -> list[Ask]:
        return [ask for ask in self.asks if not ask.end]

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self.stopping:
            ask = self._make(self._rng)
            self.asks.append(ask)
            ask.sent_s = time.monotonic()
            try:
                async with asyncio.timeout(self._hang_s):
                    await self._ask(http, ask)
            except TimeoutError:
                ask.end = "hung"
            ask.noticed_s.append(time.monotonic())

    async def _ask(self, http: httpx.AsyncClient, ask: Ask) -> None:
        while True:
            seen = len(ask.noticed_s)
            try:
                end, detail, again = await self._once(http, ask)
            except (httpx.TransportError, httpx.StreamError) as e:
                end, detail, again = "connection lost", type(e).__name__, True
            ask.end, ask.detail = end, detail
            if not again or (ask.streaming and len(ask.noticed_s) > seen) or ask.retried >= RETRIES:
                return
            ask.retried += 1
            ask.end = ""
            await asyncio.sleep(0.2 * 2**ask.retried * (0.5 + self._rng.random()))

    async def _once(self, http: httpx.AsyncClient, ask: Ask) -> tuple[str, str, bool]:
        """How it ended, more about it, whether another try may help."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": len(ask.expected),
            "temperature": 0.0 if ask.n == 1 else 1.0,
            "ignore_eos": True,
            "n": ask.n,
            "stream": ask.streaming,
            "return_token_ids": True,
        }
        if not ask.streaming:
            response = await http.post("/v1/completions", json=body)
            if response.status_code != 200:
                return f"status {response.status_code}", response.text[:200], response.status_code in (500, 502, 503)
            for choice in response.json()["choices"]:
                self._compare(ask, choice["token_ids"], whole=True)
            return "finished", "", False
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()[:200]
                return f"status {response.status_code}", text, response.status_code in (500, 502, 503)
            return await self._read(ask, response)

    async def _read(self, ask: Ask, response: httpx.Response) -> tuple[str, str, bool]:
        tokens: list[int] = []
        reason = None
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                if reason is None:
                    return "no finish reason", f"after {len(tokens)} tokens", False
                self._compare(ask, tokens, whole=True)
                return "finished", "", False
            event = json.loads(line[6:])
            if "error" in event:
                return "error event", str(event["error"].get("message"))[:200], False
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    tokens += choice["token_ids"]
                    ask.noticed_s.append(time.monotonic())
                    self._compare(ask, tokens, whole=False)
                reason = choice.get("finish_reason") or reason
        return "stream cut", f"after {len(tokens)} tokens", not tokens

    @staticmethod
    def _compare(ask: Ask, tokens: list[int], *, whole: bool) -> None:
        if tokens != (ask.expected if whole else ask.expected[: len(tokens)]):
            ask.wrong = True
