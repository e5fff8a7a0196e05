"""One run on several processes: each drives its share of the same schedule from one common start."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec
import uvloop

from cluster.errors import ConfigError, UserError
from cluster.runtime.urgent import urgent
from cluster.workload.text import TextWriter
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.runner import Job, Progress, Run, Runner
from loadtests.sample import Sample
from loadtests.scenario import ClientLimits
from loadtests.tokenizer import find_tokenizer

READY_S = 180.0  # a child reads its trace and writes its first requests before it is ready


def check_processes(client: ClientLimits, processes: int) -> None:
    """Raises ConfigError where `client.max_in_flight` cannot be shared out over so many processes."""
    most = client.max_in_flight
    if most is not None and processes > most:
        raise ConfigError(
            "--processes",
            f"{processes} is above client.max_in_flight {most}, and each process sends at least one",
            f"give at most {most}, or raise client.max_in_flight",
        )


def run_job(job: Job, endpoint: Endpoint, tokenizer: str, processes: int = 1, progress: Progress | None = None) -> Run:
    """Run a job here, or in `processes` children. Blocks until the last request has ended.

    Raises:
        UserError: the workload cannot be played, a process did not start, or there are too many of them.
    """
    check_processes(job.client, processes)
    if processes == 1:
        runner = Runner(job, _writer(endpoint, tokenizer))
        runner.prepare()
        with urgent(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            return loop.run(runner.run(progress))
    return _run_in_children(job, endpoint, tokenizer, processes, progress)


def merge(runs: Sequence[Run]) -> Run:
    """All samples in order of their schedule, as if one process had sent them."""
    samples = sorted((s for r in runs for s in r.samples), key=lambda s: (s.scheduled_s, s.index))
    return Run(samples, [late for r in runs for late in r.loop_late_s], max(r.length_s for r in runs))


def _writer(endpoint: Endpoint, tokenizer: str) -> RequestWriter:
    return RequestWriter(endpoint, TextWriter(find_tokenizer(tokenizer, tokenizer)))


def _run_in_children(job: Job, endpoint: Endpoint, tokenizer: str, processes: int, progress: Progress | None) -> Run:
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    children = []
    finished = False
    try:
        for part in range(processes):
            ours, theirs = context.Pipe()
            share = replace(job, part=part, of=processes)
            child = context.Process(target=_child, args=(theirs, share, endpoint, tokenizer), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        for pipe in pipes:
            if not pipe.poll(READY_S):
                raise UserError(f"--processes: a load generator did not start within {READY_S:g} s; give fewer")
            _answer(pipe)
        start = time.perf_counter() + 0.2  # one clock for all processes of a host
        for pipe in pipes:
            pipe.send(start)
        runs = []
        for pipe in pipes:
            while not pipe.poll(0.25):
                if progress is not None:
                    progress(time.perf_counter() - start, 0, 0)
            runs.append(_received(_answer(pipe)))
        finished = True
        return merge(runs)
    except (EOFError, BrokenPipeError):
        raise UserError("a load generator process died; its message is above") from None
    finally:
        if not finished:
            # All of them first: joining one after the other would wait for each in turn.
            for child in children:
                child.terminate()
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _answer(pipe: Connection) -> bytes:
    """What a child said. Raises UserError for a mistake that it found."""
    mistake, data = pipe.recv()
    if mistake:
        raise UserError(mistake)
    return bytes(data)


def _child(pipe: Connection, job: Job, endpoint: Endpoint, tokenizer: str) -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner = Runner(job, _writer(endpoint, tokenizer))
        runner.prepare()
        pipe.send(("", b""))
        start = pipe.recv()
        with urgent(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            run = loop.run(runner.run(start_at=start))
    except UserError as mistake:
        pipe.send((str(mistake), b""))
        return
    wire = {"samples": [s.to_wire() for s in run.samples], "late": run.loop_late_s, "length_s": run.length_s}
    pipe.send(("", msgspec.msgpack.encode(wire)))


def _received(data: bytes) -> Run:
    raw = msgspec.msgpack.decode(data)
    return Run([Sample.from_wire(s) for s in raw["samples"]], raw["late"], raw["length_s"])
