"""The rows of the prefix index: a tree of block keys with, per block, the mask of the workers that hold it.

A row is a number. Rows live in arrays (parent, first child, a ring of siblings with the newest first, key, one 64-bit
plane of the mask for every 64 workers); a dict maps key to row. About 150 bytes a block however many workers hold it.
Row 0 is the parent of all first blocks. A leaf is held by somebody: others are deleted at once (`free_upwards`).

Prompts are chains, so most writes touch long runs of rows: from `BULK_BLOCKS` on they go through numpy, at a fraction
of the cost of one row at a time and with the same result.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PLANE_BITS = 64
ROOT = 0
BULK_BLOCKS = 32
"""Chains shorter than this are cheaper row by row."""
_FREE = -1

Rows = NDArray[np.int32]


class BlockTree:
    """Rows and their links. Which worker has which bit of the mask is the caller's business."""

    __slots__ = ("_free", "_next", "_prev", "child", "keys", "parent", "planes", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.keys = array("Q", (0,))
        self.planes: list[array[int]] = [array("Q", (0,))]
        self.parent = array("i", (ROOT,))
        self.child = array("i", (0,))
        self._next = array("i", (0,))
        self._prev = array("i", (0,))
        self._free: list[int] = []

    # -- reading ------------------------------------------------------------------------------------------------

    def mask(self, row: int) -> int:
        mask = 0
        for i, plane in enumerate(self.planes):
            mask |= plane[row] << (PLANE_BITS * i)
        return mask

    def has(self, row: int, lane: int) -> bool:
        return bool(self.planes[lane // PLANE_BITS][row] >> (lane % PLANE_BITS) & 1)

    def children(self, row: int, most: int) -> int:
        """How many children a row has, counted to `most`."""
        first = child = self.child[row]
        count = 0
        while child and count < most:
            count += 1
            child = self._next[child]
            if child == first:
                break
        return count

    def any_child_has(self, row: int, plane: array[int], bit: int) -> bool:
        first = child = self.child[row]
        while child:
            if plane[child] & bit:
                return True
            child = self._next[child]
            if child == first:
                break
        return False

    def oldest_child(self, row: int) -> int:
        """0 if there is none."""
        return self._prev[self.child[row]] if self.child[row] else 0

    # -- one row ------------------------------------------------------------------------------------------------

    def add_plane(self) -> None:
        self.planes.append(array("Q", bytes(8 * len(self.keys))))

    def new(self, key: int, parent: int) -> int:
        if self._free:
            row = self._free.pop()
            self.keys[row] = key
        else:
            row = len(self.keys)
            self.keys.append(key)
            for plane in self.planes:
                plane.append(0)
            for column in (self.parent, self.child, self._next, self._prev):
                column.append(0)
        self.rows[key] = row
        self._link(row, parent)
        return row

    def move(self, row: int, parent: int) -> None:
        """Hang a row, with what is below it, under another one, as its newest child."""
        self._unlink(row)
        self._link(row, parent)

    def delete(self, row: int) -> None:
        """Delete a row without children, whoever holds it."""
        self._unlink(row)
        for plane in self.planes:
            plane[row] = 0
        del self.rows[self.keys[row]]
        self.parent[row] = _FREE
        self._free.append(row)

    def free_upwards(self, row: int) -> None:
        """Delete a row that nobody holds and that has no children, then its parent if that became such a row."""
        parents, child, planes = self.parent, self.child, self.planes
        while row and not child[row] and parents[row] != _FREE and not any(plane[row] for plane in planes):
            above = parents[row]
            self._unlink(row)
            del self.rows[self.keys[row]]
            parents[row] = _FREE
            self._free.append(row)
            row = above

    def _link(self, row: int, parent: int) -> None:
        first = self.child[parent]
        if first:
            last = self._prev[first]
            self._next[row], self._prev[row] = first, last
            self._next[last] = self._prev[first] = row
        else:
            self._next[row] = self._prev[row] = row
        self.child[parent] = row
        self.parent[row] = parent

    def _unlink(self, row: int) -> None:
        parent, after = self.parent[row], self._next[row]
        if after == row:
            self.child[parent] = 0
            return
        before = self._prev[row]
        self._next[before], self._prev[after] = after, before
        if self.child[parent] == row:
            self.child[parent] = after

    # -- many rows ----------------------------------------------------------------------------------------------

    def is_chain(self, rows: Rows, parent: int) -> bool:
        """Whether each row is a child of the one before it, the first one of `parent`."""
        parents = np.frombuffer(self.parent, dtype=np.int32)
        return bool(parents[rows[0]] == parent and np.array_equal(parents[rows[1:]], rows[:-1]))

    def set_bit(self, rows: Rows, lane: int) -> int:
        """Distinct rows are held by a lane now. Returns how many were not before."""
        plane, bit = self._plane(lane)
        before = plane[rows]
        plane[rows] = before | bit
        return len(rows) - int(np.count_nonzero(before & bit))

    def clear_bit(self, rows: Rows, lane: int) -> Rows:
        """Distinct rows are not held by a lane any more. Returns those that were."""
        plane, bit = self._plane(lane)
        held: Rows = rows[plane[rows] & bit != 0]
        plane[held] &= ~bit
        return held

    def held_by(self, lane: int) -> Rows:
        """Newest rows first, so mostly leaves before their parents."""
        plane, bit = self._plane(lane)
        return np.flatnonzero(plane & bit)[::-1].astype(np.int32)

    def with_child_in(self, rows: Rows, lane: int) -> list[int]:
        """Those of the rows that have a child which a lane holds."""
        plane, bit = self._plane(lane)
        first = np.frombuffer(self.child, dtype=np.int32)[rows]
        rows, first = rows[first != 0], first[first != 0]
        sure = plane[first] & bit != 0
        alone = np.frombuffer(self._next, dtype=np.int32)[first] == first
        one, column = 1 << (lane % PLANE_BITS), self.planes[lane // PLANE_BITS]
        more = [row for row in rows[~sure & ~alone].tolist() if self.any_child_has(row, column, one)]
        return [*rows[sure].tolist(), *more]

    def new_chain(self, keys: Sequence[int], parent: int, lane: int) -> bool:
        """Rows for unknown keys, each a child of the one before it and held by one lane.

        False, and nothing done, if a key occurs twice.
        """
        count, known = len(keys), len(self.rows)
        reused = self._free[-count:]
        fresh = count - len(reused)
        start = len(self.keys)
        numbers = [*reused, *range(start, start + fresh)]
        self.rows.update(zip(keys, numbers, strict=True))
        if len(self.rows) != known + count:
            for key in set(keys):
                del self.rows[key]
            return False
        del self._free[len(self._free) - len(reused) :]
        if fresh:
            for wide in (self.keys, *self.planes):
                wide.frombytes(bytes(8 * fresh))
            for column in (self.parent, self.child, self._next, self._prev):
                column.frombytes(bytes(4 * fresh))
        rows = np.array(numbers, dtype=np.int32)
        np.frombuffer(self.keys, dtype=np.uint64)[rows] = np.array(keys, dtype=np.uint64)
        plane, bit = self._plane(lane)
        plane[rows] = bit
        child = np.frombuffer(self.child, dtype=np.int32)
        child[rows[:-1]] = rows[1:]
        child[rows[-1]] = 0
        np.frombuffer(self.parent, dtype=np.int32)[rows[1:]] = rows[:-1]
        for ring in (self._next, self._prev):
            np.frombuffer(ring, dtype=np.int32)[rows] = rows
        self._link(numbers[0], parent)
        return True

    def free(self, rows: Rows) -> None:
        """`free_upwards` for each of the rows, in this order; cheapest where leaves come before their parents."""
        held = np.frombuffer(self.planes[0], dtype=np.uint64)[rows] != 0
        for plane in self.planes[1:]:
            held |= np.frombuffer(plane, dtype=np.uint64)[rows] != 0
        rows = rows[~held]
        if not len(rows):
            return
        # A run: every row is the only child of the next one, so all of them go or none does.
        parents, ring = np.frombuffer(self.parent, dtype=np.int32), np.frombuffer(self._next, dtype=np.int32)
        joined = (parents[rows[:-1]] == rows[1:]) & (ring[rows[:-1]] == rows[:-1])
        ends = [*(np.flatnonzero(~joined) + 1).tolist(), len(rows)]
        start = 0
        for end in ends:
            leaf, top = int(rows[start]), int(rows[end - 1])
            if end - start < BULK_BLOCKS:
                self.free_upwards(leaf)
            elif not self.child[leaf] and self.parent[leaf] != _FREE:
                run, above = rows[start:end], self.parent[top]
                self._unlink(top)
                known = self.rows
                deque(map(known.__delitem__, np.frombuffer(self.keys, dtype=np.uint64)[run].tolist()), maxlen=0)
                parents[run] = _FREE
                np.frombuffer(self.child, dtype=np.int32)[run] = 0
                self._free += run.tolist()
                self.free_upwards(above)
            start = end

    def _plane(self, lane: int) -> tuple[NDArray[np.uint64], np.uint64]:
        """A view of a lane's plane and its bit. Drop the view before rows are added: an exported array cannot grow."""
        plane = np.frombuffer(self.planes[lane // PLANE_BITS], dtype=np.uint64)
        return plane, np.uint64(1 << (lane % PLANE_BITS))
