"""One run, two accounts: vLLM's `bench serve` drives it, our accounting reads the same bytes in the same process.

Two separate runs would differ by what a busy machine did to each. Here every chunk that vLLM's client takes from its
socket is handed to our `Exchange` first, with the clock read at that moment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.messages import Outcome, Slo
from cluster.models.resolve import embedded_path
from loadtests.results import summarize
from loadtests.sample import Sample
from loadtests.scripted_server import Seen, serve, stream

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.slow]

REQUESTS, RATE, OUTPUT = 80, 10.0, 20
SLO = Slo(ttft_s=0.16, tpot_s=0.0095)

# vLLM's client with an ear on its sockets.
PROGRAM = """
import json, sys, time
from contextvars import ContextVar
import aiohttp
from loadtests.exchange import Exchange
from loadtests.sample import Sample

exchanges, current = [], ContextVar("exchange")
post, iter_any = aiohttp.ClientSession.post, aiohttp.StreamReader.iter_any

def watched_post(self, *args, **kwargs):
    now = time.perf_counter()
    exchange = Exchange(Sample(len(exchanges), now, sent_s=now))
    exchanges.append(exchange)
    current.set(exchange)
    return post(self, *args, **kwargs)

async def watched_iter_any(self):
    exchange = current.get()
    exchange.feed(time.perf_counter(), b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    async for chunk in iter_any(self):
        exchange.feed(time.perf_counter(), chunk)
        yield chunk
    exchange.eof(time.perf_counter())

aiohttp.ClientSession.post = watched_post
aiohttp.StreamReader.iter_any = lambda self: watched_iter_any(self)

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[2:]))
with open(sys.argv[1], "w") as file:
    json.dump([e.sample.to_wire() for e in exchanges], file)
"""


def script(i: int, seen: Seen) -> Any:
    """Ten first-token delays, three speeds, and a pause in every seventh answer."""
    steps = list(stream(seen.body.get("max_tokens", 1), first_s=0.05 + 0.02 * (i % 10), gap_s=0.005 + 0.003 * (i % 3)))
    if i % 7 == 3:
        steps.insert(12, 0.15)
    return steps


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("bench")
    with serve(script) as server:
        arguments = [
            *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", "scripted"),
            *("--tokenizer", str(embedded_path()), "--dataset-name", "random", "--num-prompts", str(REQUESTS)),
            *("--random-input-len", "64", "--random-output-len", str(OUTPUT), "--random-range-ratio", "0"),
            *("--request-rate", str(RATE), "--ready-check-timeout-sec", "0", "--ignore-eos", "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
            *("--goodput", f"ttft:{1e3 * SLO.ttft_s:g}", f"tpot:{1e3 * SLO.tpot_s:g}"),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "theirs.json"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder / "ours.json"), *arguments],
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    theirs = json.loads((folder / "theirs.json").read_text())
    samples = [Sample.from_wire(raw) for raw in json.loads((folder / "ours.json").read_text())]
    samples = [s for s in samples if s.outcome is not None]
    assert len(samples) == theirs["completed"] == REQUESTS
    assert all(s.outcome is Outcome.DONE for s in samples), {s.error for s in samples}
    return summarize(samples, SLO, theirs["duration"]), theirs


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl"])
@pytest.mark.parametrize("quantile", ["p50", "p99"])
def test_percentiles_agree(both: tuple[dict[str, Any], dict[str, Any]], name: str, quantile: str) -> None:
    ours, theirs = both
    mine, other = 1e3 * ours[f"{name}_s"][quantile], theirs[f"{quantile}_{name}_ms"]
    assert abs(mine - other) <= max(2.0, 0.05 * other)


def test_tokens_and_goodput_agree(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    ours, theirs = both
    assert ours["output_tokens"] == theirs["total_output_tokens"] == REQUESTS * OUTPUT
    assert ours["goodput_per_s"] == pytest.approx(theirs["request_goodput"], rel=0.05)
    assert 0 < ours["good"] < REQUESTS, "limits that everything or nothing meets would prove little"
