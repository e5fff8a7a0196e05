"""The lease ledger: every lease ends once, and what must not happen is counted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.ledger import LeaseEnd, LeaseLedger, LedgerCounters, LedgerGauges


def test_a_lease_from_grant_to_pull() -> None:
    ledger = LeaseLedger(lease_s=30)
    assert ledger.grant("l1", "r1", blocks=4, bytes=4096, now=10.0)
    assert ledger.holds("l1")
    assert ledger.gauges(12.5) == LedgerGauges(1, 4, 4096, 0, 2.5)
    assert ledger.end("l1", LeaseEnd.PULLED, 13.0)
    assert not ledger.holds("l1")
    assert ledger.request_ended("r1") == []
    assert ledger.gauges(20.0) == LedgerGauges(0, 0, 0, 0, 0.0)
    assert ledger.counters() == LedgerCounters(granted=1, pulled=1, held_s=3.0)


@pytest.mark.parametrize("first", list(LeaseEnd))
@pytest.mark.parametrize("second", list(LeaseEnd))
def test_only_the_first_end_counts_and_a_late_pull_is_a_fault(first: LeaseEnd, second: LeaseEnd) -> None:
    """Kind: lease ran out, decode read reused blocks."""
    ledger = LeaseLedger()
    ledger.grant("l1", "r1", 1, 1, 0.0)
    assert ledger.end("l1", first, 1.0)
    before = ledger.counters()
    assert not ledger.end("l1", second, 2.0)
    after = ledger.counters()
    assert after.late_pulls == (second is LeaseEnd.PULLED)
    assert (after.pulled, after.released, after.expired) == (before.pulled, before.released, before.expired)


def test_unknown_leases_end_without_a_trace() -> None:
    ledger = LeaseLedger()
    assert not ledger.end("never", LeaseEnd.RELEASED, 1.0)
    assert ledger.counters() == LedgerCounters()


def test_a_lease_that_outlives_its_request_is_counted_once_and_named() -> None:
    """Kind: the gap between prefill done and decode knows."""
    ledger = LeaseLedger()
    ledger.grant("l1", "r1", 2, 20, 0.0)
    ledger.grant("l2", "r1", 3, 30, 0.0)
    ledger.grant("l3", "r2", 4, 40, 0.0)
    ledger.end("l2", LeaseEnd.PULLED, 1.0)
    assert [lease.lease_id for lease in ledger.request_ended("r1")] == ["l1"]
    assert [lease.lease_id for lease in ledger.request_ended("r1")] == ["l1"]
    assert ledger.counters().outlived == 1
    assert ledger.gauges(1.0).open_outlived == 1
    ledger.end("l1", LeaseEnd.RELEASED, 2.0)
    assert ledger.gauges(2.0) == LedgerGauges(1, 4, 40, 0, 2.0)


def test_a_grant_to_a_request_that_has_ended_says_so() -> None:
    ledger = LeaseLedger()
    ledger.request_ended("r1")
    assert not ledger.grant("l1", "r1", 2, 20, 0.0)
    assert (ledger.counters().orphaned, ledger.counters().outlived) == (1, 1)


def test_an_id_cannot_be_granted_twice() -> None:
    ledger = LeaseLedger()
    ledger.grant("l1", "r1", 1, 1, 0.0)
    with pytest.raises(ValueError, match="l1 is granted twice"):
        ledger.grant("l1", "r2", 1, 1, 0.0)
    ledger.end("l1", LeaseEnd.PULLED, 1.0)
    with pytest.raises(ValueError, match="l1 is granted twice"):
        ledger.grant("l1", "r2", 1, 1, 2.0)


def test_overdue_leases_are_listed_until_they_are_ended() -> None:
    ledger = LeaseLedger(lease_s=5)
    for i in range(3):
        ledger.grant(f"l{i}", "r", 1, 1, float(i))
    assert ledger.overdue(4.9) == []
    assert [lease.lease_id for lease in ledger.overdue(6.0)] == ["l0", "l1"]
    ledger.end("l0", LeaseEnd.EXPIRED, 6.0)
    assert [lease.lease_id for lease in ledger.overdue(6.0)] == ["l1"]
    assert LeaseLedger().overdue(1e9) == []


def test_memory_of_what_has_ended_is_bounded() -> None:
    ledger = LeaseLedger(remember=10)
    for i in range(1000):
        ledger.grant(f"l{i}", f"r{i}", 1, 1, 0.0)
        ledger.end(f"l{i}", LeaseEnd.PULLED, 0.0)
        ledger.request_ended(f"r{i}")
    assert len(ledger._ended_leases) == len(ledger._ended_owners) == 10
    assert not ledger._by_owner


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_any_order_keeps_the_books_balanced(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    ledger = LeaseLedger(lease_s=3)
    open_blocks: dict[str, int] = {}
    now, minted, last = 0.0, 0, LedgerCounters()
    for _ in range(steps):
        now += rng.random()
        action = rng.randrange(4)
        if action <= 1:
            minted += 1
            blocks = rng.randrange(9)
            ledger.grant(f"l{minted}", f"r{rng.randrange(6)}", blocks, blocks * 10, now)
            open_blocks[f"l{minted}"] = blocks
        elif action == 2:
            lease_id = f"l{rng.randrange(minted + 2)}"
            assert ledger.end(lease_id, rng.choice(list(LeaseEnd)), now) == (lease_id in open_blocks)
            open_blocks.pop(lease_id, None)
        elif rng.random() < 0.5:
            ledger.request_ended(f"r{rng.randrange(6)}")
        else:
            for lease in ledger.overdue(now):
                assert ledger.end(lease.lease_id, LeaseEnd.EXPIRED, now)
                open_blocks.pop(lease.lease_id)
        c, g = ledger.counters(), ledger.gauges(now)
        assert c.granted == c.pulled + c.released + c.expired + g.open
        assert (g.open, g.open_blocks, g.open_bytes) == (
            len(open_blocks),
            sum(open_blocks.values()),
            10 * sum(open_blocks.values()),
        )
        assert g.open_outlived <= g.open
        assert all(getattr(c, name) >= getattr(last, name) for name in LedgerCounters.__slots__)
        last = c
    for lease in ledger.leases():
        ledger.end(lease.lease_id, LeaseEnd.RELEASED, now)
    assert ledger.gauges(now) == LedgerGauges(0, 0, 0, 0, 0.0)
