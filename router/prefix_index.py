"""Which engine holds which prompt blocks: one tree of block keys, one bit a worker.

A block's key names its whole prefix (router/block_keys.py), so the tree needs no token comparison. Per block the
index keeps a row: worker mask, parent, children (a circular list, newest first), key. Rows live in arrays, a dict maps
key to row; that costs about 150 bytes a block however many workers hold it.

`longest_match` relies on the prefix property (who holds block i holds block i-1) and bisects over depth for all
workers at once: about log2(prompt blocks) look-ups for each distinct depth, none per worker. The property can break:
a removal may overtake others, an event may be lost. Then the worker has a *hole*, is listed, and is verified by one
walk, so the answer is always the one a walk over every block would give.

`max_blocks` bounds the rows. Beyond it the oldest branch of the oldest root is dropped from its leaf upwards; a
dropped block only lowers a prediction.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from router.block_keys import block_keys, extend_keys, namespace

__all__ = ["IndexStats", "PrefixIndex", "block_keys", "extend_keys", "namespace"]

_PLANE_BITS = 64
_ROOT = 0
MASKS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes of an index. `entries` counts (worker, block) pairs, `blocks` rows, `dropped` rows lost to the cap."""

    blocks: int
    entries: int
    workers: int
    dropped_blocks: int
    holes: int


