"""Locust with four worker processes: what the master reports is what the pooled samples say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster.messages import Slo
from loadtests.sample import Sample
from loadtests.scripted_server import Seen, refuse, serve, stream
from loadtests.tally import Tally

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[2]

# Writes every sample of this process to a file, as a user's own listener would.
DUMP = """
import json, os
from pathlib import Path
from loadtests.locust_control import sample_event

def dump(name, sample, good):
    with Path({folder!r}, f"{{os.getpid()}}.jsonl").open("a") as file:
        file.write(json.dumps({{"name": name, "good": good, "sample": sample.to_wire()}}) + "\\n")

sample_event.add_listener(dump)
"""


def script(i: int, seen: Seen):
    if i % 13 == 5:
        return refuse()
    return stream(seen.body["max_completion_tokens"], first_s=0.02 + 0.003 * (i % 40), gap_s=0.004, prompt_tokens=50)


def locust(url: str, *arguments: str, files: str = "loadtests/locustfile.py") -> tuple[dict, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "locust",
            "-f",
            files,
            "--headless",
            "--host",
            url,
            "--pd-tokenizer",
            "words",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
    )
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    return json.loads(lines[-1]), done.stdout + done.stderr


def test_four_workers_merge_to_the_pooled_truth(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        json.dumps(
            {
                "workload": {
                    "duration_s": 6,
                    "slo": {"ttft_ms": 100, "tpot_ms": 50},
                    "arrivals": {"process": "poisson", "rate_per_s": 25},
                    "prompts": {"kind": "chat", "system_tokens": 20, "user_tokens": 10, "output_tokens": 12},
                }
            }
        )
    )
    dump = tmp_path / "dump.py"
    dump.write_text(DUMP.format(folder=str(tmp_path)))
    with serve(script) as server:
        line, output = locust(
            server.url,
            *("--pd-scenario", str(scenario), "--processes", "4", "-u", "4", "-r", "4", "-t", "60s"),
            *("--pd-out", str(tmp_path / "out"), "--only-summary"),
            files=f"loadtests/locustfile.py,{dump}",
        )
    dumps = sorted(tmp_path.glob("*.jsonl"))
    assert len(dumps) == 4, output
    rows = [json.loads(row) for path in dumps for row in path.read_text().splitlines()]
    samples = [Sample.from_wire(row["sample"]) for row in rows]
    assert len({(s.request_id) for s in samples}) == len(samples) == line["offered"] == len(server.seen)

    pooled = Tally(Slo(ttft_s=0.1, tpot_s=0.05))
    for row, sample in zip(rows, samples, strict=True):
        assert pooled.add(row["name"], sample) == row["good"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    mine = json.loads(json.dumps(pooled.summary()))
    for key in ("offered", "done", "rejected", "good", "attainment", "ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert summary[key] == pytest.approx(mine[key], rel=1e-9), key
    assert 0 < line["good"] < line["offered"]

    # And within a bucket's width of the exact percentile of the pooled samples.
    for name, values in (
        ("ttft_s", [s.ttft_s for s in samples if s.e2e_s is not None]),
        ("itl_s", [gap for s in samples if s.e2e_s is not None for gap in s.times.itl_s]),
    ):
        for p in (50, 90, 99):
            assert summary[name][f"p{p}"] == pytest.approx(float(np.percentile(values, p)), rel=0.1), (name, p)


def test_users_keep_the_open_loops_rate_against_a_slow_server() -> None:
    with serve(lambda i, _: stream(4, first_s=0.02 if i < 40 else 2.0)) as server:
        line, output = locust(
            server.url, "-u", "10", "-r", "10", "-t", "6s", "--pd-rate", "4", "--only-summary", "ChatUser"
        )
        seen = [s.at_s for s in server.seen]
    assert line["loop"] == "open"
    assert line["offered"] == pytest.approx(240, rel=0.25), output
    assert len(seen) == line["offered"]
    half = sum(1 for t in seen if t - seen[0] > 3)
    assert half == pytest.approx(len(seen) / 2, rel=0.25), "the second half is as fast as the first"
    for row in ("TTFT", "TPOT", "ITL", "E2E", "output tokens", "good"):
        assert row in output, row


def test_a_closed_loop_is_labelled_and_waits() -> None:
    with serve(lambda *_: stream(4, first_s=0.3)) as server:
        line, _ = locust(
            server.url,
            *("-u", "4", "-r", "4", "-t", "4s", "--pd-loop", "closed", "--pd-think", "0.1", "--only-summary"),
            "CodeUser",
        )
    assert line["loop"] == "closed"
    assert line["offered"] <= 4 * 4 / 0.3
    assert line["attainment"] is not None
