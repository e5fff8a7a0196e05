"""The life of one request, as a pure state machine: `on(event, now) -> [action]`.

State      Event (of the current attempt)          Actions                                      Next
---------  --------------------------------------  -------------------------------------------  --------
NEW        Arrived                                 Place(1)                                     PLACING
PLACING    Placed, with a prefill worker           StartPrefill                                 PREFILL
PLACING    Placed, local or one token left         StartDecode for every choice                 DECODE
PLACING    Refused, the first time                 Finish rejected                              ENDED
PLACING    Refused, a retry or a migration         SetTimer: Place again soon, up to the        PLACING
                                                   queue limit; then Finish failed
PREFILL    TicketReady                             StartDecode for every choice, with ticket    DECODE
PREFILL    PrefillFailed, LeaseEnded, its worker   close, Suspect, retry                        PLACING
           is down
DECODE     DecodeOutput                            the first: EndPrefill                        DECODE
DECODE     DecodeOutput, every choice finished     EndPrefill if open, Unplace, Finish done     ENDED
DECODE     LeaseEnded pulled                       -                                            DECODE
DECODE     LeaseEnded otherwise, PrefillFailed,    close, Suspect, retry                        PLACING
           prefill worker down
DECODE     DecodeFailed, decode worker down        close, Suspect, retry or migrate             PLACING
any        TimerFired, a limit has passed          as if the leg that is waited for had failed
any        TimerFired, too early                   SetTimer for the rest                        same
any        ClientLeft                              close, Finish cancelled                      ENDED
any        event of an older attempt, or ENDED     give back what it carries                    same

close      CancelDecode for every unfinished choice, EndPrefill if the call is open, Unplace: the first leg that
           fails ends the other.
retry      nothing has reached the client: Place(attempt + 1) without the workers that failed, up to
           `limits.attempts` and within the first-token budget (queue + prefill + first token, from arrival). The
           last one avoids the transfer if a prefill or a transfer has failed. Output that an answer without
           streaming has gathered is dropped and computed again.
migrate    tokens have reached the client: Place(attempt + 1, tokens_sent) up to `limits.migrations`, if the
           request is movable; else Finish failed. With all tokens sent already: Finish done, reason length.

Errors that no other worker would answer differently (`retryable` is false) end the request at once.

There is one timer. It is armed for the nearest limit and never moved later, so output costs no action: when it
fires too early, it is set again for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.config import LimitsConfig
from cluster.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    LeaseExpired,
    NoWorker,
    Overloaded,
    RequestError,
    TenantOverBudget,
    TransferFailed,
    WorkerLost,
)
from cluster.messages import Outcome, Placement, Rejection, Request, Role, Ticket
from router.lifecycle_messages import (
    Action,
    Arrived,
    CancelDecode,
    ClientLeft,
    DecodeFailed,
    DecodeOutput,
    EndPrefill,
    Event,
    Finish,
    LeaseEnded,
    LeaseOutcome,
    Limit,
    Place,
    Placed,
    PrefillFailed,
    Refused,
    SetTimer,
    StartDecode,
    StartPrefill,
    Suspect,
    TicketReady,
    TimerFired,
    Unplace,
    WorkerDown,
)

PLACE_AGAIN_S = 0.25
"""Pause between the tries to place a request that has failed once: a worker may be on its way back."""


class State(StrEnum):
    NEW = "new"
    PLACING = "placing"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(slots=True)
class _Choice:
    """One sample. `shown` and `since_s` belong to the current attempt; tokens and finished to the whole request."""

    tokens: int = 0
    finished: bool = False
    shown: bool = False
    since_s: float = 0.0


class Lifecycle:
    """One request.

    Args:
        request: `n`, `max_output_tokens` and `movable` are read. A request with `n > 1` is not movable.
        limits: how long each wait may take and how often another place is tried.
        streaming: False where the client sees nothing before the end, so that all may be computed again.

    Attributes:
        state, attempt, tries, migrations, placement: for records and status; `tries` counts places before the
            first token.
    """

    __slots__ = (
        "_again_s",
        "_armed_s",
        "_budget_s",
        "_choices",
        "_decoder",
        "_exclude",
        "_first_s",
        "_limits",
        "_place_order",
        "_prefill_open",
        "_refusal",
        "_request",
        "_since_s",
        "_split_failures",
        "_streaming",
        "attempt",
        "migrations",
        "placement",
        "state",
        "tries",
    )

    def __init__(self, request: Request, limits: LimitsConfig, *, streaming: bool = True) -> None:
        self.state = State.NEW
        self.attempt = 0
        self.tries = 0
        self.migrations = 0
        self.placement: Placement | None = None
        self._request = request
        self._limits = limits
        self._streaming = streaming
        self._choices = [_Choice() for _ in range(request.n)]
        self._exclude: frozenset[str] = frozenset()
        self._split_failures = 0
        self._prefill_open = False
        self._decoder = ""
        self._first_s = 0.0
        self._since_s = 0.0
        self._budget_s = 0.0
        self._armed_s: float | None = None
        self._place_order = Place(0)
        self._again_s: float | None = None
        self._refusal: RequestError | None = None

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    @property
    def lease_open(self) -> bool:
        """Whether the prefill call (and with it the prompt's KV) is held."""
        return self._prefill_open

    def on(self, event: Event, now: float) -> list[Action]:
        """Take a fact, give orders. Never raises: an event that cannot be is treated as one that came late."""
        match event:
            case DecodeOutput():
                return self._on_output(event, now)
            case TimerFired():
                return self._on_timer(now)
            case Arrived():
                return self._on_arrived(now)
            case Placed():
                return self._on_placed(event, now)
            case Refused():
                return self._on_refused(event, now)
            case TicketReady():
                return self._on_ticket(event, now)
            case PrefillFailed():
                return self._on_prefill_failed(event, now)
            case LeaseEnded():
                return self._on_lease_ended(event, now)
            case DecodeFailed():
                return self._on_decode_failed(event, now)
            case ClientLeft():
                if self.ended:
                    return []
                return [*self._close(), self._finish(Outcome.CANCELLED, Cancelled("the client left"))]
            case WorkerDown():
                return self._on_worker_down(event, now)

    # Placing

    def _on_arrived(self, now: float) -> list[Action]:
        if self.state is not State.NEW:
            return []
        self._budget_s = now + self._limits.queue_s + self._limits.prefill_s + self._limits.first_token_s
        self.tries = 1
        return self._place(now, local_only=False)

    def _place(self, now: float, *, local_only: bool) -> list[Action]:
        self.attempt += 1
        self.state = State.PLACING
        self.placement = None
        self._since_s = now
        self._again_s = self._refusal = None
        self._place_order = Place(self.attempt, self._exclude, local_only, self._tokens_sent)
        # The timer first: the driver may answer a Place before it returns, and that may set a nearer one.
        return [*self._arm(now), self._place_order]

    def _on_placed(self, event: Placed, now: float) -> list[Action]:
        if self.state is not State.PLACING or event.attempt != self.attempt:
            return [] if self._is_current(event.attempt) else [Unplace(event.attempt)]
        self.placement = event.placement
        self._since_s = now
        prefill = event.placement.prefill
        if prefill is None:
            return self._start_decode(event.placement.decode, Role.DECODE, None, now)
        if self._request.max_output_tokens - self._tokens_sent == 1:
            return self._start_decode(prefill, Role.PREFILL, None, now)
        self.state = State.PREFILL
        self._prefill_open = True
        return [StartPrefill(self.attempt, prefill, self._tokens_sent), *self._arm(now)]

    def _on_refused(self, event: Refused, now: float) -> list[Action]:
        if self.state is not State.PLACING or event.attempt != self.attempt:
            return []
        if self.attempt == 1:
            return [self._finish(Outcome.REJECTED, _refusal(event.rejection))]
        # It was accepted, and its client waits: a pause is better than an error.
        self._refusal = _refusal(event.rejection)
        self._again_s = now + PLACE_AGAIN_S
        return self._arm(now)

    # The prefill leg and its lease

    def _on_ticket(self, event: TicketReady, now: float) -> list[Action]:
        if event.attempt == self.attempt and self.state is State.PREFILL and self.placement is not None:
            return self._start_decode(self.placement.decode, Role.DECODE, event.ticket, now)
        if event.attempt == self.attempt and self._prefill_open:
            return []
        return [EndPrefill(event.attempt)]

    def _on_prefill_failed(self, event: PrefillFailed, now: float) -> list[Action]:
        if event.attempt != self.attempt or not self._prefill_open:
            return []
        self._prefill_open = False
        return self._prefill_lost(event.error, now)

    def _on_lease_ended(self, event: LeaseEnded, now: float) -> list[Action]:
        if event.attempt != self.attempt or not self._prefill_open:
            return []
        self._prefill_open = False
        if self.state is State.DECODE and event.outcome is LeaseOutcome.PULLED:
            return []
        if event.outcome is LeaseOutcome.EXPIRED:
            # The prefill engine kept its word; whoever did not pull in time may not do so the next time either.
            assert self.placement is not None and self.placement.prefill is not None
            self._exclude |= {self.placement.decode}
            error = LeaseExpired("the prompt's KV expired before it was pulled")
            return self._fail(error, now, self.placement.prefill, peer=self.placement.decode)
        return self._prefill_lost(WorkerLost("the prefill call ended before its KV was pulled"), now)

    def _prefill_lost(self, error: RequestError, now: float) -> list[Action]:
        assert self.placement is not None and self.placement.prefill is not None
        return self._fail(error, now, self.placement.prefill)

    # The decode legs

    def _start_decode(self, worker: str, role: Role, ticket: Ticket | None, now: float) -> list[Action]:
        self.state = State.DECODE
        self._decoder = worker
        # An engine that computes the prompt itself has the prefill's time as well.
        self._first_s = self._limits.first_token_s + (0.0 if ticket else self._limits.prefill_s)
        actions: list[Action] = []
        for index, choice in enumerate(self._choices):
            choice.shown = False
            choice.since_s = now
            actions.append(StartDecode(self.attempt, index, worker, ticket, choice.tokens, role))
        actions += self._arm(now)
        return actions

    def _on_output(self, event: DecodeOutput, now: float) -> list[Action]:
        choice = self._running(event.attempt, event.choice)
        if choice is None:
            if event.finished or self._is_finished(event.attempt, event.choice):
                return []
            return [CancelDecode(event.attempt, event.choice)]
        choice.tokens += event.tokens
        choice.finished = event.finished
        choice.since_s = now
        if event.finished or not choice.shown:
            for other in self._choices:
                if not other.shown:
                    # Choices start after the first one's first token, which brings their prompt's KV along, or when one
                    # that ends leaves them room.
                    other.since_s = now
        if choice.shown or not (event.tokens or event.finished):
            return self._done_if_all_finished() if event.finished else []
        choice.shown = True
        actions: list[Action] = []
        if self._prefill_open:
            # Nothing more is pulled: the other choices find the prompt where the first one is.
            self._prefill_open = False
            actions.append(EndPrefill(self.attempt, event.pulled))
        if event.finished:
            actions += self._done_if_all_finished()
        return actions if self.ended else actions + self._arm(now)

    def _done_if_all_finished(self) -> list[Action]:
        if not all(c.finished for c in self._choices):
            return []
        return [*self._close(), self._finish(Outcome.DONE)]

    def _on_decode_failed(self, event: DecodeFailed, now: float) -> list[Action]:
        choice = self._running(event.attempt, event.choice)
        if choice is None:
            return []
        return self._decode_lost(event.error, now, ended=choice)

    def _decode_lost(self, error: RequestError, now: float, ended: _Choice | None = None) -> list[Action]:
        assert self.placement is not None
        prefill = self.placement.prefill
        if isinstance(error, TransferFailed | LeaseExpired) and prefill is not None:
            return self._fail(error, now, prefill, peer=self.placement.decode, ended=ended)
        if isinstance(error, DeadlineExceeded) and self._prefill_open and prefill is not None:
            # No first token while KV may still be on its way: either side may hang.
            self._exclude |= {self._decoder}
            return self._fail(error, now, prefill, peer=self._decoder, ended=ended)
        return self._fail(error, now, self._decoder, ended=ended)

    # Failure: close everything, then another place or the end

    def _on_worker_down(self, event: WorkerDown, now: float) -> list[Action]:
        if self.placement is None or self.ended:
            return []
        lost = WorkerLost("the worker died", worker_id=event.worker_id)
        if self.state is State.DECODE and event.worker_id == self._decoder:
            return self._decode_lost(lost, now)
        if self._prefill_open and event.worker_id == self.placement.prefill:
            return self._prefill_lost(lost, now)
        return []

    def _on_timer(self, now: float) -> list[Action]:
        self._armed_s = None
        due = self._due()
        if due is None:
            return []
        at_s, limit = due
        if now < at_s:
            return self._arm(now)
        if self._again_s is not None and self._again_s == at_s:
            self._again_s = None
            return [*self._arm(now), self._place_order]
        waited = f"{limit.replace('_', ' ')} limit of {self._limit_s(limit):g} s passed"
        if limit is Limit.QUEUE:
            outcome = Outcome.REJECTED if self.attempt == 1 else Outcome.FAILED
            error = self._refusal or Overloaded(f"no worker was free: {waited}", retry_after_s=1.0)
            return [*self._close(), self._finish(outcome, error)]
        if limit is Limit.PREFILL:
            return self._prefill_lost(DeadlineExceeded(waited), now)
        return self._decode_lost(DeadlineExceeded(waited), now)

    def _fail(
        self, error: RequestError, now: float, worker: str, *, peer: str | None = None, ended: _Choice | None = None
    ) -> list[Action]:
        assert self.placement is not None
        actions = self._close(ended)
        if not (error.retryable or isinstance(error, DeadlineExceeded)):
            return [*actions, self._finish(_outcome_of(error), error)]
        if not isinstance(error, NoWorker):  # a worker that only refused (it drains, it is full) is not ill
            actions.append(Suspect(worker, type(error).__name__, peer))
        self._exclude |= {worker}
        if worker == self.placement.prefill:
            self._split_failures += 1
        return actions + self._another_place(error, now)

    def _another_place(self, error: RequestError, now: float) -> list[Action]:
        seen = any(c.tokens or c.finished for c in self._choices)
        movable = self._request.movable and len(self._choices) == 1
        if seen and movable:
            if self._tokens_sent >= self._request.max_output_tokens:
                return [self._finish(Outcome.DONE, finish_reason="length")]
            if self.migrations >= self._limits.migrations:
                return [self._finish(Outcome.FAILED, error)]
            self.migrations += 1
            last = self.migrations == self._limits.migrations
        elif seen and self._streaming:
            return [self._finish(Outcome.FAILED, error)]
        else:
            if self.tries >= self._limits.attempts or now >= self._budget_s:
                return [self._finish(Outcome.FAILED, error)]
            self.tries += 1
            last = self.tries == self._limits.attempts
            self._choices = [_Choice() for _ in self._choices]
        return self._place(now, local_only=last and self._split_failures > 0)

    def _close(self, ended: _Choice | None = None) -> list[Action]:
        """Orders that end everything of the current attempt, except the leg that has `ended` by itself."""
        actions: list[Action] = []
        if self.state is State.DECODE:
            for index, choice in enumerate(self._choices):
                if not choice.finished and choice is not ended:
                    actions.append(CancelDecode(self.attempt, index))
        if self._prefill_open:
            self._prefill_open = False
            actions.append(EndPrefill(self.attempt))
        if self.state not in (State.NEW, State.ENDED):
            actions.append(Unplace(self.attempt))
        return actions

    def _finish(self, outcome: Outcome, error: RequestError | None = None, finish_reason: str | None = None) -> Finish:
        self.state = State.ENDED
        self._armed_s = None
        return Finish(outcome, error, finish_reason)

    # Limits

    def _arm(self, now: float) -> list[Action]:
        due = self._due()
        if due is None or (self._armed_s is not None and self._armed_s <= due[0]):
            return []
        self._armed_s = due[0]
        return [SetTimer(max(0.0, due[0] - now), due[1])]

    def _due(self) -> tuple[float, Limit] | None:
        """The nearest moment at which a limit passes."""
        limits = self._limits
        if self.state is State.PLACING:
            end_s = self._within_budget(self._since_s + limits.queue_s)
            return (end_s if self._again_s is None else min(end_s, self._again_s)), Limit.QUEUE
        if self.state is State.PREFILL:
            return self._within_budget(self._since_s + limits.prefill_s), Limit.PREFILL
        if self.state is not State.DECODE:
            return None
        left = [choice for choice in self._choices if not choice.finished]
        running = [choice for choice in left if choice.shown]
        # Choices that the engine has no room for wait for those that run, which show that it is well.
        return min(
            (choice.since_s + limits.idle_s, Limit.IDLE)
            if choice.shown
            else (self._within_budget(choice.since_s + self._first_s), Limit.FIRST_TOKEN)
            for choice in running or left
        )

    def _within_budget(self, at_s: float) -> float:
        """A retry may not stretch the wait for the first token; a migration has nothing to do with it."""
        begun = self._tokens_sent or any(choice.shown for choice in self._choices)
        return at_s if begun else min(at_s, self._budget_s)

    def _limit_s(self, limit: Limit) -> float:
        value: float = getattr(self._limits, f"{limit.value}_s")
        return value

    # Small questions

    @property
    def _tokens_sent(self) -> int:
        """Tokens that a new place continues after; only a request with one choice has any."""
        return self._choices[0].tokens if len(self._choices) == 1 else 0

    def _is_current(self, attempt: int) -> bool:
        return attempt == self.attempt and self.state in (State.PREFILL, State.DECODE)

    def _running(self, attempt: int, index: int) -> _Choice | None:
        if self.state is not State.DECODE or attempt != self.attempt or not 0 <= index < len(self._choices):
            return None
        choice = self._choices[index]
        return None if choice.finished else choice

    def _is_finished(self, attempt: int, index: int) -> bool:
        return attempt == self.attempt and 0 <= index < len(self._choices) and self._choices[index].finished


def _refusal(rejection: Rejection) -> RequestError:
    kinds: dict[int, type[RequestError]] = {400: BadRequest, 429: TenantOverBudget}
    return kinds.get(rejection.status, Overloaded)(rejection.reason, retry_after_s=rejection.retry_after_s)


def _outcome_of(error: RequestError) -> Outcome:
    return Outcome.REJECTED if 400 <= error.status < 500 else Outcome.FAILED
