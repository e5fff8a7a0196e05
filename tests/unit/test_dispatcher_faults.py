"""The dispatcher over pools in memory, with a virtual clock: cancels, deaths, hangs, failed transfers, departures.

Kinds: Ray Serve cancellation holes; cancel before the first token; the gap between prefill done and decode knows;
in-flight counters leak; n>1 over PD; retry in mid-stream; dead worker stays attractive; drain does not stop intake.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import LIMITS, Cluster

from cluster.config import PlacementConfig
from cluster.engine.simulation.virtual_time import run_virtual as run
from cluster.errors import WorkerLost
from cluster.messages import Outcome, Role
from cluster.perf.times import LinearTimes
from cluster.wire import Output
from router.placement import Placer
from router.prefix_index import PrefixIndex


def test_requests_of_every_shape_are_answered_right() -> None:
    async def main() -> None:
        c = Cluster()
        for _ in range(300):
            c.send(n=c.rng.choice((1, 1, 2, 3)), streaming=c.rng.random() < 0.5, movable=c.rng.random() < 0.5)
            await asyncio.sleep(c.rng.random() * 0.02)
        await c.settle()
        assert c.check() == {Outcome.DONE: 300}
        assert c.pools.transfers > 100

    run(main())


@pytest.mark.parametrize("failing", [0, 1])
def test_tokens_of_the_step_in_which_another_choice_fails_do_not_enter_the_new_answer(failing: int) -> None:
    """Kind: n>1 over PD. Not streamed, all choices are computed again."""

    async def main() -> None:
        c = Cluster(prefill=0, decode=2)
        broken: list[str] = []
        on_outputs = c.dispatcher.on_outputs

        def breaking(worker_id: str, outputs: list[Output]) -> None:
            if not broken and len(outputs) == 2 and all(o.offset_tokens > 3 for o in outputs):
                broken.append(outputs[failing].request_id)
                outputs[failing] = Output(broken[0], 0, [], error=("EngineFailed", "broken"))
            on_outputs(worker_id, outputs)

        c.dispatcher.on_outputs = breaking  # type: ignore[method-assign]
        job = c.send(n=2, streaming=False, max_tokens=40)
        await c.settle()
        assert broken
        assert c.check() == {Outcome.DONE: 1}
        assert [len(given) for given in job.given] == [40, 40]

    run(main())


def test_an_engine_is_told_what_it_is_expected_to_hold_of_a_prompt() -> None:
    """A prefill engine what placement has found there; one that serves several choices, what the first one leaves."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        told: dict[str, int] = {}
        place, start = c.placing.place, c.pools.open

        def knowing(*args: Any, **kwargs: Any) -> Any:
            placed = place(*args, **kwargs)
            return replace(placed, predicted_cached_tokens=32)

        def noting(info: Any, kind: str, request: Any) -> None:
            told[request.request_id] = request.predicted_cached_tokens
            start(info, kind, request)

        c.placing.place, c.pools.open = knowing, noting  # type: ignore[method-assign]
        job = c.send(n=2, max_tokens=5)
        await c.settle()
        assert c.check() == {Outcome.DONE: 1}
        assert (told["r0-1p"], told["r0-1d1"]) == (32, len(job.prompt) - 1)

    run(main())


def test_max_tokens_1_never_meets_the_decode_pool() -> None:
    """Kind: max_tokens=1 and first-token endings."""

    async def main() -> None:
        c = Cluster()
        jobs = [c.send(max_tokens=1) for _ in range(20)]
        await c.settle()
        c.check()
        assert all(len(job.given[0]) == 1 for job in jobs)
        assert c.pools.transfers == 0
        assert all(w.steps == 0 for w in c.pools.everyone if w.info.role is Role.DECODE)

    run(main())


