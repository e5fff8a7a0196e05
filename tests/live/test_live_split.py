"""1P1D with real engines behind `pdserve serve`: it answers exactly like one engine and leaves nothing behind."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from bare import Bare
from served import Served, wait_for

from cluster.config import parse
from cluster.messages import Role
from cluster.models.resolve import embedded_path
from cluster.models.tiny.recipe import gen_corpus

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    # Every prompt takes the split path, however short it is.
    "router": {"placement": {"conditional": False}},
}
LENGTHS = [1, 15, 16, 17, 127, 128, 129, 256, 500, 1000, 1500, 2000]
PROMPTS = 50
MAX_TOKENS = 12
MODEL = "embedded"


def prompts() -> list[list[int]]:
    """50 seeded prompts cut from chats that the model knows, with lengths around block borders and shared starts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_path())
    rng = random.Random(11)
    made: list[list[int]] = []
    while len(made) < PROMPTS:
        length = LENGTHS[len(made) % len(LENGTHS)]
        tokens: list[int] = []
        if made and len(made) % 4 == 3:  # repeat a start that an engine has seen
            tokens = list(rng.choice(made))[: length // 2]
        while len(tokens) < length:
            question, answer = gen_corpus.qa(rng)
            turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            tokens += tokenizer.encode(turn, add_special_tokens=False)
        made.append(tokens[:length])
    return made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy tokens) of one colocated engine."""
    config = parse({**CONFIG, "pools": {"prefill": None}})
    engine = Bare(config, Role.DECODE, "0", tmp_path_factory.mktemp("one") / "engine.log", dtype="float32")
    try:
        engine.answer()
        return [(prompt, engine.ask(prompt, MAX_TOKENS)["tokens"]) for prompt in prompts()]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def served(expected: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    del expected  # the reference engine first: both together need more memory than a laptop has
    cluster = Served(CONFIG, tmp_path_factory.mktemp("split"))
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()
    assert cluster.left() == []


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_greedy_output_equals_one_engine_streamed_or_not(
    served: Served, client: openai.OpenAI, expected: list[tuple[list[int], list[int]]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_path())
    block = served.replicas()[0]["block_size_tokens"]
    computed_more: list[int] = []
    for prompt, tokens in expected:
        options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        whole = client.completions.create(**options, extra_body={"return_token_ids": True})
        got = whole.choices[0].model_dump()["token_ids"]
        assert got == tokens, f"prompt of {len(prompt)} tokens"
        text, usage, reason = "", None, None
        for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
            usage = chunk.usage or usage
        assert text == whole.choices[0].text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert reason == whole.choices[0].finish_reason
        for counted in (usage, whole.usage):
            assert counted is not None
            assert (counted.prompt_tokens, counted.completion_tokens) == (len(prompt), len(tokens))
    records = served.records()[-2 * len(expected) :]
    assert {r["path"] for r in records} == {"split"}
    computed_more = [r["decode_computed_tokens"] for r in records if r["decode_computed_tokens"] > block]
    assert computed_more == [], "a decode engine computed more than one block of a prompt"
    assert sum(r["transfer_bytes"] for r in records) > 0


def test_the_openai_sdk(served: Served, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == [MODEL]
    question: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
    chat = client.chat.completions.create(model=MODEL, messages=question, max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == "The capital of Japan is Tokyo."
    assert chat.choices[0].finish_reason == "stop"
    deltas, usages, reasons = [], [], []
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=question,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            deltas.append(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(deltas) == chat.choices[0].message.content
    assert reasons == ["stop"] and usages[0].completion_tokens == chat.usage.completion_tokens
    assert len([d for d in deltas if d]) > 3, "a stream that comes in one piece is no stream"

    prompt = "Once upon a time"
    three = client.completions.create(model=MODEL, prompt=prompt, n=3, temperature=1, seed=5, max_tokens=6)
    again = client.completions.create(model=MODEL, prompt=prompt, n=3, temperature=1, seed=5, max_tokens=6)
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert [c.text for c in three.choices] == [c.text for c in again.choices], "a seed gives the same samples"
    assert (
        three.usage.prompt_tokens
        == client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage.prompt_tokens
    )

    logprobs = (
        client.chat.completions.create(
            model=MODEL, messages=question, max_tokens=8, temperature=0, logprobs=True, top_logprobs=5
        )
        .choices[0]
        .logprobs
    )
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 8 and all(len(entry.top_logprobs) == 5 for entry in logprobs.content)

    stopped = client.chat.completions.create(
        model=MODEL, messages=question, max_tokens=20, temperature=0, stop=["Japan"]
    )
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("The capital of ", "stop")

    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    formatted = client.chat.completions.create(
        model=MODEL,
        messages=question,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
    )
    assert (formatted.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "nope"}, 404, "nope"),
        ({"max_tokens": 100_000}, 400, "2048"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, 400, "2048"),
        ({"top_p": 7}, 400, "top_p"),
    ],
)
def test_mistakes_get_typed_errors(client: openai.OpenAI, change: dict[str, Any], status: int, says: str) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{**options, **change})
    assert caught.value.status_code == status
    assert says in caught.value.message


def test_one_token_never_meets_the_decode_pool(served: Served, client: openai.OpenAI) -> None:
    before = len(served.records())
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=1, temperature=0)
    assert answer.usage.completion_tokens == 1
    record = served.records()[-1]
    assert len(served.records()) == before + 1
    assert record["prefill_worker"] and record["output_tokens"] == 1
    assert record["transfer_bytes"] == 0 and "kv_transfer" not in record["stage_s"]


def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(served: Served) -> None:
    rng = random.Random(3)
    body = {"model": MODEL, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}

    def leave(number: int) -> None:
        tokens = [(7 * i + number) % 1900 + 20 for i in range(rng.choice([20, 300, 1200]))]
        moment = rng.choice([0.0, 0.005, 0.02, 0.05, 0.1, 0.3])
        try:
            with (
                httpx.Client(timeout=httpx.Timeout(30, read=moment + 0.001)) as http,
                http.stream("POST", f"{served.url}/v1/completions", json={**body, "prompt": tokens}) as answer,
            ):
                began = time.monotonic()
                for _ in answer.iter_bytes():
                    if time.monotonic() - began > moment:
                        break
        except httpx.HTTPError:
            pass

    for start in range(0, 50, 10):
        threads = [threading.Thread(target=leave, args=(start + i,)) for i in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    waited_s = wait_for(served.idle, 20, "engines idle and no lease open")
    assert waited_s < 2, f"engines idle and leases closed only after {waited_s:.1f} s"


def test_status_names_pools_replicas_leases_model_and_layout(served: Served) -> None:
    import json
    import subprocess
    import sys

    run = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "status", "--url", served.url, "--json"], capture_output=True, check=True
    )
    status = json.loads(run.stdout)
    assert status["model"] == MODEL
    assert set(status["pools"]) == {"prefill", "decode"}
    for pool in status["pools"].values():
        assert pool["layout"] == {"tp": 1, "pp": 1, "dp": 1} and pool["open_leases"] == 0
        (replica,) = pool["replicas"]
        assert replica["state"] == "ready" and replica["kv_total_blocks"] > 0
    assert [pair["state"] for pair in status["pairs"]] == ["ready"]


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_lets_running_streams_finish_and_leaves_no_process_or_port(served: Served, number: int) -> None:
    got: dict[str, Any] = {"tokens": 0, "reason": None, "error": None}
    started = threading.Event()

    def stream() -> None:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)
        try:
            for chunk in client.completions.create(
                model=MODEL,
                prompt="Once upon a time",
                max_tokens=300,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                started.set()
                got["tokens"] += len(chunk.choices[0].text) > 0
                got["reason"] = chunk.choices[0].finish_reason or got["reason"]
        except Exception as e:
            got["error"] = e

    thread = threading.Thread(target=stream)
    thread.start()
    assert started.wait(60)
    assert served.stop(number) == 0
    thread.join(60)
    assert got["error"] is None and got["reason"] == "length"
    wait_for(lambda: served.left() == [], 20, "the processes to end")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", served.port)) != 0, "something still listens"
