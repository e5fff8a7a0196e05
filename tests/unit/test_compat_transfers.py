"""Reads of several ranks are put together to the transfers of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.engine.vllm.transfers import Transfers


def step(*reads: tuple[float, int], **more: Any) -> SimpleNamespace:
    data = {
        "transfer_duration": [seconds for seconds, _ in reads],
        "post_duration": [0.0] * len(reads),
        "bytes_transferred": [size for _, size in reads],
        **more,
    }
    return SimpleNamespace(kv_connector_stats={"data": data})


def test_one_rank_reads_whole_requests() -> None:
    transfers = Transfers(64)
    transfers.on_stats(step((0.1, 100), (0.2, 200)))
    assert transfers.take(1.0) == (0.1, 100)
    assert transfers.take(0.05) == (0.05, 200), "never longer than the request waited"
    assert transfers.take(1.0) == (None, None)


def test_the_reads_of_all_ranks_are_one_transfer() -> None:
    transfers = Transfers(64)
    transfers.reads_per_request = 2
    transfers.on_stats(step((0.1, 50), (0.3, 100), (0.2, 50), (0.1, 100)))
    assert transfers.take(1.0) == (0.2, 100)
    assert transfers.take(1.0) == (0.3, 200)
    assert transfers.bytes_total == 300


def test_ranks_may_report_in_different_steps() -> None:
    transfers = Transfers(64)
    transfers.reads_per_request = 2
    transfers.on_stats(step((0.1, 50)))
    assert transfers.take(1.0) == (None, None)
    transfers.on_stats(step((0.2, 50)))
    assert transfers.take(1.0) == (0.2, 100)


def test_a_failed_read_does_not_shift_later_requests() -> None:
    transfers = Transfers(64)
    transfers.reads_per_request = 2
    transfers.on_stats(step((0.1, 50), num_failed_transfers=[1]))
    transfers.on_stats(step((0.1, 70), (0.1, 70)))
    assert transfers.take(1.0) == (0.1, 140)
    assert transfers.failed == 1