def test_ten_thousand_requests_with_random_cancels_leave_nothing() -> None:
    async def main() -> None:
        c = Cluster(seed=5, prefill=3, decode=3)
        c.pools.step_s = 0.02
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            job = c.send(n=c.rng.choice((1, 1, 1, 1, 2)), max_tokens=c.rng.choice((1, 2, 4)))
            if c.rng.random() < 0.6:
                loop.call_later(c.rng.random() * 0.15, c.dispatcher.client_left, job.request.request_id)
            await asyncio.sleep(c.rng.random() * 0.002)
        await c.settle(5)
        ends = c.check()
        assert set(ends) == {Outcome.DONE, Outcome.CANCELLED}
        assert min(ends.values()) > 2000

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_chaos(seed: int) -> None:
    """Workers die, hang, wake up, leave and are replaced while transfers fail now and then."""

    async def main() -> None:
        c = Cluster(seed=seed, prefill=3, decode=3)
        c.pools.fail_transfer = 0.02
        loop = asyncio.get_running_loop()
        faults: Counter[str] = Counter()

        def put_another(worker) -> None:
            c.pools.add(worker.info.role)

        async def break_things() -> None:
            while True:
                await asyncio.sleep(c.rng.random() * 1.0)
                role = c.rng.choice((Role.PREFILL, Role.DECODE))
                up = [w for w in c.pools.workers.values() if w.info.role is role and not w.stopped]
                if len(up) < 3:
                    continue
                worker = c.rng.choice(sorted(up, key=lambda w: w.info.worker_id))
                fault = c.rng.choice(("kill", "stop", "leave"))
                faults[fault] += 1
                if fault == "kill":
                    worker.kill()
                    loop.call_later(c.rng.random(), c.pools.remove, worker)
                    loop.call_later(1 + c.rng.random(), put_another, worker)
                elif fault == "stop":
                    worker.stopped = True
                    loop.call_later(c.rng.random() * 10, setattr, worker, "stopped", False)
                else:
                    c.pools.remove(worker)
                    loop.call_later(1.0, put_another, worker)

        breaker = loop.create_task(break_things())
        for _ in range(600):
            c.send(
                n=c.rng.choice((1, 1, 1, 2)),
                streaming=c.rng.random() < 0.6,
                movable=c.rng.random() < 0.8,
                max_tokens=c.rng.choice((1, 5, 40)),
            )
            await asyncio.sleep(c.rng.random() * 0.1)
        breaker.cancel()
        await c.settle(90)
        for worker in c.pools.everyone:
            worker.stopped = False
        await asyncio.sleep(2.0)
        ends = c.check()
        assert sum(faults.values()) > 12
        # What had begun and cannot be moved may fail. Anything else only if its places failed one after the other.
        failed = [j for j in c.jobs if j.ends[0][0] is not Outcome.DONE]
        unlucky = [j for j in failed if j.request.movable or not j.streaming]
        assert len(unlucky) <= 0.005 * len(c.jobs), [j.ends for j in unlucky]
        assert ends[Outcome.DONE] >= 0.95 * len(c.jobs)
        assert c.dispatcher.migrations + c.dispatcher.retries > 0

    run(main())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_first_failure_takes_a_dead_worker_out(role: Role) -> None:
    """Kind: dead worker stays attractive. It stays listed for long; only the first requests meet it."""

    async def main() -> None:
        c = Cluster()
        dead = next(w for w in c.pools.everyone if w.info.role is role)
        dead.kill()
        for _ in range(100):
            c.send(max_tokens=5)
            await asyncio.sleep(0.05)
        await c.settle()
        assert c.check() == {Outcome.DONE: 100}
        # It is tried again after 1, 2, 4, ... seconds, by a handful of requests each time.
        assert c.dispatcher.retries < 25

    run(main())


def test_a_broken_link_takes_its_worker_out_before_any_request_meets_it() -> None:
    """Kind: dead worker stays attractive."""

    async def main() -> None:
        c = Cluster()
        dead = next(w for w in c.pools.everyone if w.info.role is Role.DECODE)
        dead.kill()
        c.dispatcher.on_link_lost(dead.info.worker_id)
        for _ in range(20):
            c.send(max_tokens=5)
        await asyncio.sleep(0.5)
        assert c.dispatcher.retries == 0
        await c.settle()
        assert c.check() == {Outcome.DONE: 20}

    run(main())


