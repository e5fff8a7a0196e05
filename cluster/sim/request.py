"""One request in virtual time: feeds its lifecycle with what happens and carries out the actions it answers with.

The counterpart of router/dispatcher.py. It decides nothing: lifecycle, placement and admission are the live ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.engine.scheduler.sequence import Sequence
from cluster.errors import PdserveError, RequestError, WorkerLost
from cluster.messages import Outcome, Path, Placement, Rejection, Request, RequestRecord, Stage, Ticket
from cluster.sim.kernel import Timer
from cluster.sim.record import token_times
from cluster.sim.worker import SimWorker
from router import lifecycle_messages as msg
from router.lifecycle import Lifecycle
from router.record import FirstToken, Measured, make_record, stages

if TYPE_CHECKING:
    from cluster.sim.fleet import Fleet


@dataclass(slots=True)
class Leg:
    """A sequence on an engine. `told` counts the tokens that the lifecycle was told of."""

    run: RequestRun
    attempt: int
    worker: SimWorker
    sequence: Sequence
    prefill: bool
    told: int = 0
    ticket: Ticket | None = None
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    transfer_blocks: int = 0


class RequestRun:
    """A request from its arrival to its record."""

    __slots__ = (
        "_first_leg",
        "_fleet",
        "_legs",
        "_placed_s",
        "_ticket",
        "_ticket_s",
        "_timer",
        "first_seen",
        "lifecycle",
        "output_tokens",
        "placement",
        "request",
    )

    def __init__(self, fleet: Fleet, request: Request, output_tokens: int) -> None:
        self._fleet, self.request, self.output_tokens = fleet, request, output_tokens
        self.lifecycle = Lifecycle(request, fleet.config.router.limits)
        self.placement: Placement | None = None
        self.first_seen = False
        self._legs: list[Leg] = []
        self._first_leg: Leg | None = None
        self._placed_s: float | None = None
        self._ticket: Ticket | None = None
        self._ticket_s = 0.0
        self._timer: Timer | None = None

    def feed(self, event: msg.Event) -> None:
        self._carry_out(self.lifecycle.on(event, self._fleet.kernel.now))

    def on_ticket(self, leg: Leg) -> None:
        """The prefill leg has ended and its KV is leased."""
        sequence, info, now = leg.sequence, leg.worker.info, self._fleet.kernel.now
        scheduled_s = sequence.scheduled_s if sequence.scheduled_s is not None else now
        # The engine's own time; `now` is later by the way back.
        computed_s, _, _ = token_times(leg.worker.engine, sequence)
        blocks = -(-sequence.prompt_tokens // info.block_size_tokens)
        ticket = Ticket(
            lease_id=sequence.seq_id,
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            kv_transfer_params={},
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            blocks=blocks,
            bytes=sequence.prompt_tokens * info.kv_bytes_per_token,
            queue_s=scheduled_s - sequence.arrival_s,
            compute_s=computed_s - scheduled_s,
        )
        if not self.first_seen:
            self._ticket, self._ticket_s = ticket, now
        self._fleet.placer.on_prefilled(self.request.request_id, now, ticket.cached_tokens)
        self.feed(msg.TicketReady(leg.attempt, ticket))

    def on_tokens(self, leg: Leg, *, finished: bool) -> None:
        """Tokens of a decode leg that the lifecycle has not been told of."""
        tokens = leg.sequence.generated - leg.told
        leg.told = leg.sequence.generated
        if not tokens:
            return
        if self._first_leg is None:
            self._first_leg = leg
        actions = self.lifecycle.on(msg.DecodeOutput(leg.attempt, 0, tokens, finished), self._fleet.kernel.now)
        if not self.first_seen:
            self.first_seen = True
            self._fleet.placer.on_first_token(self.request.request_id, self._fleet.kernel.now)
        self._carry_out(actions)

    def on_leg_failed(self, leg: Leg, error: RequestError) -> None:
        if leg.prefill:
            self.feed(msg.PrefillFailed(leg.attempt, error))
        else:
            self._catch_up()
            self.feed(msg.DecodeFailed(leg.attempt, 0, error))

    # Actions

    def _carry_out(self, actions: list[msg.Action]) -> None:
        for action in actions:
            match action:
                case msg.Place():
                    self._fleet.place(self, action)
                case msg.Unplace():
                    self._fleet.unplace(self)
                case msg.StartPrefill():
                    self._start_prefill(action)
                case msg.EndPrefill():
                    self._fleet.end_prefill(self._leg_id(action.attempt, "p"), pulled=action.pulled)
                case msg.StartDecode():
                    self._start_decode(action)
                case msg.CancelDecode():
                    self._fleet.cancel(self._leg_id(action.attempt, "d0"))
                case msg.SetTimer():
                    if self._timer:
                        self._timer.cancel()
                    self._timer = self._fleet.kernel.after(action.after_s, self._on_timer)
                case msg.Suspect():
                    self._fleet.suspect(action)
                case msg.Finish():
                    self._finish(action)

    def on_placed(self, action: msg.Place, placed: Placement | Rejection) -> None:
        if isinstance(placed, Rejection):
            self.feed(msg.Refused(action.attempt, placed))
            return
        self.placement = placed
        if self._placed_s is None:
            self._placed_s = self._fleet.kernel.now
        self.feed(msg.Placed(action.attempt, placed))

    def _start_prefill(self, action: msg.StartPrefill) -> None:
        sequence = Sequence(
            self._leg_id(action.attempt, "p"),
            self.request.prompt_tokens + action.tokens_sent,
            1,
            self.request.block_keys,
            priority=self.request.priority,
            lease=True,
        )
        self._open(action.attempt, action.worker, sequence, prefill=True)

    def _start_decode(self, action: msg.StartDecode) -> None:
        if action.tokens_sent == 0:
            self._legs.clear()
            self._first_leg = None
        sequence = Sequence(
            self._leg_id(action.attempt, "d0"),
            self.request.prompt_tokens + action.tokens_sent,
            self.output_tokens - action.tokens_sent,
            self.request.block_keys,
            priority=self.request.priority,
            remote=action.ticket is not None,
        )
        leg = self._open(action.attempt, action.worker, sequence, prefill=False, ticket=action.ticket)
        if leg is not None:
            self._legs.append(leg)

    def _open(
        self, attempt: int, worker_id: str, sequence: Sequence, *, prefill: bool, ticket: Ticket | None = None
    ) -> Leg | None:
        worker = self._fleet.workers.get(worker_id)
        if worker is None:
            lost = WorkerLost("the worker is gone", worker_id=worker_id)
            failed = msg.PrefillFailed(attempt, lost) if prefill else msg.DecodeFailed(attempt, 0, lost)
            self._fleet.kernel.after(0.0, self.feed, failed)
            return None
        leg = Leg(self, attempt, worker, sequence, prefill, ticket=ticket)
        self._fleet.open(leg)
        return leg

    def _on_timer(self) -> None:
        self._timer = None
        self._catch_up()
        self.feed(msg.TimerFired())

    def _catch_up(self) -> None:
        """Between its first and last token the engine reports nothing; limits want to know of progress."""
        if self._legs and self.first_seen:
            self._legs[-1].worker.engine.sync()
            self.on_tokens(self._legs[-1], finished=False)

    def _finish(self, action: msg.Finish) -> None:
        if self._timer:
            self._timer.cancel()
        self._fleet.finish(self._record(action.outcome, action.error))

    def _leg_id(self, attempt: int, leg: str) -> str:
        return f"{self.request.request_id}-{attempt}{leg}"

    # The record

    def _record(self, outcome: Outcome, error: PdserveError | None) -> RequestRecord:
        request, now, leg = self.request, self._fleet.kernel.now, self._first_leg
        first_s, last_s, tokens, itl_s = self._tokens()
        split = leg is not None and leg.ticket is not None
        cached = 0
        if leg is not None:
            cached = self._ticket.cached_tokens if split and self._ticket else leg.sequence.cached_tokens
        measured = Measured(
            output_tokens=tokens,
            ttft_s=None if first_s is None else first_s - request.arrival_s,
            tpot_s=None if first_s is None or last_s is None else (last_s - first_s) / max(1, tokens - 1),
            itl_s=itl_s,
            stage_s=self._stages(now if first_s is None else first_s),
            cached_tokens=cached,
            decode_computed_tokens=1 if split else 0,
            transfer_bytes=leg.transfer_bytes if leg else 0,
            transfer_blocks=leg.transfer_blocks if leg else 0,
            finish_reason="length" if outcome is Outcome.DONE else None,
        )
        return make_record(request, self.placement, self.lifecycle, measured, outcome, error, now)

    def _tokens(self) -> tuple[float | None, float | None, int, list[float]]:
        first_s: float | None = None
        last_s: float | None = None
        itl_s: list[float] = []
        tokens = 0
        for leg in self._legs:
            if not leg.sequence.generated:
                continue
            first, last, gaps = token_times(leg.worker.engine, leg.sequence)
            if last_s is not None:
                itl_s.append(first - last_s)
            first_s, last_s = first if first_s is None else first_s, last
            itl_s += gaps
            tokens += leg.sequence.generated
        return first_s, last_s, tokens, itl_s

    def _stages(self, until_s: float) -> dict[Stage, float]:
        leg = self._first_leg
        scheduled_s = leg.sequence.scheduled_s if leg else None
        return stages(
            self.request.arrival_s,
            self._placed_s,
            until_s,
            split=leg.ticket is not None if leg else self.placement is not None and self.placement.path is Path.SPLIT,
            ticket=self._ticket,
            ticket_s=self._ticket_s,
            first=FirstToken(until_s - scheduled_s, leg.transfer_s) if leg and scheduled_s is not None else None,
        )
