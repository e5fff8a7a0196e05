"""Admission and placement behind the real dispatcher, over pools in memory with a virtual clock."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from fake_pools import FakeJob, FakePools, deliver

from cluster.config import AdmissionConfig, LimitsConfig, PlacementConfig
from cluster.engine.simulation.virtual_time import run_virtual as run
from cluster.messages import Outcome, Rejection, Request, RequestRecord, Role, Stage
from cluster.perf.times import LinearTimes
from router.admission import PASSED_OVER, Admission, Forecast, Refusal
from router.dispatcher import Dispatcher
from router.placement import Placer
from router.prefix_index import PrefixIndex

LIMITS = LimitsConfig(queue_s=5, prefill_s=20, first_token_s=10, idle_s=8, silent_s=3, stall_s=5)


class Cluster:
    """One prefill and one decode engine of 64 sequences, with everything of the router that is real."""

    def __init__(self, limits: LimitsConfig = LIMITS, prefill: int = 1, decode: int = 1, **admission) -> None:
        self.rng = random.Random(1)
        self.pools = FakePools(self.rng)
        self.records: list[RequestRecord] = []
        self.jobs: list[FakeJob] = []
        loop = asyncio.get_running_loop()
        times = LinearTimes()
        config = PlacementConfig(conditional=False, no_prefill_worker="fail")
        self.placer = Placer(config, lambda _: times, PrefixIndex(), key_block_tokens=16)
        # Answers are expected to be long: a sequence does not come free while prompts are computed.
        self.placer.model.output_tokens.value = 2000.0
        self.admission = Admission(AdmissionConfig(**admission), self.placer, 1.0)
        self.dispatcher = self.pools.dispatcher = Dispatcher(
            self.pools,  # type: ignore[arg-type]
            self.placer,
            limits,
            deliver=deliver,
            ticket_request={"do_remote_decode": True},
            on_record=self.records.append,
            clock=loop.time,
            rng=self.rng,
            admission=self.admission,
        )
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for _ in range(count):
                self.pools.add(role)

    def send(self, max_tokens: int = 40) -> FakeJob:
        prompt = [self.rng.randrange(30_000) for _ in range(40)]
        job = FakeJob(f"r{len(self.jobs)}", prompt, max_tokens, asyncio.get_running_loop().time())
        self.jobs.append(job)
        self.dispatcher.submit(job)
        return job

    async def settle(self) -> None:
        for _ in range(3000):
            if not self.dispatcher.running:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)

    def check(self) -> None:
        for job in self.jobs:
            job.check()
        assert self.dispatcher.running == self.dispatcher.open_legs == 0
        assert len(self.admission) == 0
        assert not self.dispatcher._waiting
        assert self.placer.reserved == 0
        assert len(self.records) == len(self.jobs)


def test_more_requests_than_sequences_wait_in_the_router_and_are_all_served() -> None:
    async def main() -> None:
        c = Cluster()
        for _ in range(110):
            c.send()
        await asyncio.sleep(0.2)
        decode = next(w for w in c.pools.everyone if w.info.role is Role.DECODE)
        assert len(decode.legs) <= 70
        assert len(c.admission) >= 30
        peak = 0
        while c.dispatcher.running:
            await asyncio.sleep(0.05)
            peak = max(peak, len(decode.legs))
        await c.settle()
        c.check()
        assert {j.ends[0][0] for j in c.jobs} == {Outcome.DONE}
        assert 50 < peak <= 96  # places are given when they are predicted to be free by the time of the ticket
        waits = [r.stage_s.get(Stage.ROUTER_QUEUE, 0.0) for r in c.records]
        assert max(waits) > 0.3 > min(waits)

    run(main())


def test_cancelled_and_timed_out_requests_leave_the_queue() -> None:
    async def main() -> None:
        c = Cluster(LIMITS.model_copy(update={"queue_s": 0.5}))
        for _ in range(110):
            c.send(max_tokens=120)
        await asyncio.sleep(0.2)
        for job in c.jobs[90:100]:
            c.dispatcher.client_left(job.request.request_id)
        await asyncio.sleep(0.1)
        waiting = len(c.admission)
        assert waiting <= 100 - 50
        await c.settle()
        c.check()
        outcomes = [j.ends[0][0] for j in c.jobs]
        assert outcomes.count(Outcome.CANCELLED) == 10
        assert outcomes.count(Outcome.DONE) >= 60
        assert outcomes.count(Outcome.DONE) + outcomes.count(Outcome.CANCELLED) < 110  # the rest waited too long

    run(main())


def test_reports_of_load_cost_no_forecasts_beyond_those_of_every_ten_milliseconds() -> None:
    """Every step of every engine sends one."""

    async def main() -> None:
        c = Cluster()
        asked: list[float] = []
        ask = c.placer.forecast

        def counted(request: Request, now: float, *ahead: Any) -> Forecast | Rejection:
            asked.append(now)
            return ask(request, now, *ahead)

        c.placer.forecast = counted  # type: ignore[method-assign]
        for _ in range(75):
            c.send(max_tokens=400)
        await asyncio.sleep(1.0)
        assert len(c.admission) > 5, "decode has no room for them"
        loads = list(c.dispatcher.loads.values())
        asked.clear()
        for i in range(1000):
            c.dispatcher.on_load(loads[i % len(loads)])
        assert not asked
        await asyncio.sleep(0.1)
        assert 9 <= len(set(asked)) <= 11
        assert len(asked) <= 11 * (PASSED_OVER + 1)
        await c.settle()
        c.check()

    run(main())


def test_an_error_while_one_is_placed_does_not_end_the_looks() -> None:
    async def main() -> None:
        c = Cluster(wait_for_workers=True, prefill=0, decode=0)
        job = c.send()
        await asyncio.sleep(0.1)
        look, failures = c.admission.next, iter([True])

        def broken(now: float) -> Request | None:
            if next(failures, False):
                raise RuntimeError("a mistake of ours")
            return look(now)

        c.admission.next = broken  # type: ignore[method-assign]
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        await asyncio.sleep(0.1)
        c.pools.add(Role.PREFILL)
        c.pools.add(Role.DECODE)
        await c.settle()
        c.check()
        assert job.ends[0][0] is Outcome.DONE

    run(main())


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def main() -> None:
        c = Cluster(max_queue=10, retry_after_s=2.0)
        for _ in range(110):
            c.send()
        await asyncio.sleep(0.2)
        refused = [j.ends[0] for j in c.jobs if j.ends]
        assert len(refused) >= 20
        assert {(outcome, error.status) for outcome, error, _ in refused} == {(Outcome.REJECTED, 503)}
        assert all(error.retry_after_s >= 2.0 for _, error, _ in refused)
        await c.settle()
        c.check()

    run(main())


def test_a_displaced_request_whose_client_leaves_at_that_moment_holds_up_nobody() -> None:
    """The queue has refused it already, and the dispatcher has not heard of that yet."""

    async def main() -> None:
        c = Cluster(max_queue=3)
        for _ in range(110):
            c.send()
        waiting = next(iter(c.dispatcher._waiting))
        request = c.dispatcher._waiting[waiting][0].request
        c.admission.remove(waiting)
        c.admission._refusals.append(Refusal(request, Rejection(503, "displaced", 1.0)))
        c.dispatcher.client_left(waiting)
        await c.settle()
        c.check()

    run(main())


def test_requests_wait_for_the_first_worker() -> None:
    async def main() -> None:
        c = Cluster(prefill=0, decode=0, wait_for_workers=True)
        jobs = [c.send() for _ in range(5)]
        await asyncio.sleep(1.0)
        assert len(c.admission) == 5
        c.pools.add(Role.PREFILL)
        c.pools.add(Role.DECODE)
        await c.settle()
        c.check()
        assert {j.ends[0][0] for j in jobs} == {Outcome.DONE}

    run(main())


def test_a_distrusted_worker_comes_back_with_its_index() -> None:
    async def main() -> None:
        c = Cluster(prefill=2)
        c.placer.set_index_exact("p0", True)
        c.placer.index.store("p0", (1, 2, 3))
        c.placer.pause_worker("p0", 1.0)
        assert c.placer.find("p0") is None
        c.placer.index.store("p0", (1, 2, 3, 4))  # its events go on
        c.placer.add_worker(c.dispatcher.workers["p0"], 2.0)
        assert c.placer.index.longest_match((1, 2, 3, 4, 5)) == {"p0": 4}
        assert c.placer.find("p0").index_exact
        c.placer.remove_worker("p0", 3.0)
        assert c.placer.index.longest_match((1, 2, 3)) == {}

    run(main())
