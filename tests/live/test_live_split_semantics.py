"""Real engines, split: each request equals the same request computed by one engine, and cancels leave nothing.

The one engine is the decode engine of the same cluster: a request that wants the prompt's log probabilities is
computed there alone. Kinds: the prefill leg contradicts itself; logprobs over PD; cached_tokens is wrong in PD; n>1
over PD hangs; decode silently repeats the prefill; full hit on decode; cancel before the first token; disconnect does
not stop generation; Ray Serve cancellation holes.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from bad_bodies import CHAT, COMPLETION
from served import Served, wait_for

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]

MODEL = "embedded"
CHUNK_TOKENS = 256
CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "engine": {"args": {"max_num_batched_tokens": CHUNK_TOKENS, "max_num_seqs": 64}},
    "router": {"placement": {"conditional": False}},
}
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
CLOSE = 2e-3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cluster = Served(CONFIG, tmp_path_factory.mktemp("semantics"))
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()
    assert cluster.left() == []


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A streamed answer, put together to the form of a whole one."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    with http.stream("POST", path, json=body | {"stream": True, "stream_options": {"include_usage": True}}) as response:
        assert response.status_code == 200
        done = False
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
                continue
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                one = choices.setdefault(part["index"], {"text": "", "ids": [], "logprobs": [], "reasons": []})
                one["text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
                one["ids"] += part.get("token_ids") or []
                one["logprobs"] += _logprobs(part)
                one["reasons"] += [part["finish_reason"]] if part["finish_reason"] else []
    assert done
    assert all(len(one["reasons"]) == 1 for one in choices.values())
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {
            "text": c["text"] if "text" in c else c["message"]["content"],
            "ids": c.get("token_ids") or [],
            "logprobs": _logprobs(c),
            "reasons": [c["finish_reason"]],
        }
        for c in answer["choices"]
    ]
    return {"choices": choices, "usage": answer["usage"]}


def _logprobs(choice: dict[str, Any]) -> list[tuple[float, list[float]]]:
    """(of the token, of the alternatives) for each token, from either endpoint's form."""
    given = choice.get("logprobs")
    if not given:
        return []
    if "content" in given:
        return [(e["logprob"], sorted(t["logprob"] for t in e["top_logprobs"])) for e in given["content"] or []]
    tops = given.get("top_logprobs") or [{}] * len(given["token_logprobs"])
    return [(own, sorted(top.values())) for own, top in zip(given["token_logprobs"], tops, strict=True)]


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"max_tokens": 20, "min_tokens": 10}),
    (COMPLETION, {"max_tokens": 20, "ignore_eos": True}),
    (COMPLETION, {"max_tokens": 1}),
    (COMPLETION, {"max_tokens": 2}),
    (COMPLETION, {"max_tokens": 8, "logprobs": 5}),
    (COMPLETION, {"max_tokens": 6, "n": 3, "temperature": 1, "seed": 5}),
    (COMPLETION, {"max_tokens": 12, "stop": [" "]}),
    (CHAT, {"max_completion_tokens": 20}),
    (CHAT, {"max_completion_tokens": 20, "max_tokens": 20}),
    (CHAT, {}),
    (CHAT, {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"max_tokens": 8, "n": 2, "temperature": 1, "seed": 7}),
    (CHAT, {"max_tokens": 12, "repetition_penalty": 1.2, "presence_penalty": 0.5}),
    (CHAT, {"max_tokens": 40, "structured_outputs": {"regex": "(yes|no), [a-z]{3,5}"}}),
    (CHAT, {"max_tokens": 60, "response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("path, more", BODIES, ids=lambda v: json.dumps(v) if isinstance(v, dict) else v)
def test_a_split_request_equals_one_engine(
    served: Served, http: httpx.Client, path: str, more: dict[str, Any], mode: str
) -> None:
    """Kinds: the prefill leg contradicts itself; logprobs over PD; max_tokens=1; n>1 over PD."""
    what = {"messages": QUESTION} if path == CHAT else {"prompt": "Once upon a time there was a router"}
    body = {"model": MODEL, "temperature": 0, "return_token_ids": True, **what, **more}
    one_engine = whole(ask(http, path, {**body, "prompt_logprobs": 0}))
    assert served.records()[-1]["prefill_worker"] is None
    split = stream(http, path, body) if mode == "streamed" else whole(ask(http, path, body))
    record = served.records()[-1]
    assert record["path"] == "split"
    for ours, theirs in zip(split["choices"], one_engine["choices"], strict=True):
        assert (ours["text"], ours["ids"], ours["reasons"]) == (theirs["text"], theirs["ids"], theirs["reasons"])
        assert len(ours["logprobs"]) == len(theirs["logprobs"])
        for (a, tops_a), (b, tops_b) in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            assert abs(a - b) < CLOSE
            assert tops_a == pytest.approx(tops_b, abs=CLOSE)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert split["usage"][name] == one_engine["usage"][name]
    if "logprobs" in more:
        assert len(split["choices"][0]["logprobs"]) == split["usage"]["completion_tokens"]


@pytest.mark.parametrize("echo", [True, False])
def test_prompt_log_probabilities_come_from_one_engine(http: httpx.Client, echo: bool) -> None:
    """Kind: logprobs over PD: prompt log probabilities with `echo`, and without any output token."""
    body = {"model": MODEL, "prompt": "Once upon a time", "logprobs": 1, "temperature": 0, "max_tokens": 4}
    body |= {"echo": True, "max_tokens": 0} if echo else {"prompt_logprobs": 1}
    (choice,) = ask(http, COMPLETION, body)["choices"]
    if echo:
        assert choice["text"] == "Once upon a time"
        assert len(choice["logprobs"]["token_logprobs"]) >= 4
    else:
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) >= 4


def test_bytes_of_log_probabilities_join_to_the_text(http: httpx.Client) -> None:
    """Kind: split UTF-8."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": True}
    (choice,) = ask(http, CHAT, body)["choices"]
    joined = bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"] or [])
    assert joined.decode().startswith(choice["message"]["content"])


def test_cached_tokens_are_what_prefill_did_not_compute(served: Served, http: httpx.Client) -> None:
    """Kind: cached_tokens is wrong in PD. Also: full hit on decode, sent three times to the same pair."""
    block = served.replicas()[0]["block_size_tokens"]
    prompt = [(13 * i) % 1800 + 100 for i in range(4 * block)]
    seen = []
    for salt in (None, None, None, "other"):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        started = time.monotonic()
        usage = ask(http, COMPLETION, body | ({"cache_salt": salt} if salt else {}))["usage"]
        assert time.monotonic() - started < 5
        seen.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        record = served.records()[-1]
        assert record["decode_computed_tokens"] <= block
        wait_for(served.idle, 2, "leases of a prompt that was not pulled")
    assert seen[0] == seen[3] == 0
    assert seen[1] == seen[2]
    assert 3 * block <= seen[1] < len(prompt)


def test_fifty_prompts_at_once_are_computed_once(served: Served) -> None:
    """Kind: decode silently repeats the prefill."""

    async def main() -> list[int]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            bodies = [
                {"model": MODEL, "prompt": [(i * 31 + j * 7) % 1800 + 100 for j in range(500)], "max_tokens": 3}
                for i in range(50)
            ]
            return [r.status_code for r in await asyncio.gather(*(client.post(COMPLETION, json=b) for b in bodies))]

    assert asyncio.run(main()) == [200] * 50
    block = served.replicas()[0]["block_size_tokens"]
    records = served.records()[-50:]
    assert {r["path"] for r in records} == {"split"}
    assert max(r["decode_computed_tokens"] for r in records) <= block


@pytest.mark.slow
def test_five_hundred_random_cancels_leave_nothing_within_two_seconds(served: Served) -> None:
    """Kinds: Ray Serve cancellation holes; disconnect does not stop generation; the gap between the legs."""
    rng = random.Random(9)
    left = 0

    async def one(client: httpx.AsyncClient, seed: int) -> None:
        nonlocal left
        prompt = [(seed * 17 + j * 5) % 1800 + 100 for j in range(rng.choice([20, 200, 900]))]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.choice([1, 20, 200]), "ignore_eos": True,
                "stream": rng.random() < 0.5}  # fmt: skip
        try:
            async with asyncio.timeout(rng.choice([0.01, 0.05, 0.1, 0.3, 1.0, None])):
                await client.post(COMPLETION, json=body)
        except TimeoutError:
            left += 1

    async def main() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
            for start in range(0, 500, 20):
                await asyncio.gather(*(one(client, start + i) for i in range(20)))

    start, before = [r["kv_used_blocks"] for r in served.replicas()], len(served.records())
    asyncio.run(main())
    waited_s = wait_for(served.idle, 20, "engines idle and no lease open")
    assert left > 200
    ends = Counter(record["outcome"] for record in served.records()[before:])
    # Some left before their request was sent, some as their answer was on its way; nobody else was served to the end.
    assert ends["done"] < 500 - left + 0.1 * left, f"{left} clients left; {dict(ends)}"
    assert ends["cancelled"] > 0.5 * left, f"{left} clients left; {dict(ends)}"
    assert waited_s < 2, f"idle only after {waited_s:.1f} s"
    wait_for(lambda: [r["kv_used_blocks"] for r in served.replicas()] == start, 2, "the start level of blocks")


@pytest.mark.slow
def test_ten_cancelled_long_prefills_do_not_delay_the_next_short_prompt(served: Served, http: httpx.Client) -> None:
    """Kind: cancel before the first token. As long as the model allows; what runs on is one chunk of the budget."""

    def ttft_s() -> float:
        body = {"model": MODEL, "prompt": [rng.randrange(100, 1900) for _ in range(10)], "max_tokens": 4,
                "ignore_eos": True, "stream": True}  # fmt: skip
        started = time.monotonic()
        with http.stream("POST", COMPLETION, json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    return time.monotonic() - started
        raise AssertionError("no token")

    async def cancelled() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:

            async def one() -> None:
                prompt = [rng.randrange(100, 1900) for _ in range(2000)]
                try:
                    async with asyncio.timeout(0.2):
                        await client.post(COMPLETION, json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
                except TimeoutError:
                    pass

            await asyncio.gather(*(one() for _ in range(10)))

    rng = random.Random(4)
    idle = statistics.median(ttft_s() for _ in range(15))
    after = []
    for _ in range(15):
        asyncio.run(cancelled())
        after.append(ttft_s())
        wait_for(served.idle, 10, f"cancelled prefills: {served.status()['pools']}")
    print(f"idle TTFT {1e3 * idle:.1f} ms, behind ten cancelled prefills {1e3 * statistics.median(after):.1f} ms")
    assert statistics.median(after) < 2 * idle
