"""`pdserve loadtest smoke` and `pdserve diagnose` against a real 1P1D cluster on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtests.bench.servers import Front, start

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.slow]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with start("pdserve", tmp_path_factory.mktemp("serve")) as running:
        yield running


def pdserve(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments, "--json"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def result(front: Front, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("report")
    return pdserve("loadtest", "smoke", "--host", front.url, "--out", str(folder), "--tokenizer", "embedded")


def test_every_request_is_served_and_counted_by_the_servers_tokens(result: dict[str, Any]) -> None:
    s = result["summary"]
    assert s["offered"] > 30
    assert s["done"] == s["offered"], s["errors"]
    assert s["token_counts"] == ["usage"]
    assert result["length_s"] < 100
    assert result["tokenizer"] == "tiny"


def test_outputs_have_the_workloads_length_and_prompts_are_the_templates_longer(result: dict[str, Any]) -> None:
    page = Path(result["files"][0]).parent
    header, *rows = (page / "requests.csv").read_text().splitlines()
    columns = header.split(",")
    for row in rows:
        value = dict(zip(columns, row.split(","), strict=False))
        assert value["output_tokens"] == value["asked_output_tokens"]
        added = int(value["prompt_tokens"]) - int(value["asked_prompt_tokens"])
        assert 0 < added <= 64, "the chat template's own tokens"


def test_every_request_is_joined_with_the_servers_record(result: dict[str, Any]) -> None:
    joined = result["misses_by_stage"]
    assert joined["joined"] == result["summary"]["offered"]
    late = result["summary"]["misses"].get("ttft", 0) + result["summary"]["misses"].get("tpot", 0)
    assert sum(joined["stages"].values()) == late
    evidence = result["evidence"]
    assert evidence["split_share"] > 0
    assert evidence["prefill_compute_p50_s"] > 0
    assert evidence["reusable_share"] > 0.2


def test_diagnose_reads_the_report_and_the_cluster(front: Front, result: dict[str, Any]) -> None:
    folder = str(Path(result["files"][0]).parent)
    for source in (folder, front.url):
        (run,) = pdserve("diagnose", source)["runs"]
        verdicts = {f["id"]: f["verdict"] for f in run["findings"]}
        assert len(verdicts) == 18
        assert verdicts["transfer-bound"] != "undecided", run
        assert run["evidence"]["requests"] >= 30
