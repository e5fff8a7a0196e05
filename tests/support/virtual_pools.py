"""The live dispatcher, placer and simulated engines of one process in virtual time: the parity tests' live side.

What Serve and the links do is done here by tasks: a leg starts in the loop's next turn, an engine step's load reaches
the dispatcher before its outputs, a lease ends when it is pulled, settled or over.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.base import EngineDelta, EngineRequest
from cluster.engine.simulated import SimulatedEngine, create
from cluster.engine.simulation.leases import LeaseBook, LocalPeers
from cluster.engine.simulation.sampling import PlainSampling
from cluster.errors import EngineFailed, PdserveError, RequestError
from cluster.messages import Outcome, Path, Placement, Request, RequestRecord, Role, WorkerInfo
from cluster.wire import LegEnd, LegKind, Output
from cluster.workload.arrival import Arrival
from kv_transfer.settings import TICKET_REQUEST
from router.admission import Admission
from router.block_keys import block_keys
from router.block_translator import BlockTranslator, EventCounts
from router.dispatcher import Dispatcher
from router.placement import Placer
from router.prefix_index import PrefixIndex

Decided = tuple[float, str, int, Path | None, str | None, str | None]


def token_ids(arrival: Arrival) -> list[int]:
    """Token j of a segment is a function of its content id and j, as in cluster/workload/text.py."""
    return [300 + hash((content, j)) % 1600 for content, tokens in arrival.prompt for j in range(tokens)]


class _Events:
    """In place of ZMQ: an engine's events go straight to the router's translator."""

    endpoint = replay_endpoint = ""

    def __init__(self, worker_id: str, index: PrefixIndex, block_tokens: int) -> None:
        self._translator = BlockTranslator(worker_id, index, block_tokens, EventCounts())

    def publish(self, events: list[dict[str, Any]], now: float) -> None:
        self._translator.apply(events)

    async def close(self) -> None:
        pass


class Job:
    """A client that wants exactly so many tokens."""

    streaming = True
    cache_salt = lora = trace_headers = None
    local_only = False
    forced: Placement | None = None

    def __init__(self, request: Request, prompt: list[int]) -> None:
        self.request, self.prompt, self.priority = request, prompt, request.priority
        self.given: list[int] = []
        self.ended: Outcome | None = None
        self.done = asyncio.Event()

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], Any]:
        rest = self.request.max_output_tokens - tokens_sent
        return [*self.prompt, *self.given[:tokens_sent]], PlainSampling(max_tokens=rest, ignore_eos=True)

    def restart(self, choice: int) -> None:
        self.given.clear()

    def end(self, outcome: Outcome, error: Any, finish_reason: str | None, record: RequestRecord) -> None:
        assert self.ended is None
        self.ended = outcome
        self.done.set()


class _Recorder(Placer):
    """The placer, and what it decided."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decided: list[Decided] = []
        self._tries: dict[str, int] = {}

    def place(self, request: Request, now: float, rng: random.Random, **how: Any) -> Any:
        placed = super().place(request, now, rng, **how)
        attempt = self._tries[request.request_id] = self._tries.get(request.request_id, 0) + 1
        if isinstance(placed, Placement):
            self.decided.append((now, request.request_id, attempt, placed.path, placed.prefill, placed.decode))
        else:
            self.decided.append((now, request.request_id, attempt, None, None, None))
        return placed


