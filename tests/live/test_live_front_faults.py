"""What goes wrong between the legs, through the whole front in one process: real gateway, dispatcher, workers, links.

Kinds: Ray Serve cancellation holes; deadline starts at the wrong moment; in-flight counters leak; proxy session
closed before the stream is consumed; decode silently repeats the prefill; full hit on decode; lease ran out; no ready
prefill; retry in mid-stream; drain is too short, or does not stop intake; dead worker stays attractive; cached_tokens
is wrong in PD.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bad_bodies import COMPLETION
from front import LIMITS, Front, completion, events, reasons_of, right, running, tokens_of
from in_process import HIGH, LOW, until

from cluster.config import AdmissionConfig, PlacementConfig
from cluster.errors import BadRequest
from cluster.messages import Outcome, Path, Role, WorkerState
from cluster.perf.times import LinearTimes
from router.admission import Admission
from router.placement import Placer
from router.prefix_index import PrefixIndex

# Importing vLLM and torch warns of their own affairs.
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]

STEP = {"linear": {"fixed_ms": 10, "per_prefill_token_us": 20, "transfer_fixed_ms": 2}}


def prompt(seed: int, tokens: int = 100) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(LOW, HIGH) for _ in range(tokens)]


def placer(**config: Any) -> Placer:
    """The real one; with `conditional` off every prompt is prefilled by the prefill pool."""
    return Placer(PlacementConfig(**{"conditional": False, **config}), lambda _: LinearTimes(), PrefixIndex())


def clean(front: Front) -> bool:
    return not any(front.cluster.open().values())


@pytest.fixture(scope="module")
async def front() -> AsyncIterator[Front]:
    async with running(simulated=STEP) as it:
        yield it


@pytest.fixture(scope="module")
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=60) as client:
        yield client


async def test_three_hundred_sockets_closed_at_random_twenty_times(front: Front, http: httpx.AsyncClient) -> None:
    """Kind: Ray Serve cancellation holes. After each round nothing runs, and the next request is served at once."""
    rng = random.Random(1)

    async def leave(stream: bool) -> None:
        body = completion(prompt=prompt(rng.randrange(10**6)), max_tokens=400, stream=stream)
        try:
            async with asyncio.timeout(0.05 * rng.random()):
                await http.post(COMPLETION, json=body)
        except TimeoutError:
            pass

    for _ in range(20):
        await asyncio.gather(*(leave(rng.random() < 0.5) for _ in range(300)))
        await until(lambda: clean(front), 5.0)
        assert clean(front), front.cluster.open()
        answer = await asyncio.wait_for(http.post(COMPLETION, json=completion()), 2.0)
        assert answer.json()["choices"][0]["token_ids"] == right(8)


async def test_a_burst_far_beyond_the_decode_window_is_served_whole() -> None:
    """Kind: deadline starts at the wrong moment. 64 requests for a window of 4: waiting in the router is no failure."""
    limits = LIMITS.model_copy(update={"queue_s": 60.0, "first_token_s": 3.0})
    place = placer()
    admission = Admission(AdmissionConfig(), place, 60.0)
    window = {**STEP, "max_num_seqs": 4}
    options: dict[str, Any] = {"placing": place, "admission": admission, "limits": limits, "simulated": window}
    async with running(prefill=1, decode=1, **options) as front:
        async with httpx.AsyncClient(base_url=front.url, timeout=60) as http:
            bodies = [completion(prompt=prompt(i), max_tokens=40) for i in range(64)]
            answers = await asyncio.gather(*(http.post(COMPLETION, json=b) for b in bodies))
        assert [a.status_code for a in answers] == [200] * 64
        assert all(
            a.json()["choices"][0]["token_ids"] == right(40, b["prompt"]) for a, b in zip(answers, bodies, strict=True)
        )
        assert front.cluster.dispatcher.retries == front.cluster.dispatcher.migrations == 0


async def test_counters_are_exact_after_every_kind_of_end_and_a_restart_draws_no_flood() -> None:
    """Kind: in-flight counters leak. A fresh worker's honest zero competes with honest zeros."""
    place = placer()
    async with running(prefill=2, decode=2, placing=place, simulated=STEP) as front:
        cluster = front.cluster
        async with httpx.AsyncClient(base_url=front.url, timeout=60) as http:

            async def ask(seed: int, leave_s: float | None, stream: bool) -> None:
                body = completion(prompt=prompt(seed), max_tokens=30, stream=stream)
                try:
                    async with asyncio.timeout(leave_s):
                        await http.post(COMPLETION, json=body)
                except TimeoutError:
                    pass

            plans = [(None, False), (0.001, False), (0.15, True), (None, True)] * 50
            tasks = [asyncio.create_task(ask(i, *plan)) for i, plan in enumerate(plans)]
            await asyncio.sleep(0.2)
            dead = cluster.workers(Role.PREFILL)[0]
            dead.engine.die()  # type: ignore[attr-defined]
            await asyncio.gather(*tasks)
            await until(lambda: clean(front), 5.0)
            assert clean(front), cluster.open()
            for role in Role:
                views = place.workers(role, time.monotonic())
                assert [v.reserved_requests for v in views] == [0] * len(views), views
            cluster.dispatcher.on_worker_down(dead.info.worker_id)
            await cluster.add(Role.PREFILL)
            cluster.records.clear()
            for i in range(100):
                await http.post(COMPLETION, json=completion(prompt=prompt(10_000 + i), max_tokens=2))
        shares = Counter(r.prefill_worker for r in cluster.records)
        assert len(shares) == 2
        assert min(shares.values()) >= 35, shares