def test_the_last_worker_is_used_although_it_failed_and_what_was_accepted_waits_for_it() -> None:
    """Kind: retry: clients notice at most a pause."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        (decode,) = [w for w in c.pools.everyone if w.info.role is Role.DECODE]
        c.dispatcher.on_link_lost(decode.info.worker_id)
        job = c.send(max_tokens=5)
        await c.settle(10)
        assert job.ends[0][0] is Outcome.DONE
        running = [c.send(max_tokens=200) for _ in range(5)]
        await asyncio.sleep(0.3)
        decode.kill()
        await asyncio.sleep(0.2)
        c.pools.remove(decode)
        await asyncio.sleep(2.0)
        c.pools.add(Role.DECODE)
        await c.settle(30)
        assert [j.ends[0][0] for j in running] == [Outcome.DONE] * 5
        c.check()

    run(main())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_stopped_worker_is_noticed_by_its_silence(role: Role) -> None:
    """SIGSTOP: no connection breaks. Recovery is bounded by `silent_s`, not by the request's own limits."""

    async def main() -> None:
        c = Cluster()
        for _ in range(20):
            c.send(max_tokens=5)
        await c.settle()
        jobs = [c.send(max_tokens=60) for _ in range(20)]
        await asyncio.sleep(0.1 if role is Role.DECODE else 0.005)
        stopped = next(w for w in c.pools.everyone if w.info.role is role)
        stopped.stopped = True
        started = asyncio.get_running_loop().time()
        await c.settle(30)
        assert all(job.ends[0][0] is Outcome.DONE for job in jobs)
        assert max(job.ended_s or 0 for job in jobs) - started < LIMITS.silent_s + 3
        assert c.dispatcher.retries + c.dispatcher.migrations > 0
        stopped.stopped = False
        await asyncio.sleep(3)
        c.check()
        assert stopped.info.worker_id in c.placing.pools[role], "it is used again"

    run(main())


@pytest.mark.parametrize("told", [True, False])
def test_workers_whose_links_broke_while_idle_serve_the_next_request(told: bool) -> None:
    """Kind: dead worker stays attractive, the reverse: a link is made by a call, and who is not used gets none.

    A cut may end a link at the worker's end alone.
    """

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        c.send(max_tokens=5)
        await c.settle()
        for worker in c.pools.everyone:
            worker.linked = False
            if told:
                c.dispatcher.on_link_lost(worker.info.worker_id)
        await asyncio.sleep(60)
        c.send(max_tokens=5)
        await c.settle()
        assert c.check() == {Outcome.DONE: 2}
        assert c.dispatcher.retries == 0
        assert [len(pool) for pool in c.placing.pools.values()] == [1, 1]

    run(main())


def test_a_silent_worker_comes_back_where_nobody_else_is_left() -> None:
    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        c.send(max_tokens=5)
        await c.settle()
        (decode,) = [w for w in c.pools.everyone if w.info.role is Role.DECODE]
        decode.linked = False
        while c.placing.pools[Role.DECODE]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        c.send(max_tokens=5)
        await c.settle()
        assert c.check() == {Outcome.DONE: 2}

    run(main())


def test_a_worker_that_stays_stopped_costs_few_requests_a_wait() -> None:
    async def main() -> None:
        c = Cluster(prefill=2, decode=2)
        for _ in range(20):
            c.send(max_tokens=5)
        await c.settle()
        stopped = next(w for w in c.pools.everyone if w.info.role is Role.DECODE)
        stopped.stopped = True
        while stopped.info.worker_id in c.placing.pools[Role.DECODE]:
            c.send(max_tokens=5)
            await asyncio.sleep(0.1)
        jobs = []
        for _ in range(600):
            jobs.append(c.send(max_tokens=5))
            await asyncio.sleep(0.1)
        await c.settle()
        waits = [(job.ended_s or 0) - job.request.arrival_s for job in jobs]
        assert max(waits) < LIMITS.silent_s + 2
        assert 4 <= sum(wait > 1 for wait in waits) <= 10, "one or two after 1, 2, 4, 8 and 16 s"
        stopped.stopped = False
        await asyncio.sleep(3)
        assert c.check() == {Outcome.DONE: len(c.jobs)}
        assert stopped.info.worker_id in c.placing.pools[Role.DECODE]

    run(main())


def test_a_leg_that_the_router_gives_up_ends_at_its_worker_too() -> None:
    """Kind: Ray Serve cancellation holes. A call that "may or may not have been executed" runs on for nobody."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        lost = WorkerLost("the worker cannot be reached")
        # A finished prefill, then a stream: each in its turn is said to have failed, and has not.
        job = c.send(max_tokens=1000)
        (prefill,) = [w for w in c.pools.everyone if w.info.role is Role.PREFILL]
        (decode,) = [w for w in c.pools.everyone if w.info.role is Role.DECODE]
        while not prefill.leases:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        c.dispatcher.on_leg_end("r0-1p", lost)
        while "r0-2d0" not in decode.legs or len(job.given[0]) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert prefill.leases == 0
        c.dispatcher.on_leg_end("r0-2d0", lost)
        await asyncio.sleep(0.1)
        assert "r0-2d0" not in decode.legs
        c.dispatcher.client_left(job.request.request_id)
        await c.settle()
        c.check()

    run(main())


def test_a_lease_whose_worker_died_was_given_up_and_has_not_expired() -> None:
    """Expired leases are a sign of a router that settles nothing."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        (prefill,) = [w for w in c.pools.everyone if w.info.role is Role.PREFILL]
        (decode,) = [w for w in c.pools.everyone if w.info.role is Role.DECODE]
        decode.stopped = True
        c.send(max_tokens=5)
        while not len(c.dispatcher.leases):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        prefill.kill()
        c.pools.remove(prefill)
        await asyncio.sleep(0.1)
        decode.stopped = False
        await c.settle()
        counters = c.dispatcher.leases.counters()
        assert (counters.granted, counters.released, counters.expired) == (1, 1, 0)

    run(main())


