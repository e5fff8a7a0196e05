"""Two running engines that cannot exchange KV: refused at first contact, said in the status, never paired.

Kind: mismatched pools give silent garbage. The check of the configuration, which would refuse these pools before the
start, is switched off here: engines that were configured apart must find out by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from cluster.config import parse
from cluster.runtime import local
from cluster.runtime.local import LocalCluster, free_port, start

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def mismatched() -> Iterator[LocalCluster]:
    simulated = {"max_model_len": 2048, "token_ids": [300, 1999]}
    config = parse(
        {
            "model": {"id": "embedded", "served_name": "m"},
            "engine": {"kind": "simulated", "simulated": simulated},
            "router": {"http": {"port": free_port("127.0.0.1")}, "placement": {"conditional": False}},
            "pools": {"prefill": {"simulated": {"block_size_tokens": 32}}},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "preflight", lambda config: None)
        running = start(config)
    try:
        yield running
    finally:
        running.stop()


def test_the_pair_is_refused_with_both_values_and_requests_go_on_without_it(mismatched: LocalCluster) -> None:
    (pair,) = mismatched.router_status()["pairs"]
    assert pair["state"].startswith("refused: ")
    assert "block_size: prefill has 32, decode has 16" in pair["state"]
    body = {"model": "m", "prompt": list(range(300, 400)), "max_tokens": 4}
    answer = httpx.post(f"{mismatched.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    records = httpx.get(f"{mismatched.url}/pdserve/records", timeout=30).json()
    assert [r["path"] for r in records] == ["local: no prefill worker"]
