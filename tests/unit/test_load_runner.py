"""How a run is shared out and timed: with a client that answers at once, and no socket."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import UserError
from cluster.messages import Outcome
from cluster.workload.spec import Workload, parse
from loadtests import lag, parallel, runner
from loadtests.client import Client
from loadtests.endpoint import Endpoint
from loadtests.results import validity
from loadtests.runner import Job, Run, Runner
from loadtests.sample import Sample
from loadtests.scenario import ClientLimits, Validity


class Writer:
    """Counts bodies; `on_body` is called for each."""

    endpoint = Endpoint("http://127.0.0.1:9", "m")

    def __init__(self, on_body: Callable[[], None] = lambda: None) -> None:
        self.on_body = on_body

    def body(self, *_: Any, **__: Any) -> bytes:
        self.on_body()
        return b"{}"

    def request(self, body: bytes, **_: Any) -> bytes:
        return body


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the client; `hold` is awaited between sending and answering, `most` is what was in flight at once."""
    state = SimpleNamespace(hold=None, now=0, most=0, sent=lambda sample: None)

    class Answers:
        def __init__(self, endpoint: Endpoint, clock: Callable[[], float], limits: Any) -> None:
            self.clock = clock

        async def send(self, sample: Sample, request: bytes) -> Sample:
            sample.sent_s = self.clock()
            state.sent(sample)
            state.now += 1
            state.most = max(state.most, state.now)
            if state.hold is not None:
                await state.hold()
            state.now -= 1
            sample.end_s, sample.outcome = self.clock(), Outcome.DONE
            return sample

        async def close(self) -> None:
            pass

    monkeypatch.setattr(runner, "Client", Answers)
    return state


def workload(process: str, *, requests: int, **arrivals: Any) -> Workload:
    prompts = {"kind": "plain", "prompt_tokens": 20, "output_tokens": 4}
    return parse({"requests": requests, "arrivals": {"process": process, **arrivals}, "prompts": prompts})


def part(w: Workload, number: int, of: int, writer: Writer | None = None, **limits: Any) -> Runner:
    return Runner(Job(w, ClientLimits(**limits), "t", number, of), writer or Writer())  # type: ignore[arg-type]


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("of", [1, 2, 3, 4, 7])
def test_a_closed_loop_sends_every_request_however_many_processes(of: int) -> None:
    w = workload("closed", requests=10, users=3)
    found = [asyncio.run(part(w, number, of).run()).samples for number in range(of)]
    assert sorted(s.index for samples in found for s in samples) == list(range(10))
    # Two of three users are in one of two processes, and so are two thirds of the requests.
    if of == 2:
        assert [len(samples) for samples in found] == [7, 3]


@pytest.mark.parametrize(("most", "of"), [(3, 3), (5, 3), (8, 4), (2, 1)])
def test_processes_share_the_limit_of_requests_in_flight(answers: SimpleNamespace, most: int, of: int) -> None:
    async def hold() -> None:
        await asyncio.sleep(0.02)

    answers.hold = hold
    w = workload("constant", requests=40, rate_per_s=10_000)

    async def all_parts() -> None:
        await asyncio.gather(*(part(w, number, of, max_in_flight=most).run() for number in range(of)))

    asyncio.run(all_parts())
    assert answers.most == most


@pytest.mark.usefixtures("answers")
def test_bodies_that_are_written_first_are_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def slow() -> None:
        now[0] += 0.05

    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(runner.gc, "collect", slow)
    run = asyncio.run(part(workload("constant", requests=3, rate_per_s=1000), 0, 1, Writer(slow)).run())
    assert run.samples[0].sent_s == 0.0


