"""The bench's own client against scripted servers: two calls for the direct split, one for the other fronts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import UserError
from cluster.workload.structures import Ids
from cluster.workload.text import TextWriter
from loadtests.bench.fronts import closed_loop, figures, key_figures, measure, show
from loadtests.bench.servers import Front
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.scripted_server import Seen, refuse, serve, stream
from loadtests.tokenizer import PlainWords

pytestmark = pytest.mark.live

TICKET = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_port": 7}


def prefill(i: int, seen: Seen) -> list[bytes | float]:
    body = json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": TICKET}).encode()
    return [0.05, f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body]


def decode(_: int, seen: Seen) -> Any:
    return stream(seen.body["max_tokens"], first_s=0.02, gap_s=0.002, prompt_tokens=16)


def run(front: Front, concurrency: int = 4, requests: int = 12) -> dict[str, Any]:
    writer = RequestWriter(Endpoint(front.url, "m", api="tokens", tenant_header=None), TextWriter(PlainWords()))
    samples, seconds = asyncio.run(closed_loop(front, writer, Ids(1, 0), concurrency, requests, (16, 8)))
    assert len(samples) == requests
    return figures(samples, seconds, {"client": 0.5})


def test_the_direct_split_is_two_calls_and_its_first_token_waits_for_both() -> None:
    with serve(prefill) as p, serve(decode) as d:
        direct = run(Front("direct", d.url, p.url))
        one = run(Front("pdserve", d.url))
        assert len(p.seen) == 12
        assert len(d.seen) == 24
        first, second = p.seen[0].body, d.seen[0].body
    assert first["max_tokens"] == 1
    assert first["stream"] is False
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert "min_tokens" not in first
    assert second["kv_transfer_params"] == TICKET
    assert second["max_tokens"] == 8
    assert second["stream"] is True
    assert "kv_transfer_params" not in d.seen[-1].body
    assert direct["ttft_p50_s"] > one["ttft_p50_s"] + 0.04
    assert direct["cpu_s_per_1000_tokens"]["client"] == pytest.approx(1e3 * 0.5 / 96)
    found = key_figures({"direct": {4: direct}, "pdserve": {4: one}})
    assert found["4"]["ttft_p50_ratio"] < 1
    assert "| direct | 4 |" in show({"direct": {4: direct}, "pdserve": {4: one}}, (16, 8))


def test_failures_stop_the_bench_and_say_which() -> None:
    with serve(lambda *_: refuse()) as p, serve(decode) as d, pytest.raises(UserError, match="HTTP 503"):
        run(Front("direct", d.url, p.url))


def test_a_front_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.bench.servers.sys.executable", "/bin/false")
    with pytest.raises(UserError, match="did not start"):
        measure("colocated", [1], 1, (16, 8), tmp_path, 1)