@pytest.mark.parametrize("gap_s", [0.02, 0.0])
async def test_a_slow_reader_gets_the_whole_stream(front: Front, gap_s: float) -> None:
    """Kind: proxy session closed before the stream is consumed. 200 deltas, each read later than it came."""
    async with httpx.AsyncClient(base_url=front.url, timeout=60) as http:
        body = completion(max_tokens=200, stream=True)
        count = 0
        async with http.stream("POST", COMPLETION, json=body) as response:
            async for line in response.aiter_lines():
                count += line.startswith("data: {")
                await asyncio.sleep(gap_s)
                last = line or locals().get("last")
        assert last == "data: [DONE]"
        assert count >= 1
    await until(lambda: clean(front), 2.0)
    assert clean(front)


async def test_a_reader_that_stops_reading_is_bounded_and_harms_nobody(front: Front, http: httpx.AsyncClient) -> None:
    """Kind: proxy session closed (back-pressure): its output waits in one place, merged; others are served."""
    with socket.create_connection(("127.0.0.1", int(front.url.rsplit(":", 1)[1]))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(completion(max_tokens=1500, stream=True)).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        started = time.monotonic()
        answer = await http.post(COMPLETION, json=completion())
        assert answer.status_code == 200
        assert time.monotonic() - started < 2.0
    await until(lambda: clean(front), 5.0)
    assert clean(front), "a reader that never read and left holds something"


async def test_decode_computes_no_prompt_again(front: Front, http: httpx.AsyncClient) -> None:
    """Kind: decode silently repeats the prefill. 50 prompts of 1,000 tokens at once: one block at most each."""
    front.cluster.records.clear()
    bodies = [completion(prompt=prompt(i, 1000), max_tokens=4) for i in range(50)]
    answers = await asyncio.gather(*(http.post(COMPLETION, json=b) for b in bodies))
    assert [a.status_code for a in answers] == [200] * 50
    records = front.cluster.records
    assert len(records) == 50
    assert {r.path for r in records} == {Path.SPLIT}
    assert max(r.decode_computed_tokens for r in records) <= 16
    assert sum(r.cached_tokens for r in records) == 0, "arrived was taken for reused"


async def test_a_prompt_that_decode_holds_needs_no_transfer_and_still_gives_its_lease_back() -> None:
    """Kind: full hit on decode: nothing to pull. Exactly four blocks, three times to the same pair."""
    async with (
        running(prefill=1, decode=1, simulated=STEP) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        for _ in range(3):
            started = time.monotonic()
            answer = await http.post(COMPLETION, json=completion(prompt=prompt(7, 64), max_tokens=4))
            assert answer.json()["choices"][0]["token_ids"] == right(4, prompt(7, 64))
            assert time.monotonic() - started < 2.0
            await until(lambda: clean(front), 1.0)
            assert clean(front), front.cluster.open()


async def test_cached_tokens_are_what_prefill_did_not_compute() -> None:
    """Kind: cached_tokens is wrong in PD. Cold 0, again whole blocks, another salt 0; never by what decode holds."""
    async with (
        running(prefill=1, decode=1, simulated=STEP) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):

        async def cached(**more: Any) -> int:
            body = completion(prompt=prompt(3, 100), max_tokens=2, **more)
            usage = (await http.post(COMPLETION, json=body)).json()["usage"]
            status, found, _, _ = await events(http, body | {"stream_options": {"include_usage": True}})
            assert status == 200
            assert 0 <= (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) <= usage["prompt_tokens"]
            details = found[-1]["usage"].get("prompt_tokens_details") or {}
            assert details.get("cached_tokens", 0) == 96, "the same prompt again, streamed"
            return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        assert await cached() == 0
        assert await cached() == 96
        assert await cached(cache_salt="other") == 0


async def test_kv_that_was_given_up_is_computed_again_and_never_read() -> None:
    """Kind: lease ran out, decode read reused blocks. Decode sleeps for three leases while prefill serves others."""
    limits = LIMITS.model_copy(update={"stall_s": 30.0, "silent_s": 30.0, "first_token_s": 20.0})
    async with running(prefill=1, decode=1, limits=limits, simulated={**STEP, "kv_blocks": 400}) as front:
        cluster = front.cluster
        (prefill,), (decode,) = cluster.workers(Role.PREFILL), cluster.workers(Role.DECODE)
        prefill._lease_s = 0.4
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            decode.engine.stall()  # type: ignore[attr-defined]
            waiting = asyncio.create_task(http.post(COMPLETION, json=completion(prompt=prompt(1, 600), max_tokens=20)))
            await until(lambda: prefill.leases.counters().granted == 1, 5.0)
            others = [completion(prompt=prompt(100 + i, 200), max_tokens=1) for i in range(50)]
            assert {(await http.post(COMPLETION, json=b)).status_code for b in others} == {200}
            await asyncio.sleep(1.2)
            decode.engine.resume()  # type: ignore[attr-defined]
            answer = await waiting
        assert prefill.leases.counters().expired >= 1
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == right(20, prompt(1, 600))
        assert cluster.dispatcher.retries >= 1, "it went on with KV that was no longer its own"


@pytest.mark.parametrize("policy", ["local", "fail"])
async def test_no_prefill_worker_is_a_policy_that_can_be_seen(policy: str) -> None:
    """Kind: no ready prefill: silent decode-only mode."""
    place = placer(no_prefill_worker=policy)
    async with running(prefill=1, decode=1, placing=place, simulated=STEP) as front:
        cluster = front.cluster
        (prefill,) = cluster.workers(Role.PREFILL)
        async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
            cluster.dispatcher.on_worker_down(prefill.info.worker_id)
            answer = await http.post(COMPLETION, json=completion())
            status, _, _, _ = await events(http, completion())
            if policy == "fail":
                assert (answer.status_code, status) == (503, 503)
                assert int(answer.headers["retry-after"]) >= 1
                assert "prefill" in answer.json()["error"]["message"]
            else:
                assert (answer.status_code, status) == (200, 200)
                assert place.paths[Path.LOCAL_NO_PREFILL] == 2
            cluster.dispatcher.on_worker_up(prefill.info)
            answer = await http.post(COMPLETION, json=completion())
            assert answer.status_code == 200
            assert cluster.records[-1].path is Path.SPLIT, "the split is used again without a restart"


async def killing(front: Front, body: dict[str, Any], times: int) -> tuple[int, list[dict], bool]:
    """A stream whose decode engine dies `times` times, 5 tokens apart; dead engines are replaced."""
    cluster = front.cluster
    async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
        task = asyncio.create_task(events(http, body))
        for number in range(1, times + 1):
            await until(lambda at=5 * number: any(r.tokens(0) >= at for r in cluster.dispatcher.runs()), 5.0)
            alive = [w for w in cluster.workers(Role.DECODE) if w.snapshot().state is WorkerState.READY]
            (busy,) = [w for w in alive if w.snapshot().running]
            busy.engine.die()  # type: ignore[attr-defined]
            await cluster.add(Role.DECODE)
        status, found, done, _ = await task
        return status, found, done


async def test_a_stream_whose_engine_dies_twice_is_still_right_and_at_the_limit_ends_with_an_error() -> None:
    """Kind: retry in mid-stream (kill twice; limit)."""
    limits = LIMITS.model_copy(update={"migrations": 2})
    async with running(limits=limits, simulated=STEP) as front:
        usage = {"stream_options": {"include_usage": True}}
        status, found, done = await killing(front, completion(max_tokens=40) | usage, times=2)
        assert (status, done, reasons_of(found), tokens_of(found)) == (200, True, ["length"], right(40))
        assert found[-1]["usage"]["completion_tokens"] == 40
        assert found[-1]["usage"]["prompt_tokens"] == 50
        status, found, done = await killing(front, completion(max_tokens=40), times=3)
        tokens = tokens_of(found)
        assert status == 200
        assert reasons_of(found) == []
        assert [e["error"]["code"] in (500, 502) for e in found if "error" in e] == [True]
        assert tokens == right(len(tokens))
        assert len(tokens) < 40


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1.0},
        {"seed": 5, "temperature": 1.0},
        {"structured_outputs": {"regex": "[a-z ]+"}},
        {"presence_penalty": 1.0},
    ],
    ids=["n", "seed", "grammar", "penalty"],
)
async def test_what_cannot_be_moved_ends_with_one_error_event(more: dict[str, Any]) -> None:
    """Kinds: retry in mid-stream; stream ends silently (a)."""
    async with running(simulated=STEP) as front:
        status, found, _ = await killing(front, completion(max_tokens=60, **more), times=1)
        assert status == 200
        assert reasons_of(found) == []
        assert len([e for e in found if "error" in e]) == 1
        assert {r.outcome for r in front.cluster.records} == {Outcome.FAILED}


