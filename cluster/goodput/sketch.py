"""Mergeable latency histograms: buckets grow geometrically, and the SLO values are bucket edges.

Because a limit is an edge, "how many were within the limit" is exact; a percentile between two edges is
interpolated linearly and clamped to the smallest and largest value seen, so its error is below one bucket
(about 9%). Two sketches with the same edges merge by adding counts: over routers, windows or runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LOWEST_S, HIGHEST_S = 1e-4, 3600.0
STEPS_PER_DOUBLING = 8


def latency_edges(slo_s: Iterable[float | None] = ()) -> tuple[float, ...]:
    """Upper bucket edges from 0.1 ms to one hour, eight a doubling, with each SLO value among them."""
    count = math.ceil(math.log2(HIGHEST_S / LOWEST_S) * STEPS_PER_DOUBLING)
    edges = {LOWEST_S * 2 ** (i / STEPS_PER_DOUBLING) for i in range(count + 1)}
    edges.update(v for v in slo_s if v is not None)
    return tuple(sorted(edges))


def coarse_edges(slo_s: Iterable[float | None] = ()) -> tuple[float, ...]:
    """A subset of `latency_edges` small enough to scrape: one edge a doubling from 0.4 ms to 14 min, and the SLOs."""
    edges = {LOWEST_S * 2**i for i in range(2, 24)}
    edges.update(v for v in slo_s if v is not None)
    return tuple(sorted(edges))


@dataclass(slots=True)
class Sketch:
    """Counts per bucket. Bucket i holds values in (edges[i-1], edges[i]]; the last one everything above.

    `total` is the exact sum of all values, `low` and `high` the extremes.
    """

    edges: tuple[float, ...]
    counts: dict[int, int] = field(default_factory=dict)
    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float, times: int = 1) -> None:
        """Record `value` `times` times. Values that are no finite number >= 0 raise ValueError."""
        if not 0 <= value < math.inf:
            raise ValueError(f"{value!r} is no latency")
        bucket = bisect_left(self.edges, value)
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.count += times
        self.total += value * times
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def extend(self, values: Iterable[float]) -> None:
        for value in values:
            self.add(value)

    def merge(self, other: Sketch) -> None:
        """Add another sketch's samples to this one. ValueError where the edges differ."""
        if other.edges != self.edges:
            raise ValueError("sketches with different bucket edges cannot be merged")
        for bucket, n in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + n
        self.count += other.count
        self.total += other.total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    def copy(self) -> Sketch:
        return Sketch(self.edges, dict(self.counts), self.count, self.total, self.low, self.high)

    def since(self, before: Sketch) -> Sketch:
        """The samples added after `before`, an earlier copy of this sketch. The extremes stay those of the whole."""
        if before.edges != self.edges:
            raise ValueError("sketches with different bucket edges cannot be subtracted")
        counts = {b: n - before.counts.get(b, 0) for b, n in self.counts.items() if n > before.counts.get(b, 0)}
        return Sketch(self.edges, counts, self.count - before.count, self.total - before.total, self.low, self.high)

    def within(self, limit: float) -> int:
        """Samples at or below `limit`: exact where `limit` is an edge, otherwise those below the edge before it."""
        last = bisect_left(self.edges, limit)
        if last < len(self.edges) and self.edges[last] == limit:
            last += 1
        return sum(n for bucket, n in self.counts.items() if bucket < last)

    def cumulative(self, edges: Sequence[float]) -> list[int]:
        """Samples at or below each of `edges`, which must be edges of this sketch, in rising order."""
        return [self.within(edge) for edge in edges]

    def quantile(self, q: float, infinite: int = 0) -> float | None:
        """The q-quantile (0 <= q <= 1), None without a sample.

        Args:
            infinite: requests that never finished. They count as samples above every value, so a server that
                refuses does not look fast: beyond the finished ones the quantile is `inf`.
        """
        everything = self.count + infinite
        if everything == 0:
            return None
        rank = q * everything
        if rank > self.count or self.count == 0:
            return math.inf
        seen = 0
        for bucket in sorted(self.counts):
            n = self.counts[bucket]
            if seen + n >= rank:
                below = self.edges[bucket - 1] if bucket > 0 else 0.0
                above = self.edges[bucket] if bucket < len(self.edges) else self.high
                below, above = max(below, self.low), min(above, self.high)
                return below + (above - below) * min(1.0, max(0.0, (rank - seen) / n))
            seen += n
        return self.high

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None
