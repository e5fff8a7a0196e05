"""2P2D with real engines: every pair meets, requests spread, answers do not depend on which pair gives them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import Served, wait_for

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]

CONFIG = {
    "model": {"dtype": "float32"},
    "pools": {pool: {"replicas": {"min": 2, "max": 2}} for pool in ("prefill", "decode")},
    "router": {"placement": {"conditional": False}},
}
QUESTIONS = ("What is the capital of Japan?", "What is a KV cache?", "What is the capital of France?")
ROUNDS = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cluster = Served(CONFIG, tmp_path_factory.mktemp("two"))
    yield cluster
    cluster.stop()
    wait_for(lambda: cluster.left() == [], 20, "the processes to end")


def test_all_pairs_serve_and_answer_alike(served: Served) -> None:
    status = served.status()
    assert {pool: len(of["replicas"]) for pool, of in status["pools"].items()} == {"prefill": 2, "decode": 2}
    assert [pair["state"] for pair in status["pairs"]] == ["ready"] * 4
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(question: str) -> str | None:
        messages: list = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(model="embedded", messages=messages, max_tokens=24, temperature=0)
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        answers = {q: set(pool.map(ask, [q] * ROUNDS)) for q in QUESTIONS}
    assert all(len(texts) == 1 for texts in answers.values()), answers
    assert answers[QUESTIONS[0]] == {"The capital of Japan is Tokyo."}
    records = served.records()
    assert len(records) == ROUNDS * len(QUESTIONS) and {r["outcome"] for r in records} == {"done"}
    assert len({r["prefill_worker"] for r in records}) == len({r["decode_worker"] for r in records}) == 2
    wait_for(served.idle, 20, "engines idle and no lease open")
    client.close()
