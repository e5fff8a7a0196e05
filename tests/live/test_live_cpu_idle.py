"""Engines on CPU leave the cores alone while nobody asks them anything, and the KV transfer still works."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.config import parse
from cluster.messages import Role
from cluster.models.resolve import resolve
from kv_transfer import ports
from kv_transfer.settings import TICKET_REQUEST, PortPlan, engine_transfer, ports_needed

pytestmark = pytest.mark.live

BLOCK = 32  # the smallest that the CPU attention kernel takes
IDLE_CORES = 0.3
WATCHED_S = 10.0
# The engines' queues spin for a second after the last message; then they must be quiet.
SETTLED_S = 3.0


class Bare:
    """A `bare_engine.py` process in its own process group."""

    def __init__(self, role: Role, cores: str, log: Path) -> None:
        config = parse({})
        self._ports = ports.reserve(
            ports_needed(config.pool(role).layout),
            lowest=config.kv_transfer.port_min,
            highest=config.kv_transfer.port_max,
        )
        transfer = engine_transfer(config, role, host="127.0.0.1", ports=PortPlan(self._ports.first), on_cpu=True)
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **transfer.environment,
        }
        options = {
            "environment": environment,
            "kv_transfer_config": transfer.kv_transfer_config,
            "engine_args": {"model": resolve(config.model).path, "block_size": BLOCK, "max_model_len": 1024},
        }
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("bare_engine.py")), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended; see {self._log.name}"
        return json.loads(line)

    def ask(self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens, "params": params}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        group = self.process.pid
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.communicate("\n", timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        self._ports.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bare, Bare]]:
    logs = tmp_path_factory.mktemp("engines")
    engines: list[Bare] = []
    try:
        engines += [Bare(Role.PREFILL, "0", logs / "prefill.log"), Bare(Role.DECODE, "1", logs / "decode.log")]
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
    expected = prefill.ask(prompt, 12)["tokens"]
    ticket = prefill.ask(prompt, 1, TICKET_REQUEST)["params"]
    got = decode.ask(prompt, 12, ticket)
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
