"""Events and actions of one request's lifecycle. Events are facts that happened; actions are orders to the driver.

`attempt` numbers the places that one request was given, from 1. Every event carries the attempt it belongs to, so
that an answer which comes late is recognised and what it carries (a place, a lease, a running leg) is given back.
`choice` numbers the samples of a request with `n > 1`, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.errors import RequestError
from cluster.messages import Outcome, Placement, Rejection, Role, Ticket


class Limit(StrEnum):
    """Which wait a timer measures. The names are those of `router.limits` without the unit."""

    QUEUE = "queue"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"
    IDLE = "idle"


class LeaseOutcome(StrEnum):
    """How an open prefill call ended by itself, after it had given its ticket."""

    PULLED = "pulled"
    EXPIRED = "expired"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Arrived:
    """The request was read, checked and tokenized."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement chose workers; whatever it holds for them is held until `Unplace`."""

    attempt: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Refused:
    """Placement or admission gave no place; nothing is held."""

    attempt: int
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class TicketReady:
    """The prefill call gave its ticket and stays open: that is the lease."""

    attempt: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The prefill call ended with an error, before or after its ticket."""

    attempt: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The prefill call ended by itself after its ticket."""

    attempt: int
    outcome: LeaseOutcome


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Output of one choice that the driver passes on to the client (or keeps, where the answer is not streamed).

    `finished` says that the engine named a natural finish reason (stop, length); an abort or an error of the
    engine is a `DecodeFailed`. `pulled`, in the first output, that the prompt's KV came by the ticket.
    """

    attempt: int
    choice: int
    tokens: int
    finished: bool = False
    pulled: bool = False


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    attempt: int
    choice: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client closed its connection or cancelled."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last `SetTimer` has come, or any other moment: the machine looks at the clock itself."""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker died or left; sent to every request, in whatever state it is."""

    worker_id: str


Event = (
    Arrived
    | Placed
    | Refused
    | TicketReady
    | PrefillFailed
    | LeaseEnded
    | DecodeOutput
    | DecodeFailed
    | ClientLeft
    | TimerFired
    | WorkerDown
)


@dataclass(frozen=True, slots=True)
class Place:
    """Ask placement for workers. Answered by `Placed` or `Refused`, or withdrawn by `Unplace`.

    Attributes:
        exclude: workers that have failed this request: to be used only where no other is left.
        local_only: no prefill leg: the decode engine computes the prompt itself.
        tokens_sent: output tokens that the new place continues after; 0 = from the start.
    """

    attempt: int
    exclude: frozenset[str] = frozenset()
    local_only: bool = False
    tokens_sent: int = 0


@dataclass(frozen=True, slots=True)
class Unplace:
    """Give back what placement holds for this attempt: its entry in the queue, or its share of the workers' load.

    Idempotent. Every `Place` ends with one `Refused` or at least one `Unplace`.
    """

    attempt: int


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Open the prefill call. Its prompt is the client's prompt and the first `tokens_sent` output tokens."""

    attempt: int
    worker: str
    tokens_sent: int = 0


@dataclass(frozen=True, slots=True)
class EndPrefill:
    """Close the prefill call: a running prefill is aborted, a lease is released. Idempotent.

    `pulled` says that the decode engine has it. Without, the KV is freed, also behind a first output: the decode
    engine had no need of it, or could not pull it and computed the prompt itself.
    """

    attempt: int
    pulled: bool = False


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Start one choice.

    Attributes:
        worker: an engine of the pool `role`. `Role.PREFILL` means that the prefill engine serves all of the
            request itself, which is how a request for one token never meets the decode pool.
        ticket: what to pull; None = compute the prompt here.
        tokens_sent: continue after that many output tokens of this choice (prompt and tokens become the prompt;
            max_tokens, min_tokens, stop buffer, usage and log probabilities are carried on). 0 = from the start:
            whatever the driver has kept of this choice from an earlier attempt is dropped.
    """

    attempt: int
    choice: int
    worker: str
    ticket: Ticket | None = None
    tokens_sent: int = 0
    role: Role = Role.DECODE


@dataclass(frozen=True, slots=True)
class CancelDecode:
    """Stop one choice's leg and drop anything it still sends. Idempotent."""

    attempt: int
    choice: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `TimerFired` after that time. A request has one timer; this replaces it, `Finish` ends it."""

    after_s: float
    limit: Limit


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker failed this request. With `peer` it is the transfer from `worker_id` to `peer` that failed."""

    worker_id: str
    reason: str
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The one end of the request; the last action. Nothing of the request is left open when it is given.

    `finish_reason` is set where the engine's own was lost although all tokens had been sent: the driver sends it.
    """

    outcome: Outcome
    error: RequestError | None = None
    finish_reason: str | None = None


Action = Place | Unplace | StartPrefill | EndPrefill | StartDecode | CancelDecode | SetTimer | Suspect | Finish