class PrefixIndex:
    """Exact map from prompt blocks to the workers that hold them. Not thread-safe.

    Args:
        max_blocks: bound on distinct blocks, over all workers.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks: {max_blocks} is below 1")
        self.max_blocks = max_blocks
        self._rows: dict[int, int] = {}
        # Row 0 is the parent of all first blocks. `_next`/`_prev` link siblings in a ring, newest first.
        self._keys: list[int] = [-1]
        self._planes: list[array[int]] = [array("Q", (0,))]
        self._parent = array("i", (0,))
        self._child = array("i", (0,))
        self._next = array("i", (0,))
        self._prev = array("i", (0,))
        self._free: list[int] = []
        self._lanes: dict[str, int] = {}
        self._names: list[str | None] = []
        self._names_of: dict[int, tuple[str, ...]] = {}
        self._held: list[int] = []
        self._holes: dict[int, set[int]] = {}
        self._holey = 0
        self._dropped = 0

    # -- writing ------------------------------------------------------------------------------------------------

    def store(self, worker_id: str, keys: Sequence[int], parent: int | None = None) -> None:
        """A worker now holds these consecutive blocks. `parent` is the key before them, None at a prompt's start."""
        if not keys:
            return
        lane = self._lane(worker_id)
        rows = self._rows
        overflow = len(rows) + len(keys) + 1 - self.max_blocks
        if overflow > 0:  # only then is it worth counting exactly
            missing = sum(key not in rows for key in keys) + (parent is not None and parent not in rows)
            overflow = len(rows) + missing - self.max_blocks
        if overflow > 0:
            if missing > self.max_blocks:
                fits = max(0, self.max_blocks - 1)
                self._dropped += len(keys) - fits
                self.store(worker_id, keys[:fits], parent)
                return
            self._drop_oldest(overflow + (missing == 0))
        above = _ROOT
        if parent is not None:
            above = rows.get(parent, _ROOT)
            if above == _ROOT:
                above = self._new_row(parent, _ROOT)
            if not self._has(above, lane):
                self._add_hole(lane, parent)
        holes = self._holes.get(lane)
        plane, bit = self._planes[lane // _PLANE_BITS], 1 << (lane % _PLANE_BITS)
        parents = self._parent
        added = 0
        for key in keys:
            row = rows.get(key)
            if row is None:
                if len(rows) >= self.max_blocks:  # dropping made room for fewer keys than it removed of this chain
                    self._dropped += 1
                    break
                row = self._new_row(key, above)
            elif parents[row] != above:  # it was stored before its parent was known
                self._unlink(row)
                self._link(row, above)
            mask = plane[row]
            if not mask & bit:
                plane[row] = mask | bit
                added += 1
                if holes and key in holes:
                    self._close_hole(lane, key)
            above = row
        self._held[lane] += added

    def remove(self, worker_id: str, keys: Iterable[int]) -> None:
        """A worker no longer holds these blocks. Unknown keys and workers are ignored."""
        lane = self._lanes.get(worker_id)
        if lane is None:
            return
        plane, bit = self._planes[lane // _PLANE_BITS], 1 << (lane % _PLANE_BITS)
        for key in keys:
            row = self._rows.get(key)
            if row is None or not plane[row] & bit:
                continue
            plane[row] ^= bit
            self._held[lane] -= 1
            if self._child[row] and self._any_child_has(row, plane, bit):
                self._add_hole(lane, key)
            holes = self._holes.get(lane)
            above = self._parent[row]
            if holes and self._keys[above] in holes and not self._any_child_has(above, plane, bit):
                self._close_hole(lane, self._keys[above])
            self._free_upwards(row)

    def clear(self, worker_id: str) -> None:
        """Forget a worker and everything it held: it died, restarted, or said that its cache is empty."""
        lane = self._lanes.pop(worker_id, None)
        if lane is None:
            return
        self._names[lane] = None
        self._names_of.clear()
        self._holes.pop(lane, None)
        self._holey &= ~(1 << lane)
        self._held[lane] = 0
        plane, bit = self._planes[lane // _PLANE_BITS], np.uint64(1 << (lane % _PLANE_BITS))
        view = np.frombuffer(plane, dtype=np.uint64)
        held = np.flatnonzero(view & bit)
        view[held] &= ~bit
        del view  # an array with an exported buffer cannot grow
        for row in held.tolist():
            self._free_upwards(row)

    # -- reading ------------------------------------------------------------------------------------------------

    def longest_match(self, keys: Sequence[int]) -> dict[str, int]:
        """Blocks from the prompt's start that each worker holds without a gap; workers with none are absent."""
        matches: dict[str, int] = {}
        for mask, depth in self.match_masks(keys):
            matches.update(dict.fromkeys(self.names_of(mask), depth))
        return matches

    def names_of(self, mask: int) -> tuple[str, ...]:
        """The workers of a mask. Masks recur, so the answers are kept."""
        names = self._names_of.get(mask)
        if names is None:
            if len(self._names_of) >= MASKS_KEPT:
                self._names_of.clear()
            names = tuple(name for i, name in enumerate(self._names) if mask >> i & 1 and name is not None)
            self._names_of[mask] = names
        return names

    def match_masks(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """The same as (mask, blocks) for each distinct depth; `names_of` tells the workers of a mask."""
        if not keys:
            return []
        first = self._rows.get(keys[0])
        mask = 0 if first is None else self._mask(first)
        if not mask:
            return []
        found: list[tuple[int, int]] = []
        spans = [(0, len(keys), mask)]  # lanes in mask hold block lo and, as far as known, not block hi
        rows, planes = self._rows, self._planes
        plane = planes[0] if len(planes) == 1 else None
        while spans:
            lo, hi, mask = spans.pop()
            while hi - lo > 1:
                mid = (lo + hi) // 2
                row = rows.get(keys[mid])
                if row is None:
                    hi = mid
                    continue
                deeper = mask & (self._mask(row) if plane is None else plane[row])
                if deeper != mask:
                    if not deeper:
                        hi = mid
                        continue
                    spans.append((lo, mid, mask ^ deeper))
                    mask = deeper
                lo = mid
            found.append((mask, hi))
        return self._verified(keys, found) if self._holey else found

    def fan_out(self, key: int, most: int = 64) -> int:
        """In how many ways prompts go on after this block, as far as is known; counts to `most`."""
        row = self._rows.get(key)
        first = child = self._child[row] if row is not None else 0
        count = 0
        while child and count < most:
            count += 1
            child = self._next[child]
            if child == first:
                break
        return count

    def held_blocks(self, worker_id: str) -> int:
        lane = self._lanes.get(worker_id)
        return 0 if lane is None else self._held[lane]

    def holds(self, worker_id: str, key: int) -> bool:
        lane, row = self._lanes.get(worker_id), self._rows.get(key)
        return lane is not None and row is not None and self._has(row, lane)

    @property
    def stats(self) -> IndexStats:
        return IndexStats(
            blocks=len(self._rows),
            entries=sum(self._held),
            workers=len(self._lanes),
            dropped_blocks=self._dropped,
            holes=sum(len(holes) for holes in self._holes.values()),
        )

    # -- rows ---------------------------------------------------------------------------------------------------

    def _lane(self, worker_id: str) -> int:
        lane = self._lanes.get(worker_id)
        if lane is None:
            lane = next((i for i, name in enumerate(self._names) if name is None), len(self._names))
            if lane == len(self._names):
                self._names.append(None)
                self._held.append(0)
                if lane // _PLANE_BITS == len(self._planes):
                    self._planes.append(array("Q", bytes(8 * len(self._keys))))
            self._names[lane] = worker_id
            self._names_of.clear()
            self._lanes[worker_id] = lane
        return lane

    def _mask(self, row: int) -> int:
        mask = 0
        for i, plane in enumerate(self._planes):
            mask |= plane[row] << (_PLANE_BITS * i)
        return mask

    def _has(self, row: int, lane: int) -> bool:
        return bool(self._planes[lane // _PLANE_BITS][row] >> (lane % _PLANE_BITS) & 1)

    def _new_row(self, key: int, parent: int) -> int:
        if self._free:
            row = self._free.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
            for plane in self._planes:
                plane.append(0)
            for column in (self._parent, self._child, self._next, self._prev):
                column.append(0)
        self._rows[key] = row
        self._link(row, parent)
        return row

    def _link(self, row: int, parent: int) -> None:
        first = self._child[parent]
        if first:
            last = self._prev[first]
            self._next[row], self._prev[row] = first, last
            self._next[last] = self._prev[first] = row
        else:
            self._next[row] = self._prev[row] = row
        self._child[parent] = row
        self._parent[row] = parent

    def _unlink(self, row: int) -> None:
        parent, after = self._parent[row], self._next[row]
        if after == row:
            self._child[parent] = 0
            return
        before = self._prev[row]
        self._next[before], self._prev[after] = after, before
        if self._child[parent] == row:
            self._child[parent] = after

    def _free_upwards(self, row: int) -> None:
        """Delete a row that nobody holds and that has no children, then its parent if that became such a row."""
        while row and not self._child[row] and self._keys[row] >= 0 and not any(p[row] for p in self._planes):
            parent = self._parent[row]
            self._unlink(row)
            self._rows.pop(self._keys[row], None)
            self._keys[row] = -1
            self._free.append(row)
            row = parent

    def _drop_oldest(self, rows: int) -> None:
        """Make room: from the oldest root follow the oldest children to a leaf and delete upwards."""
        while rows > 0 and self._child[_ROOT]:
            root = self._prev[self._child[_ROOT]]
            row, depth = root, 1
            while self._child[row]:
                row = self._prev[self._child[row]]
                depth += 1
            budget = max(rows, depth // 8)  # so that the walk down costs a few steps per deleted row
            while row and budget > 0 and not self._child[row]:
                parent = self._parent[row]
                self._drop_leaf(row)
                rows -= 1
                budget -= 1
                row = parent
            if row:  # something is left under this root: other roots are next
                self._unlink(root)
                self._link(root, _ROOT)

    def _drop_leaf(self, row: int) -> None:
        key = self._keys[row]
        for i, plane in enumerate(self._planes):
            mask = plane[row]
            plane[row] = 0
            while mask:
                low = mask & -mask
                self._held[low.bit_length() - 1 + _PLANE_BITS * i] -= 1
                mask ^= low
        if self._holey:
            for lane in [lane for lane, holes in self._holes.items() if key in holes]:
                self._close_hole(lane, key)
        self._unlink(row)
        del self._rows[key]
        self._keys[row] = -1
        self._free.append(row)
        self._dropped += 1

    # -- holes --------------------------------------------------------------------------------------------------

    def _any_child_has(self, row: int, plane: array[int], bit: int) -> bool:
        first = child = self._child[row]
        while child:
            if plane[child] & bit:
                return True
            child = self._next[child]
            if child == first:
                break
        return False

    def _add_hole(self, lane: int, key: int) -> None:
        self._holes.setdefault(lane, set()).add(key)
        self._holey |= 1 << lane

    def _close_hole(self, lane: int, key: int) -> None:
        holes = self._holes.get(lane)
        if holes is None:
            return
        holes.discard(key)
        if not holes:
            del self._holes[lane]
            self._holey &= ~(1 << lane)

    def _verified(self, keys: Sequence[int], found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        doubtful = {depth: mask & self._holey for mask, depth in found if mask & self._holey}
        if not doubtful:
            return found
        exact = [(mask & ~self._holey, depth) for mask, depth in found if mask & ~self._holey]
        # Beyond a hole a bisection may have stopped too early as well as too late: walk to the end.
        alive = 0
        for mask in doubtful.values():
            alive |= mask
        for depth, key in enumerate(keys):
            row = self._rows.get(key)
            still = 0 if row is None else alive & self._mask(row)
            if still != alive:
                exact.append((alive ^ still, depth))
                alive = still
                if not alive:
                    break
        else:
            exact.append((alive, len(keys)))
        return exact
