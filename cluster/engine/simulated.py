"""A simulated engine behind the engine protocol, in real time: the scheduler of the simulator, a timer a step.

It computes nothing: steps last what the cost model says, tokens are a function of the prefix (`TokenStream`), KV moves
by waiting, and a ticket is honoured only while its lease is alive. Any number of engines share a process and an event
loop; with a loop whose clock is virtual they run in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from cluster.config import ClusterConfig
from cluster.engine.base import EngineDelta, EngineRequest, Sink
from cluster.engine.scheduler.scheduler import Scheduler
from cluster.engine.scheduler.sequence import Sequence
from cluster.engine.scheduler.step import Load, Output, Step
from cluster.engine.simulation.faults import Faults
from cluster.engine.simulation.kv_publisher import Blocks, KvPublisher
from cluster.engine.simulation.leases import LeaseBook, Peers, ZmqPeers
from cluster.engine.simulation.settings import EngineSpec, engine_spec
from cluster.engine.simulation.tokens import BlockHashes, TokenStream
from cluster.errors import BadRequest, EngineFailed, LeaseExpired, RequestError, TransferFailed
from cluster.messages import Role, WorkerInfo, WorkerSnapshot, WorkerState

# A timer that came later than this shifts the schedule; a smaller delay is made up by the next step.
LATE_S = 0.05


async def create(
    config: ClusterConfig,
    role: Role,
    *,
    worker_id: str,
    incarnation: str,
    host: str,
    node: str,
    peers: Peers | None = None,
    publish: bool = True,
) -> SimulatedEngine:
    """Start the simulated engine of one replica.

    Args:
        peers: how it reaches the engines of the other pool; default ZMQ, as between processes.
        publish: KV events over ZMQ.

    Raises:
        ConfigError: `engine.simulated` or `pools.*.simulated` cannot be used.
    """
    spec = engine_spec(config, role)
    ports = range(config.kv_transfer.port_min, config.kv_transfer.port_max + 1)
    publisher = KvPublisher(host, ports) if publish and spec.scheduler.prefix_caching else None
    endpoints = (
        {"kv_events_endpoint": publisher.endpoint, "kv_replay_endpoint": publisher.replay_endpoint} if publisher else {}
    )
    info = spec.info(worker_id, incarnation, node, **endpoints)
    engine = SimulatedEngine(
        info,
        spec,
        peers or ZmqPeers(ports),
        publisher,
        # A decode engine that waits to pull renews it, as NIXL's is.
        lease_s=config.lease_backstop_s,
        recompute=config.kv_transfer.on_failure == "recompute",
    )
    await engine.open(host)
    if spec.settings.startup_s:
        await asyncio.sleep(spec.settings.startup_s / spec.settings.speed)
    return engine


class _Running:
    """One request on this engine: where its output goes and what its tokens are. `tokens` holds prompt and output."""

    __slots__ = (
        "hashes",
        "request",
        "sequence",
        "sink",
        "stop_ids",
        "stream",
        "tokens",
        "transfer_bytes",
        "transfer_s",
    )

    def __init__(
        self, request: EngineRequest, sink: Sink, sequence: Sequence, hashes: BlockHashes, stream: TokenStream
    ) -> None:
        self.request, self.sink, self.sequence, self.hashes, self.stream = request, sink, sequence, hashes, stream
        self.tokens = list(request.prompt_token_ids)
        self.stop_ids = _stop_ids(request.sampling)
        self.transfer_s: float | None = None
        self.transfer_bytes: int | None = None

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.sequence.prompt_tokens


class SimulatedEngine:
    """See `cluster.engine.base.Engine`. `faults` may be changed while it runs."""

    def __init__(
        self,
        info: WorkerInfo,
        spec: EngineSpec,
        peers: Peers,
        publisher: KvPublisher | None,
        *,
        lease_s: float,
        recompute: bool,
    ) -> None:
        settings = spec.settings
        seed = f"{settings.seed}/{info.worker_id}"
        self._info, self._spec, self._peers, self._publisher = info, spec, peers, publisher
        self._lease_s, self._recompute, self._speed = lease_s, recompute, settings.speed
        self.scheduler = Scheduler(spec.scheduler, spec.times, random.Random(seed), record_events=publisher is not None)
        self.faults = Faults.of(settings.faults, settings.seed)
        if publisher is not None:
            publisher.faults = self.faults
        self._loop = asyncio.get_running_loop()
        self.leases = LeaseBook(self._pulled, self._loop.time)
        self.busy_s = 0.0
        self._blocks = Blocks(spec.scheduler.block_size_tokens)
        self._running: dict[str, _Running] = {}
        self._lease_timers: dict[str, asyncio.TimerHandle] = {}
        self._callbacks: list[Callable[[WorkerSnapshot], None]] = []
        self._pulls: set[asyncio.Task[None]] = set()
        self._step: Step | None = None
        self._step_timer: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._dead: str | None = None
        self._address = ("", 0)
        self._block_bytes = info.block_size_tokens * info.kv_bytes_per_token
        # KV leaves and enters one transfer at a time.
        self._adapter_free_s = 0.0
        if settings.faults.stall_after_s is not None:
            self._timers.append(self._loop.call_later(settings.faults.stall_after_s / self._speed, self.stall))
        if settings.faults.die_after_s is not None:
            self._timers.append(self._loop.call_later(settings.faults.die_after_s / self._speed, self.die))

    async def open(self, host: str) -> None:
        """Answer for this engine's leases from now on."""
        self._address = await self._peers.serve(host, self.leases)

    # -- the protocol ------------------------------------------------------------------------------------------

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def snapshot(self) -> WorkerSnapshot:
        scheduler = self.scheduler
        return WorkerSnapshot(
            self._info.worker_id,
            self._info.incarnation,
            WorkerState.DEAD if self._dead else WorkerState.READY,
            scheduler.counters.steps,
            len(scheduler.running),
            scheduler.waiting_count,
            scheduler.queued_prefill_tokens,
            scheduler.kv.used_blocks,
            len(scheduler.leased),
        )

    def on_step(self, callback: Callable[[WorkerSnapshot], None]) -> None:
        self._callbacks.append(callback)

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        if self._dead:
            raise EngineFailed(self._dead, worker_id=self._info.worker_id)
        request_id, prompt = request.request_id, request.prompt_token_ids
        if request_id in self._running:
            raise BadRequest(f"request id {request_id} is in use on this engine")
        if getattr(request.sampling, "logprobs", None) is not None:
            raise BadRequest("a simulated engine has no log probabilities")
        params = request.kv_transfer_params or {}
        prefill = bool(params.get("do_remote_decode"))
        output_tokens = 1 if prefill else self._output_tokens(request)
        refusal = self.scheduler.refusal(len(prompt), output_tokens)
        if refusal:
            raise BadRequest(refusal)
        lowest, highest = self._spec.settings.token_ids
        hashes = BlockHashes(prompt, self._spec.scheduler.block_size_tokens, request.cache_salt)
        sequence = Sequence(
            request_id,
            len(prompt),
            output_tokens,
            hashes.keys,
            priority=request.priority,
            remote=bool(params.get("do_remote_prefill")),
            lease=prefill,
        )
        running = _Running(request, sink, sequence, hashes, TokenStream(prompt, lowest, highest))
        self._running[request_id] = running
        self._blocks.add(request_id, running.tokens, request.cache_salt)
        self.scheduler.add(sequence, self._loop.time())
        self._wake()

    async def abort(self, request_id: str) -> None:
        if self._forget(request_id) is not None:
            self.scheduler.abort(request_id)
            self._wake()

    async def release(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.leases.drop(request_id)
            self._free(request_id)

    async def check_health(self) -> None:
        if self._dead:
            raise EngineFailed(self._dead, worker_id=self._info.worker_id)

    async def shutdown(self) -> None:
        self._end("shut down")
        for task in list(self._pulls):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._pulls, return_exceptions=True)
        await self._peers.close()
        if self._publisher is not None:
            await self._publisher.close()

    # -- faults ------------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Begin no step any more."""
        self.faults.stalled = True

    def resume(self) -> None:
        self.faults.stalled = False
        self._wake()

    def die(self) -> None:
        """The engine core is gone: every request fails, every lease is lost."""
        self._end("the simulated engine died")
        snapshot = self.snapshot()
        for callback in self._callbacks:
            callback(snapshot)

    def _end(self, why: str) -> None:
        if self._dead:
            return
        self._dead = why
        for timer in (self._step_timer, *self._timers, *self._lease_timers.values()):
            if timer is not None:
                timer.cancel()
        self._lease_timers.clear()
        for request_id in list(self.scheduler.leased):
            self.leases.drop(request_id)
        error = EngineFailed(why, worker_id=self._info.worker_id)
        error.retryable = True
        for request_id, running in list(self._running.items()):
            self._running.pop(request_id, None)
            running.sink(request_id, error)

    # -- steps -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._step is None and not self._dead:
            self._begin(self._loop.time())

    def _begin(self, started_s: float) -> None:
        if self.faults.stalled:
            return
        step = self.scheduler.schedule(started_s)
        for load in self.scheduler.take_loads():
            task = self._loop.create_task(self._pull(load), name=f"pull {load.sequence.seq_id}")
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)
        if step is None:
            return
        self._step = step
        duration_s = step.durations_s[0] * self.faults.slowdown / self._speed
        self.busy_s += duration_s
        self._step_timer = self._loop.call_at(started_s + duration_s, self._step_over, started_s + duration_s)

    def _step_over(self, due_s: float) -> None:
        step, self._step = self._step, None
        assert step is not None
        now = self._loop.time()
        outputs = self.scheduler.complete(step)
        if self._publisher is not None:
            # Before the outputs: who ends is forgotten, with the tokens that an event may carry.
            events = [e for event in self.scheduler.kv.take_events() if (e := self._blocks.encode(event)) is not None]
            if events:
                self._publisher.publish(events, time.time())
        for output in outputs:
            self._deliver(output, now)
        snapshot = self.snapshot()
        for callback in self._callbacks:
            callback(snapshot)
        # Sinks and callbacks only take note; whatever they cause comes with the loop's next turns.
        if self._step is None and not self._dead:
            self._begin(due_s if now - due_s < LATE_S else now)

    def _deliver(self, output: Output, now: float) -> None:
        sequence = output.sequence
        request_id = sequence.seq_id
        running = self._running.get(request_id)
        if running is None:
            self.scheduler.release(request_id)
            return
        first = not running.produced
        tokens = running.stream.take(output.tokens)
        stopped = self._stop_at(running, tokens)
        running.tokens += tokens
        if not sequence.lease:
            running.hashes.extend(tokens)
        delta = EngineDelta(tokens)
        if first:
            scheduled_s = sequence.scheduled_s if sequence.scheduled_s is not None else now
            delta.cached_tokens = min(sequence.cached_tokens + sequence.external_tokens, sequence.prompt_tokens - 1)
            delta.external_tokens = sequence.external_tokens
            delta.queue_s = max(0.0, scheduled_s - sequence.arrival_s)
            delta.compute_s = max(0.0, now - scheduled_s)
            delta.transfer_s, delta.transfer_bytes = running.transfer_s, running.transfer_bytes
        if stopped is not None:
            delta.finish_reason, delta.stop_reason = "stop", stopped
            self.scheduler.abort(request_id)
        elif output.finished:
            delta.finish_reason = "length"
        if delta.finish_reason is not None:
            if sequence.lease:
                delta.kv_transfer_params = self._grant(sequence)
            self._forget(request_id)
        running.sink(request_id, delta)

    def _stop_at(self, running: _Running, tokens: list[int]) -> int | None:
        """Cut the tokens behind the first one that ends the request; returns that token."""
        least = getattr(running.request.sampling, "min_tokens", 0) or 0
        for index, token in enumerate(tokens):
            if token in running.stop_ids and running.produced + index + 1 >= least:
                del tokens[index + 1 :]
                return token
        return None

    def _output_tokens(self, request: EngineRequest) -> int:
        room = self._spec.scheduler.max_model_len - len(request.prompt_token_ids)
        asked = getattr(request.sampling, "max_tokens", None)
        if request.sampling is None:
            asked = 1
        return max(1, room) if asked is None else int(asked)

    def _forget(self, request_id: str) -> _Running | None:
        self._blocks.drop(request_id)
        return self._running.pop(request_id, None)

    # -- leases and transfers ----------------------------------------------------------------------------------

    def _grant(self, sequence: Sequence) -> Mapping[str, Any]:
        request_id = sequence.seq_id
        generation = self.leases.grant(request_id)
        self._lease_timers[request_id] = self._loop.call_later(self._lease_s, self._expire, request_id)
        fixed_s = self._spec.times.transfer_s(0)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self._info.worker_id}@{self._info.incarnation}",
            "remote_request_id": request_id,
            "remote_host": self._address[0],
            "remote_port": self._address[1],
            "remote_block_ids": list(sequence.table),
            "generation": generation,
            "tp_size": self._spec.tp,
            "transfer_fixed_s": fixed_s,
            "transfer_block_s": self._spec.times.transfer_s(self._block_bytes) - fixed_s,
        }

    def _expire(self, request_id: str) -> None:
        self.leases.drop(request_id)
        self._free(request_id)

    def _pulled(self, request_id: str) -> None:
        self._free(request_id)

    def _free(self, request_id: str) -> None:
        timer = self._lease_timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        if self.scheduler.release(request_id):
            self._wake()

    def _transfer_s(self, ticket: Mapping[str, Any], blocks: int) -> float:
        """The slower side's adapters decide; a ticket tells what its own take."""
        there_s: float = ticket.get("transfer_fixed_s", 0.0) + blocks * ticket.get("transfer_block_s", 0.0)
        return max(self._spec.times.transfer_s(blocks * self._block_bytes), there_s) / self._speed

    async def _pull(self, load: Load) -> None:
        """Wait as long as the KV travels; the lease must be alive before and after."""
        request_id = load.sequence.seq_id
        running = self._running.get(request_id)
        ticket = (running.request.kv_transfer_params or {}) if running is not None else {}
        error: RequestError | None = None
        asked_s = self._loop.time()
        moved_bytes = load.blocks * self._block_bytes
        worker_id = self._info.worker_id
        try:
            duration_s = self._transfer_s(ticket, load.blocks) if moved_bytes else 0.0
            wait_s = await self._peers.begin(ticket, max(0.0, self._adapter_free_s - asked_s), duration_s)
            if wait_s is None:
                error = LeaseExpired("the prompt's KV was given up before it was pulled", worker_id=worker_id)
            else:
                if moved_bytes:
                    self._adapter_free_s = self._loop.time() + wait_s + duration_s
                    await asyncio.sleep(wait_s + duration_s)
                if self.faults.transfer_fails():
                    error = TransferFailed("the KV could not be pulled", worker_id=worker_id)
                elif not await self._peers.end(ticket):
                    error = LeaseExpired("the prompt's KV was given up while it was pulled", worker_id=worker_id)
        except (KeyError, OSError, TypeError) as e:
            error = TransferFailed(f"the ticket cannot be used: {e!r}", worker_id=worker_id)
        if self._dead:
            return
        if error is None:
            if running is not None and moved_bytes:
                running.transfer_s, running.transfer_bytes = self._loop.time() - asked_s, moved_bytes
            self.scheduler.loaded(request_id)
        elif not self.scheduler.load_failed(request_id, recompute=self._recompute):
            failed = self._forget(request_id)
            if failed is not None:
                failed.sink(request_id, error)
        self._wake()


def _stop_ids(sampling: Any) -> frozenset[int]:
    ids = set(getattr(sampling, "stop_token_ids", None) or ())
    if not getattr(sampling, "ignore_eos", False):
        ids |= set(getattr(sampling, "all_stop_token_ids", None) or ())
    return frozenset(ids)
