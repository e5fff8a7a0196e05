"""Runs requests: feeds each one's lifecycle with what happens and carries out the actions it answers with.

One event loop, no locks: every callback runs to its end. Nothing here decides; placement, lifecycle and breaker do.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.config import LimitsConfig
from cluster.engine.base import EngineDelta
from cluster.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    LeaseExpired,
    NoWorker,
    RequestError,
    TransferFailed,
    WorkerLost,
)
from cluster.messages import (
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
from router.legs import Leg, Legs
from router.lifecycle import Lifecycle
from router.members import Members
from router.run import Run
from router.seams import Deliver, Job, Placing
from router.waiting import WaitingRoom

if TYPE_CHECKING:  # the transport brings Ray along; deciding needs none of it
    from router.transport import Transport

log = logging.getLogger(__name__)

_ERRORS: dict[str, type[RequestError]] = {
    kind.__name__: kind
    for kind in (BadRequest, TransferFailed, LeaseExpired, EngineFailed, WorkerLost, NoWorker, DeadlineExceeded)
}
_NATURAL_ENDS = frozenset({"stop", "length", "repetition"})


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
        self.members = Members(placer, limits, lambda: self._legs.owing(), self._on_lost, clock)
        self.workers, self.loads, self.health = self.members.workers, self.members.loads, self.members.health
        self._legs = Legs(transport, self.workers, ticket_request, self.on_leg_end, clock)
        self.retries = self.migrations = 0

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
        self.members.close()
        if self.room is not None:
            self.room.close()

    # From the transport

    def on_worker_up(self, info: WorkerInfo) -> None:
        self.members.up(info)

    def on_worker_down(self, worker_id: str) -> None:
        self.members.down(worker_id)

    def on_load(self, snapshot: WorkerSnapshot) -> None:
        if not self.members.loaded(snapshot):
            return
        if snapshot.state is WorkerState.DEAD:
            # Its leases too: finished prefills, of which the engine itself can say nothing any more.
            self.members.lose(snapshot.worker_id, "its engine died")
            self.members.down(snapshot.worker_id)

    def on_outputs(self, worker_id: str, outputs: list[Output]) -> None:
        now = self._clock()
        self.health.heard(worker_id, None, now)
        batch: list[tuple[Any, int, EngineDelta, int | None]] = []
        facts: list[tuple[Run, int, int, Output]] = []
        # After the tokens of the same step: a failed choice may start all of its request's choices anew, and what they
        # had before must not enter their new output.
        failed: list[tuple[Leg, RequestError, bool]] = []
        for output in outputs:
            leg = self._legs.get(output.request_id)
            if leg is None:
                continue
            run, choice = leg.run, leg.choice
            if output.error is not None:
                failed.append((leg, _error(output.error, worker_id), True))
            elif choice is None:
                self._on_prefill_output(leg, output, now)
            elif output.offset_tokens != run.leg_tokens(choice):
                failed.append((leg, WorkerLost("output was lost on the way", worker_id=worker_id), False))
            elif output.finish_reason in ("abort", "error"):
                failed.append((leg, EngineFailed("the engine ended the request", worker_id=worker_id), True))
            else:
                if output.offset_tokens == 0 and output.token_ids:
                    peer = run.placement.prefill if run.placement is not None and output.external_tokens else None
                    self.health.served(worker_id, peer, now)
                    if leg.pulls and not output.external_tokens:
                        self._on_nothing_pulled(leg, output)
                leg.finished = output.finish_reason is not None
                delta = output.delta()
                cached = run.on_output(choice, delta, now)
                batch.append((run.job, choice, delta, cached))
                facts.append((run, leg.attempt, choice, output))
        if batch:
            self._hand_on(batch, facts, now)
        for leg, error, ended in failed:
            if self._legs.get(leg.leg_id) is leg:
                self._leg_failed(leg, error, ended=ended)

    def _on_nothing_pulled(self, leg: Leg, output: Output) -> None:
        """An engine whose pull failed computes the prompt itself (`on_failure: recompute`): no error tells of it.

        An engine that holds all full blocks of the prompt has nothing to pull, which is no failure.
        """
        run, info = leg.run, self.workers.get(leg.worker_id)
        prefill = None if run.placement is None else run.placement.prefill
        if info is None or prefill is None or output.cached_tokens is None:
            return
        prompt_tokens = run.request.prompt_tokens + run.tokens(0)  # what was sent before is prompt on this leg
        if prompt_tokens - output.cached_tokens > info.block_size_tokens:
            self.members.suspect(prefill, TransferFailed.__name__, leg.worker_id)

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
            tokens, pulled = len(output.token_ids), bool(output.external_tokens)
            actions = run.lifecycle.on(msg.DecodeOutput(attempt, choice, tokens, finished, pulled), now)
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
        self.members.link_lost(worker_id)

    def _leg_incomplete(self, leg_id: str) -> None:
        leg = self._legs.get(leg_id)
        if leg is not None:
            self._leg_failed(leg, WorkerLost("the leg ended before its output was complete"), ended=True)

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
                    self.members.asked(action.worker)
                    self._legs.start_prefill(run, action)
                case msg.EndPrefill():
                    self._legs.end_prefill(run, action)
                case msg.StartDecode():
                    self.members.asked(action.worker)
                    self._legs.start_decode(run, action)
                case msg.CancelDecode():
                    self._legs.cancel(run, action.attempt, action.choice)
                case msg.SetTimer():
                    run.set_timer(asyncio.get_running_loop().call_later(action.after_s, self._on_timer, run))
                case msg.Suspect():
                    self.members.suspect(action.worker_id, action.reason, action.peer)
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
        if action.attempt == 1:
            self.members.take_back()
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
        """Placement's choice, without pairs whose transfers fail.

        First another decode worker for the same prefill worker. Only where that gives no transfer, another prefill
        worker: without any, a policy may refuse the client.
        """
        prefill = ""
        others: frozenset[str] = frozenset()  # decode workers out of this choice, because of `prefill` alone
        while True:
            placed = self.placer.place(request, now, self._rng, exclude=exclude | others, local_only=local)
            if isinstance(placed, Rejection) or placed.prefill is None:
                if not others:
                    return placed
                exclude, others = exclude | {prefill}, frozenset()
                continue
            if request.max_output_tokens == 1:
                return placed  # served where it is prefilled: nothing is transferred
            prefill = placed.prefill
            pair = (prefill, placed.decode)
            if self.health.pairs.allows(pair, now):
                self.health.pairs.begin(pair, now)
                return placed
            if self._may_pull(prefill, exclude | others | {placed.decode}, now):
                others |= {placed.decode}
            else:
                exclude, others = exclude | {prefill}, frozenset()

    def _may_pull(self, prefill: str, without: frozenset[str], now: float) -> bool:
        """Whether another decode worker is trusted with transfers from there."""
        decodes = [i for i, info in self.workers.items() if info.role is Role.DECODE and i not in without]
        return any(self.health.pairs.allows((prefill, worker_id), now) for worker_id in decodes)

    def _on_prefill_output(self, leg: Leg, output: Output, now: float) -> None:
        if output.kv_transfer_params is None:
            if output.finish_reason is not None:
                error = TransferFailed("the prefill engine gave no ticket", worker_id=leg.worker_id)
                self._leg_failed(leg, error, ended=True)
            return
        run, ticket = leg.run, self._legs.grant(leg, output, now)
        run.on_ticket(ticket, now)
        self.health.served(leg.worker_id, None, now)
        self.placer.on_prefilled(run.request.request_id, now, ticket.cached_tokens)
        self._feed(run, msg.TicketReady(leg.attempt, ticket))
        self._pump()

    def _leg_failed(self, leg: Leg, error: RequestError, *, ended: bool = False) -> None:
        """`ended` says that its worker told so and holds nothing more of it."""
        if ended:
            self._legs.ended(leg.leg_id, LeaseEnd.RELEASED)
        else:
            self._legs.give_up(leg)
        if isinstance(error, EngineFailed):
            error.retryable = True
        if leg.choice is None:
            self._feed(leg.run, msg.PrefillFailed(leg.attempt, error))
        else:
            self._feed(leg.run, msg.DecodeFailed(leg.attempt, leg.choice, error))

    def _on_lost(self, worker_id: str) -> None:
        """Every request with a leg there goes elsewhere."""
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
        run.job.end(record.outcome, error, action.finish_reason, record)
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
