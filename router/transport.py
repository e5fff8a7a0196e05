"""Between the dispatcher and the pools: opens legs as Serve calls, speaks to workers over links.

Ray's errors become ours here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.engine.base import EngineRequest
from cluster.errors import EngineFailed, NoWorker, RequestError, WorkerLost
from cluster.link import LinkServer
from cluster.messages import Role, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.wire import Cancel, LegCall, LegEnd, LegKind, Load, Message, Output, Settle, Step
from router.pinning import ReplicaWatch

log = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0


class Events(Protocol):
    """What a transport reports; the dispatcher implements it. All calls come from the router's event loop."""

    def on_worker_up(self, info: WorkerInfo) -> None: ...

    def on_worker_down(self, worker_id: str) -> None: ...

    def on_outputs(self, worker_id: str, outputs: list[Output]) -> None: ...

    def on_load(self, snapshot: WorkerSnapshot) -> None: ...

    def on_leg_end(self, leg_id: str, end: LegEnd | RequestError) -> None: ...

    def on_link_lost(self, worker_id: str) -> None: ...


class Transport(Protocol):
    """How the dispatcher reaches workers: live over Serve and links, in tests over simulated engines."""

    def open(self, worker: WorkerInfo, kind: LegKind, request: EngineRequest) -> None:
        """Start a leg; its id is `request.request_id`. Always answered by one `on_leg_end`."""
        ...

    def cancel(self, worker_id: str, leg_id: str) -> None: ...

    def settle(self, worker_id: str, leg_id: str, *, pulled: bool) -> None: ...


class ServeTransport:
    """Legs as calls of Serve deployments.

    Args:
        handles: one per pool; its replicas run `PoolReplica.run`.
        application: name of the Serve application, part of the key under which replicas are watched.
        sampling_for_engine: what of a leg's sampling parameters is sent; the engine's kind decides.
    """

    def __init__(
        self,
        application: str,
        handles: dict[Role, DeploymentHandle[Any]],
        deployments: dict[Role, str],
        sampling_for_engine: Callable[[Any], Any] = lambda sampling: sampling,
    ) -> None:
        self._application = application
        self._sampling_for_engine = sampling_for_engine
        self._handles = handles
        self._deployments = deployments
        self._links = LinkServer(self._on_message, self._on_link_lost)
        self._watches: list[ReplicaWatch] = []
        self._calls: dict[str, tuple[str, asyncio.Task[None], Any]] = {}
        self._events: Events
        self._loop: asyncio.AbstractEventLoop

    async def start(self, events: Events, router_id: str, host: str) -> None:
        self._events = events
        self._loop = asyncio.get_running_loop()
        await self._links.start(router_id, host)
        for role, handle in self._handles.items():
            self._watches.append(
                ReplicaWatch(
                    self._application,
                    self._deployments[role],
                    lambda _, metadata: self._soon(self._up, metadata),
                    lambda worker_id: self._soon(self._down, worker_id),
                    lambda call: self._soon(self._missed, call.request.request_id),
                )
            )
            # The request router of a handle is made with its first use; without one, no replica is known.
            handle._init()  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        for watch in self._watches:
            watch.close()
        for _, task, _ in list(self._calls.values()):
            task.cancel()
        await self._links.close()

    def open(self, worker: WorkerInfo, kind: LegKind, request: EngineRequest) -> None:
        request = replace(request, sampling=self._sampling_for_engine(request.sampling))
        call = LegCall(worker.worker_id, worker.incarnation, kind, request, self._links.address)
        # In a context of its own. Serve names a call after the request in whose context it is made, and calls from a
        # link's callbacks would all have the name of the request that opened the link: Serve's routing of two calls
        # with one name spins until one of them is gone.
        response = contextvars.Context().run(self._handles[worker.role].run.remote, call)
        task = self._loop.create_task(self._wait(request.request_id, worker.worker_id, response))
        self._calls[request.request_id] = (worker.worker_id, task, response)

    def cancel(self, worker_id: str, leg_id: str) -> None:
        # The link is the fast way; Serve's own cancellation follows where the call does not end by itself.
        self._links.send(worker_id, Cancel([leg_id]))
        self._loop.call_later(CANCEL_GRACE_S, self._cancel_call, leg_id)

    def settle(self, worker_id: str, leg_id: str, *, pulled: bool) -> None:
        self._links.send(worker_id, Settle([leg_id], pulled))
        self._loop.call_later(CANCEL_GRACE_S, self._cancel_call, leg_id)

    def _cancel_call(self, leg_id: str) -> None:
        entry = self._calls.get(leg_id)
        if entry is not None:
            entry[2].cancel()

    async def _wait(self, leg_id: str, worker_id: str, response: Any) -> None:
        end: LegEnd | RequestError
        try:
            end = await response
        except asyncio.CancelledError:
            end = LegEnd("cancelled")
        except Exception as e:
            end = as_request_error(e, worker_id)
        self._calls.pop(leg_id, None)
        self._events.on_leg_end(leg_id, end)

    def _on_message(self, worker_id: str, incarnation: str, message: Message) -> None:
        if not isinstance(message, Step):
            return
        if message.load is not None:
            self._events.on_load(_snapshot(worker_id, incarnation, message.load))
        if message.outputs:
            self._events.on_outputs(worker_id, message.outputs)

    def _on_link_lost(self, worker_id: str, incarnation: str) -> None:
        """The worker's legs of this router have ended with the link; what it still holds, its calls tell."""
        for leg_id, (owner, _, _) in list(self._calls.items()):
            if owner == worker_id:
                self._events.on_leg_end(leg_id, WorkerLost("the link to the worker broke", worker_id=worker_id))
                # One that is still on its way would make a new link and run for nobody.
                self._cancel_call(leg_id)
        self._events.on_link_lost(worker_id)

    def _up(self, metadata: dict[str, Any]) -> None:
        fields = dict(metadata["worker"])
        fields["role"] = Role(fields["role"])
        fields["pid"] = int(metadata.get("pid", 0))
        self._events.on_worker_up(WorkerInfo(**fields))

    def _down(self, worker_id: str) -> None:
        self._events.on_worker_down(worker_id)

    def _missed(self, leg_id: str) -> None:
        """The worker left before the call reached it: nothing was started."""
        entry = self._calls.pop(leg_id, None)
        if entry is not None:
            worker_id, task, response = entry
            response.cancel()
            task.cancel()
            self._events.on_leg_end(leg_id, NoWorker("the worker has left the pool", worker_id=worker_id))

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        # Serve may run its routers on a loop of their own.
        self._loop.call_soon_threadsafe(callback, *args)


def as_request_error(error: Exception, worker_id: str) -> RequestError:
    """What failed, in our terms. A Ray task error carries ours inside when a worker raised it."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, RequestError) else EngineFailed(f"worker error: {_line(cause or error)}")
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RayActorError | TaskCancelledError):
        return WorkerLost("the worker died", worker_id=worker_id)
    if isinstance(error, RayError | RayServeException | ConnectionError):
        return WorkerLost(f"the worker cannot be reached: {_line(error)}", worker_id=worker_id)
    log.exception("unexpected error of a leg", exc_info=error)
    return EngineFailed(_line(error))


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[-1] if text else type(error).__name__


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
