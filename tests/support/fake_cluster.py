"""The real dispatcher over pools in memory: what tests and the chaos run in memory have in common."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from fake_pools import FakeJob, FakePlacing, FakePools, deliver

from cluster.config import LimitsConfig
from cluster.messages import RequestRecord, Role
from router.dispatcher import Dispatcher

LIMITS = LimitsConfig(queue_s=5, prefill_s=20, first_token_s=10, idle_s=8, silent_s=3, stall_s=5)


class Cluster:
    def __init__(self, seed: int = 1, prefill: int = 2, decode: int = 2, limits: LimitsConfig = LIMITS) -> None:
        self.rng = random.Random(seed)
        self.pools = FakePools(self.rng)
        self.placing = FakePlacing()
        self.records: list[RequestRecord] = []
        loop = asyncio.get_running_loop()
        self.dispatcher = self.pools.dispatcher = Dispatcher(
            self.pools,  # type: ignore[arg-type]
            self.placing,
            limits,
            deliver=deliver,
            ticket_request={"do_remote_decode": True},
            on_record=self.records.append,
            clock=loop.time,
            rng=self.rng,
        )
        self.jobs: list[FakeJob] = []
        for _ in range(prefill):
            self.pools.add(Role.PREFILL)
        for _ in range(decode):
            self.pools.add(Role.DECODE)

    def send(self, **options) -> FakeJob:
        prompt = [self.rng.randrange(30_000) for _ in range(self.rng.randrange(1, 80))]
        max_tokens = options.pop("max_tokens", self.rng.choice((1, 2, 5, 12)))
        now = asyncio.get_running_loop().time()
        job = FakeJob(f"r{len(self.jobs)}", prompt, max_tokens, now, **options)
        self.jobs.append(job)
        self.dispatcher.submit(job)
        return job

    async def settle(self, seconds: float = 60.0) -> None:
        """Wait for every request, then let the last messages arrive."""
        for _ in range(round(seconds * 10)):
            if not self.dispatcher.running:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)

    def check(self) -> Counter[str]:
        for job in self.jobs:
            job.check()
        assert self.dispatcher.running == 0
        assert self.dispatcher.open_legs == 0
        assert self.placing.held == set()
        assert len(self.records) == len(self.jobs)
        for worker in self.pools.everyone:
            if worker.alive:
                assert (worker.leases, worker.used_blocks, worker.legs) == (0, 0, {}), worker.info.worker_id
        return Counter(job.ends[0][0] for job in self.jobs)
