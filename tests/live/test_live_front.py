"""The whole front of one process: gateway, vLLM's OpenAI layer, dispatcher, links, simulated engines. No Ray.

Kinds: malformed bodies give 500; empty prompt; context-limit arithmetic; stream ends silently; n>1 over PD; the
prefill leg contradicts itself; max_tokens=1; caller-chosen request id; tenant isolation of the prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bad_bodies import CHAT, COMPLETION, TABLE, Bad
from front import MODEL, Front, completion, events, right, running, strict
from in_process import LOW, until

# Importing vLLM and torch warns of their own affairs.
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
async def front() -> AsyncIterator[Front]:
    async with running(http={"keep_alive_s": 0.2}) as it:
        yield it


@pytest.fixture(scope="module")
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("bad", TABLE, ids=str)
async def test_a_bad_request_gets_4xx_and_breaks_nothing(front: Front, http: httpx.AsyncClient, bad: Bad) -> None:
    workers = front.cluster.transport.workers.values()
    before = [w.counts["legs"] for w in workers]
    start = time.monotonic()
    content = bad.body.replace(b"MODEL", MODEL.encode())
    response = await http.request(bad.method, bad.path, content=content, headers=bad.headers)
    took_s = time.monotonic() - start
    assert response.status_code == bad.status if bad.status else 400 <= response.status_code < 500, response.text
    error = strict(response.text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == response.status_code
    assert took_s < 2.0
    if bad.name != "completion: prompt a and empty":  # its first prompt is good and has begun when the second is seen
        assert [w.counts["legs"] for w in workers] == before, "a pool was touched"
    await until(lambda: not any(front.cluster.open().values()), 2.0)
    assert not any(front.cluster.open().values())


async def test_a_good_request_works_after_all_of_them(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETION, json=completion())
    assert response.status_code == 200
    assert response.json()["choices"][0]["token_ids"] == right(8)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1},
        {"max_tokens": 8, "min_tokens": 8},
        {"max_tokens": 8, "stop": ["no such text"]},
        {"max_tokens": 2},
    ],
    ids=str,
)
async def test_stream_and_whole_answer_agree(front: Front, http: httpx.AsyncClient, more: dict) -> None:
    """Kinds: the prefill leg contradicts itself; max_tokens=1 and first-token endings."""
    decodes = [w for name, w in front.cluster.transport.workers.items() if name.startswith("decode")]
    before = sum(w.counts["legs"] for w in decodes)
    whole = (await http.post(COMPLETION, json=completion(**more))).json()
    status, found, done, _ = await events(http, completion(**more, stream_options={"include_usage": True}))
    tokens = [t for e in found for c in e["choices"] for t in c.get("token_ids") or []]
    reasons = [c["finish_reason"] for e in found for c in e["choices"] if c.get("finish_reason")]
    text = "".join(c["text"] for e in found for c in e["choices"])
    count = more["max_tokens"]
    assert (status, done, reasons) == (200, True, ["length"])
    assert tokens == whole["choices"][0]["token_ids"] == right(count)
    assert text == whole["choices"][0]["text"]
    assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == count
    assert found[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == 50
    if count == 1:
        assert sum(w.counts["legs"] for w in decodes) == before, "decode was called for one token"


async def test_three_choices_share_one_prefill(front: Front, http: httpx.AsyncClient) -> None:
    """Kind: n>1 over PD hangs; 20 at once, one of them left in the middle."""
    prefills = [w for name, w in front.cluster.transport.workers.items() if name.startswith("prefill")]
    before = sum(w.counts["legs"] for w in prefills)
    body = completion(n=3, temperature=1.0, seed=5, max_tokens=6)
    leaving = asyncio.create_task(http.post(COMPLETION, json=body | {"max_tokens": 1500}))
    answers = await asyncio.gather(*(http.post(COMPLETION, json=body) for _ in range(20)))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert [c["token_ids"] for c in answer.json()["choices"]] == [right(6)] * 3
        assert answer.json()["usage"] == answer.json()["usage"] | {"prompt_tokens": 50, "completion_tokens": 18}
    assert sum(w.counts["legs"] for w in prefills) - before == 21
    await until(lambda: not any(front.cluster.open().values()), 2.0)
    assert not any(front.cluster.open().values()), front.cluster.open()


async def test_ten_streams_with_one_id_each_get_their_own_text(http: httpx.AsyncClient) -> None:
    """Kind: caller-chosen request id."""
    prompts = [list(range(LOW + i, LOW + 40 + i)) for i in range(10)]
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(
        *(http.post(COMPLETION, json=completion(prompt=p, max_tokens=20), headers=headers) for p in prompts)
    )
    assert [a.json()["choices"][0]["token_ids"] for a in answers] == [right(20, p) for p in prompts]


async def test_the_context_limit_is_exact_and_named(http: httpx.AsyncClient) -> None:
    """Kind: context-limit arithmetic and message."""

    async def ask(prompt_tokens: int, **more: Any) -> httpx.Response:
        return await http.post(COMPLETION, json=completion(prompt=[LOW] * prompt_tokens, **more))

    assert (await ask(2047, max_tokens=1)).status_code == 200
    for asked in (4, 5, 100):  # vLLM gives what fits
        fitted = await ask(2044, max_tokens=asked)
        assert fitted.status_code == 200
        assert fitted.json()["usage"]["completion_tokens"] == 4
    assert (await ask(2048, max_tokens=1)).status_code == 400
    for prompt_tokens, more in [(2049, {"max_tokens": 1}), (3000, {"stream": True})]:
        response = await ask(prompt_tokens, **more)
        assert response.status_code == 400, response.text
        assert "2048" in response.json()["error"]["message"]


async def test_a_chat_stream_is_well_formed(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    status, found, done, _ = await events(http, body, CHAT)
    reasons = [c["finish_reason"] for e in found for c in e["choices"] if c.get("finish_reason")]
    assert (status, done, reasons) == (200, True, ["length"])
    assert found[-1]["usage"]["completion_tokens"] == 5


class Broken:
    """Switches the decode engines off, and on again."""

    def __init__(self, front: Front) -> None:
        self.workers = [w for n, w in front.cluster.transport.workers.items() if n.startswith("decode")]

    def __enter__(self) -> None:
        for worker in self.workers:
            worker.engine.stall()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.engine.resume()  # type: ignore[attr-defined]


async def test_a_long_wait_for_the_first_token_is_kept_alive(front: Front, http: httpx.AsyncClient) -> None:
    broken = Broken(front)
    with broken:
        task = asyncio.create_task(events(http, completion()))
        await asyncio.sleep(1.0)
    status, found, done, comments = await task
    assert (status, done) == (200, True)
    assert comments >= 2
    assert [t for e in found for c in e["choices"] for t in c.get("token_ids") or []] == right(8)


async def test_a_failure_before_the_first_byte_has_a_real_status() -> None:
    """Kind: stream ends silently (b)."""
    async with running() as front:
        for name, worker in front.cluster.transport.workers.items():
            if name.startswith("decode"):
                front.cluster.dispatcher.on_worker_down(worker.info.worker_id)
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            status, answer, _, _ = await events(http, completion())
            plain = await http.post(COMPLETION, json=completion())
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
            chat_status, chat_answer, _, _ = await events(http, chat, CHAT)
        assert (status, plain.status_code, chat_status) == (503, 503, 503)
        for error in (answer[0]["error"], plain.json()["error"], chat_answer[0]["error"]):
            assert error["code"] == 503
            assert "no decode worker" in error["message"]


async def test_tenants_share_no_block() -> None:
    """Kind: tenant isolation of the prefix cache, at prefill and decode engines alike."""
    async with (
        running({"api_keys_env": "KEYS"}) as front,
        httpx.AsyncClient(base_url=front.url, timeout=30) as http,
    ):

        async def cached(key: str, **more: Any) -> int:
            prompt = list(range(LOW, LOW + 512))
            headers = {"authorization": f"Bearer {key}"}
            response = await http.post(
                COMPLETION, json=completion(prompt=prompt, max_tokens=2, **more), headers=headers
            )
            assert response.status_code == 200, response.text
            return int((response.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

        # Each pool has two engines: ask often enough that both have been met.
        for _ in range(6):
            await cached("key-of-tenant-a")
        assert await cached("key-of-tenant-a") >= 496
        from router.gateway.salt import namespace_salt

        for salt in (None, "s", namespace_salt("a", None)):
            more = {} if salt is None else {"cache_salt": salt}
            assert await cached("key-of-tenant-b", **more) == 0
        assert await cached("key-of-tenant-a", cache_salt="mine") == 0
        assert (await http.post(COMPLETION, json=completion())).status_code == 401


async def dying(front: Front, body: dict[str, Any], after_s: float = 0.25) -> tuple[asyncio.Task, Any]:
    """Send a request and end the decode engine that runs it."""
    decodes = [w for n, w in front.cluster.transport.workers.items() if n.startswith("decode")]
    async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
        streamed = body.get("stream")
        task = asyncio.create_task(events(http, body) if streamed else http.post(COMPLETION, json=body))
        await asyncio.sleep(after_s)
        busy = [w for w in decodes if w.snapshot().running]
        assert len(busy) == 1
        busy[0].engine.die()  # type: ignore[attr-defined]
        return task, await task


async def test_what_can_be_moved_goes_on_and_what_cannot_ends_with_an_error_event() -> None:
    """Kinds: retry in mid-stream; stream ends silently (a)."""
    async with running() as front:
        _, (status, found, done, _) = await dying(front, completion(max_tokens=400, stream=True))
        tokens = [t for e in found for c in e["choices"] for t in c.get("token_ids") or []]
        reasons = [c["finish_reason"] for e in found for c in e["choices"] if c.get("finish_reason")]
        assert (status, done, reasons) == (200, True, ["length"])
        assert tokens == right(400)
        assert front.cluster.dispatcher.migrations == 1
    async with running() as front:
        seeded = completion(max_tokens=400, stream=True, seed=5, temperature=1.0)
        _, (status, found, _, _) = await dying(front, seeded)
        errors = [e["error"] for e in found if "error" in e]
        choices = [c for e in found for c in e.get("choices", [])]
        tokens = [t for c in choices for t in c.get("token_ids") or []]
        assert status == 200
        assert 0 < len(tokens) < 400
        assert tokens == right(len(tokens))
        assert not any(c.get("finish_reason") for c in choices)
        assert len(errors) == 1
        assert errors[0]["code"] in (500, 502)


async def test_an_answer_that_is_not_streamed_is_computed_again() -> None:
    async with running() as front:
        _, response = await dying(front, completion(max_tokens=400, n=2, seed=5, temperature=1.0))
        assert response.status_code == 200, response.text
        answer = response.json()
        assert [c["token_ids"] for c in answer["choices"]] == [right(400)] * 2
        assert answer["usage"]["completion_tokens"] == 800
        assert front.cluster.dispatcher.retries == 1
