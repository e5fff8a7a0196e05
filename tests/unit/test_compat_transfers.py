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


def reported(transfers: Transfers, stats: SimpleNamespace, now: float = 1.0) -> None:
    transfers.on_stats(stats, now)


def test_one_rank_reads_whole_requests() -> None:
    transfers = Transfers(10)
    reported(transfers, step((0.1, 100), (0.2, 200)))
    assert transfers.take(0.0, 1.0, 10) == (0.1, 100)
    assert transfers.take(0.0, 0.05, 20) == (0.05, 200), "never longer than the request waited"
    assert transfers.take(0.0, 1.0, 10) == (None, None)


def test_the_reads_of_all_ranks_are_one_transfer() -> None:
    transfers = Transfers(10)
    transfers.reads_per_request = 2
    reported(transfers, step((0.1, 50), (0.3, 100), (0.2, 50), (0.1, 100)))
    assert transfers.take(0.0, 1.0, 10) == (0.2, 100)
    assert transfers.take(0.0, 1.0, 20) == (0.3, 200)
    assert transfers.bytes_total == 300


def test_ranks_may_report_in_different_steps() -> None:
    transfers = Transfers(10)
    transfers.reads_per_request = 2
    reported(transfers, step((0.1, 50)))
    assert transfers.take(0.0, 1.0, 10) == (None, None)
    reported(transfers, step((0.2, 50)))
    assert transfers.take(0.0, 1.0, 10) == (0.2, 100)


def test_a_failed_read_does_not_shift_later_requests() -> None:
    transfers = Transfers(10)
    transfers.reads_per_request = 2
    reported(transfers, step((0.1, 50), num_failed_transfers=[1]))
    reported(transfers, step((0.1, 70), (0.1, 70)))
    assert transfers.take(0.0, 1.0, 14) == (0.1, 140)
    assert transfers.failed == 1


def test_a_transfer_that_nobody_claims_is_not_the_next_requests() -> None:
    """A cancelled request's, or that of a one-token prompt, which the engine computes all the same."""
    transfers = Transfers(10)
    reported(transfers, step((0.5, 100)), now=1.0)
    reported(transfers, step((0.1, 100)), now=3.0)
    assert transfers.take(2.0, 1.0, 10) == (0.1, 100), "it was there before the request came"
    reported(transfers, step((0.6, 200), (0.2, 100)), now=5.0)
    assert transfers.take(4.0, 1.0, 10) == (0.2, 100), "its size is another one"
    assert transfers.take(4.0, 1.0, 30) == (0.6, 200), "copies of heads: the size says nothing"


def test_what_is_never_claimed_does_not_pile_up() -> None:
    transfers = Transfers(10)
    for i in range(5000):
        reported(transfers, step((0.1, 100)), now=float(i))
    assert len(transfers._done) <= 256
    assert transfers.take(4999.0, 1.0, 10) == (0.1, 100)
