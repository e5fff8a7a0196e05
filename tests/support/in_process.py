"""Dispatcher, links, workers and simulated engines of one process, without Ray: the real code, real connections."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_pools import FakePlacing

from cluster.config import LimitsConfig, parse
from cluster.engine.base import EngineDelta, EngineRequest
from cluster.engine.simulated import create
from cluster.engine.simulation.leases import LocalPeers
from cluster.engine.simulation.sampling import PlainSampling, plain
from cluster.engine.simulation.tokens import TokenStream
from cluster.errors import RequestError
from cluster.link import LinkServer
from cluster.messages import (
    Outcome,
    Placement,
    Request,
    RequestRecord,
    Role,
    Slo,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from cluster.wire import Cancel, LegCall, Load, Settle, Step
from cluster.worker import Worker
from kv_transfer.settings import TICKET_REQUEST
from router.dispatcher import Dispatcher

LOW, HIGH = 300, 1999
SIMULATED: dict[str, Any] = {
    "linear": {"fixed_ms": 3, "per_prefill_token_us": 20, "transfer_fixed_ms": 2},
    "max_model_len": 4096,
    "kv_blocks": 4000,
    "token_ids": [LOW, HIGH],
}
CONFIG: dict[str, Any] = {"engine": {"kind": "simulated", "simulated": SIMULATED}}


class InProcess:
    """The dispatcher's transport: calls are tasks, links are real connections over loopback."""

    def __init__(self) -> None:
        self.links = LinkServer(self._on_message, lambda *_: None)
        self.workers: dict[str, Worker] = {}
        self.calls: dict[str, asyncio.Task[None]] = {}
        self.dispatcher: Dispatcher

    def open(self, worker: WorkerInfo, kind, request: EngineRequest) -> None:
        request = replace(request, sampling=plain(request.sampling))
        call = LegCall(worker.worker_id, worker.incarnation, kind, request, self.links.address)
        self.calls[request.request_id] = asyncio.get_running_loop().create_task(self._wait(call))

    async def _wait(self, call: LegCall) -> None:
        leg_id = call.request.request_id
        try:
            end = await self.workers[call.worker_id].run(call)
        except RequestError as e:
            self.dispatcher.on_leg_end(leg_id, e)
        except asyncio.CancelledError:
            pass
        else:
            self.dispatcher.on_leg_end(leg_id, end)
        finally:
            del self.calls[leg_id]

    def cancel(self, worker_id: str, leg_id: str) -> None:
        self.links.send(worker_id, Cancel([leg_id]))
        self._make_sure(leg_id)

    def settle(self, worker_id: str, leg_id: str, *, pulled: bool) -> None:
        self.links.send(worker_id, Settle([leg_id], pulled))
        self._make_sure(leg_id)

    def _make_sure(self, leg_id: str) -> None:
        """As over Serve: a call that has not ended by itself, because no link was there yet, is cancelled."""
        call = self.calls.get(leg_id)
        if call is not None:
            asyncio.get_running_loop().call_later(1.0, call.cancel)

    def _on_message(self, worker_id: str, incarnation: str, message) -> None:
        if isinstance(message, Step):
            if message.load is not None:
                self.dispatcher.on_load(_snapshot(worker_id, incarnation, message.load))
            self.dispatcher.on_outputs(worker_id, message.outputs)


def _snapshot(worker_id: str, incarnation: str, load: Load) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id,
        incarnation,
        WorkerState(load.state),
        load.steps,
        load.running,
        load.waiting,
        load.queued_prefill_tokens,
        load.kv_used_blocks,
        load.open_leases,
    )


