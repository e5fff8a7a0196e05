"""Counters summed over replicas that come, go, return and restart."""

from __future__ import annotations

from cluster.goodput import accounting
from cluster.goodput.accounting import Totals


def test_a_source_that_was_out_of_sight_is_counted_once():
    totals = Totals()
    totals.update("a", {"started": 1000, "good": 900})
    totals.keep_only([])
    assert totals.sum().started == 1000
    totals.update("a", {"started": 1001, "good": 900})
    assert (totals.sum().started, totals.sum().good) == (1001, 900)
    totals.keep_only(["a"])
    assert totals.sum().started == 1001


def test_one_that_returns_from_zero_was_restarted():
    totals = Totals()
    totals.update("a", {"started": 1000})
    totals.keep_only([])
    totals.update("a", {"started": 3})
    assert totals.sum().started == 1003
    totals.keep_only([])
    totals.update("a", {"started": 4})
    assert totals.sum().started == 1004


def test_names_of_those_gone_are_forgotten_their_counters_are_not():
    totals = Totals()
    for number in range(accounting.REMEMBERED + 5):
        totals.update(str(number), {"started": 1})
        totals.keep_only([])
    assert len(totals.departed) == accounting.REMEMBERED
    assert totals.sum().started == accounting.REMEMBERED + 5