async def test_an_error_in_mid_stream_that_no_engine_would_answer_differently_is_told_once() -> None:
    """Kind: stream ends silently (c): a grammar that cannot go on, say. No other engine is tried."""
    async with running(simulated=STEP) as front:
        cluster = front.cluster
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            task = asyncio.create_task(events(http, completion(max_tokens=200)))
            await until(lambda: any(r.tokens(0) >= 3 for r in cluster.dispatcher.runs()), 5.0)
            (busy,) = [w for w in cluster.workers(Role.DECODE) if w.snapshot().running]
            (leg,) = busy._legs
            busy._sink(leg, BadRequest("the grammar cannot go on"))
            status, found, _, _ = await task
        assert status == 200
        assert reasons_of(found) == []
        (error,) = [e["error"] for e in found if "error" in e]
        assert (error["code"], error["message"]) == (400, "the grammar cannot go on")
        assert cluster.dispatcher.migrations == cluster.dispatcher.retries == 0
        await until(lambda: clean(front), 2.0)
        assert clean(front), cluster.open()


async def test_a_fault_of_ours_in_passing_output_on_ends_one_request_and_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kind: telemetry able to break serving: the engine's loop goes on, and so does everybody else."""
    async with running(prefill=1, decode=1, simulated=STEP) as front:
        cluster = front.cluster
        (decode,) = cluster.workers(Role.DECODE)
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            task = asyncio.create_task(http.post(COMPLETION, json=completion(max_tokens=60)))
            await until(lambda: any(r.tokens(0) >= 3 for r in cluster.dispatcher.runs()), 5.0)
            with monkeypatch.context() as broken:
                broken.setattr(type(decode.meter), "on_output", lambda *_, **__: 1 / 0)
                await until(lambda: decode.counts["failed"] > 0, 5.0)
            answer = await task
            assert answer.status_code in (200, 500, 502)
            assert (await http.post(COMPLETION, json=completion())).status_code == 200
        await until(lambda: clean(front), 2.0)
        assert clean(front), cluster.open()