class VirtualPools:
    """A cluster; `run` plays arrivals. Worker names are the simulator's."""

    def __init__(self, config: ClusterConfig, seed: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self.config, self.clock = config, loop.time
        self.index = PrefixIndex()
        self.engines: dict[str, SimulatedEngine] = {}
        self.records: list[RequestRecord] = []
        self.jobs: list[Job] = []
        self._network: dict[int, LeaseBook] = {}
        self._owners: dict[str, tuple[str, LegKind]] = {}
        self._sent: dict[str, int] = {}
        self._outbox: dict[str, list[Output]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.placer = _Recorder(
            config.router.placement,
            lambda info: self.engines[info.worker_id]._spec.times,
            self.index,
            colocated=config.colocated,
            tp_pairs=config.kv_transfer.tp_pairs,
        )
        self.dispatcher = Dispatcher(
            self,  # type: ignore[arg-type]
            self.placer,
            config.router.limits,
            deliver=self._deliver,
            ticket_request=TICKET_REQUEST,
            on_record=self.records.append,
            clock=self.clock,
            rng=random.Random(seed),
            admission=Admission(config.router.admission, self.placer, config.slo.to_slo().ttft_s),
        )

    async def start(self) -> None:
        for role in (Role.DECODE,) if self.config.colocated else (Role.DECODE, Role.PREFILL):
            for number in range(self.config.pool(role).replicas.start):
                await self._add(role, number)

    async def _add(self, role: Role, number: int) -> None:
        worker_id = f"{role.value}-{number}"
        engine = await create(
            self.config,
            role,
            worker_id=worker_id,
            incarnation=worker_id,
            host="here",
            node=f"node-{number}",
            peers=LocalPeers(self._network),
            publish=False,
        )
        engine._publisher = _Events(worker_id, self.index, engine.info.block_size_tokens)  # type: ignore[assignment]
        engine.scheduler.kv.record_events = True
        engine.on_step(lambda snapshot: self._after_step(worker_id, snapshot))
        self.engines[worker_id] = engine
        self.dispatcher.on_worker_up(engine.info)
        self.placer.set_index_exact(worker_id, True)

    async def run(self, arrivals: list[Arrival]) -> None:
        """Send all arrivals at their times and wait for the last end."""
        slo = self.config.slo.to_slo()
        for number, arrival in enumerate(arrivals, 1):
            await asyncio.sleep(arrival.at_s - self.clock())
            prompt = token_ids(arrival)
            request = Request(
                str(number),
                self.clock(),
                len(prompt),
                arrival.output_tokens,
                slo,
                block_keys(prompt, self.placer.key_block_tokens),
                arrival.tenant,
                arrival.priority,
            )
            job = Job(request, prompt)
            self.jobs.append(job)
            self.dispatcher.submit(job)
        for job in self.jobs:
            await job.done.wait()
        await asyncio.sleep(2.0)
        self.dispatcher.end_all("over")

    # The dispatcher's transport

    def open(self, worker: WorkerInfo, kind: LegKind, request: EngineRequest) -> None:
        self._owners[request.request_id] = (worker.worker_id, kind)
        self._spawn(self._start(worker.worker_id, request))

    def cancel(self, worker_id: str, leg_id: str) -> None:
        self._spawn(self._end(worker_id, leg_id, give_back=True))

    def settle(self, worker_id: str, leg_id: str, *, pulled: bool) -> None:
        self._spawn(self._end(worker_id, leg_id, give_back=not pulled))

    async def _start(self, worker_id: str, request: EngineRequest) -> None:
        if request.request_id not in self._owners:
            return
        try:
            await self.engines[worker_id].start(request, self._sink)
        except RequestError as e:
            del self._owners[request.request_id]
            self.dispatcher.on_leg_end(request.request_id, e)

    async def _end(self, worker_id: str, leg_id: str, *, give_back: bool) -> None:
        self._owners.pop(leg_id, None)
        if give_back:
            await self.engines[worker_id].abort(leg_id)
            await self.engines[worker_id].release([leg_id])

    # From the engines

    def _sink(self, leg_id: str, item: EngineDelta | PdserveError) -> None:
        if leg_id not in self._owners:
            return
        worker_id, kind = self._owners[leg_id]
        if isinstance(item, PdserveError):
            del self._owners[leg_id]
            name = type(item).__name__ if isinstance(item, RequestError) else EngineFailed.__name__
            self.dispatcher.on_outputs(
                worker_id, [Output(leg_id, self._sent.pop(leg_id, 0), [], error=(name, str(item)))]
            )
            return
        sent = self._sent.get(leg_id, 0)
        output = Output(leg_id, sent, item.token_ids, item.finish_reason, item.stop_reason, item.cached_tokens)
        output.external_tokens, output.queue_s, output.compute_s = item.external_tokens, item.queue_s, item.compute_s
        output.transfer_s, output.transfer_bytes = item.transfer_s, item.transfer_bytes
        if kind == "prefill" and item.kv_transfer_params is not None:
            output.kv_transfer_params = dict(item.kv_transfer_params)
        self._outbox.setdefault(worker_id, []).append(output)
        self._sent[leg_id] = sent + len(item.token_ids)
        if item.finish_reason is not None and kind == "serve":
            del self._owners[leg_id]
            end = LegEnd("done", self._sent.pop(leg_id))
            asyncio.get_running_loop().call_soon(self.dispatcher.on_leg_end, leg_id, end)

    def _after_step(self, worker_id: str, snapshot: Any) -> None:
        self.dispatcher.on_load(snapshot)
        outputs = self._outbox.pop(worker_id, None)
        if outputs:
            self.dispatcher.on_outputs(worker_id, outputs)

    def _deliver(self, batch: list[tuple[Job, int, EngineDelta, int | None]]) -> list[tuple[Job, int]]:
        for job, _, delta, _ in batch:
            job.given += delta.token_ids
        return []

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
