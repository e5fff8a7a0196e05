"""Text out of tokens, through the whole front in one process: engines say scripted tokens, prefill says the first.

Kinds: stop string across token boundaries; split UTF-8; max_tokens=1 and first-token endings; retry in mid-stream (a
stop string that straddles the cut). Every case streamed and whole; both must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bad_bodies import CHAT, COMPLETION
from front import MODEL, Front, completion, events, reasons_of, running, tokens_of
from in_process import LOW, until
from scripted import Script, Vocabulary

from cluster.messages import Role

# Importing vLLM and torch warns of their own affairs.
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]

PROMPT = list(range(LOW, LOW + 50))
WORDS = ("user", "stant", "end", "he", " the")
CHARACTER = "\U0001fae0"
SLOW = {"linear": {"fixed_ms": 60, "per_prefill_token_us": 20, "transfer_fixed_ms": 2}}


@pytest.fixture(scope="module")
async def front() -> AsyncIterator[Front]:
    async with running() as it:
        yield it


@pytest.fixture(scope="module")
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=30) as client:
        yield client


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


class Answer:
    """What a client makes of an answer, whichever way it came."""

    def __init__(self, text: str, reason: str, stop_reason: Any, usage: dict[str, Any], parts: list[str]) -> None:
        self.text, self.reason, self.stop_reason, self.usage, self.parts = text, reason, stop_reason, usage, parts


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], choice: int = 0) -> Answer:
    status, found, done, _ = await events(http, body | {"stream_options": {"include_usage": True}})
    assert (status, done) == (200, True), found
    choices = [c for e in found for c in e["choices"] if c["index"] == choice]
    ends = [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]]
    assert len(ends) == 1, "one finish reason per choice"
    parts = [c["text"] for c in choices]
    return Answer("".join(parts), *ends[0], found[-1]["usage"], parts)


async def whole(http: httpx.AsyncClient, body: dict[str, Any], choice: int = 0) -> Answer:
    response = await http.post(COMPLETION, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    c = answer["choices"][choice]
    return Answer(c["text"], c["finish_reason"], c.get("stop_reason"), answer["usage"], [c["text"]])


READ = pytest.mark.parametrize("read", [streamed, whole], ids=["streamed", "whole"])


@READ
@pytest.mark.parametrize(
    "stop, text, matched, tokens",
    [
        (["nten"], "usersta", "nten", 3),  # over a token's tail and the next one's head
        (["stant"], "user", "stant", 2),  # a whole token
        (["tan"], "users", "tan", 2),  # inside a token
        (["he", "ten"], "userstan", "ten", 3),  # the earliest of two
        (["user"], "", "user", 1),  # the first token, which the prefill engine sampled
        (["se"], "u", "se", 1),  # inside the first token
        (["rst"], "use", "rst", 2),  # across prefill's first token and decode's second
        (["rstantendh"], "use", "rstantendh", 4),  # across four
        (["enough", "endx"], "userstantendhe the", None, 5),  # begins twice, and never ends
    ],
)
async def test_a_stop_string_is_found_wherever_it_lies_and_never_shown(
    front: Front, http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, read, stop, text, matched, tokens
) -> None:
    """Kind: stop string across token boundaries."""
    script.answer(PROMPT, vocabulary.ids(*WORDS))
    answer = await read(http, completion(prompt=PROMPT, max_tokens=5, stop=stop))
    assert answer.text == text
    assert (answer.reason, answer.stop_reason) == (("stop", matched) if matched else ("length", None))
    assert answer.usage["completion_tokens"] == tokens
    assert answer.usage["prompt_tokens"] == 50
    await until(lambda: not any(front.cluster.open().values()), 2.0)
    assert not any(front.cluster.open().values()), "the leg that the stop string ended goes on"


@READ
async def test_chat_finds_stop_strings_too(
    http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, read
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stop": ["rst"]}
    asked = {"model": MODEL, "messages": body["messages"], "add_generation_prompt": True}
    prompt = (await http.post("/tokenize", json=asked)).json()["tokens"]
    script.answer(prompt, vocabulary.ids(*WORDS))
    if read is whole:
        (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    else:
        _, found, done, _ = await events(http, body, CHAT)
        assert done
        text = "".join(c["delta"].get("content") or "" for e in found for c in e["choices"])
        (reason,) = reasons_of(found)
    assert (text, reason) == ("use", "stop")


@READ
@pytest.mark.parametrize("kept", [True, False], ids=["shown", "hidden"])
async def test_a_stop_string_can_be_part_of_the_output(
    http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, read, kept: bool
) -> None:
    script.answer(PROMPT, vocabulary.ids(*WORDS))
    answer = await read(http, completion(prompt=PROMPT, max_tokens=5, stop=["nten"], include_stop_str_in_output=kept))
    assert answer.text == ("userstanten" if kept else "usersta")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
async def test_a_character_of_four_tokens_is_whole_or_left_out_in_both_modes(
    http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, count: int
) -> None:
    """Kind: split UTF-8. The first byte is sampled by the prefill engine."""
    tokens = [vocabulary.byte(b) for b in CHARACTER.encode()] + vocabulary.ids("he")
    script.answer(PROMPT, tokens)
    body = completion(prompt=PROMPT, max_tokens=count)
    one, other = await streamed(http, body), await whole(http, body)
    assert one.text == other.text == {4: CHARACTER, 5: CHARACTER + "he"}.get(count, "")
    if count >= 4:
        assert not any("\ufffd" in part for part in one.parts)
    assert one.usage["completion_tokens"] == other.usage["completion_tokens"] == count


@READ
async def test_interleaved_choices_keep_their_bytes_apart(
    http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, read
) -> None:
    """Kind: split UTF-8, n = 2."""
    script.answer(PROMPT, [vocabulary.byte(b) for b in CHARACTER.encode()] * 2)
    body = completion(prompt=PROMPT, max_tokens=8, n=2, temperature=1.0)
    for choice in range(2):
        assert (await read(http, body, choice)).text == CHARACTER * 2


@READ
async def test_a_stop_string_right_behind_a_split_character(
    http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, read
) -> None:
    """Kind: split UTF-8."""
    script.answer(PROMPT, [vocabulary.byte(b) for b in CHARACTER.encode()] + vocabulary.ids("stant", "end"))
    answer = await read(http, completion(prompt=PROMPT, max_tokens=6, stop=["st"]))
    assert (answer.text, answer.reason) == (CHARACTER, "stop")


@READ
@pytest.mark.parametrize(
    "more, tokens, reason, decoded",
    [
        ({"max_tokens": 1}, 1, "length", False),
        ({"max_tokens": 1, "stop": ["user"]}, 1, "stop", False),
        ({"max_tokens": 2}, 2, "length", True),
    ],
    ids=str,
)
async def test_first_token_endings_are_counted_exactly(
    front: Front, http: httpx.AsyncClient, script: Script, vocabulary: Vocabulary, read, more, tokens, reason, decoded
) -> None:
    """Kind: max_tokens=1 and first-token endings."""
    decodes = front.cluster.workers(Role.DECODE)
    before = sum(w.counts["legs"] for w in decodes)
    script.answer(PROMPT, vocabulary.ids(*WORDS))
    answer = await read(http, completion(prompt=PROMPT) | more)
    assert (answer.usage["completion_tokens"], answer.reason) == (tokens, reason)
    assert (sum(w.counts["legs"] for w in decodes) > before) == decoded


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_stop_string_that_straddles_the_death_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary, cut: int
) -> None:
    """Kind: retry in mid-stream. The held-back text moves along: neither shown, nor lost, nor matched anew."""
    script = Script(monkeypatch)
    script.answer(PROMPT, vocabulary.ids(*WORDS, "user", "user"))
    async with running(simulated=SLOW) as front, httpx.AsyncClient(base_url=front.url, timeout=30) as http:
        body = completion(prompt=PROMPT, max_tokens=7, stop=["rstantendh"])
        task = asyncio.create_task(streamed(http, body))
        await until(lambda: any(run.tokens(0) >= cut for run in front.cluster.dispatcher.runs()), 5.0)
        (busy,) = [w for w in front.cluster.workers(Role.DECODE) if w.snapshot().running]
        busy.engine.die()  # type: ignore[attr-defined]
        answer = await task
        assert (answer.text, answer.reason, answer.stop_reason) == ("use", "stop", "rstantendh")
        assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (50, 4)
        assert front.cluster.dispatcher.migrations == 1


async def test_a_character_is_not_torn_by_the_death_of_its_engine(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    """Kinds: retry in mid-stream; split UTF-8: two bytes came from one engine, two from the other."""
    script = Script(monkeypatch)
    script.answer(PROMPT, [vocabulary.byte(b) for b in CHARACTER.encode() * 2])
    async with running(simulated=SLOW) as front, httpx.AsyncClient(base_url=front.url, timeout=30) as http:
        task = asyncio.create_task(events(http, completion(prompt=PROMPT, max_tokens=8)))
        await until(lambda: any(run.tokens(0) >= 2 for run in front.cluster.dispatcher.runs()), 5.0)
        (busy,) = [w for w in front.cluster.workers(Role.DECODE) if w.snapshot().running]
        busy.engine.die()  # type: ignore[attr-defined]
        _, found, done, _ = await task
        assert done
        assert "".join(c["text"] for e in found for c in e["choices"]) == CHARACTER * 2
        assert len(tokens_of(found)) == 8
        assert front.cluster.dispatcher.migrations == 1
