"""Paged KV memory: a model of it in plain Python, and any order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.engine.scheduler.kv import PagedKv, Removed, Stored

BLOCKS = 12


class KvMachine(RuleBasedStateMachine):
    """Owners take, grow, share, write and release tables; the content of every block is known to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = PagedKv(BLOCKS)
        self.tables: list[list[int]] = []
        self.stored: list[int] = []
        self.content: dict[int, int] = {}
        self.index: set[int] = set()

    def _drain_events(self) -> None:
        for event in self.kv.take_events():
            if isinstance(event, Stored):
                assert self.index.isdisjoint(event.keys), "stored twice"
                self.index.update(event.keys)
            elif isinstance(event, Removed):
                assert self.index.issuperset(event.keys), "removed what was not stored"
                self.index.difference_update(event.keys)
            else:
                self.index.clear()

    @rule(chain=st.integers(0, 3), length=st.integers(1, 6), extra=st.integers(0, 3))
    def acquire(self, chain: int, length: int, extra: int) -> None:
        keys = [100 * chain + i for i in range(length)]
        hit = self.kv.match(keys, length)
        free = self.kv.available_blocks
        table = self.kv.acquire(keys, hit, length + extra)
        self._drain_events()
        if table is None:
            assert self.kv.available_blocks == free, "a refusal changed something"
            return
        assert len(table) == len(set(table)) == length + extra
        for block, key in zip(table[:hit], keys, strict=False):
            assert self.content[block] == key, "a hit gave a block with other content"
        for block in table[hit:]:
            assert all(block not in other for other in self.tables), "a block was given away that somebody holds"
            self.content.pop(block, None)
        self.kv.store(table, keys, hit, length, "x")
        self._drain_events()
        for block, key in zip(table[:length], keys, strict=False):
            self.content[block] = key
        self.tables.append(table)
        self.stored.append(length)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), more=st.integers(1, 4))
    def grow(self, which: int, more: int) -> None:
        table = self.tables[which % len(self.tables)]
        before = list(table)
        grown = self.kv.grow(table, len(table) + more)
        self._drain_events()
        assert table[: len(before)] == before
        assert len(table) == len(before) + (more if grown else 0)
        for block in table[len(before) :]:
            assert sum(block in other for other in self.tables) == 1
            self.content.pop(block, None)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        self.tables.append(self.kv.fork(self.tables[which % len(self.tables)]))
        self.stored.append(self.stored[which % len(self.stored)])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def write_last(self, which: int) -> None:
        number = which % len(self.tables)
        table = self.tables[number]
        if len(table) <= self.stored[number]:
            return  # full blocks with known content are never written to
        shared = sum(table[-1] in other for other in self.tables) > 1
        old = table[-1]
        copied = self.kv.own(table, len(table) - 1)
        self._drain_events()
        if copied is None:
            assert shared and not self.kv.available_blocks
        else:
            assert copied == shared
            assert (table[-1] != old) == shared
            assert sum(table[-1] in other for other in self.tables) == 1
            if copied:
                self.content.pop(table[-1], None)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        number = which % len(self.tables)
        table = self.tables.pop(number)
        self.stored.pop(number)
        self.kv.release(table)
        assert not table

    @rule()
    def clear(self) -> None:
        self.kv.clear_cache()
        self._drain_events()
        assert not self.index

    @invariant()
    def nothing_leaks(self) -> None:
        held = {block for table in self.tables for block in table}
        assert self.kv.used_blocks == len(held)
        assert self.kv.used_blocks + self.kv.available_blocks == BLOCKS

    @invariant()
    def the_index_knows_the_cache(self) -> None:
        assert len(self.index) == self.kv.cached_blocks
        assert all(self.kv.match([key], 1) for key in self.index)


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_double_release_is_our_own_bug_and_is_caught() -> None:
    kv = PagedKv(4)
    table = kv.acquire((), 0, 2)
    assert table is not None
    copy = list(table)
    kv.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        kv.release(copy)


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head() -> None:
    kv = PagedKv(4)
    for chain in (1, 2):
        table = kv.acquire((), 0, 2)
        assert table is not None
        kv.store(table, [10 * chain, 10 * chain + 1], 0, 2, "x")
        kv.release(table)
    kv.take_events()
    assert kv.acquire((), 0, 1) is not None
    assert kv.take_events() == [Removed([11])]
    # A hit renews: chain 1's head is used again, so chain 2 goes next, its tail first.
    table = kv.acquire([10], 1, 1)
    assert table is not None
    kv.release(table)
    assert kv.acquire((), 0, 2) is not None
    assert kv.take_events() == [Removed([21, 20])]


def test_a_block_that_was_computed_twice_is_announced_once() -> None:
    kv = PagedKv(8)
    first, second = kv.acquire((), 0, 1), kv.acquire((), 0, 3)
    assert first is not None and second is not None
    kv.store(first, [1], 0, 1, "a")
    kv.store(second, [1, 2, 3], 0, 3, "b")
    assert kv.take_events() == [Stored([1], None, "a", 0), Stored([2, 3], 1, "b", 1)]
    assert kv.cached_blocks == 3