def test_a_request_is_on_its_way_before_the_next_bodies_are_written(
    answers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    async def connect() -> None:
        await asyncio.sleep(0)
        events.append("connected")

    answers.hold = connect
    answers.sent = lambda sample: events.append("sent")
    monkeypatch.setattr(runner, "AHEAD", 2)
    monkeypatch.setattr(runner.gc, "collect", lambda: 0)
    w = workload("constant", requests=5, rate_per_s=20)
    asyncio.run(part(w, 0, 1, Writer(lambda: events.append("body"))).run())
    assert events.count("body") == 5
    # Two bodies before the start; then each request leaves and connects with one body written at most meanwhile.
    assert events[:3] == ["body", "body", "sent"]
    for i, event in enumerate(events):
        if event == "sent":
            assert events[i + 1 :].index("connected") <= 1, events


def test_a_stall_counts_for_every_timer_that_it_delayed() -> None:
    readings = iter([0.0, 0.515])

    def clock() -> float:
        reading = next(readings, None)
        if reading is None:
            raise asyncio.CancelledError
        return reading

    seen = lag.LoopLag(clock)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(seen.watch())
    assert len(seen.late_s) == 51
    assert seen.late_s[0] == pytest.approx(0.505)
    assert seen.late_s[-1] == pytest.approx(0.005)
    # Half a second in every two, sampled every 10 ms: no run to believe.
    verdict = validity([], ([0.0] * 150 + seen.late_s) * 30, Validity(), closed=True)
    assert not verdict["valid"]


def bad_trace(folder: Path) -> Workload:
    path = folder / "trace.jsonl"
    path.write_text("not a trace\n")
    return parse({"trace": {"path": str(path)}})


def test_a_child_sends_its_mistake_and_dies_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    job = Job(bad_trace(tmp_path), ClientLimits(), "t", 1, 2)
    parallel._child(theirs, job, Endpoint("http://127.0.0.1:9", "m"), "words")
    with pytest.raises(UserError, match=r"trace\.jsonl:1"):
        parallel._answer(ours)
    ours.close()
    theirs.close()


def test_one_childs_mistake_ends_all_before_any_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Child:
        def __init__(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            self.pipe, self.job = args[0], args[1]

        def start(self) -> None:
            self.pipe.send(("trace: cannot be read", b"") if self.job.part == 1 else ("", b""))

        def terminate(self) -> None:
            done.append("terminate")

        def join(self, timeout: float) -> None:
            done.append("join")

        def is_alive(self) -> bool:
            return False

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Child)
    monkeypatch.setattr(parallel.multiprocessing, "get_context", lambda _: context)
    w = workload("constant", requests=3, rate_per_s=10)
    with pytest.raises(UserError, match="cannot be read"):
        parallel.run_job(Job(w, ClientLimits(), "t"), Endpoint("http://127.0.0.1:9", "m"), "words", 3)
    assert done == ["terminate"] * 3 + ["join"] * 3


def test_one_process_finds_its_mistake_before_the_run(tmp_path: Path) -> None:
    job = Job(bad_trace(tmp_path), ClientLimits(), "t")
    with pytest.raises(UserError, match=r"trace\.jsonl:1"):
        parallel.run_job(job, Endpoint("http://127.0.0.1:9", "m"), "words")


def test_a_connect_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: Client) -> None:
        raise TimeoutError

    monkeypatch.setattr(Client, "_connect", never)

    async def run() -> Sample:
        client = Client(Endpoint("http://127.0.0.1:9", "m"), lambda: 0.0)
        try:
            return await client.send(Sample(0, 0.0), b"")
        finally:
            await client.close()

    s = asyncio.run(run())
    assert s.outcome is Outcome.FAILED
    assert s.error == "connect: TimeoutError"


def test_runs_of_parts_merge_in_order() -> None:
    runs = [Run([Sample(i, i * 0.1) for i in range(p, 10, 3)], [0.0], float(p)) for p in range(3)]
    whole = parallel.merge(runs)
    assert [s.index for s in whole.samples] == list(range(10))
    assert (len(whole.loop_late_s), whole.length_s) == (3, 2.0)
    assert json.dumps([s.to_wire() for s in whole.samples])
