"""A trace under another seed: other words, the same sharing, so that a sweep's steps do not find each other's KV."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from cluster.workload.arrival import Prompt, shared_tokens
from cluster.workload.spec import parse
from cluster.workload.text import TextWriter
from loadtests.tokenizer import PlainWords

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 4000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 7000, "input_length": 513, "output_length": 9, "hash_ids": [0, 8]},
]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    return path


def prompts(trace: Path, seed: int) -> list[Prompt]:
    return [a.prompt for a in parse({"seed": seed, "trace": {"path": str(trace)}}).arrivals()]


def test_another_seed_has_other_prompts_that_share_alike(mooncake: Path) -> None:
    recorded, one, two = (prompts(mooncake, seed) for seed in (0, 1, 2))
    assert recorded == [((0, 512), (7, 488)), ((0, 512),), ((0, 512), (8, 1))]
    assert one == prompts(mooncake, 1)
    ids = [{content for prompt in found for content, _ in prompt} for found in (recorded, one, two)]
    assert not (ids[0] & ids[1] or ids[1] & ids[2] or ids[0] & ids[2])
    for found in (one, two):
        assert [[shared_tokens(a, b) for a in found] for b in found] == [
            [shared_tokens(a, b) for a in recorded] for b in recorded
        ]
        assert max(content for prompt in found for content, _ in prompt) < 1 << 61


def test_the_words_of_two_steps_differ_from_the_first_on(mooncake: Path) -> None:
    writer = TextWriter(PlainWords())
    seeds = [1 + round(1e4 * factor) for factor in (0.25, 0.5, 1.0, 1.5)]
    texts = [writer.text(prompts(mooncake, seed)[0]).split() for seed in (1, *seeds)]
    assert len({tuple(words[:16]) for words in texts}) == len(texts)


def test_a_seed_still_draws_the_times(mooncake: Path) -> None:
    spread = {"trace": {"path": str(mooncake), "spread_s": 3.0}}
    times = [[a.at_s for a in parse({"seed": seed} | spread).arrivals()] for seed in (3, 3, 4)]
    rng = Random("3/0/times")
    assert times[0] == sorted(t + rng.uniform(0, 3) for t in (0, 3, 6))
    assert times[0] == times[1] != times[2]
