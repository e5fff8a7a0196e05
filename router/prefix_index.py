"""Which engine holds which prompt blocks: one tree of block keys, one bit a worker.

A block's key names its whole prefix (router/block_keys.py), so the tree needs no token comparison; its rows are in
router/block_tree.py.

`longest_match` relies on the prefix property (who holds block i holds block i-1) and bisects over depth for all
workers at once: about log2(prompt blocks) look-ups for each distinct depth, none per worker. The property can break:
a removal may overtake others, an event may be lost. Then the worker has a *hole*, is listed, and is verified by one
walk, so the answer is always the one a walk over every block would give.

`max_blocks` bounds the rows. Beyond it the oldest branch of the oldest root is dropped from its leaf upwards; a
dropped block only lowers a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from router.block_keys import block_keys, extend_keys, namespace
from router.block_tree import BULK_BLOCKS, PLANE_BITS, ROOT, BlockTree, Rows

__all__ = ["IndexStats", "PrefixIndex", "block_keys", "extend_keys", "namespace"]

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
        self._tree = BlockTree()
        self._rows = self._tree.rows
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
        rows, tree = self._rows, self._tree
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
        above = ROOT
        if parent is not None:
            above = rows.get(parent, ROOT)
            if above == ROOT:
                above = tree.new(parent, ROOT)
            if not tree.has(above, lane):
                self._add_hole(lane, parent)
        if len(keys) < BULK_BLOCKS or not self._store_chain(lane, keys, above):
            self._store_each(lane, keys, above)

    def _store_each(self, lane: int, keys: Sequence[int], above: int) -> None:
        rows, tree = self._rows, self._tree
        holes = self._holes.get(lane)
        plane, bit = tree.planes[lane // PLANE_BITS], 1 << (lane % PLANE_BITS)
        parents = tree.parent
        added = 0
        for key in keys:
            row = rows.get(key)
            if row is None:
                if len(rows) >= self.max_blocks:  # dropping made room for fewer keys than it removed of this chain
                    self._dropped += 1
                    break
                row = tree.new(key, above)
            elif parents[row] != above:  # it was stored before its parent was known
                tree.move(row, above)
            mask = plane[row]
            if not mask & bit:
                plane[row] = mask | bit
                added += 1
                if holes and key in holes:
                    self._close_hole(lane, key)
            above = row
        self._held[lane] += added

    def _store_chain(self, lane: int, keys: Sequence[int], above: int) -> bool:
        """The same at once, for keys of which a first part is known, as one chain, and the rest is new.

        False, and nothing done, where that is not so.
        """
        rows, tree = self._rows, self._tree
        found = list(map(rows.get, keys))
        known = found.index(None) if None in found else len(found)
        new = keys[known:]
        if found.count(None) != len(new) or len(rows) + len(new) > self.max_blocks:
            return False
        old = np.array(found[:known], dtype=np.int32)
        if known and not tree.is_chain(old, above):
            return False
        if new and not tree.new_chain(new, int(old[-1]) if known else above, lane):
            return False
        self._held[lane] += len(new)
        if known:
            self._held[lane] += tree.set_bit(old, lane)
            if lane in self._holes:
                for key in self._holes[lane].intersection(keys[:known]):
                    self._close_hole(lane, key)
        return True

    def remove(self, worker_id: str, keys: Iterable[int]) -> None:
        """A worker no longer holds these blocks. Unknown keys and workers are ignored."""
        lane = self._lanes.get(worker_id)
        if lane is None:
            return
        found = [row for row in map(self._rows.get, keys) if row is not None]
        if len(found) >= BULK_BLOCKS and len(set(found)) == len(found):
            self._remove_many(lane, np.array(found, dtype=np.int32))
            return
        tree = self._tree
        plane, bit = tree.planes[lane // PLANE_BITS], 1 << (lane % PLANE_BITS)
        for row in found:
            # A row that is freed on the way has no mask.
            if not plane[row] & bit:
                continue
            plane[row] ^= bit
            self._held[lane] -= 1
            if tree.child[row] and tree.any_child_has(row, plane, bit):
                self._add_hole(lane, tree.keys[row])
            self._close_hole_above(lane, row)
            tree.free_upwards(row)

    def _remove_many(self, lane: int, rows: Rows) -> None:
        """A hole is a block that a worker lacks although it holds one behind it, so the order does not matter."""
        tree = self._tree
        gone = tree.clear_bit(rows, lane)
        self._held[lane] -= len(gone)
        for row in tree.with_child_in(gone, lane):
            self._add_hole(lane, tree.keys[row])
        if lane in self._holes:
            for row in gone.tolist():
                self._close_hole_above(lane, row)
        tree.free(gone)

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
        self._tree.free(self._tree.clear_bit(self._tree.held_by(lane), lane))

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
        mask = 0 if first is None else self._tree.mask(first)
        if not mask:
            return []
        found: list[tuple[int, int]] = []
        spans = [(0, len(keys), mask)]  # lanes in mask hold block lo and, as far as known, not block hi
        rows, tree, planes = self._rows, self._tree, self._tree.planes
        plane = planes[0] if len(planes) == 1 else None
        while spans:
            lo, hi, mask = spans.pop()
            while hi - lo > 1:
                mid = (lo + hi) // 2
                row = rows.get(keys[mid])
                if row is None:
                    hi = mid
                    continue
                deeper = mask & (tree.mask(row) if plane is None else plane[row])
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
        return 0 if row is None else self._tree.children(row, most)

    def held_blocks(self, worker_id: str) -> int:
        lane = self._lanes.get(worker_id)
        return 0 if lane is None else self._held[lane]

    def holds(self, worker_id: str, key: int) -> bool:
        lane, row = self._lanes.get(worker_id), self._rows.get(key)
        return lane is not None and row is not None and self._tree.has(row, lane)

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
                if lane // PLANE_BITS == len(self._tree.planes):
                    self._tree.add_plane()
            self._names[lane] = worker_id
            self._names_of.clear()
            self._lanes[worker_id] = lane
        return lane

    def _drop_oldest(self, rows: int) -> None:
        """Make room: from the oldest root follow the oldest children to a leaf and delete upwards."""
        tree = self._tree
        while rows > 0 and (root := tree.oldest_child(ROOT)):
            row, depth = root, 1
            while below := tree.oldest_child(row):
                row = below
                depth += 1
            budget = max(rows, depth // 8)  # so that the walk down costs a few steps per deleted row
            while row and budget > 0 and not tree.child[row]:
                parent = tree.parent[row]
                self._drop_leaf(row)
                rows -= 1
                budget -= 1
                row = parent
            if row:  # something is left under this root: other roots are next
                tree.move(root, ROOT)

    def _drop_leaf(self, row: int) -> None:
        tree = self._tree
        key, mask = tree.keys[row], tree.mask(row)
        while mask:
            low = mask & -mask
            self._held[low.bit_length() - 1] -= 1
            mask ^= low
        if self._holey:
            for lane in [lane for lane, holes in self._holes.items() if key in holes]:
                self._close_hole(lane, key)
        tree.delete(row)
        self._dropped += 1

    # -- holes --------------------------------------------------------------------------------------------------

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

    def _close_hole_above(self, lane: int, row: int) -> None:
        """The lane does not hold `row` any more: was that the last one behind a hole?"""
        tree, holes = self._tree, self._holes.get(lane)
        if not holes or not (above := tree.parent[row]) or tree.keys[above] not in holes:
            return
        if not tree.any_child_has(above, tree.planes[lane // PLANE_BITS], 1 << (lane % PLANE_BITS)):
            self._close_hole(lane, tree.keys[above])

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
            still = 0 if row is None else alive & self._tree.mask(row)
            if still != alive:
                exact.append((alive ^ still, depth))
                alive = still
                if not alive:
                    break
        else:
            exact.append((alive, len(keys)))
        return exact
