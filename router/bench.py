"""`make bench-router`: what one decision costs on one core, and what the index weighs.

A decision is what a request pays before its first call: hashing 8,192 token ids, one look-up over all workers, choosing
the pair and reserving it. Prompts share a system prompt, continue conversations of the workers, or are new.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.config import PlacementConfig
from cluster.messages import Request, Role, Slo, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import LinearTimes
from router.block_keys import block_keys
from router.placement import Placer
from router.prefix_index import PrefixIndex

WORKERS = 64
BLOCKS = 2_000
BLOCK = 16
PROMPT = 8_192
SYSTEM = 1_024
DECISIONS = 10_000
IN_FLIGHT = 256
VOCABULARY = 150_000


def main() -> None:
    rng = random.Random(1)
    ids = np.random.default_rng(1)
    before = _resident_bytes()  # first of all, so that no freed memory hides what is taken
    weighed = _filled(BLOCKS * 10, ids, rng, keep=0)
    bytes_per_block = (_resident_bytes() - before) / weighed.index.stats.blocks
    del weighed
    small = _filled(BLOCKS, ids, rng)
    decisions = _decide(small, ids, rng)
    match_1x = _match_us(small, rng)
    large = _filled(BLOCKS * 10, ids, rng)
    match_10x = _match_us(large, rng)
    decisions_10x = _decide(large, ids, rng)
    _report(small, large, decisions, decisions_10x, match_1x, match_10x, bytes_per_block)


class Cluster:
    """Half prefill, half decode workers, each holding `blocks` blocks of conversations with one system prompt."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex(max_blocks=100_000_000)
        times = LinearTimes()
        self.placer = Placer(PlacementConfig(), lambda _: times, self.index, key_block_tokens=BLOCK)
        self.names = [f"{role.value}-{i}" for role in Role for i in range(WORKERS // 2)]
        self.conversations: list[tuple[int, ...]] = []
        self.tokens: list[list[int]] = []
        for name in self.names:
            role = Role.PREFILL if name.startswith("prefill") else Role.DECODE
            info = WorkerInfo(name, "1", role, BLOCK, 4 * blocks + 20_000, 131_072, 256, 8_192, 131_072)
            self.placer.add_worker(info, 0.0)
            self.placer.set_index_exact(name, True)


def _filled(blocks: int, ids: np.random.Generator, rng: random.Random, keep: int = 600) -> Cluster:
    cluster = Cluster(blocks)
    system = ids.integers(0, VOCABULARY, SYSTEM).tolist()
    seen = 0
    for name in cluster.names:
        left = blocks - SYSTEM // BLOCK
        while left > 0:
            length = min(left, rng.randrange(100, 500))
            tokens = [*system, *ids.integers(0, VOCABULARY, length * BLOCK).tolist()]
            keys = block_keys(tokens, BLOCK)
            cluster.index.store(name, keys)
            left -= length
            seen += 1
            if len(cluster.tokens) < keep:
                cluster.conversations.append(keys)
                cluster.tokens.append(tokens)
            elif (place := rng.randrange(seen)) < keep:  # an even sample of all workers' conversations
                cluster.conversations[place], cluster.tokens[place] = keys, tokens
    return cluster


def _prompt(cluster: Cluster, ids: np.random.Generator, rng: random.Random) -> list[int]:
    """A prompt of 8,192 ids: a longer turn of a known conversation, the system prompt alone, or all new."""
    kind = rng.random()
    head: list[int] = []
    if kind < 0.7:
        head = rng.choice(cluster.tokens)[: PROMPT - BLOCK]
    elif kind < 0.9:
        head = cluster.tokens[0][:SYSTEM]
    return head + [int(t) for t in ids.integers(0, VOCABULARY, PROMPT - len(head))]


def _decide(cluster: Cluster, ids: np.random.Generator, rng: random.Random) -> dict[str, float]:
    """Time `DECISIONS` decisions with `IN_FLIGHT` requests in flight, and the rest of a request's bookkeeping."""
    placer, slo = cluster.placer, Slo(2.0, 0.05)
    prompts = [_prompt(cluster, ids, rng) for _ in range(200)]
    seconds, rest, now = [], 0.0, 0.0
    gc.collect()
    gc.freeze()
    for i in range(DECISIONS):
        tokens = prompts[i % len(prompts)]
        request_id = f"r{i}"
        start = time.thread_time()
        keys = block_keys(tokens, BLOCK)
        placer.place(Request(request_id, now, PROMPT, 256, slo, keys), now, rng)
        seconds.append(time.thread_time() - start)
        start = time.thread_time()
        now += 0.002
        if i >= IN_FLIGHT:
            old = f"r{i - IN_FLIGHT}"
            placer.on_prefilled(old, now, 0)
            placer.on_first_token(old, now)
            placer.on_end(old, now)
        name = cluster.names[i % WORKERS]
        placer.on_snapshot(WorkerSnapshot(name, "1", WorkerState.READY, i, 4, 0, 20_000, 1_000), now)
        rest += time.thread_time() - start
    for i in range(DECISIONS - IN_FLIGHT, DECISIONS):
        placer.on_end(f"r{i}", now)
    gc.unfreeze()
    hashing = _time_us(lambda: block_keys(prompts[0], BLOCK))
    return {
        "per_s": DECISIONS / sum(seconds),
        "p50_ms": statistics.median(seconds) * 1e3,
        "p99_ms": statistics.quantiles(seconds, n=100)[98] * 1e3,
        "max_ms": max(seconds) * 1e3,
        "hash_us": hashing,
        "rest_us": rest / DECISIONS * 1e6,
    }


def _match_us(cluster: Cluster, rng: random.Random) -> float:
    """Mean look-up over many different prompts, so that the index does not stay in the CPU's cache."""
    chains = rng.sample(cluster.conversations, min(400, len(cluster.conversations)))
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        for keys in chains:
            cluster.index.longest_match(keys)
        best = min(best, (time.thread_time() - start) / len(chains) * 1e6)
    return best


def _time_us(call: object, rounds: int = 300) -> float:
    assert callable(call)
    samples = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        samples.append(time.thread_time() - start)
    return statistics.median(samples) * 1e6


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _report(
    small: Cluster,
    large: Cluster,
    decisions: dict[str, float],
    decisions_10x: dict[str, float],
    match_1x: float,
    match_10x: float,
    bytes_per_block: float,
) -> None:
    table = Table(title=f"Router: {WORKERS} workers, prompts of {PROMPT:,} tokens, blocks of {BLOCK}")
    for column in ("", f"{BLOCKS:,} blocks/worker", f"{10 * BLOCKS:,} blocks/worker"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("distinct blocks", f"{small.index.stats.blocks:,}", f"{large.index.stats.blocks:,}"),
        *(
            (label, f"{decisions[key]:,.{digits}f}", f"{decisions_10x[key]:,.{digits}f}")
            for label, key, digits in (
                ("decisions per second, hashing included", "per_s", 0),
                ("one decision, p50 ms", "p50_ms", 3),
                ("one decision, p99 ms", "p99_ms", 3),
                ("one decision, max ms", "max_ms", 3),
                ("of it hashing, us", "hash_us", 1),
                ("rest of a request's bookkeeping, us", "rest_us", 1),
            )
        ),
        ("look-up, us", f"{match_1x:.2f}", f"{match_10x:.2f}"),
        ("index, MB per million blocks", "", f"{bytes_per_block:.0f}"),
    ]
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table)
    figures = {
        "decisions_per_s": round(decisions["per_s"]),
        "p50_ms": round(decisions["p50_ms"], 4),
        "p99_ms": round(decisions["p99_ms"], 4),
        "bytes_per_block": round(bytes_per_block, 1),
        "growth_10x_ratio": round(match_10x / match_1x, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
