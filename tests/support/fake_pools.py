"""Pools in memory behind the dispatcher's transport: engines that step, hold blocks and leases, and can be broken.

The next token is a function of the tokens before it and the choice, so any text that is not the right one shows.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import NoWorker, RequestError, WorkerLost
from cluster.messages import (
    Outcome,
    Path,
    Placement,
    Rejection,
    Request,
    Role,
    Slo,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from cluster.wire import LegEnd, Output
from router.dispatcher import Dispatcher

BLOCK = 16


def next_token(before: list[int], choice: int) -> int:
    return zlib.crc32(bytes(str(before[-8:]) + str(len(before)) + str(choice), "ascii")) % 30_000


def answer(prompt: list[int], tokens: int, choice: int) -> list[int]:
    out = list(prompt)
    for _ in range(tokens):
        out.append(next_token(out, choice))
    return out[len(prompt) :]


@dataclass
class Leg:
    leg_id: str
    kind: str
    prompt: list[int]
    sampling: Any
    pulls: str | None
    started: bool = False
    tokens: int = 0
    done: bool = False
    context: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = list(self.prompt)

    @property
    def blocks(self) -> int:
        return -(-(len(self.prompt) + self.tokens + 1) // BLOCK)


class FakeWorker:
    """One engine. `stopped` is SIGSTOP: it answers nothing and forgets nothing. Not `linked`: until the next call."""

    def __init__(self, pools: FakePools, info: WorkerInfo) -> None:
        self.pools, self.info = pools, info
        self.legs: dict[str, Leg] = {}
        self.inbox: list[tuple[str, str]] = []
        self.steps = 0
        self.alive = True
        self.stopped = False
        self.linked = True
        self.task = asyncio.get_running_loop().create_task(self._run())

    @property
    def leases(self) -> int:
        return sum(leg.kind == "prefill" and leg.done for leg in self.legs.values())

    @property
    def used_blocks(self) -> int:
        return sum(leg.blocks for leg in self.legs.values())

    async def _run(self) -> None:
        beat = 0.0
        while self.alive:
            await asyncio.sleep(self.pools.step_s)
            if self.stopped or not self.alive:
                continue
            inbox, self.inbox = self.inbox, []
            for what, leg_id in inbox:
                self._end(leg_id, what)
            outputs = [o for leg in list(self.legs.values()) if (o := self._advance(leg)) is not None]
            now = asyncio.get_running_loop().time()
            if outputs or now - beat > 1.0:
                beat = now
                self.steps += bool(outputs)
                self._report(outputs)

    def _report(self, outputs: list[Output]) -> None:
        if not self.linked:
            return
        waiting = sum(not leg.done for leg in self.legs.values())
        load = WorkerSnapshot(
            self.info.worker_id,
            self.info.incarnation,
            WorkerState.READY,
            self.steps,
            waiting,
            kv_used_blocks=self.used_blocks,
            open_leases=self.leases,
        )
        self.pools.later(self.pools.dispatcher.on_load, load)
        self.pools.later(self.pools.dispatcher.on_outputs, self.info.worker_id, outputs)

    def _advance(self, leg: Leg) -> Output | None:
        if leg.done:
            return None
        if leg.pulls is not None and not leg.started:
            problem = self.pools.pull(leg.pulls, self.info.worker_id)
            if problem is not None:
                self._end(leg.leg_id, "failed")
                return Output(leg.leg_id, 0, [], error=problem)
        leg.started = True
        if leg.kind == "prefill":
            leg.done = True
            return Output(leg.leg_id, 0, [1], "length", cached_tokens=0, kv_transfer_params={"lease": leg.leg_id})
        wanted = leg.sampling["max_tokens"]
        count = min(self.pools.rng.choice((1, 1, 1, 2)), wanted - leg.tokens)
        tokens = []
        for _ in range(count):
            tokens.append(next_token(leg.context, leg.sampling["choice"]))
            leg.context.append(tokens[-1])
        finish = "length" if leg.tokens + count == wanted else None
        output = Output(leg.leg_id, leg.tokens, tokens, finish, cached_tokens=0, external_tokens=leg.pulls and 1)
        leg.tokens += count
        if finish is not None:
            leg.done = True
            self._end(leg.leg_id, "done")
        return output

    def _end(self, leg_id: str, how: str) -> None:
        leg = self.legs.pop(leg_id, None)
        if leg is not None:
            self.pools.later(self.pools.dispatcher.on_leg_end, leg_id, LegEnd(how, leg.tokens))  # type: ignore[arg-type]

    def kill(self) -> None:
        self.alive = False
        self.task.cancel()
        for leg_id in self.legs:
            lost = WorkerLost("the worker died", worker_id=self.info.worker_id)
            self.pools.later(self.pools.dispatcher.on_leg_end, leg_id, lost)
        self.legs = {}


@dataclass
class FakePools:
    """The transport, and the hand that breaks things."""

    rng: random.Random
    step_s: float = 0.01
    fail_transfer: float = 0.0
    delay_s: float = 0.004
    dispatcher: Dispatcher = field(init=False)
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    everyone: list[FakeWorker] = field(default_factory=list)
    opened: int = 0
    transfers: int = 0

    def add(self, role: Role) -> FakeWorker:
        name = f"{role[0]}{len(self.everyone)}"
        info = WorkerInfo(name, f"i-{name}", role, BLOCK, 10_000, 100, 64, 2048, 4096)
        worker = FakeWorker(self, info)
        self.workers[name] = worker
        self.everyone.append(worker)
        self.dispatcher.on_worker_up(info)
        return worker

    def remove(self, worker: FakeWorker) -> None:
        """It leaves its pool; what runs there goes on."""
        self.workers.pop(worker.info.worker_id, None)
        self.dispatcher.on_worker_down(worker.info.worker_id)

    def pull(self, lease: str, by: str) -> tuple[str, str] | None:
        self.transfers += 1
        holder = next((w for w in self.everyone if lease in w.legs and w.alive), None)
        if holder is None:
            return "LeaseExpired", "the lease is gone"
        if self.rng.random() < self.fail_transfer:
            return "TransferFailed", f"{by} could not connect"
        return None

    def later(self, what: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_later(self.delay_s, what, *args)

    # Transport

    def open(self, info: WorkerInfo, kind: str, request: Any) -> None:
        self.opened += 1
        ticket = request.kv_transfer_params if kind == "serve" else None
        leg = Leg(request.request_id, kind, request.prompt_token_ids, request.sampling, ticket and ticket["lease"])
        delay_s = self.rng.random() * 2 * self.delay_s
        asyncio.get_running_loop().call_later(delay_s, self._arrive, info.worker_id, leg)

    def _arrive(self, worker_id: str, leg: Leg) -> None:
        worker = next(w for w in self.everyone if w.info.worker_id == worker_id)
        if not worker.alive:
            self.dispatcher.on_leg_end(leg.leg_id, WorkerLost("the worker died", worker_id=worker_id))
        elif worker_id not in self.workers:
            self.dispatcher.on_leg_end(leg.leg_id, NoWorker("the worker has left the pool", worker_id=worker_id))
        else:
            worker.linked = True
            worker.legs[leg.leg_id] = leg

    def cancel(self, worker_id: str, leg_id: str) -> None:
        self._tell(worker_id, "cancelled", leg_id)

    def settle(self, worker_id: str, leg_id: str, *, pulled: bool) -> None:
        self._tell(worker_id, "pulled" if pulled else "released", leg_id)

    def _tell(self, worker_id: str, what: str, leg_id: str) -> None:
        worker = next(w for w in self.everyone if w.info.worker_id == worker_id)

        def arrive() -> None:
            worker.inbox.append((what, leg_id))

        # A cancel may not overtake the call it cancels (the real worker remembers cancels that come early).
        asyncio.get_running_loop().call_later(2 * self.delay_s, arrive)


class FakePlacing:
    """Draws among the workers it was told of; counts reservations."""

    def __init__(self, colocated: bool = False) -> None:
        self.pools: dict[Role, set[str]] = {Role.PREFILL: set(), Role.DECODE: set()}
        self.held: set[str] = set()

    def add_worker(self, info: WorkerInfo, now: float) -> None:
        self.pools[info.role].add(info.worker_id)

    def remove_worker(self, worker_id: str, now: float) -> None:
        for pool in self.pools.values():
            pool.discard(worker_id)

    def pause_worker(self, worker_id: str, now: float) -> None:
        self.remove_worker(worker_id, now)

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float) -> None: ...

    def place(
        self, request: Request, now: float, rng: random.Random, *, exclude: frozenset[str], local_only: bool
    ) -> Placement | Rejection:
        decodes = sorted(self.pools[Role.DECODE] - exclude)
        prefills = sorted(self.pools[Role.PREFILL] - exclude)
        if not decodes:
            return Rejection(503, "no decode worker is ready", 1.0)
        self.held.add(request.request_id)
        if local_only or not prefills:
            return Placement(Path.LOCAL_NO_PREFILL, rng.choice(decodes))
        return Placement(Path.SPLIT, rng.choice(decodes), rng.choice(prefills))

    def on_prefilled(self, request_id: str, now: float, cached_tokens: int) -> None: ...

    def on_first_token(self, request_id: str, now: float) -> None: ...

    def on_end(self, request_id: str, now: float) -> None:
        self.held.discard(request_id)

    def observe(self, record: Any) -> None: ...


class FakeJob:
    """A client: keeps what it is given and notices every wrong, repeated or missing token."""

    cache_salt = None
    priority = 0
    lora = None
    trace_headers = None
    local_only = False
    forced: Placement | None = None

    def __init__(
        self, name: str, prompt: list[int], max_tokens: int, now: float, *, n: int = 1, streaming: bool = True,
        movable: bool = True,
    ) -> None:  # fmt: skip
        self.prompt, self.max_tokens, self.streaming = prompt, max_tokens, streaming
        self.request = Request(name, now, len(prompt), max_tokens, Slo(1, 1), n=n, movable=movable and n == 1)
        self.given: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[tuple[Outcome, Any, str | None]] = []
        self.ended_s: float | None = None
        self.seen_s: list[float] = []

    def seen_after(self, at_s: float) -> float:
        """When the client next noticed anything: a token, where it streams, or the end."""
        assert self.ended_s is not None
        return next((t for t in self.seen_s if t > at_s), self.ended_s) if self.streaming else self.ended_s

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], Any]:
        sent = self.given[choice][:tokens_sent]
        assert len(sent) == tokens_sent
        return [*self.prompt, *sent], {"choice": choice, "max_tokens": self.max_tokens - tokens_sent}

    def restart(self, choice: int) -> None:
        assert not self.streaming, "a client would see its tokens twice"
        self.given[choice] = []

    def end(self, outcome: Outcome, error: RequestError | None, finish_reason: str | None, record: Any) -> None:
        self.ends.append((outcome, error, finish_reason))
        self.ended_s = asyncio.get_running_loop().time()

    def check(self) -> None:
        assert len(self.ends) == 1, f"{self.request.request_id} ended {len(self.ends)} times"
        for choice, given in enumerate(self.given):
            right = answer(self.prompt, self.max_tokens, choice)
            assert given == right[: len(given)], f"{self.request.request_id} has a wrong token"
            if self.ends[0][0] is Outcome.DONE:
                assert len(given) == self.max_tokens, f"{self.request.request_id} was cut short and called done"


def deliver(batch: list[tuple[FakeJob, int, Any, int | None]]) -> list[tuple[FakeJob, int]]:
    for job, choice, delta, _ in batch:
        assert not job.ends, "output after the end"
        job.given[choice] += delta.token_ids
        job.seen_s.append(asyncio.get_running_loop().time())
    return []
