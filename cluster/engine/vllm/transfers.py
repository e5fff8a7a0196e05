"""Transfers as the NIXL connector measured them, matched to the requests that pulled.

The connector reports finished transfers with the step in which the scheduler saw them, in order, without a request
id. One reader's transfers finish in the order in which their requests start to run, so they are matched in order.
With tensor parallelism every rank reports its own reads, rank after rank: a request is one read of each rank (or of
each prefill rank, if those are more).
"""

from __future__ import annotations

from collections import deque
from typing import Any


class Transfers:
    def __init__(self, kv_bytes_per_token: int) -> None:
        self.kv_bytes_per_token = kv_bytes_per_token
        self.failed = self.expired = 0
        self.bytes_total = 0
        self.seconds_total = 0.0
        self.reads_per_request = 1
        self._reads: list[tuple[float, int]] = []
        self._done: deque[tuple[float, int]] = deque(maxlen=1024)

    def on_stats(self, scheduler_stats: Any) -> None:
        """Take what the connector reported with one engine step."""
        stats = getattr(scheduler_stats, "kv_connector_stats", None)
        if not stats:
            return
        data = stats.get("data", stats)
        durations, posts, sizes = (data.get(k, ()) for k in ("transfer_duration", "post_duration", "bytes_transferred"))
        for duration, post, size in zip(durations, posts, sizes, strict=False):
            self._reads.append((duration + post, size))
            self.bytes_total += size
            self.seconds_total += duration + post
        self._group()
        if data.get("num_failed_transfers"):
            self._reads.clear()  # the reads of its other ranks would be taken for another request's
        self.failed += len(data.get("num_failed_transfers", ())) + len(data.get("num_failed_handshakes", ()))
        self.expired += len(data.get("num_kv_expired_reqs", ()))

    def _group(self) -> None:
        """Once every rank has reported: the i-th read of each rank is one request's."""
        requests, rest = divmod(len(self._reads), self.reads_per_request)
        if rest:
            return
        for i in range(requests):
            reads = self._reads[i::requests]
            self._done.append((max(seconds for seconds, _ in reads), sum(size for _, size in reads)))
        self._reads.clear()

    def take(self, at_most_s: float) -> tuple[float | None, int | None]:
        """(seconds, bytes) of the oldest transfer that no request has claimed; None where none was reported."""
        if not self._done:
            return None, None
        duration_s, size = self._done.popleft()
        return min(duration_s, at_most_s), size
