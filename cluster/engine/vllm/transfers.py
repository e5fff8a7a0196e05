"""Transfers as the NIXL connector measured them, matched to the requests that pulled.

The connector reports finished transfers with the step in which the scheduler saw them, in order, without a request
id. One reader's transfers finish in the order in which their requests start to run, so a request takes the oldest one
that was reported after it came and has its size. A transfer whose request is gone (a cancelled one), or whose prompt
was recomputed (one of a single token), is claimed by nobody and must not be taken for the next request's.
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
        # (when it was reported, seconds, bytes); unclaimed ones fall out at the other end.
        self._done: deque[tuple[float, float, int]] = deque(maxlen=256)

    def on_stats(self, scheduler_stats: Any, now: float) -> None:
        """Take what the connector reported with one engine step, at `now`."""
        stats = getattr(scheduler_stats, "kv_connector_stats", None)
        if not stats:
            return
        data = stats.get("data", stats)
        durations, posts, sizes = (data.get(k, ()) for k in ("transfer_duration", "post_duration", "bytes_transferred"))
        for duration, post, size in zip(durations, posts, sizes, strict=False):
            self._reads.append((duration + post, size))
            self.bytes_total += size
            self.seconds_total += duration + post
        self._group(now)
        if data.get("num_failed_transfers"):
            self._reads.clear()  # the reads of its other ranks would be taken for another request's
        self.failed += len(data.get("num_failed_transfers", ())) + len(data.get("num_failed_handshakes", ()))
        self.expired += len(data.get("num_kv_expired_reqs", ()))

    def _group(self, now: float) -> None:
        """Once every rank has reported: the i-th read of each rank is one request's."""
        requests, rest = divmod(len(self._reads), self.reads_per_request)
        if rest:
            return
        for i in range(requests):
            reads = self._reads[i::requests]
            self._done.append((now, max(seconds for seconds, _ in reads), sum(size for _, size in reads)))
        self._reads.clear()

    def take(self, since_s: float, at_most_s: float, tokens: int) -> tuple[float | None, int | None]:
        """(seconds, bytes) of the transfer of a request that came at `since_s`; None where none was reported.

        Args:
            at_most_s: what the request waited in the engine; its transfer took no longer.
            tokens: of the blocks that it pulled, the unused ones of the last block included. Where ranks hold copies
                of KV heads no transfer has that size, and the oldest one is taken.
        """
        later = [entry for entry in self._done if entry[0] >= since_s]
        if not later:
            return None, None
        entry = next((e for e in later if e[2] == tokens * self.kv_bytes_per_token), later[0])
        self._done.remove(entry)
        return min(entry[1], at_most_s), entry[2]
