"""The balancers that exist elsewhere, as baselines over the same view of the workers.

They choose each pool by itself and know nothing of transfers, SLOs or room. `cost` (router/placement.py) is not one
of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.messages import Request
from router.approximate import ApproximateCache
from router.load import WorkerLoad
from router.prefix_index import PrefixIndex

MATCH_THRESHOLD = 0.5
IMBALANCE_REQUESTS = 32
IMBALANCE_RATIO = 1.1


class Baseline(Protocol):
    """Chooses one worker of each pool; `workers` is never empty and holds ready workers only."""

    def prefill(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad: ...

    def decode(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad: ...

    def placed(self, request: Request, prefill: WorkerLoad | None, decode: WorkerLoad) -> None:
        """A choice was reserved."""
        ...


class RoundRobin:
    """Each worker in turn."""

    def __init__(self) -> None:
        self._turn = {"prefill": 0, "decode": 0}

    def prefill(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad:
        self._turn["prefill"] += 1
        return workers[self._turn["prefill"] % len(workers)]

    def decode(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad:
        self._turn["decode"] += 1
        return workers[self._turn["decode"] % len(workers)]

    def placed(self, request: Request, prefill: WorkerLoad | None, decode: WorkerLoad) -> None:
        pass


class LeastLoaded:
    """The worker with the fewest unfinished requests."""

    def prefill(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad:
        return _least_loaded(workers, rng)

    decode = prefill

    def placed(self, request: Request, prefill: WorkerLoad | None, decode: WorkerLoad) -> None:
        pass


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher, 2001)."""

    def prefill(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad:
        return _least_loaded(rng.sample(list(workers), min(2, len(workers))), rng)

    decode = prefill

    def placed(self, request: Request, prefill: WorkerLoad | None, decode: WorkerLoad) -> None:
        pass


class ApproximateAffinity:
    """The cache-aware balancing of common routers.

    A tree of what was sent where; the longest match wins if it covers half of the prompt, else the worker with the
    fewest indexed blocks; whenever the busiest worker is far busier than the idlest, the least loaded one is taken.
    Decode workers are balanced by load.
    """

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._caches: dict[str, ApproximateCache] = {}

    def prefill(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad:
        loads = [w.requests for w in workers]
        most, least = max(loads), min(loads)
        if most - least > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * least:
            return _least_loaded(workers, rng)
        matches = self._index.longest_match(request.block_keys)
        best = max(workers, key=lambda w: (matches.get(w.info.worker_id, 0), rng.random()))
        if matches.get(best.info.worker_id, 0) > MATCH_THRESHOLD * len(request.block_keys):
            return best
        return min(workers, key=lambda w: (self._index.held_blocks(w.info.worker_id), rng.random()))

    def decode(self, workers: Sequence[WorkerLoad], request: Request, rng: random.Random) -> WorkerLoad:
        return _least_loaded(workers, rng)

    def placed(self, request: Request, prefill: WorkerLoad | None, decode: WorkerLoad) -> None:
        worker = prefill or decode
        name = worker.info.worker_id
        if name not in self._caches:
            self._caches[name] = ApproximateCache(name, self._index, worker.info.kv_total_blocks)
        self._caches[name].sent(request.block_keys)


def _least_loaded(workers: Sequence[WorkerLoad], rng: random.Random) -> WorkerLoad:
    return min(workers, key=lambda w: (w.requests, rng.random()))


BASELINES: dict[str, Callable[[], Baseline]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "approximate": ApproximateAffinity,
}


def baseline(name: str) -> Baseline | None:
    """A new baseline; None for `cost`, which is the placer itself."""
    return None if name == "cost" else BASELINES[name]()
