"""Puts a workload to an endpoint: open loops by their schedule, closed loops by their users.

The first request bodies are written before the clock starts and the others a little ahead of their time, one at a turn
of a loop that would be idle anyway, so that tokenizing and JSON are hardly ever part of a latency. Garbage collection
is off during the run: a full collection would be a stall that looks like the server's.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random
from typing import Any

from cluster.workload.arrival import Arrival
from cluster.workload.processes import Closed
from cluster.workload.spec import Stream, Workload
from cluster.workload.structures import Agent, Chat, Source
from loadtests.client import Client
from loadtests.endpoint import RequestWriter
from loadtests.lag import LoopLag
from loadtests.sample import UNFINISHED, Sample
from loadtests.scenario import ClientLimits, Warmup

AHEAD = 32
Progress = Callable[[float, int, int], None]
"""Called about four times a second with (seconds into the run, sent, ended)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One process's share of a run: every `of`-th request or user, beginning with `part`."""

    workload: Workload
    client: ClientLimits
    run_id: str
    part: int = 0
    of: int = 1


def in_flight_share(most: int | None, part: int, of: int) -> int | None:
    """This part's share of `max_in_flight` requests; the shares of all parts add up to it. None: no limit."""
    return None if most is None else most // of + (part < most % of)


def numbers_share(streams: Sequence[Stream], requests: int | None, part: int, of: int) -> Iterator[int]:
    """The request numbers that this part's closed-loop users take from, in proportion to their number.

    Each number belongs to one user, in turn, and so to the part that has this user: all numbers are sent, also where
    some parts have no user at all.
    """
    closed = [s.arrivals for s in streams if isinstance(s.arrivals, Closed)]
    parts = [user % of for arrivals in closed for user in range(arrivals.users)]
    numbers: Iterator[int] = count() if requests is None else iter(range(requests))
    return (n for n in numbers if parts[n % len(parts)] == part) if part in parts else iter(())


@dataclass(slots=True)
class Run:
    """What came of a run. `length_s` is from the start to the end of the last request."""

    samples: list[Sample] = field(default_factory=list)
    loop_late_s: list[float] = field(default_factory=list)
    length_s: float = 0.0


@dataclass(slots=True)
class _Ready:
    arrival: Arrival
    index: int
    request: bytes


