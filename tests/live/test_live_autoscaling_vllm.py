"""1P1D of real engines grows to 2P1D under a prompt-heavy load and comes back; nobody notices but by being faster.

Kinds: requests that fail while a replica joins or leaves; a decision that nobody can explain.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.filterwarnings("default")]

CONFIG: dict[str, Any] = {
    "model": {"dtype": "float32"},
    # Far below what a prompt of 1,500 tokens takes where two engines share two cores; nothing is refused or cut.
    "slo": {"ttft_ms": 1500, "tpot_ms": 500},
    "pools": {
        "prefill": {"replicas": {"min": 1, "max": 2}},
        "decode": {"replicas": {"min": 1, "max": 2}},
    },
    "router": {"placement": {"conditional": False}, "limits": {"queue_s": 200, "prefill_s": 200, "first_token_s": 200}},
    "autoscaling": {
        "policy": "goodput",
        "accelerators_max": 3,
        "interval_s": 1,
        "look_back_s": 10,
        "upscale_delay_s": 2,
        # Longer than an engine of two cores takes to start: the load is lowered as soon as one was asked for.
        "downscale_delay_s": 75,
        "min_samples": 5,
        "startup_s": 30,
    },
}
PROMPT_TOKENS = 1500
# Raised every few seconds until the pool is too small: how much an engine takes depends on the machine.
RATES_PER_S = (2.0, 4.0, 6.0, 8.0, 10.0, 13.0, 16.0, 20.0)
STEP_S = 6.0
CALM_PER_S = 0.3


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cluster = Served(CONFIG, tmp_path_factory.mktemp("scaled"))
    yield cluster
    cluster.stop()
    wait_for(lambda: cluster.left() == [], 30, "the processes to end")


class Load:
    """Open loop on a thread: prompts that share nothing, at a rate that may change."""

    def __init__(self, served: Served) -> None:
        self.rate_per_s = 1.0
        self.statuses: Counter[int | str] = Counter()
        self._served, self._stop = served, threading.Event()
        self._pool = ThreadPoolExecutor(200)
        self._client = httpx.Client(base_url=served.url, timeout=280, limits=httpx.Limits(max_connections=None))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(1 / self.rate_per_s):
            number += 1
            self._pool.submit(self._ask, number)

    def _ask(self, number: int) -> None:
        prompt = [300 + (number * 7919 + 13 * i) % 1600 for i in range(PROMPT_TOKENS)]
        body = {"model": "embedded", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        try:
            self.statuses[self._client.post("/v1/completions", json=body).status_code] += 1
        except httpx.HTTPError as e:
            self.statuses[repr(e)] += 1

    def end(self) -> Counter[int | str]:
        """Stop and wait for every answer."""
        self._stop.set()
        self._thread.join()
        self._pool.shutdown(wait=True)
        self._client.close()
        return self.statuses


def ready(served: Served) -> dict[str, int]:
    pools = served.status()["pools"]
    return {name: sum(r["state"] == "ready" for r in pool["replicas"]) for name, pool in pools.items()}


def controller_log() -> str:
    """What Serve's controller of the newest Ray session has logged."""
    logs = Path(tempfile.gettempdir()).glob("ray/session_*/logs/serve/controller_*.log")
    return max(logs, key=lambda p: p.stat().st_mtime).read_text(errors="replace")


def test_a_pool_grows_under_load_and_shrinks_after_it_and_no_request_fails(served: Served) -> None:
    assert ready(served) == {"prefill": 1, "decode": 1}
    load = Load(served)
    try:
        for rate in RATES_PER_S:
            load.rate_per_s = rate
            deadline = time.monotonic() + STEP_S
            while time.monotonic() < deadline and not served.status()["autoscaling"]["changes"]:
                time.sleep(0.3)
            if served.status()["autoscaling"]["changes"]:
                break
        grown = served.status()["autoscaling"]["changes"][0]
        load.rate_per_s = CALM_PER_S
        took_s = wait_for(lambda: sum(ready(served).values()) == 3, 150, "the third engine to serve")
        pools = ready(served)
        back_s = wait_for(
            lambda: ready(served) == {"prefill": 1, "decode": 1} and served.status()["autoscaling"]["changes"][1:],
            240,
            "the pools to shrink",
        )
    finally:
        statuses = load.end()
    changes = served.status()["autoscaling"]["changes"]
    print(f"{pools} after {took_s:.0f} s at {rate:g}/s, back after {back_s:.0f} s, {dict(statuses)}, {changes}")
    assert set(statuses) == {200}
    assert {r["outcome"] for r in served.records()} == {"done"}
    assert (grown["from"], grown["to"]) == (1, 2)
    assert grown["reason"] in {"demand", "queue", "misses", "concurrency", "kv", "maximum"}
    assert changes[-1]["to"] == 1
    logged = re.findall(r"autoscaling: (\w+) (\d+) -> (\d+): (\w+) \((.+)\)", controller_log())
    assert (grown["pool"], "1", "2", grown["reason"], grown["why"]) in logged
    assert any(was == "2" and to == "1" for _, was, to, _, _ in logged)