class Client:
    cache_salt = None
    priority = 0
    lora = None
    trace_headers = None
    local_only = False
    streaming = True
    forced: Placement | None = None

    def __init__(self, name: str, prompt: list[int], max_tokens: int, n: int) -> None:
        self.prompt, self.max_tokens = prompt, max_tokens
        self.request = Request(name, time.monotonic(), len(prompt), max_tokens, Slo(1, 1), n=n, movable=n == 1)
        self.given: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[Outcome] = []
        self.ended = asyncio.Event()
        self.first_s: float | None = None

    def leg(self, choice: int, tokens_sent: int):
        rest = self.max_tokens - tokens_sent
        return [*self.prompt, *self.given[choice][:tokens_sent]], PlainSampling(max_tokens=rest, ignore_eos=True)

    def restart(self, choice: int) -> None:
        raise AssertionError("nothing fails here")

    def end(self, outcome: Outcome, error, finish_reason, record: RequestRecord) -> None:
        self.ends.append(outcome)
        self.ended.set()

    def check(self) -> None:
        assert len(self.ends) == 1
        right = TokenStream(self.prompt, LOW, HIGH).take(self.max_tokens)
        for given in self.given:
            assert given == right[: len(given)]
            assert self.ends[0] is not Outcome.DONE or given == right


def deliver_to_clients(batch: list[tuple[Client, int, EngineDelta, int | None]]) -> list[tuple[Client, int]]:
    for client, choice, delta, _ in batch:
        assert not client.ends
        client.first_s = client.first_s or time.monotonic()
        client.given[choice] += delta.token_ids
    return []


class Cluster:
    """
    Args:
        simulated: settings of `engine.simulated` that differ from `CONFIG`.
        placing: what the dispatcher asks for places; default draws at random.
        admission: of the dispatcher; default lets everything in.
    """

    def __init__(
        self,
        seed: int,
        deliver: Any = None,
        limits: LimitsConfig | None = None,
        simulated: dict[str, Any] | None = None,
        placing: Any = None,
        admission: Any = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.transport = InProcess()
        self.placing = placing or FakePlacing()
        self.records: list[RequestRecord] = []
        self._config = parse({"engine": {**CONFIG["engine"], "simulated": {**SIMULATED, **(simulated or {})}}})
        self._network: dict = {}
        self.dispatcher = self.transport.dispatcher = Dispatcher(
            self.transport,
            self.placing,
            limits or LimitsConfig(),
            deliver=deliver or deliver_to_clients,
            ticket_request=TICKET_REQUEST,
            on_record=self.records.append,
            clock=time.monotonic,
            rng=self.rng,
            admission=admission,
        )
        self.clients: list[Client] = []

    async def start(self, prefill: int, decode: int) -> None:
        await self.transport.links.start("router", "127.0.0.1")
        for role in [Role.PREFILL] * prefill + [Role.DECODE] * decode:
            await self.add(role)

    async def add(self, role: Role) -> Worker:
        name = f"{role.value}{len(self.transport.workers)}"
        where = {"worker_id": name, "incarnation": "i", "host": "127.0.0.1", "node": "n"}
        engine = await create(self._config, role, **where, peers=LocalPeers(self._network), publish=False)
        worker = self.transport.workers[name] = Worker(engine, lease_s=300)
        self.dispatcher.on_worker_up(engine.info)
        return worker

    def workers(self, role: Role) -> list[Worker]:
        return [w for w in self.transport.workers.values() if w.info.role is role]

    def send(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> Client:
        prompt = [self.rng.randrange(LOW, HIGH) for _ in range(prompt_tokens)]
        client = Client(f"r{len(self.clients)}", prompt, max_tokens, n)
        self.clients.append(client)
        self.dispatcher.submit(client)
        return client

    def open(self) -> dict[str, int]:
        snapshots = [w.snapshot() for w in self.transport.workers.values()]
        return {
            "requests": self.dispatcher.running,
            "legs": self.dispatcher.open_legs,
            "calls": len(self.transport.calls),
            "places": len(getattr(self.placing, "held", ())),
            "leases": sum(s.open_leases for s in snapshots) + len(self.dispatcher.leases),
            "blocks": sum(s.kv_used_blocks for s in snapshots),
            "sequences": sum(s.running + s.waiting for s in snapshots),
        }

    async def stop(self) -> None:
        self.dispatcher.end_all("the test is over")
        for worker in self.transport.workers.values():
            await worker.shutdown()
        await self.transport.links.close()


async def until(condition: Callable[[], bool], within_s: float) -> None:
    """Wait for it, at most that long; the caller asserts."""
    for _ in range(round(within_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