async def test_a_leaving_prefill_worker_waits_for_kv_that_nobody_pulled_yet() -> None:
    """Kind: drain is too short, or does not stop intake. Ten finished prefills, none pulled, when it is told to go."""
    async with running(prefill=2, decode=1, simulated=STEP) as front:
        cluster = front.cluster
        (decode,) = cluster.workers(Role.DECODE)
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            decode.engine.stall()  # type: ignore[attr-defined]
            bodies = [completion(prompt=prompt(i), max_tokens=20) for i in range(20)]
            tasks = [asyncio.create_task(http.post(COMPLETION, json=b)) for b in bodies]
            leaving = cluster.workers(Role.PREFILL)[0]
            await until(lambda: sum(len(w.leases) for w in cluster.workers(Role.PREFILL)) == 20, 5.0)
            held = len(leaving.leases)
            assert held > 0
            cluster.dispatcher.on_worker_down(leaving.info.worker_id)  # as Serve tells routers of a replica that stops
            gone = asyncio.create_task(leaving.drain(20.0))
            await asyncio.sleep(0.3)
            assert not gone.done(), "it left although its KV was still to be pulled"
            late = await http.post(COMPLETION, json=completion(prompt=prompt(77), max_tokens=1))
            assert late.status_code == 200
            decode.engine.resume()  # type: ignore[attr-defined]
            answers = await asyncio.gather(*tasks)
            assert await asyncio.wait_for(gone, 5.0) == 0
        assert all(
            a.json()["choices"][0]["token_ids"] == right(20, b["prompt"]) for a, b in zip(answers, bodies, strict=True)
        )
        assert cluster.dispatcher.retries == cluster.dispatcher.migrations == 0
        assert leaving.leases.counters().pulled == held


