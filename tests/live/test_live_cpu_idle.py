"""Engines on CPU leave the cores alone while nobody asks them anything, and the KV transfer still works."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest
from bare import Bare

from cluster.config import parse
from cluster.messages import Role
from kv_transfer.settings import TICKET_REQUEST

pytestmark = pytest.mark.live

BLOCK = 32  # the smallest that the CPU attention kernel takes
IDLE_CORES = 0.3
WATCHED_S = 10.0
# The engines' queues spin for a second after the last message; then they must be quiet.
SETTLED_S = 3.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bare, Bare]]:
    logs = tmp_path_factory.mktemp("engines")
    engines: list[Bare] = []
    try:
        for role, cores in ((Role.PREFILL, "0"), (Role.DECODE, "1")):
            log = logs / f"{role}.log"
            engines.append(Bare(parse({}), role, cores, log, block_size=BLOCK, max_model_len=1024))
        for engine in engines:
            assert engine.answer() == {"ready": True}
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.close()


def cpu_s(engine: Bare) -> dict[str, float]:
    """CPU seconds so far of every process of an engine."""
    root = psutil.Process(engine.process.pid)
    found = {}
    for process in [root, *root.children(recursive=True)]:
        times = process.cpu_times()
        found[f"{process.pid} {process.name()}"] = times.user + times.system
    return found


def test_kv_transfer_works_with_all_parts_of_the_plugin(pair: tuple[Bare, Bare]) -> None:
    prefill, decode = pair
    prompt = [5 + i % 1500 for i in range(500)]
    expected = prefill.ask(prompt, 12, ignore_eos=True)["tokens"]
    ticket = prefill.ask(prompt, 1, params=TICKET_REQUEST)["params"]
    got = decode.ask(prompt, 12, ignore_eos=True, params=ticket)
    assert got["tokens"] == expected
    # All whole blocks came from the prefill engine; a recomputation on the decode engine would show as 0 here.
    assert got["cached"] >= len(prompt) - BLOCK


def test_an_idle_pair_uses_little_cpu(pair: tuple[Bare, Bare]) -> None:
    time.sleep(SETTLED_S)
    before = [cpu_s(engine) for engine in pair]
    time.sleep(WATCHED_S)
    after = [cpu_s(engine) for engine in pair]
    used = {
        name: (seconds - old.get(name, 0.0)) / WATCHED_S
        for old, new in zip(before, after, strict=True)
        for name, seconds in new.items()
    }
    print({name: round(cores, 3) for name, cores in used.items()})
    assert sum(used.values()) < IDLE_CORES, used
