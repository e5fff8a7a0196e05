"""Pools with different tensor parallelism: the same tokens as one engine, and exactly the KV that the formula says.

Runs alone: on two cores the ranks of these engines have no core to spare.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from bare import Bare

from cluster.config import ClusterConfig, parse
from cluster.messages import Role
from cluster.models.resolve import embedded_path
from cluster.models.tiny.recipe import gen_corpus
from cluster.preflight import preflight
from cluster.runtime.local import LocalCluster, free_port, start

# Ray warns about its own use of pydantic.
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLOCK = 32
MAX_TOKENS = 24
LENGTHS = (1, 31, 32, 33, 64, 127, 128, 129, 500, 1500)
SETTINGS: dict[str, Any] = {
    "engine": {"device": "cpu", "args": {"block_size": BLOCK}},
    # On a busy machine the first handshake between ranks can outlast the usual lease.
    "kv_transfer": {"lease_s": 120},
    # Every request takes the split path, however short its prompt is.
    "router": {"placement": {"conditional": False}},
}


def prompts() -> list[list[int]]:
    """Chats that the model knows, cut to lengths around block borders; the last two share a prefix."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_path())
    rng = random.Random(5)
    made = []
    for length in LENGTHS:
        tokens: list[int] = []
        while len(tokens) < length:
            question, answer = gen_corpus.qa(rng)
            turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            tokens += tokenizer.encode(turn, add_special_tokens=False)
        made.append(tokens[:length])
    return [*made, [*made[-1][:1200], *made[-2][:50]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy tokens) of one colocated engine without tensor parallelism."""
    config = parse({**SETTINGS, "pools": {"prefill": None}})
    log = tmp_path_factory.mktemp("one") / "engine.log"
    engine = Bare(config, Role.DECODE, "0", log, block_size=BLOCK)
    try:
        assert engine.answer() == {"ready": True}
        return [(prompt, engine.ask(prompt, MAX_TOKENS)["tokens"]) for prompt in prompts()]
    finally:
        engine.close()


@pytest.fixture(scope="module", params=[(1, 2), (2, 2)], ids=["P1-D2", "P2-D2"])
def split(request: pytest.FixtureRequest, expected: object) -> Iterator[tuple[LocalCluster, ClusterConfig]]:
    prefill, decode = request.param
    pools = {"prefill": {"layout": {"tp": prefill}}, "decode": {"layout": {"tp": decode}}}
    http = {"port": free_port("127.0.0.1")}
    config = parse({**SETTINGS, "pools": pools, "router": {**SETTINGS["router"], "http": http}})
    cluster = start(config, progress=lambda what, seconds: print(f"{seconds:5.0f} s  {what}"))
    try:
        yield cluster, config
    finally:
        cluster.stop()


def records(cluster: LocalCluster) -> list[dict[str, Any]]:
    """Finished requests as the router keeps them, oldest first."""
    found: list[dict[str, Any]] = httpx.get(f"{cluster.url}/pdserve/records", timeout=30).json()
    return found


def test_tokens_equal_one_engine_and_bytes_the_formula(
    split: tuple[LocalCluster, ClusterConfig], expected: list[tuple[list[int], list[int]]]
) -> None:
    cluster, config = split
    for prompt, tokens in expected:
        assert complete(cluster, config, prompt) == tokens, f"{len(prompt)} prompt tokens"

    shape = preflight(config).shape
    deadline = time.monotonic() + 10
    while len(found := records(cluster)) < len(expected) and time.monotonic() < deadline:
        time.sleep(0.1)
    pulled = 0
    for record, (prompt, _) in zip(found, expected, strict=True):
        assert record["path"] == "split"
        assert record["decode_computed_tokens"] <= BLOCK, "the decode engine computed the prompt again"
        blocks = record["transfer_blocks"]
        assert record["transfer_bytes"] == blocks * BLOCK * shape.kv_bytes_per_token()
        assert blocks <= -(-len(prompt) // BLOCK)
        pulled += blocks
    # Only the last prompt shares blocks with an earlier one, which the decode engine need not pull again.
    assert pulled >= sum(-(-n // BLOCK) - 1 for n in LENGTHS)


def test_the_pair_is_shown_as_ready(split: tuple[LocalCluster, ClusterConfig]) -> None:
    cluster, config = split
    status = cluster.router_status()
    assert [pair["state"] for pair in status["pairs"]] == ["ready"]
    assert [pair["distance"] for pair in status["pairs"]] == ["node"]
    for role in (Role.PREFILL, Role.DECODE):
        assert [r["tp"] for r in status["pools"][role]["replicas"]] == [config.pool(role).layout.tp]


def test_a_ranks_death_ends_the_replica_and_a_replacement_serves(
    split: tuple[LocalCluster, ClusterConfig], expected: list[tuple[list[int], list[int]]]
) -> None:
    cluster, config = split
    if config.pool(Role.PREFILL).layout.tp == 1:
        pytest.skip("once is enough: in the cluster whose pools both have ranks")
    replica = next(p for p in descendants(psutil.Process()) if "ServeReplica:pdserve:decode" in title(p))
    engine = descendants(replica)
    ranks = [p for p in engine if "VLLM::Worker" in title(p)]
    assert len(ranks) == config.pool(Role.DECODE).layout.tp
    before = {r["id"] for r in cluster.router_status()["pools"]["decode"]["replicas"]}
    ranks[-1].kill()

    _, alive = psutil.wait_procs([replica, *engine], timeout=60)
    assert alive == [], "processes of a replica that lost a rank"
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        status = cluster.router_status()
        now = {r["id"] for r in status["pools"]["decode"]["replicas"]}
        if now and not now & before and [pair["state"] for pair in status["pairs"]] == ["ready"]:
            break
        time.sleep(0.5)
    else:
        pytest.fail(f"no replacement: {status['pools']['decode']['replicas']}, {status['pairs']}")
    prompt, tokens = expected[-2]
    assert complete(cluster, config, prompt) == tokens


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def complete(cluster: LocalCluster, config: ClusterConfig, prompt: list[int]) -> list[int]:
    """Greedy tokens of one completion over HTTP."""
    body = {
        "model": config.model.id,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