async def test_leases_of_an_engine_that_died_are_not_waited_for() -> None:
    """Kind: prefill failure is not told to anyone: it had finished, and its KV went with it."""
    limits = LIMITS.model_copy(update={"stall_s": 30.0, "silent_s": 30.0, "first_token_s": 30.0})
    async with running(prefill=2, decode=2, limits=limits, simulated=STEP) as front:
        cluster = front.cluster
        decodes = cluster.workers(Role.DECODE)
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            for worker in decodes:
                worker.engine.stall()  # type: ignore[attr-defined]
            bodies = [completion(prompt=prompt(i), max_tokens=10) for i in range(10)]
            tasks = [asyncio.create_task(http.post(COMPLETION, json=b)) for b in bodies]
            await until(lambda: sum(len(w.leases) for w in cluster.workers(Role.PREFILL)) == 10, 5.0)
            dying = max(cluster.workers(Role.PREFILL), key=lambda w: len(w.leases))
            held = len(dying.leases)
            dying.engine.die()  # type: ignore[attr-defined]
            await until(lambda: cluster.dispatcher.retries >= held, 2.0)
            assert cluster.dispatcher.retries == held, "found out only when decode tried to pull"
            for worker in decodes:
                worker.engine.resume()  # type: ignore[attr-defined]
            answers = await asyncio.gather(*tasks)
        assert all(
            a.json()["choices"][0]["token_ids"] == right(10, b["prompt"]) for a, b in zip(answers, bodies, strict=True)
        )


async def test_a_call_that_reaches_a_draining_worker_goes_elsewhere_unnoticed() -> None:
    """Kind: drain: late arrivals are refused with an error that another worker answers differently."""
    async with running(prefill=2, decode=2, simulated=STEP) as front:
        cluster = front.cluster
        draining = [cluster.workers(Role.PREFILL)[0], cluster.workers(Role.DECODE)[0]]
        await asyncio.gather(*(w.drain(5.0) for w in draining))
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            for i in range(20):
                answer = await http.post(COMPLETION, json=completion(prompt=prompt(i), max_tokens=4))
                assert answer.json()["choices"][0]["token_ids"] == right(4, prompt(i))
        assert cluster.dispatcher.retries > 0
        assert cluster.dispatcher.members.last_failure == {}, "a worker that only leaves is not ill"


async def test_with_three_of_four_engines_dead_nobody_waits_two_seconds() -> None:
    """Kind: dead worker stays attractive. Dead ones stay listed; each costs the first requests one retry."""
    async with running(prefill=2, decode=4, simulated=STEP) as front:
        cluster = front.cluster
        async with httpx.AsyncClient(base_url=front.url, timeout=30) as http:
            for worker in cluster.workers(Role.DECODE)[:3]:
                worker.engine.die()  # type: ignore[attr-defined]

            async def timed(seed: int) -> float:
                started = time.monotonic()
                answer = await http.post(COMPLETION, json=completion(prompt=prompt(seed), max_tokens=4))
                assert answer.status_code == 200, answer.text
                return time.monotonic() - started

            took = [await timed(i) for i in range(40)]
        assert max(took) < 2.0
