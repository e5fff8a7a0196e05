"""What prefill and decode workers share: an engine, links to routers, and legs that are open calls.

`run(call)` is open for as long as the leg holds anything on this engine. It ends by itself (output finished, KV
pulled), by the router's word over the link, by the loss of the router, or by being cancelled; whichever comes
first, and everything it held is given back once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

from cluster.drain import Drain, DrainState
from cluster.engine.base import Engine, EngineDelta
from cluster.errors import EngineFailed, NoWorker, PdserveError, RequestError, WorkerLost
from cluster.goodput.meter import LoadMeter
from cluster.link import LinkClient
from cluster.messages import WorkerInfo, WorkerSnapshot, WorkerState
from cluster.wire import Cancel, LegCall, LegEnd, Load, Message, Output, Settle, Step
from kv_transfer.ledger import LeaseEnd, LeaseLedger

log = logging.getLogger(__name__)

EARLY_CANCELS = 4096
LOAD_INTERVAL_S = 0.05
HEARTBEAT_S = 1.0
"""Routers take a longer silence for a stopped process (`router.limits.silent_s`)."""


class _Leg:
    """One open call."""

    __slots__ = ("call", "ended", "expiry", "finished", "settled", "tokens")

    def __init__(self, call: LegCall) -> None:
        self.call = call
        self.tokens = 0
        self.finished = False  # the engine gave its last output
        self.ended: asyncio.Event = asyncio.Event()
        self.settled: str | None = None
        self.expiry: asyncio.TimerHandle | None = None


class Worker:
    """One replica of a pool.

    Args:
        engine: owned: shut down with the worker.
        lease_s: backstop for a ticket that nobody settles, `ClusterConfig.lease_backstop_s`.
        stall_s: without a step for that long while work is there, the engine counts as stuck.
    """

    def __init__(self, engine: Engine, *, lease_s: float, stall_s: float = 60.0) -> None:
        self.engine = engine
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._legs: dict[str, _Leg] = {}
        self._links: dict[str, LinkClient] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._outbox: dict[str, list[Output]] = {}
        self._cancelled_early: OrderedDict[str, None] = OrderedDict()
        self.leases = LeaseLedger(lease_s)
        self._drain: Drain | None = None
        self._leg_ended = asyncio.Event()
        self._last_steps = -1
        self._last_progress_s = time.monotonic()
        self._last_load_s = 0.0
        self._heartbeat: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self.meter = LoadMeter()
        self.counts = {"legs": 0, "done": 0, "pulled": 0, "released": 0, "cancelled": 0, "failed": 0, "expired": 0}
        engine.on_step(self._after_step)

    @property
    def info(self) -> WorkerInfo:
        return self.engine.info

    def snapshot(self) -> WorkerSnapshot:
        snapshot = self.engine.snapshot()
        draining = self._drain is not None and snapshot.state is WorkerState.READY
        state = WorkerState.DRAINING if draining else snapshot.state
        return replace(snapshot, open_leases=len(self.leases), state=state)

    async def run(self, call: LegCall) -> LegEnd:
        """Serve one leg; see `LegKind`. Errors of the request travel over the link, never as an exception.

        Raises:
            WorkerLost: the call is meant for another worker or an earlier start of this one.
            NoWorker: the worker drains; nothing was started.
        """
        info = self.info
        if (call.worker_id, call.incarnation) != (info.worker_id, info.incarnation):
            raise WorkerLost("the worker was restarted", worker_id=call.worker_id)
        if self._drain is not None:
            raise NoWorker("the worker is leaving its pool", worker_id=call.worker_id)
        request_id = call.request.request_id
        if self._cancelled_early.pop(request_id, 0) is None:
            return LegEnd("cancelled")
        if request_id in self._legs or self.leases.knows(request_id):
            raise EngineFailed(f"request id {request_id} has been used before", worker_id=call.worker_id)
        leg = self._legs[request_id] = _Leg(call)
        self.counts["legs"] += 1
        try:
            await self._link(call)
            self.meter.on_start(time.monotonic())
            await self.engine.start(call.request, self._sink)
            await leg.ended.wait()
        except RequestError as e:
            self._send_error(leg, e)
        except OSError as e:
            log.warning("router %s cannot be reached: %s", call.router.router_id, e)
            leg.settled = "failed"
        finally:
            end = self._close(leg)
            await asyncio.shield(self._give_back(leg, end))
            self._tell_soon()
        return LegEnd(end, leg.tokens)  # type: ignore[arg-type]

    async def check_health(self) -> None:
        """Forward progress: steps advance while there is work.

        Raises:
            EngineFailed: the engine died, or made no step for `stall_s` with requests in it.
        """
        await self.engine.check_health()
        snapshot = self.engine.snapshot()
        busy = snapshot.running + snapshot.waiting > 0 or any(not leg.finished for leg in self._legs.values())
        now = time.monotonic()
        if snapshot.steps != self._last_steps or not busy:
            self._last_steps, self._last_progress_s = snapshot.steps, now
        elif now - self._last_progress_s > self._stall_s:
            raise EngineFailed(f"no engine step for {now - self._last_progress_s:.0f} s with work waiting")

    async def drain(self, limit_s: float, settle_s: float = 0.0) -> int:
        """Take in nothing more and wait for every leg, leases included.

        Returns:
            Legs that are still open when `limit_s` has passed.
        """
        drain = self._drain = self._drain or Drain(limit_s, settle_s)
        drain.start(time.monotonic())
        self._flush(self._load())
        while drain.observe(len(self._legs), time.monotonic()) is DrainState.DRAINING:
            self._leg_ended.clear()
            look_s = drain.next_look_s()
            assert look_s is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leg_ended.wait(), max(0.0, look_s - time.monotonic()))
        return drain.left

    async def shutdown(self) -> None:
        """End what is left, and the engine with all its processes; `drain` comes before."""
        for timer in (self._heartbeat, self._telling):
            if timer is not None:
                timer.cancel()
        for leg in list(self._legs.values()):
            leg.settled = leg.settled or "cancelled"
            leg.ended.set()
        await asyncio.sleep(0)
        await self.engine.shutdown()
        for link in list(self._links.values()):
            link.close()

    # Output

    def _sink(self, request_id: str, item: EngineDelta | PdserveError) -> None:
        leg = self._legs.get(request_id)
        if leg is None or leg.finished:
            return
        try:
            if isinstance(item, PdserveError):
                self._fail(leg, item)
            else:
                self._pass_on(leg, request_id, item)
        except Exception as e:
            # Raised further, it would end the engine's loop and with it everybody's requests.
            log.exception("output of %s could not be passed on", request_id)
            self._fail(leg, EngineFailed(f"output could not be passed on: {e}"))

    def _fail(self, leg: _Leg, error: PdserveError) -> None:
        leg.finished = True
        leg.settled = "failed"
        self._send_error(leg, error)
        leg.ended.set()

    def _pass_on(self, leg: _Leg, request_id: str, item: EngineDelta) -> None:
        ticket = item.kv_transfer_params if leg.call.kind == "prefill" else None
        self._put(
            leg,
            Output(
                request_id,
                leg.tokens,
                item.token_ids,
                item.finish_reason,
                item.stop_reason,
                item.cached_tokens,
                item.external_tokens,
                item.queue_s,
                item.compute_s,
                item.transfer_s,
                item.transfer_bytes,
                item.logprobs,
                item.prompt_logprobs,
                None if ticket is None else dict(ticket),
            ),
        )
        computed = len(leg.call.request.prompt_token_ids) - (item.cached_tokens or 0) if leg.tokens == 0 else 0
        self.meter.on_output(output_tokens=len(item.token_ids), computed_prompt_tokens=computed)
        leg.tokens += len(item.token_ids)
        if item.finish_reason is None:
            return
        leg.finished = True
        if ticket is not None:
            self._grant(leg)
            leg.expiry = asyncio.get_running_loop().call_later(self._lease_s, self._expire, leg)
        else:
            leg.settled = leg.settled or "done"
            leg.ended.set()

    def _put(self, leg: _Leg, output: Output) -> None:
        self._outbox.setdefault(leg.call.router.router_id, []).append(output)

    def _send_error(self, leg: _Leg, error: PdserveError) -> None:
        leg.settled = "failed"
        name = type(error).__name__ if isinstance(error, RequestError) else "EngineFailed"
        self._put(leg, Output(leg.call.request.request_id, leg.tokens, [], error=(name, str(error))))
        self._flush(None)

    def _after_step(self, snapshot: WorkerSnapshot) -> None:
        now = time.monotonic()
        self.meter.on_step(snapshot, now)
        if self._outbox or now - self._last_load_s >= LOAD_INTERVAL_S:
            self._tell()
        else:
            self._tell_soon()

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._last_load_s = time.monotonic()
        self._flush(self._load())

    def _tell_soon(self) -> None:
        """The last change counts most: an engine with nothing left to do makes no step that would tell of it."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._tell)

    def _beat(self) -> None:
        self._heartbeat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)
        self._tell_soon()

    def _load(self) -> Load:
        s = self.snapshot()
        return Load(
            s.state.value, s.steps, s.running, s.waiting, s.queued_prefill_tokens, s.kv_used_blocks, s.open_leases
        )

    def _flush(self, load: Load | None) -> None:
        outbox, self._outbox = self._outbox, {}
        for router_id, outputs in outbox.items():
            link = self._links.get(router_id)
            if link is not None:
                link.send(Step(outputs, load))
        if load is not None:
            for router_id, link in self._links.items():
                if router_id not in outbox:
                    link.send(Step([], load))

    # Ends

    def _grant(self, leg: _Leg) -> None:
        request = leg.call.request
        tokens = len(request.prompt_token_ids)
        blocks = -(-tokens // self.info.block_size_tokens)
        size = tokens * self.info.kv_bytes_per_token
        self.leases.grant(request.request_id, leg.call.router.router_id, blocks, size, time.monotonic())

    def _expire(self, leg: _Leg) -> None:
        if not leg.ended.is_set():
            self.counts["expired"] += 1
            log.warning(
                "lease of %s was never settled; released after %.0f s", leg.call.request.request_id, self._lease_s
            )
            leg.settled = "expired"
            leg.ended.set()

    def _close(self, leg: _Leg) -> str:
        """The outcome, and the leg is off the books."""
        self._legs.pop(leg.call.request.request_id, None)
        if leg.expiry is not None:
            leg.expiry.cancel()  # it holds the whole prompt
        self._leg_ended.set()
        end = leg.settled or "cancelled"
        if self.leases.holds(leg.call.request.request_id):
            how = LeaseEnd(end) if end in ("pulled", "expired") else LeaseEnd.RELEASED
            self.leases.end(leg.call.request.request_id, how, time.monotonic())
            end = "pulled" if end == "pulled" else "released"
        self.counts[end] += 1
        return end

    async def _give_back(self, leg: _Leg, end: str) -> None:
        request_id = leg.call.request.request_id
        with contextlib.suppress(EngineFailed):
            if not leg.finished or end == "failed":
                await self.engine.abort(request_id)
            if leg.call.kind == "prefill" and end != "pulled":
                # Also after an abort: the prefill may have finished in the same step.
                await self.engine.release([request_id])

    def _on_message(self, router_id: str, message: Message) -> None:
        if isinstance(message, Cancel):
            for request_id in message.request_ids:
                if (leg := self._legs.get(request_id)) is not None:
                    leg.settled = leg.settled or "cancelled"
                    leg.ended.set()
                else:
                    self._remember_cancel(request_id)
        elif isinstance(message, Settle):
            for request_id in message.request_ids:
                if (leg := self._legs.get(request_id)) is not None:
                    leg.settled = "pulled" if message.pulled and leg.finished else "released"
                    leg.ended.set()
                elif not message.pulled:
                    self._remember_cancel(request_id)
        else:
            log.warning("unexpected message from router %s", router_id)

    def _remember_cancel(self, request_id: str) -> None:
        """The call of a cancelled leg may still be on its way; most of these have simply ended."""
        self._cancelled_early[request_id] = None
        if len(self._cancelled_early) > EARLY_CANCELS:
            self._cancelled_early.popitem(last=False)

    def _on_router_lost(self, router_id: str) -> None:
        self._links.pop(router_id, None)
        self._connecting.pop(router_id, None)
        self._outbox.pop(router_id, None)
        for leg in list(self._legs.values()):
            if leg.call.router.router_id == router_id:
                leg.settled = leg.settled or "cancelled"
                leg.ended.set()

    async def _link(self, call: LegCall) -> None:
        router_id = call.router.router_id
        if router_id in self._links:
            return
        async with self._connecting.setdefault(router_id, asyncio.Lock()):
            if router_id not in self._links:
                self._links[router_id] = await LinkClient.connect(
                    call.router, self.info.worker_id, self.info.incarnation, self._on_message, self._on_router_lost
                )
                if self._heartbeat is None:
                    self._beat()


EngineFactory = Callable[..., Awaitable[Engine]]


def describe(worker: Worker) -> dict[str, Any]:
    """For `pdserve status`."""
    snapshot = worker.snapshot()
    return {
        "worker_id": worker.info.worker_id,
        "incarnation": worker.info.incarnation,
        "state": snapshot.state.value,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "steps": snapshot.steps,
        "kv_used_blocks": snapshot.kv_used_blocks,
        "kv_total_blocks": worker.info.kv_total_blocks,
        "open_leases": snapshot.open_leases,
        "legs": dict(worker.counts),
        "leases": asdict(worker.leases.counters()) | asdict(worker.leases.gauges(time.monotonic())),
    }
