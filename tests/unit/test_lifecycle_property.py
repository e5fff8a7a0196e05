"""Any order of events gives one terminal state and leaves no place, no lease and no leg open."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import LimitsConfig
from cluster.errors import BadRequest, NoWorker, RequestError, TransferFailed, WorkerLost
from cluster.messages import Path, Placement, Rejection, Request, Slo, Ticket
from router.lifecycle import Lifecycle
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
    Place,
    Placed,
    PrefillFailed,
    Refused,
    SetTimer,
    StartDecode,
    StartPrefill,
    TicketReady,
    TimerFired,
    Unplace,
    WorkerDown,
)

LIMITS = LimitsConfig(queue_s=10, prefill_s=20, first_token_s=5, idle_s=4, attempts=3, migrations=2)
TICKET = Ticket("lease", "p0", "i0", {}, 100, 0, 7, 7000, 0.01, 0.1)
ERRORS: list[RequestError] = [WorkerLost("w"), TransferFailed("t"), NoWorker("n"), BadRequest("b")]
WORKERS = ["p0", "p1", "d0", "d1"]


class World:
    """Everything that a driver would hold open for one request, and the rules that its machine must keep."""

    def __init__(self, n: int, movable: bool, streaming: bool, max_tokens: int) -> None:
        self.n, self.max_tokens, self.streaming = n, max_tokens, streaming
        request = Request("r", 0.0, 100, max_tokens, Slo(1, 1), n=n, movable=movable)
        self.machine = Lifecycle(request, LIMITS, streaming=streaming)
        self.now = 0.0
        self.attempt = 0
        self.places: set[int] = set()
        self.placed: set[int] = set()
        self.refused: set[int] = set()
        self.calls: set[int] = set()
        self.leases: set[int] = set()
        self.legs: set[tuple[int, int]] = set()
        self.sent = [0] * n
        self.timer_s: float | None = None
        self.finish: Finish | None = None

    def feed(self, event: Event) -> None:
        match event:
            case Refused(attempt):
                if attempt not in self.placed:
                    self.places.discard(attempt)
                    self.refused.add(attempt)
            case Placed(attempt):
                self.places.add(attempt)
                self.placed.add(attempt)
            case TicketReady(attempt):
                self.leases.add(attempt)
            case PrefillFailed(attempt) | LeaseEnded(attempt):
                self.calls.discard(attempt)
                self.leases.discard(attempt)
            case DecodeOutput(attempt, choice, tokens, finished):
                if (attempt, choice) in self.legs:
                    self.sent[choice] += tokens
                if finished:
                    self.legs.discard((attempt, choice))
            case DecodeFailed(attempt, choice):
                self.legs.discard((attempt, choice))
            case TimerFired():
                self.timer_s = None
        was_ended = self.finish is not None
        for action in self.machine.on(event, self.now):
            self.obey(action, was_ended)
        assert self.machine.ended == (self.finish is not None)
        if self.finish is not None:
            self.assert_nothing_open()
        elif self.attempt:
            assert self.timer_s is not None, "a request waits without a limit"

    def obey(self, action: Action, was_ended: bool) -> None:
        assert self.finish is None or was_ended, f"{action} after Finish"
        match action:
            case Place(attempt, _, _, tokens_sent):
                assert not was_ended
                assert attempt == self.attempt + 1 or (attempt == self.attempt > 1 and attempt in self.refused)
                self.refused.discard(attempt)
                assert not (self.places or self.calls or self.leases or self.legs), "an attempt starts beside another"
                if not tokens_sent:
                    assert not (self.streaming and any(self.sent)), "tokens would be sent twice"
                    self.sent = [0] * self.n
                assert tokens_sent == (self.sent[0] if self.n == 1 else 0)
                self.attempt = attempt
                self.places.add(attempt)
            case Unplace(attempt):
                self.places.discard(attempt)
            case StartPrefill(attempt):
                assert not was_ended
                assert attempt in self.places
                self.calls.add(attempt)
            case EndPrefill(attempt):
                self.calls.discard(attempt)
                self.leases.discard(attempt)
            case StartDecode(attempt, choice, _, ticket, tokens_sent):
                assert not was_ended
                assert attempt in self.places
                assert (ticket is None) == (attempt not in self.calls), "a ticket without its call, or the reverse"
                assert tokens_sent == self.sent[choice]
                assert (attempt, choice) not in self.legs
                self.legs.add((attempt, choice))
            case CancelDecode(attempt, choice):
                self.legs.discard((attempt, choice))
            case SetTimer(after_s):
                assert after_s >= 0
                self.timer_s = self.now + after_s
            case Finish():
                assert self.finish is None, "ended twice"
                self.finish = action

    def assert_nothing_open(self) -> None:
        assert not self.places
        assert not self.calls
        assert not self.leases
        assert not self.legs
        assert self.machine.tries <= LIMITS.attempts
        assert self.machine.migrations <= LIMITS.migrations


def an_event(world: World, kind: int, a: int, b: int) -> Event:
    """One of the kinds of events; mostly of the current attempt, sometimes of an older or one that never was (0)."""
    attempt = world.attempt if a % 5 else max(0, world.attempt - a % 3)
    choice = b % (world.n + 1) if b % 7 == 0 else b % world.n
    error = ERRORS[b % len(ERRORS)]
    match kind:
        case 0 | 1 | 2:
            where = Placement(Path.LOCAL_SHORT, "d1") if b % 3 == 0 else Placement(Path.SPLIT, "d0", "p0")
            return Placed(attempt, where)
        case 3:
            return Refused(attempt, Rejection(503, "full"))
        case 4 | 5 | 6:
            return TicketReady(attempt, TICKET)
        case 7:
            return PrefillFailed(attempt, error)
        case 8:
            return LeaseEnded(attempt, list(LeaseOutcome)[b % 3])
        case 9 | 10 | 11 | 12:
            left = world.max_tokens - (world.sent[choice] if choice < world.n else 0)
            return DecodeOutput(attempt, choice, min(b % 3, left), finished=b % 5 == 0)
        case 13:
            return DecodeFailed(attempt, choice, error)
        case 14:
            return WorkerDown(WORKERS[b % 4])
        case 15:
            return TimerFired()
        case _:
            return ClientLeft() if b % 4 == 0 else Arrived()


def run(world: World, rng: random.Random, events: int) -> None:
    if rng.random() < 0.97:
        world.feed(Arrived())
    for _ in range(events):
        world.now += rng.random() * (6 if rng.random() < 0.1 else 0.5)
        bits = rng.getrandbits(24)
        world.feed(an_event(world, (bits & 0xFF) % 17, (bits >> 8) & 0xFF, bits >> 16))


def settle(world: World) -> None:
    """However it stands: with no further answer from anyone, the limits alone end it."""
    if not world.attempt and world.finish is None:
        world.feed(Arrived())
    fired = 0
    while world.finish is None:
        assert world.timer_s is not None
        world.now = max(world.now, world.timer_s)
        world.feed(TimerFired())
        fired += 1
        assert fired < 50, "the limits do not end the request"


def test_sixty_thousand_random_orders_end_once_and_leave_nothing_open() -> None:
    rng = random.Random(20261129)
    outcomes: dict[str, int] = {}
    migrated = retried = 0
    for _ in range(60_000):
        n = rng.choice((1, 1, 1, 2, 3))
        world = World(n, rng.random() < 0.7, rng.random() < 0.7, rng.choice((1, 2, 8)))
        run(world, rng, rng.randrange(1, 16))
        if rng.random() < 0.5:
            world.feed(ClientLeft())
        settle(world)
        assert world.finish is not None
        outcomes[world.finish.outcome] = outcomes.get(world.finish.outcome, 0) + 1
        migrated += world.machine.migrations > 0
        retried += world.machine.tries > 1
    # The orders must have reached every end and every detour, or the test would show nothing.
    assert min(outcomes.values()) > 500
    assert len(outcomes) == 4
    assert migrated > 500
    assert retried > 500


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 3),
    movable=st.booleans(),
    streaming=st.booleans(),
    max_tokens=st.sampled_from((1, 2, 8)),
    steps=st.lists(
        st.tuples(st.integers(0, 16), st.integers(0, 20), st.integers(0, 20), st.floats(0, 12)), max_size=25
    ),
)
def test_shrinkable_orders_end_once_and_leave_nothing_open(
    n: int, movable: bool, streaming: bool, max_tokens: int, steps: list[tuple[int, int, int, float]]
) -> None:
    world = World(n, movable, streaming, max_tokens)
    world.feed(Arrived())
    for kind, a, b, wait_s in steps:
        world.now += wait_s
        world.feed(an_event(world, kind, a, b))
    settle(world)
