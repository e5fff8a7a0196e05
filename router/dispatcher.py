"""Runs requests: feeds each one's lifecycle with what happens and carries out the actions it answers with.

One event loop, no locks: every callback runs to its end. Nothing here decides; placement, lifecycle and breaker do.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from cluster.config import LimitsConfig
from cluster.engine.base import EngineDelta
from cluster.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    LeaseExpired,
    NoWorker,
    PdserveError,
    RequestError,
    TransferFailed,
    WorkerLost,
)
from cluster.messages import (
    Outcome,
    Placement,
    Rejection,
    Request,
    RequestRecord,
    Role,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from cluster.wire import LegEnd, Output
from kv_transfer.ledger import LeaseEnd, LeaseLedger
from router import lifecycle_messages as msg
from router.admission import Admission
from router.health import Change, Health, Trust
from router.legs import Leg, Legs
from router.lifecycle import Lifecycle
from router.run import Run
from router.waiting import WaitingRoom

if TYPE_CHECKING:  # the transport brings Ray along; deciding needs none of it
    from router.transport import Transport

log = logging.getLogger(__name__)

_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind
    for kind in (BadRequest, TransferFailed, LeaseExpired, EngineFailed, WorkerLost, NoWorker, DeadlineExceeded)
}
LOOK_EVERY_S = 0.5
_NATURAL_ENDS = frozenset({"stop", "length", "repetition"})


class Placing(Protocol):
    """What the dispatcher asks of placement; `router.placement.Placer` is one."""

    def add_worker(self, info: WorkerInfo, now: float) -> None: ...

    def remove_worker(self, worker_id: str, now: float) -> None: ...

    def pause_worker(self, worker_id: str, now: float) -> None: ...

    def on_snapshot(self, snapshot: WorkerSnapshot, now: float) -> None: ...

    def place(
        self, request: Request, now: float, rng: random.Random, *, exclude: frozenset[str], local_only: bool
    ) -> Placement | Rejection: ...

    def on_prefilled(self, request_id: str, now: float, cached_tokens: int) -> None: ...

    def on_first_token(self, request_id: str, now: float) -> None: ...

    def on_end(self, request_id: str, now: float) -> None: ...

    def observe(self, record: RequestRecord) -> None: ...


class Job(Protocol):
    """One client request, as the layer above describes it."""

    request: Request
    streaming: bool
    cache_salt: str | None
    priority: int
    lora: Any
    trace_headers: Any
    local_only: bool
    forced: Placement | None

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], Any]: ...

    def restart(self, choice: int) -> None: ...

    def end(
        self, outcome: Outcome, error: PdserveError | None, finish_reason: str | None, record: RequestRecord
    ) -> None: ...


Deliver = Callable[[list[tuple[Any, int, EngineDelta, int | None]]], list[tuple[Any, int]]]
"""(job, choice, delta, cached tokens with the first delta) -> choices that have ended by a stop string."""


class Dispatcher:
    """All requests of one router replica.

    Args:
        deliver: hands output to the clients, a whole engine step at once.
        ticket_request: the connector's request for a ticket, sent with each prefill leg.
        on_record: receives the record of every finished request.
        clock: seconds; one clock for everything here.
        admission: decides who is placed when; None places everything at once.
    """

    def __init__(
        self,
        transport: Transport,
        placer: Placing,
        limits: LimitsConfig,
        *,
        deliver: Deliver,
        ticket_request: dict[str, Any],
        on_record: Callable[[RequestRecord], None],
        clock: Callable[[], float],
        rng: random.Random,
        admission: Admission | None = None,
    ) -> None:
        self.placer = placer
        self.room = None if admission is None else WaitingRoom(admission, self._let_in, self._turn_away, clock)
        self._waiting: dict[str, tuple[Run, msg.Place]] = {}
        self._limits = limits
        self._deliver = deliver
        self._on_record = on_record
        self._clock = clock
        self._rng = rng
        self._runs: dict[str, Run] = {}
        self.workers: dict[str, WorkerInfo] = {}
        self._legs = Legs(transport, self.workers, ticket_request, self.on_leg_end, clock)
        self.loads: dict[str, WorkerSnapshot] = {}
        self.last_failure: dict[str, str] = {}
        self.retries = self.migrations = 0
        self.worker_listeners: list[Callable[[WorkerInfo, bool], None]] = []
        self.health = Health(limits.silent_s, limits.stall_s, look_every_s=LOOK_EVERY_S)
        self._look_timer: asyncio.TimerHandle | None = None
        self._no_decoder: bool | None = None  # None: to be found out

    @property
    def running(self) -> int:
        return len(self._runs)

    @property
    def open_legs(self) -> int:
        return len(self._legs)

    @property
    def leases(self) -> LeaseLedger:
        return self._legs.leases

    def runs(self) -> list[Run]:
        """Requests that have not ended."""
        return list(self._runs.values())

    def leg_workers(self) -> list[tuple[str, bool]]:
        """(worker, whether it is a prefill leg) of every open leg."""
        return [(leg.worker_id, leg.choice is None) for leg in self._legs.all()]

    # From the layer above

    def submit(self, job: Job) -> None:
        run = Run(job, Lifecycle(job.request, self._limits, streaming=job.streaming), job.request.arrival_s)
        self._runs[job.request.request_id] = run
        self._feed(run, msg.Arrived())

    def client_left(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is not None:
            self._feed(run, msg.ClientLeft())

    def end_all(self, why: str) -> None:
        """The router goes: every request that is left fails with `why`."""
        for run in list(self._runs.values()):
            run.final_error = RequestError(why)
            self._feed(run, msg.ClientLeft())
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self.room is not None:
            self.room.close()

    # From the transport

    def on_worker_up(self, info: WorkerInfo) -> None:
        old = self.workers.get(info.worker_id)
        if old is not None and old.incarnation != info.incarnation:
            self.on_worker_down(info.worker_id)
        self.workers[info.worker_id] = info
        self.health.up(info.worker_id, info.incarnation)
        self._no_decoder = None
        self.placer.add_worker(info, self._clock())
        if self._look_timer is None:
            self._look()
        for listener in self.worker_listeners:
            listener(info, True)

    def on_worker_down(self, worker_id: str) -> None:
        info = self.workers.pop(worker_id, None)
        if info is None:
            return
        self.loads.pop(worker_id, None)
        self.health.down(worker_id)
        self._no_decoder = None
        self.placer.remove_worker(worker_id, self._clock())
        for listener in self.worker_listeners:
            listener(info, False)
        # Legs on it end by themselves (a drained replica finishes its work, a dead one fails its calls).

    def on_load(self, snapshot: WorkerSnapshot) -> None:
        info = self.workers.get(snapshot.worker_id)
        if info is None or info.incarnation != snapshot.incarnation:
            return
        self.loads[snapshot.worker_id] = snapshot
        self.health.heard(snapshot.worker_id, snapshot.steps, self._clock())
        self.placer.on_snapshot(snapshot, self._clock())
        if snapshot.state is WorkerState.DEAD:
            # Its leases too: finished prefills, of which the engine itself can say nothing any more.
            self._lose(snapshot.worker_id, "its engine died")
            self.on_worker_down(snapshot.worker_id)
        self._pump()

    def on_outputs(self, worker_id: str, outputs: list[Output]) -> None:
        now = self._clock()
        self.health.heard(worker_id, None, now)
        batch: list[tuple[Any, int, EngineDelta, int | None]] = []
        facts: list[tuple[Run, int, int, Output]] = []
        # After the tokens of the same step: a failed choice may start all of its request's choices anew, and what they
        # had before must not enter their new output.
        failed: list[tuple[Leg, RequestError]] = []
        for output in outputs:
            leg = self._legs.get(output.request_id)
            if leg is None:
                continue
            run, choice = leg.run, leg.choice
            if output.error is not None:
                failed.append((leg, _error(output.error, worker_id)))
            elif choice is None:
                self._on_prefill_output(leg, output, now)
            elif output.offset_tokens != run.leg_tokens(choice):
                failed.append((leg, WorkerLost("output was lost on the way", worker_id=worker_id)))
            elif output.finish_reason in ("abort", "error"):
                failed.append((leg, EngineFailed("the engine ended the request", worker_id=worker_id)))
            else:
                if output.offset_tokens == 0 and output.token_ids:
                    peer = run.placement.prefill if run.placement is not None and output.external_tokens else None
                    self.health.served(worker_id, peer, now)
                leg.finished = output.finish_reason is not None
                delta = output.delta()
                cached = run.on_output(choice, delta, now)
                batch.append((run.job, choice, delta, cached))
                facts.append((run, leg.attempt, choice, output))
        if batch:
            self._hand_on(batch, facts, now)
        for leg, error in failed:
            if self._legs.get(leg.leg_id) is leg:
                self._leg_failed(leg, error)

    def _hand_on(
        self,
        batch: list[tuple[Any, int, EngineDelta, int | None]],
        facts: list[tuple[Run, int, int, Output]],
        now: float,
    ) -> None:
        """Tokens of one step to their clients, then what they mean for their requests."""
        stopped = {(id(job), choice) for job, choice in self._deliver(batch)}
        for run, attempt, choice, output in facts:
            by_string = (id(run.job), choice) in stopped
            if by_string:
                self._legs.cancel(run, attempt, choice)
                run.finish_reason = "stop"
            finished = by_string or output.finish_reason in _NATURAL_ENDS
            if output.finish_reason is not None:
                run.finish_reason = output.finish_reason
            actions = run.lifecycle.on(msg.DecodeOutput(attempt, choice, len(output.token_ids), finished), now)
            if not run.first_seen and output.token_ids:
                run.first_seen = True
                self.placer.on_first_token(run.request.request_id, now)
            if run.waiting_choices and not run.lifecycle.ended:
                self._legs.start_waiting(run)
            if actions:
                self._carry_out(run, actions)

    def on_leg_end(self, leg_id: str, end: LegEnd | RequestError) -> None:
        leg = self._legs.get(leg_id)
        if leg is None:
            return
        if isinstance(end, RequestError):
            self._leg_failed(leg, end)
        elif leg.choice is None:
            pulled = end.outcome == "pulled"
            self._legs.ended(leg_id, LeaseEnd.PULLED if pulled else LeaseEnd.EXPIRED)
            if end.outcome in ("pulled", "released", "cancelled"):
                outcome = msg.LeaseOutcome.PULLED if pulled else msg.LeaseOutcome.EXPIRED
                self._feed(leg.run, msg.LeaseEnded(leg.attempt, outcome))
            else:
                lost = WorkerLost("the prefill leg ended without a ticket")
                self._feed(leg.run, msg.PrefillFailed(leg.attempt, lost))
        elif end.outcome == "done" and leg.run.leg_tokens(leg.choice) >= end.tokens:
            self._legs.ended(leg_id)
        else:
            # The call may overtake the last output by a moment; the link keeps its own order.
            asyncio.get_running_loop().call_later(1.0, self._leg_incomplete, leg_id)

    def on_link_lost(self, worker_id: str) -> None:
        """Its legs have ended. Most likely it is dead, and no request need find that out."""
        change = self.health.suspect(worker_id, "the link broke", None, self._clock())
        if change is not None:
            self.last_failure[worker_id] = change.reason
            self._apply(change)

    def _leg_incomplete(self, leg_id: str) -> None:
        leg = self._legs.get(leg_id)
        if leg is not None:
            self._leg_failed(leg, WorkerLost("the leg ended before its output was complete"))

    # Inside

    def _feed(self, run: Run, event: msg.Event) -> None:
        self._carry_out(run, run.lifecycle.on(event, self._clock()))

    def _carry_out(self, run: Run, actions: list[msg.Action]) -> None:
        for action in actions:
            match action:
                case msg.Place():
                    self._place(run, action)
                case msg.Unplace():
                    self._unplace(run)
                case msg.StartPrefill():
                    self.health.asked(action.worker, self._clock())
                    self._legs.start_prefill(run, action)
                case msg.EndPrefill():
                    self._legs.end_prefill(run, action)
                case msg.StartDecode():
                    self.health.asked(action.worker, self._clock())
                    self._legs.start_decode(run, action)
                case msg.CancelDecode():
                    self._legs.cancel(run, action.attempt, action.choice)
                case msg.SetTimer():
                    run.set_timer(asyncio.get_running_loop().call_later(action.after_s, self._on_timer, run))
                case msg.Suspect():
                    self._suspect(action)
                case msg.Finish():
                    self._finish(run, action)

    def _on_timer(self, run: Run) -> None:
        self._feed(run, msg.TimerFired())

    def _let_in(self, request: Request) -> None:
        entry = self._waiting.pop(request.request_id, None)
        if entry is not None:
            self._place(*entry, waited=True)

    def _turn_away(self, request: Request, rejection: Rejection) -> None:
        entry = self._waiting.pop(request.request_id, None)
        if entry is not None:  # its client may have left since it was displaced
            run, action = entry
            self._feed(run, msg.Refused(action.attempt, rejection))

    def _unplace(self, run: Run) -> None:
        request_id = run.request.request_id
        if self.room is not None and self._waiting.pop(request_id, None) is not None:
            self.room.leave(request_id)
        self.placer.on_end(request_id, self._clock())

    def _pump(self) -> None:
        if self.room is not None:
            self.room.pump()

    def _place(self, run: Run, action: msg.Place, *, waited: bool = False) -> None:
        now = self._clock()
        job = run.job
        if action.attempt == 1 and self._no_decoder is not False:
            self._take_back()
        if job.forced is not None:
            placed: Placement | Rejection = job.forced
        elif self.room is not None and action.attempt == 1 and not waited:
            # Another attempt has waited already, and its client is nearer to the limit.
            verdict = self.room.enter(run.request)
            if verdict is False:
                self._waiting[run.request.request_id] = (run, action)
                return
            if isinstance(verdict, Rejection):
                self._feed(run, msg.Refused(action.attempt, verdict))
                return
            self._place(run, action, waited=True)
            return
        else:
            local = action.local_only or job.local_only
            placed = self._choose(run.request, action.exclude, local, now)
            if isinstance(placed, Rejection) and action.exclude:
                # Every healthy worker has failed this request once: better one of those than none.
                placed = self._choose(run.request, frozenset(), local, now)
        if isinstance(placed, Rejection):
            self._feed(run, msg.Refused(action.attempt, placed))
        else:
            if action.attempt > 1:
                if action.tokens_sent:
                    self.migrations += 1
                else:
                    self.retries += 1
            run.on_placed(placed, now)
            self._feed(run, msg.Placed(action.attempt, placed))

    def _choose(self, request: Request, exclude: frozenset[str], local: bool, now: float) -> Placement | Rejection:
        """Placement's choice, without pairs whose transfers fail."""
        while True:
            placed = self.placer.place(request, now, self._rng, exclude=exclude, local_only=local)
            if isinstance(placed, Rejection) or placed.prefill is None or request.max_output_tokens == 1:
                return placed  # one token is served where it is prefilled: nothing is transferred
            pair = (placed.prefill, placed.decode)
            if self.health.pairs.allows(pair, now):
                self.health.pairs.begin(pair, now)
                return placed
            exclude |= {placed.prefill}

    def _on_prefill_output(self, leg: Leg, output: Output, now: float) -> None:
        if output.kv_transfer_params is None:
            if output.finish_reason is not None:
                self._leg_failed(leg, TransferFailed("the prefill engine gave no ticket", worker_id=leg.worker_id))
            return
        run, ticket = leg.run, self._legs.grant(leg, output, now)
        run.on_ticket(ticket, now)
        self.health.served(leg.worker_id, None, now)
        self.placer.on_prefilled(run.request.request_id, now, ticket.cached_tokens)
        self._feed(run, msg.TicketReady(leg.attempt, ticket))
        self._pump()

    def _leg_failed(self, leg: Leg, error: RequestError) -> None:
        self._legs.ended(leg.leg_id, LeaseEnd.EXPIRED)
        if isinstance(error, EngineFailed):
            error.retryable = True
        if leg.choice is None:
            self._feed(leg.run, msg.PrefillFailed(leg.attempt, error))
        else:
            self._feed(leg.run, msg.DecodeFailed(leg.attempt, leg.choice, error))

    def _suspect(self, action: msg.Suspect) -> None:
        self.last_failure[action.worker_id] = action.reason
        change = self.health.suspect(action.worker_id, action.reason, action.peer, self._clock())
        if change is not None or action.peer is not None:
            between = f" with {action.peer}" if action.peer else ""
            log.warning("worker %s%s failed a request: %s", action.worker_id, between, action.reason)
        if change is not None:
            self._apply(change)

    def _look(self) -> None:
        """Judge the workers by what they have said and done since."""
        self._look_timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
        for change in self.health.look(self._legs.owing().__contains__, self._clock()):
            self._apply(change)

    def _apply(self, change: Change) -> None:
        self._no_decoder = None
        info = self.workers.get(change.worker_id)
        if info is None:
            return
        if change.trust is Trust.USED:
            self.placer.add_worker(info, self._clock())
            return
        self.placer.pause_worker(change.worker_id, self._clock())
        if change.trust is Trust.LOST:
            self._lose(change.worker_id, change.reason)

    def _usable(self, role: Role) -> bool:
        return any(w.role is role and self.health.trust(i) is Trust.USED for i, w in self.workers.items())

    def _take_back(self) -> None:
        """Use decode workers before their time of distrust is over: there is no other, and the client would get a 503.

        Only for what comes new. What has failed there already waits: each try would cost one of its attempts.
        """
        self._no_decoder = not self._usable(Role.DECODE)
        if self._no_decoder:
            pool = [worker_id for worker_id, info in self.workers.items() if info.role is Role.DECODE]
            for change in filter(None, map(self.health.take_back, pool)):
                self._apply(change)

    def _lose(self, worker_id: str, reason: str) -> None:
        """Nothing comes from there any more: every request with a leg there goes elsewhere."""
        log.warning("worker %s is lost: %s", worker_id, reason)
        self.last_failure[worker_id] = reason
        for run in self._legs.on(worker_id):
            self._feed(run, msg.WorkerDown(worker_id))

    def _finish(self, run: Run, action: msg.Finish) -> None:
        request_id = run.request.request_id
        self._runs.pop(request_id, None)
        run.clear_timer()
        legs, leases = self._legs.forget(run)
        if legs or leases:
            log.error("legs %s and leases %s were still open when their request ended", legs, leases)
        self._unplace(run)
        error = run.final_error or action.error
        record = run.record(action.outcome, error, self._clock())
        run.job.end(action.outcome, error, action.finish_reason, record)
        # Times first, as in cluster/sim/fleet.py: distances are judged by what the times leave unexplained.
        for hear in (self._on_record, self.placer.observe):
            try:
                hear(record)
            except Exception:  # the rest of this step has yet to reach its clients
                log.exception("the record of %s could not be taken in", request_id)
        self._pump()


def _error(error: tuple[str, str], worker_id: str) -> RequestError:
    name, text = error
    return _ERRORS.get(name, EngineFailed)(text, worker_id=worker_id)
