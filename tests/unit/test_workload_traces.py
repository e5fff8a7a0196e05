"""Both trace formats, gzipped or plain; slices, speed and thinning; mistakes name the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.workload.spec import parse
from cluster.workload.traces import read_azure, read_mooncake

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 4000, "input_length": 512, "output_length": 0, "hash_ids": [0]},
    {"timestamp": 7000, "input_length": 513, "output_length": 9, "hash_ids": [0, 8]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:16:01,1,0\n"
)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(r) for r in MOONCAKE).encode() + b"\n\n"))
    return path


def test_mooncake_hashes_become_512_token_segments(mooncake: Path) -> None:
    a, b, c = read_mooncake(mooncake)
    assert a.prompt == ((0, 512), (7, 488))
    assert (a.at_s, b.at_s, c.at_s) == (0, 3, 6)
    assert b.prompt == ((0, 512),)
    assert b.output_tokens == 1, "a request that asked for nothing still costs a token"
    assert c.prompt_tokens == 513


def test_azure_keeps_fractions_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    a, b, c = read_azure(path)
    assert b.at_s == pytest.approx(4.314579, abs=1e-6)
    assert c.at_s == pytest.approx(14.31941, abs=1e-5)
    assert [x.prompt_tokens for x in (a, b, c)] == [374, 396, 1]
    assert len({x.prompt[0][0] for x in (a, b, c)}) == 3


def test_slice_speed_rate_thinning_and_scale(mooncake: Path) -> None:
    def times(**options: object) -> list[float]:
        return [a.at_s for a in parse({"trace": {"path": str(mooncake), **options}}).arrivals()]

    assert times() == [0, 3, 6]
    assert times(speed=3) == [0, 1, 2]
    assert times(start_s=2, length_s=3) == [1]
    assert times(rate_per_s=3) == pytest.approx([0, 0.5, 1])
    assert len(times(keep=0.5)) < 3 or len(times(keep=0.01)) < 3
    spread = times(spread_s=3.0)
    assert spread == sorted(spread) != [0, 3, 6]
    small = list(parse({"trace": {"path": str(mooncake), "token_scale": 0.25}}).arrivals())
    assert small[0].prompt == ((0, 128), (7, 122))
    assert [a.at_s for a in parse({"trace": {"path": str(mooncake)}}).at_rate(2).arrivals()] == [0, 1.5, 3]


@pytest.mark.parametrize(
    ("text", "name", "where"),
    [
        ('{"timestamp": 0}\n', "a.jsonl", ":1"),
        ('{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[1,2]}\n', "a.jsonl", "does not fit"),
        ("", "a.jsonl", "no requests"),
        ("A,B\n", "a.csv", "header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "a.csv", ":2"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, name: str, where: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=where):
        list(parse({"trace": {"path": str(path)}}).arrivals())


def test_missing_file_and_empty_slice(tmp_path: Path, mooncake: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(parse({"trace": {"path": str(tmp_path / "none.jsonl")}}).arrivals())
    with pytest.raises(ConfigError, match="move the slice"):
        list(parse({"trace": {"path": str(mooncake), "start_s": 100}}).arrivals())


def test_the_published_traces_load(shared_dir: Path) -> None:
    conversation = read_mooncake(shared_dir / "traces" / "mooncake_conversation.jsonl.gz")
    assert len(conversation) == 12_031
    assert sum(a.prompt_tokens for a in conversation) / 12_031 == pytest.approx(12_035, abs=1)
    azure = read_azure(shared_dir / "traces" / "azure_llm_2023_conv.csv.gz")
    assert len(azure) == 19_366


def test_damaged_archives_are_one_line(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(MOONCAKE[0]).encode() * 50)
    damaged = {"none": b"plain", "cut": whole[:-12], "flipped": whole[:12] + b"\xff" * 8 + whole[20:]}
    for name, data in damaged.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"{name}\.jsonl\.gz: cannot be read") as refused:
            read_mooncake(path)
        assert "\n" not in str(refused.value)


def test_a_file_that_is_no_csv_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("x" * 200_000)
    with pytest.raises(ConfigError, match="is no CSV file"):
        read_azure(path)
