"""Two clients, one truth: ours and vLLM's own `bench serve` against a server whose every delay is scripted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.models.resolve import embedded_path
from cluster.workload.spec import parse
from loadtests.endpoint import Endpoint
from loadtests.parallel import run_job
from loadtests.results import summarize
from loadtests.runner import Job
from loadtests.scenario import ClientLimits
from loadtests.scripted_server import Seen, serve, stream

pytestmark = pytest.mark.live

REQUESTS, RATE, OUTPUT = 120, 12.0, 20
SLO = {"ttft_ms": 160, "tpot_ms": 9}


def script(i: int, seen: Seen) -> Any:
    """Ten first-token delays and three speeds, none of them near a limit."""
    return stream(seen.body["max_tokens"], first_s=0.05 + 0.02 * (i % 10), gap_s=0.006 + 0.002 * (i % 3))


def ours(url: str) -> dict[str, float]:
    workload = parse(
        {
            "requests": REQUESTS,
            "slo": SLO,
            "arrivals": {"process": "constant", "rate_per_s": RATE},
            "prompts": {"kind": "plain", "prompt_tokens": 64, "output_tokens": OUTPUT},
        }
    )
    assert workload.slo is not None
    run = run_job(Job(workload, ClientLimits(), "x"), Endpoint(url, "scripted", api="completions"), "words")
    s = summarize(run.samples, workload.slo.to_slo(), run.length_s)
    found = {f"{p}_{name}": 1e3 * s[f"{name}_s"][p] for name in ("ttft", "tpot", "itl") for p in ("p50", "p99")}
    return found | {"goodput": s["goodput_per_s"], "done": s["done"], "tokens": s["output_tokens"]}


def theirs(url: str, folder: Path) -> dict[str, float]:
    arguments = [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "scripted"),
        *("--tokenizer", str(embedded_path()), "--dataset-name", "random", "--num-prompts", str(REQUESTS)),
        *("--random-input-len", "64", "--random-output-len", str(OUTPUT), "--random-range-ratio", "0"),
        *("--request-rate", str(RATE), "--burstiness", "1000000", "--ready-check-timeout-sec", "0", "--ignore-eos"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"),
        *("--goodput", f"ttft:{SLO['ttft_ms']}", f"tpot:{SLO['tpot_ms']}"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "theirs.json"),
    ]
    program = (
        "import sys\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "add_cli_args(parser)\n"
        "main(parser.parse_args(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    raw = json.loads((folder / "theirs.json").read_text())
    found = {f"{p}_{name}": raw[f"{p}_{name}_ms"] for name in ("ttft", "tpot", "itl") for p in ("p50", "p99")}
    return found | {
        "goodput": raw["request_goodput"],
        "done": raw["completed"],
        "tokens": raw["total_output_tokens"],
    }


def test_our_client_agrees_with_vllms(tmp_path: Path) -> None:
    with serve(script) as server:
        mine = ours(server.url)
        mine_sent = len(server.seen)
    with serve(script) as server:
        other = theirs(server.url, tmp_path)
    assert mine_sent == REQUESTS == mine["done"] == other["done"]
    assert mine["tokens"] == other["tokens"] == REQUESTS * OUTPUT
    for name in ("p50_ttft", "p99_ttft", "p50_tpot", "p99_tpot", "p50_itl", "p99_itl"):
        assert abs(mine[name] - other[name]) <= max(2.0, 0.05 * other[name]), (name, mine, other)
    assert mine["goodput"] == pytest.approx(other["goodput"], rel=0.05)
    assert 0.2 * RATE < mine["goodput"] < 0.8 * RATE, "limits that everything or nothing meets would prove little"