class Runner:
    """Drives one job: `prepare`, then `run`."""

    def __init__(self, job: Job, writer: RequestWriter) -> None:
        self._job, self._writer = job, writer
        self._start = 0.0
        self._client = Client(writer.endpoint, self.clock, job.client.to_limits())
        most = in_flight_share(job.client.max_in_flight, job.part, job.of)
        self._limit = None if most is None else asyncio.Semaphore(most)
        self._mine: Iterator[tuple[int, Arrival]] = iter(())
        self._ahead: deque[_Ready] = deque()
        self._sources: list[Source] | None = None
        self._prepared = False
        self._samples: list[Sample] = []
        self._defect: BaseException | None = None  # of this program; what servers do never raises
        self._streams = job.workload.all_streams

    def clock(self) -> float:
        return time.perf_counter() - self._start

    def prepare(self) -> None:
        """Everything that can be done before the clock starts: read traces, write the first bodies, collect garbage.

        Raises:
            ConfigError: the workload cannot be played, e.g. a trace that cannot be read.
        """
        job, w = self._job, self._job.workload
        if w.closed:
            self._sources = [w.source(number, part=job.part) for number in range(len(self._streams))]
        else:
            self._mine = islice(enumerate(w.arrivals()), job.part, None, job.of)
            self._ahead.extend(self._ready(i, a) for i, a in islice(self._mine, AHEAD))
        gc.collect()
        self._prepared = True

    async def run(self, progress: Progress | None = None, *, start_at: float | None = None) -> Run:
        """Play the job once.

        Args:
            start_at: a reading of `time.perf_counter`, so that processes can share a start; None is now.
        """
        if not self._prepared:
            self.prepare()
        gc.disable()
        lag = LoopLag(self.clock)
        self._start = time.perf_counter() if start_at is None else start_at
        watchers: list[asyncio.Task[None]] = []
        try:
            await asyncio.sleep(max(0.0, -self.clock()))
            watchers.append(asyncio.create_task(lag.watch()))
            if progress is not None:
                watchers.append(asyncio.create_task(self._tell(progress)))
            if self._job.workload.closed:
                await self._closed_loops()
            else:
                await self._open_loop()
        finally:
            gc.enable()
            for watcher in watchers:
                watcher.cancel()
            await self._client.close()
        length_s = max((s.end_s for s in self._samples if s.end_s is not None), default=0.0)
        return Run(self._samples, lag.late_s, length_s)

    async def _tell(self, progress: Progress) -> None:
        while True:
            await asyncio.sleep(0.25)
            progress(self.clock(), len(self._samples), sum(1 for s in self._samples if s.outcome is not None))

    # Open loop: nobody waits for an answer.

    async def _open_loop(self) -> None:
        ahead = self._ahead
        tasks: set[asyncio.Task[Sample]] = set()
        while ahead and self._defect is None:
            ready = ahead.popleft()
            await self._fill(until_s=ready.arrival.at_s, most=AHEAD)
            wait_s = ready.arrival.at_s - self.clock()
            # Even a late request gives the loop its turn: answers that have arrived are stamped first.
            await asyncio.sleep(max(0.0, wait_s))
            task = asyncio.create_task(self._send(ready))
            tasks.add(task)
            task.add_done_callback(lambda ended: self._ended(ended, tasks))
            # It leaves before the next body is written.
            await asyncio.sleep(0)
            if not ahead:
                await self._fill(until_s=float("inf"), most=1)
        await self._drain(tasks, self._job.client.drain_s)

    def _ended(self, task: asyncio.Task[Sample], tasks: set[asyncio.Task[Sample]]) -> None:
        tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._defect = task.exception()

    async def _fill(self, *, until_s: float, most: int) -> None:
        while len(self._ahead) < most and self.clock() < until_s - 0.005:
            following = next(self._mine, None)
            if following is None:
                return
            self._ahead.append(self._ready(*following))
            # Connects and answers have their turn between two bodies.
            await asyncio.sleep(0)

    def _ready(self, index: int, arrival: Arrival) -> _Ready:
        alternate = isinstance(self._streams[arrival.stream].prompts, Chat | Agent)
        body = self._writer.body(arrival.prompt, arrival.output_tokens, alternate=alternate, priority=arrival.priority)
        request = self._writer.request(body, request_id=f"{self._job.run_id}-{index}", tenant=arrival.tenant)
        return _Ready(arrival, index, request)

    async def _send(self, ready: _Ready, *, scheduled_s: float | None = None) -> Sample:
        a = ready.arrival
        sample = Sample(
            index=ready.index,
            scheduled_s=a.at_s if scheduled_s is None else scheduled_s,
            stream=self._streams[a.stream].name or str(a.stream),
            tenant=a.tenant,
            priority=a.priority,
            session=a.session,
            asked_prompt_tokens=a.prompt_tokens,
            asked_output_tokens=a.output_tokens,
            request_id=f"{self._job.run_id}-{ready.index}",
        )
        self._samples.append(sample)
        if self._limit is None:
            return await self._client.send(sample, ready.request)
        async with self._limit:
            return await self._client.send(sample, ready.request)

    async def _drain(self, tasks: Collection[asyncio.Task[Any]], within_s: float) -> None:
        if tasks:
            done, late = await asyncio.wait(tasks, timeout=None if within_s == float("inf") else within_s)
            for task in late:
                task.cancel()
            self._defect = self._defect or next((e for task in done if (e := task.exception())), None)
            await asyncio.gather(*late, return_exceptions=True)
        if self._defect is not None:
            raise self._defect
        for sample in self._samples:
            if sample.outcome is None:
                sample.error, sample.end_s = UNFINISHED, self.clock()

    # Closed loop: each user waits for the answer, thinks, and asks again.

    async def _closed_loops(self) -> None:
        job, w = self._job, self._job.workload
        end_s = w.duration_s if w.duration_s is not None else float("inf")
        numbers = numbers_share(self._streams, w.requests, job.part, job.of)
        users: list[asyncio.Task[None]] = []
        assert self._sources is not None
        for number, (stream, source) in enumerate(zip(self._streams, self._sources, strict=True)):
            assert isinstance(stream.arrivals, Closed)
            mine = range(job.part, stream.arrivals.users, job.of)
            users += [asyncio.create_task(self._user(number, user, source, numbers, end_s)) for user in mine]
        await self._drain(users, end_s - self.clock() + job.client.drain_s)

    async def _user(self, number: int, user: int, source: Source, numbers: Iterator[int], end_s: float) -> None:
        stream = self._streams[number]
        assert isinstance(stream.arrivals, Closed)
        rng = Random(f"{self._job.workload.seed}/{number}/{user}/think")
        while self.clock() < end_s:
            index = next(numbers, None)
            if index is None:
                return
            c = source.next(self.clock())
            arrival = Arrival(0.0, c.prompt, c.output_tokens, stream.tenant, stream.priority, c.session, number)
            ready = self._ready(index, arrival)
            await self._send(ready, scheduled_s=self.clock())
            if stream.arrivals.think_s:
                await asyncio.sleep(rng.expovariate(1 / stream.arrivals.think_s))


async def warm_up(writer: RequestWriter, workload: Workload, warmup: Warmup, limits: ClientLimits) -> list[Sample]:
    """Send a few requests of another seed and wait for them. What they measure is thrown away."""
    if warmup.requests == 0:
        return []
    seed = workload.seed + 7_777_777
    sources = [workload.source(i, seed=seed) for i, s in enumerate(workload.all_streams) if s.prompts is not None]
    start = time.perf_counter()
    client = Client(writer.endpoint, lambda: time.perf_counter() - start, limits.to_limits())
    slots = asyncio.Semaphore(warmup.concurrency)

    async def one(i: int) -> Sample:
        async with slots:
            if sources:
                content = sources[i % len(sources)].next(0.0)
                prompt, output = content.prompt, min(content.output_tokens, 16)
            else:
                prompt, output = ((seed + i, 64),), 8
            body = writer.body(prompt, output)
            sample = Sample(i, time.perf_counter() - start, request_id=f"warmup-{i}")
            return await client.send(sample, writer.request(body, request_id=f"warmup-{i}"))

    try:
        return list(await asyncio.gather(*(one(i) for i in range(warmup.requests))))
    finally:
        await client.close()