def test_an_open_pair_takes_another_decode_worker_before_it_gives_up_the_prefill_worker() -> None:
    """Where a policy refuses clients without a prefill worker, one pair of two would refuse them all."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=2)
        config = PlacementConfig(no_prefill_worker="fail", conditional=False)
        placer = Placer(config, lambda _: LinearTimes(), PrefixIndex())
        for info in c.dispatcher.workers.values():
            placer.add_worker(info, 0.0)
        c.dispatcher.placer = placer
        pairs, now = c.dispatcher.health.pairs, asyncio.get_running_loop().time()
        pairs.failed(("p0", "d1"), now, fatal=True)
        for _ in range(5):
            c.send(max_tokens=5)
        await asyncio.sleep(0.5)
        assert [r.outcome for r in c.records] == [Outcome.DONE] * 5
        assert {(r.prefill_worker, r.decode_worker) for r in c.records} == {("p0", "d2")}
        now = asyncio.get_running_loop().time()
        for decode in ("d1", "d2"):
            pairs.failed(("p0", decode), now, fatal=True)
        job = c.send(max_tokens=5)
        assert (job.ends[0][0], job.ends[0][1].status) == (Outcome.REJECTED, 503)
        await c.settle()
        assert placer.reserved == 0

    run(main())


def test_a_worker_that_left_between_choice_and_call_costs_a_retry() -> None:
    """Kind: drain. New work that reaches a leaving worker goes elsewhere, the client unaware, nobody suspected."""

    async def main() -> None:
        c = Cluster()
        leaving = next(w for w in c.pools.everyone if w.info.role is Role.DECODE)
        c.pools.workers.pop(leaving.info.worker_id)
        for _ in range(20):
            c.send(max_tokens=5)
        await c.settle()
        assert c.check() == {Outcome.DONE: 20}
        assert c.dispatcher.members.last_failure == {}

    run(main())


def test_a_draining_worker_finishes_what_it_has() -> None:
    async def main() -> None:
        c = Cluster()
        jobs = [c.send(max_tokens=200) for _ in range(10)]
        await asyncio.sleep(0.2)
        for worker in list(c.pools.workers.values()):
            c.pools.add(worker.info.role)
            c.pools.remove(worker)
        await c.settle()
        assert c.check() == {Outcome.DONE: 10}
        assert all(len(job.given[0]) == 200 for job in jobs)
        assert c.dispatcher.migrations == c.dispatcher.retries == 0

    run(main())


def test_a_pair_whose_transfers_fail_is_given_up_for_a_while() -> None:
    """Kind: peer restarted on the same address."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        c.pools.fail_transfer = 1.0
        for _ in range(30):
            c.send(max_tokens=5)
            await asyncio.sleep(0.2)
        await c.settle()
        assert c.check() == {Outcome.DONE: 30}
        assert c.pools.transfers < 15
        assert c.dispatcher.health.pairs.opened >= 2
        c.pools.fail_transfer = 0.0
        await asyncio.sleep(30)
        before = c.pools.transfers
        for _ in range(10):
            c.send(max_tokens=5)
            await asyncio.sleep(0.2)
        await c.settle()
        c.check()
        assert c.pools.transfers - before == 10

    run(main())


def test_without_any_worker_a_request_is_refused_at_once() -> None:
    async def main() -> None:
        c = Cluster(prefill=1, decode=0)
        job = c.send()
        assert job.ends[0][0] is Outcome.REJECTED
        assert job.ends[0][1].status == 503
        assert job.ends[0][1].retry_after_s == 1.0
        await c.settle()
        c.check()

    run(main())


def test_a_router_that_goes_ends_everything() -> None:
    async def main() -> None:
        c = Cluster()
        for _ in range(20):
            c.send(max_tokens=100)
        await asyncio.sleep(0.15)
        c.dispatcher.end_all("the router is shutting down")
        await asyncio.sleep(2)
        c.check()

    run(main())
