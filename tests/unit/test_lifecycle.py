"""The request lifecycle as tables: a history of events, and the whole list of orders that each must give."""

from __future__ import annotations

import pytest

from cluster.config import LimitsConfig
from cluster.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    LeaseExpired,
    NoWorker,
    Overloaded,
    RequestError,
    TenantOverBudget,
    TransferFailed,
    WorkerLost,
)
from cluster.messages import Outcome, Path, Placement, Rejection, Request, Role, Slo, Ticket
from router.lifecycle import PLACE_AGAIN_S, Lifecycle, State
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

LIMITS = LimitsConfig(queue_s=10, prefill_s=20, first_token_s=5, idle_s=4, attempts=3, migrations=2)
TICKET = Ticket("lease", "p0", "i0", {"remote_block_ids": [1]}, 100, 0, 7, 7000, 0.01, 0.1)
LOST = WorkerLost("the actor died")


def ids(*names: str) -> frozenset[str]:
    return frozenset(names)


def split(prefill: str = "p0", decode: str = "d0") -> Placement:
    return Placement(Path.SPLIT, decode, prefill)


def local(decode: str = "d0") -> Placement:
    return Placement(Path.LOCAL_SHORT, decode)


def machine(*, n: int = 1, max_tokens: int = 20, movable: bool = True, streaming: bool = True) -> Lifecycle:
    request = Request("r", 0.0, 100, max_tokens, Slo(1, 1), n=n, movable=movable)
    return Lifecycle(request, LIMITS, streaming=streaming)


def play(m: Lifecycle, *history: tuple[float, Event]) -> list[Action]:
    """All orders of the last event."""
    actions: list[Action] = []
    for at_s, event in history:
        actions = m.on(event, at_s)
    return actions


ARRIVED = (0.0, Arrived())
PLACED = (1.0, Placed(1, split()))
TICKETED = (2.0, TicketReady(1, TICKET))
FIRST = (3.0, DecodeOutput(1, 0, 1, pulled=True))


def test_the_split_path_from_arrival_to_done() -> None:
    m = machine()
    assert m.on(Arrived(), 0.0) == [SetTimer(10, Limit.QUEUE), Place(1)]
    assert m.on(Placed(1, split()), 1.0) == [StartPrefill(1, "p0")]
    assert m.on(TicketReady(1, TICKET), 2.0) == [StartDecode(1, 0, "d0", TICKET), SetTimer(5, Limit.FIRST_TOKEN)]
    assert m.lease_open
    assert m.on(DecodeOutput(1, 0, 1, pulled=True), 3.0) == [EndPrefill(1, pulled=True)]
    assert not m.lease_open
    assert m.on(DecodeOutput(1, 0, 3), 3.1) == []
    assert m.on(DecodeOutput(1, 0, 16, finished=True), 3.2) == [Unplace(1), Finish(Outcome.DONE)]
    assert m.ended


def test_a_local_path_has_no_prefill_leg() -> None:
    m = machine()
    m.on(Arrived(), 0.0)
    assert m.on(Placed(1, local()), 1.0) == [StartDecode(1, 0, "d0")]
    assert m.on(DecodeOutput(1, 0, 2), 2.0) == [SetTimer(4, Limit.IDLE)]
    assert m.on(DecodeOutput(1, 0, 0, finished=True), 3.0) == [Unplace(1), Finish(Outcome.DONE)]


def test_one_token_is_served_by_the_prefill_engine_alone() -> None:
    """Kind: max_tokens=1 and first-token endings. The decode pool is never called."""
    m = machine(max_tokens=1)
    m.on(Arrived(), 0.0)
    assert m.on(Placed(1, split()), 1.0) == [StartDecode(1, 0, "p0", role=Role.PREFILL)]
    assert m.on(DecodeOutput(1, 0, 1, finished=True), 2.0) == [Unplace(1), Finish(Outcome.DONE)]


def test_a_first_token_that_ends_the_answer_releases_the_lease() -> None:
    """Kind: max_tokens=1 and first-token endings."""
    m = machine()
    actions = play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 1, finished=True, pulled=True)))
    assert actions == [EndPrefill(1, pulled=True), Unplace(1), Finish(Outcome.DONE)]


def test_kv_that_no_engine_pulled_is_given_back_with_the_first_output() -> None:
    """Kind: decode silently repeats the prefill. Called pulled, its blocks would stay until the lease runs out."""
    m = machine()
    assert play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 1))) == [EndPrefill(1)]
    assert not m.lease_open


def test_an_answer_without_any_token_is_done_too() -> None:
    m = machine()
    actions = play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 0, finished=True)))
    assert actions == [EndPrefill(1), Unplace(1), Finish(Outcome.DONE)]


def test_three_choices_share_one_prefill_and_one_pull() -> None:
    """Kind: n>1 over PD hangs. The driver gives the ticket to the first choice and starts the others behind it."""
    m = machine(n=3)
    assert play(m, ARRIVED, PLACED) == [StartPrefill(1, "p0")]
    assert play(m, TICKETED) == [
        StartDecode(1, 0, "d0", TICKET),
        StartDecode(1, 1, "d0", TICKET),
        StartDecode(1, 2, "d0", TICKET),
        SetTimer(5, Limit.FIRST_TOKEN),
    ]
    assert m.on(DecodeOutput(1, 0, 1, pulled=True), 3.0) == [EndPrefill(1, pulled=True)]
    assert m.on(WorkerDown("p0"), 3.05) == [], "the stream needs it no more"
    assert m.on(DecodeOutput(1, 1, 1), 3.1) == []
    assert m.on(DecodeOutput(1, 0, 3, finished=True), 3.1) == []
    assert m.on(DecodeOutput(1, 2, 1), 3.2) == []
    assert m.on(DecodeOutput(1, 2, 1, finished=True), 3.3) == []
    assert m.on(DecodeOutput(1, 1, 1, finished=True), 3.4) == [Unplace(1), Finish(Outcome.DONE)]


def test_a_lease_that_reports_its_pull_is_not_ended_again() -> None:
    m = machine()
    assert play(m, ARRIVED, PLACED, TICKETED, (2.5, LeaseEnded(1, LeaseOutcome.PULLED))) == []
    assert m.on(DecodeOutput(1, 0, 1), 3.0) == []


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "moment, closing",
    [
        ([], []),
        ([ARRIVED], [Unplace(1)]),
        ([ARRIVED, PLACED], [EndPrefill(1), Unplace(1)]),
        ([ARRIVED, PLACED, TICKETED], ["legs", EndPrefill(1), Unplace(1)]),
        ([ARRIVED, PLACED, TICKETED, FIRST, (3.1, DecodeOutput(1, 1, 1))], ["legs", Unplace(1)]),
    ],
    ids=["new", "queued", "prefill", "between the legs", "streaming"],
)
def test_a_client_that_leaves_ends_every_leg_at_any_moment(n: int, moment: list, closing: list) -> None:
    """Kinds: disconnect does not stop generation; cancel before the first token; the gap between the legs."""
    m = machine(n=n)
    if n == 1:
        moment = [(at, e) for at, e in moment if not (isinstance(e, DecodeOutput) and e.choice)]
    play(m, *moment)
    actions = m.on(ClientLeft(), 4.0)
    legs: list[Action] = [CancelDecode(1, i) for i in range(n)]
    expected = [a for c in closing for a in (legs if c == "legs" else [c])]
    assert actions[:-1] == expected
    finish = actions[-1]
    assert isinstance(finish, Finish)
    assert finish.outcome is Outcome.CANCELLED
    assert isinstance(finish.error, Cancelled)
    assert m.on(ClientLeft(), 4.0) == []


def test_a_cancelled_choice_that_finished_is_not_cancelled() -> None:
    m = machine(n=2)
    play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 2, finished=True)))
    assert m.on(ClientLeft(), 4.0)[:-1] == [CancelDecode(1, 1), Unplace(1)]


# What comes late is given back

LATE: list[tuple[Event, list[Action]]] = [
    (Placed(1, split()), [Unplace(1)]),
    (Refused(1, Rejection(503, "no")), []),
    (TicketReady(1, TICKET), [EndPrefill(1)]),
    (PrefillFailed(1, LOST), []),
    (LeaseEnded(1, LeaseOutcome.EXPIRED), []),
    (DecodeOutput(1, 0, 1), [CancelDecode(1, 0)]),
    (DecodeOutput(1, 7, 1), [CancelDecode(1, 7)]),
    (DecodeOutput(1, 0, 1, finished=True), []),
    (DecodeFailed(1, 0, LOST), []),
]


@pytest.mark.parametrize("event, expected", LATE, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("ended", [True, False], ids=["after the end", "in the next attempt"])
def test_late_events_give_back_what_they_carry(event: Event, expected: list[Action], ended: bool) -> None:
    """Kinds: the gap between prefill done and decode knows; Ray Serve cancellation holes."""
    m = machine()
    play(m, ARRIVED, PLACED, (1.5, ClientLeft() if ended else PrefillFailed(1, LOST)))
    assert m.ended is ended
    assert m.on(event, 2.0) == expected
    if not ended:
        assert m.state is State.PLACING


def test_a_second_ticket_of_a_running_attempt_changes_nothing() -> None:
    m = machine()
    assert play(m, ARRIVED, PLACED, TICKETED, TICKETED) == []
    assert m.on(DecodeOutput(1, 0, 1, pulled=True), 3.0) == [EndPrefill(1, pulled=True)]
    assert m.on(TicketReady(1, TICKET), 3.1) == [EndPrefill(1)]


def test_events_before_arrival_and_a_second_arrival_change_nothing() -> None:
    m = machine()
    assert m.on(WorkerDown("d0"), 0.0) == []
    assert m.on(TimerFired(), 0.0) == []
    assert m.on(DecodeOutput(1, 0, 1), 0.0) == [CancelDecode(1, 0)]
    m.on(Arrived(), 0.0)
    assert m.on(Arrived(), 0.0) == []


def test_output_after_the_end_of_a_choice_is_ignored() -> None:
    m = machine(n=2)
    play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 2, finished=True)))
    assert m.on(DecodeOutput(1, 0, 1), 3.1) == []
    assert m.on(DecodeFailed(1, 0, LOST), 3.1) == []


# Refusals


@pytest.mark.parametrize("status, kind", [(503, Overloaded), (429, TenantOverBudget), (400, BadRequest)])
def test_a_refusal_is_a_rejection_with_its_status_and_retry_after(status: int, kind: type[RequestError]) -> None:
    m = machine()
    m.on(Arrived(), 0.0)
    (finish,) = m.on(Refused(1, Rejection(status, "the queue is full", 2.0)), 0.1)
    assert isinstance(finish, Finish)
    assert (finish.outcome, type(finish.error)) == (Outcome.REJECTED, kind)
    assert finish.error is not None
    assert (finish.error.status, finish.error.retry_after_s) == (status, 2.0)


def test_a_retry_that_is_refused_is_placed_again_soon_and_fails_at_the_queue_limit() -> None:
    """Kind: retry: no worker is ready for a moment, but the request was accepted and its client waits."""
    m = machine()
    (*_, order) = play(m, ARRIVED, PLACED, (1.5, PrefillFailed(1, LOST)))
    assert isinstance(order, Place)
    now, asked = 2.0, 0
    while not m.ended:
        for timer in m.on(Refused(2, Rejection(503, "no worker", 2.0)), now):
            assert isinstance(timer, SetTimer)
            assert timer.after_s <= PLACE_AGAIN_S
        now += PLACE_AGAIN_S
        actions = m.on(TimerFired(), now)
        asked += order in actions
    assert asked > 10
    assert now == pytest.approx(1.5 + LIMITS.queue_s, abs=PLACE_AGAIN_S)
    finish = actions[-1]
    assert isinstance(finish, Finish)
    assert (finish.outcome, str(finish.error)) == (Outcome.FAILED, "no worker")
    assert Unplace(2) in actions


def test_a_retry_that_was_refused_goes_on_where_a_worker_came_back() -> None:
    m = machine()
    play(m, ARRIVED, PLACED, (1.5, PrefillFailed(1, LOST)))
    m.on(Refused(2, Rejection(503, "no worker", 2.0)), 2.0)
    assert m.on(TimerFired(), 2.0 + PLACE_AGAIN_S)[-1] == Place(2, ids("p0"))
    assert StartPrefill(2, "p0") in m.on(Placed(2, split()), 2.3)


# Before the first token: another place


def test_a_prefill_failure_goes_to_another_worker_and_at_last_avoids_the_transfer() -> None:
    """Kinds: prefill failure is not told to anyone; dead worker stays attractive."""
    m = machine()
    assert play(m, ARRIVED, PLACED, (1.5, PrefillFailed(1, LOST))) == [
        Unplace(1),
        Suspect("p0", "WorkerLost"),
        Place(2, ids("p0")),
    ]
    m.on(Placed(2, split("p1")), 1.6)
    assert m.on(PrefillFailed(2, LOST), 1.7) == [
        Unplace(2),
        Suspect("p1", "WorkerLost"),
        Place(3, ids("p0", "p1"), local_only=True),
    ]
    assert m.on(Placed(3, local()), 1.8) == [StartDecode(3, 0, "d0")]
    assert m.on(DecodeFailed(3, 0, LOST), 1.9) == [
        Unplace(3),
        Suspect("d0", "WorkerLost"),
        Finish(Outcome.FAILED, LOST),
    ]
    assert (m.tries, m.attempt, m.migrations) == (3, 3, 0)


def test_a_worker_that_refuses_is_avoided_but_not_suspected() -> None:
    """Kind: drain. A request that reaches a draining worker is placed elsewhere."""
    m = machine()
    assert play(m, ARRIVED, PLACED, (1.5, PrefillFailed(1, NoWorker("draining")))) == [Unplace(1), Place(2, ids("p0"))]


def test_an_error_that_no_worker_would_answer_differently_ends_both_legs_at_once() -> None:
    m = machine(n=2)
    bad = BadRequest("temperature -1 is below 0")
    assert play(m, ARRIVED, PLACED, TICKETED, (2.5, DecodeFailed(1, 0, bad))) == [
        CancelDecode(1, 1),
        EndPrefill(1),
        Unplace(1),
        Finish(Outcome.REJECTED, bad),
    ]


@pytest.mark.parametrize("error", [TransferFailed("connect"), LeaseExpired("gone")], ids=lambda e: type(e).__name__)
def test_a_failed_transfer_suspects_the_pair_and_avoids_the_prefill_worker(error: TransferFailed) -> None:
    m = machine()
    assert play(m, ARRIVED, PLACED, TICKETED, (2.5, DecodeFailed(1, 0, error))) == [
        EndPrefill(1),
        Unplace(1),
        Suspect("p0", type(error).__name__, peer="d0"),
        Place(2, ids("p0")),
    ]


@pytest.mark.parametrize(
    "event, reason",
    [
        (LeaseEnded(1, LeaseOutcome.LOST), "WorkerLost"),
        (PrefillFailed(1, LOST), "WorkerLost"),
        (WorkerDown("p0"), "WorkerLost"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else x,
)
def test_a_lease_lost_before_the_pull_cancels_decode(event: Event, reason: str) -> None:
    """Kinds: lease ran out; a router did not drop the decode call when prefill had failed already."""
    m = machine()
    actions = play(m, ARRIVED, PLACED, TICKETED, (2.5, event))
    closing: list[Action] = [CancelDecode(1, 0)]
    if isinstance(event, WorkerDown):
        closing.append(EndPrefill(1))
    assert actions == [*closing, Unplace(1), Suspect("p0", reason), Place(2, ids("p0"))]


def test_kv_that_nobody_pulled_in_time_is_the_pairs_fault_and_both_are_avoided() -> None:
    """Kind: lease ran out. The prefill engine did its part, so it stays in use for others."""
    m = machine()
    assert play(m, ARRIVED, PLACED, TICKETED, (2.5, LeaseEnded(1, LeaseOutcome.EXPIRED))) == [
        CancelDecode(1, 0),
        Unplace(1),
        Suspect("p0", "LeaseExpired", peer="d0"),
        Place(2, ids("p0", "d0")),
    ]


def test_a_prefill_worker_that_dies_after_the_pull_is_nobodys_business() -> None:
    m = machine()
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    for event in (WorkerDown("p0"), PrefillFailed(1, LOST), LeaseEnded(1, LeaseOutcome.LOST), WorkerDown("other")):
        assert m.on(event, 3.5) == []


def test_a_decode_worker_that_dies_before_the_first_token_is_replaced() -> None:
    m = machine(n=2)
    assert play(m, ARRIVED, PLACED, TICKETED, (2.5, WorkerDown("d0"))) == [
        CancelDecode(1, 0),
        CancelDecode(1, 1),
        EndPrefill(1),
        Unplace(1),
        Suspect("d0", "WorkerLost"),
        Place(2, ids("d0")),
    ]


def test_a_dead_engine_is_tried_elsewhere() -> None:
    m = machine()
    actions = play(m, ARRIVED, PLACED, TICKETED, (2.5, DecodeFailed(1, 0, EngineFailed("core died"))))
    assert actions[-1] == Place(2, ids("d0"))


# After the first token: migration


def test_migration_continues_after_the_tokens_that_were_sent() -> None:
    """Kind: retry in mid-stream."""
    m = machine()
    play(m, ARRIVED, PLACED, TICKETED, FIRST, (3.1, DecodeOutput(1, 0, 4)))
    assert m.on(DecodeFailed(1, 0, LOST), 3.2) == [
        Unplace(1),
        Suspect("d0", "WorkerLost"),
        Place(2, ids("d0"), tokens_sent=5),
    ]
    assert m.on(Placed(2, split("p0", "d1")), 3.3) == [StartPrefill(2, "p0", tokens_sent=5)]
    assert m.on(TicketReady(2, TICKET), 3.4) == [StartDecode(2, 0, "d1", TICKET, tokens_sent=5)]
    assert m.on(DecodeOutput(2, 0, 15, finished=True, pulled=True), 3.5) == [
        EndPrefill(2, pulled=True),
        Unplace(2),
        Finish(Outcome.DONE),
    ]
    assert (m.tries, m.migrations) == (1, 1)


def test_a_migration_with_one_token_left_needs_no_decode_engine() -> None:
    m = machine(max_tokens=20)
    play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 19)), (3.1, DecodeFailed(1, 0, LOST)))
    assert m.on(Placed(2, split("p0", "d1")), 3.2) == [StartDecode(2, 0, "p0", None, 19, Role.PREFILL)]


def test_killed_after_the_last_token_is_done_with_reason_length() -> None:
    """Kind: retry in mid-stream (kill at token 20)."""
    m = machine(max_tokens=20)
    actions = play(m, ARRIVED, PLACED, TICKETED, (3.0, DecodeOutput(1, 0, 20)), (3.1, DecodeFailed(1, 0, LOST)))
    assert actions == [Unplace(1), Suspect("d0", "WorkerLost"), Finish(Outcome.DONE, finish_reason="length")]


def test_migrations_have_a_limit() -> None:
    m = machine()
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    for attempt in (2, 3):
        m.on(DecodeFailed(attempt - 1, 0, LOST), 3.0)
        m.on(Placed(attempt, local(f"d{attempt}")), 3.0)
        m.on(DecodeOutput(attempt, 0, 1), 3.0)
    assert m.on(DecodeFailed(3, 0, LOST), 3.0)[-1] == Finish(Outcome.FAILED, LOST)
    assert m.migrations == 2


@pytest.mark.parametrize("n, movable", [(1, False), (2, True)])
def test_what_cannot_be_moved_ends_with_an_error_once_tokens_were_sent(n: int, movable: bool) -> None:
    """Kind: retry in mid-stream (grammar, seed, n > 1)."""
    m = machine(n=n, movable=movable)
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    actions = m.on(DecodeFailed(1, 0, LOST), 3.1)
    assert actions[-1] == Finish(Outcome.FAILED, LOST)
    assert [a for a in actions if isinstance(a, CancelDecode)] == [CancelDecode(1, i) for i in range(1, n)]


@pytest.mark.parametrize("n, movable", [(1, False), (2, True)])
def test_an_answer_that_is_not_streamed_is_computed_again_from_the_start(n: int, movable: bool) -> None:
    m = machine(n=n, movable=movable, streaming=False)
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    assert m.on(DecodeFailed(1, 0, LOST), 3.1)[-1] == Place(2, ids("d0"))
    assert m.on(Placed(2, local("d1")), 3.2) == [StartDecode(2, i, "d1") for i in range(n)]


# Limits


def fire_when_due(m: Lifecycle, actions: list[Action], now: float) -> tuple[list[Action], float]:
    timers = [a for a in actions if isinstance(a, SetTimer)]
    now += timers[-1].after_s
    return m.on(TimerFired(), now), now


def test_the_queue_has_its_own_limit() -> None:
    m = machine()
    actions, now = fire_when_due(m, m.on(Arrived(), 0.0), 0.0)
    assert now == 10
    assert actions[0] == Unplace(1)
    finish = actions[-1]
    assert isinstance(finish, Finish)
    assert finish.outcome is Outcome.REJECTED
    assert isinstance(finish.error, Overloaded)
    assert "queue limit of 10 s" in str(finish.error)


def test_a_timer_that_fires_too_early_is_set_for_the_rest() -> None:
    """Kind: deadline starts at the wrong moment. Nine seconds in the queue are not the prefill's."""
    m = machine()
    m.on(Arrived(), 0.0)
    m.on(Placed(1, split()), 9.0)
    assert m.on(TimerFired(), 10.0) == [SetTimer(19, Limit.PREFILL)]
    assert m.on(TimerFired(), 29.0) == [
        EndPrefill(1),
        Unplace(1),
        Suspect("p0", "DeadlineExceeded"),
        SetTimer(6, Limit.QUEUE),
        Place(2, ids("p0")),
    ]


def test_no_first_token_with_a_lease_open_avoids_both_sides() -> None:
    m = machine()
    play(m, ARRIVED, PLACED, TICKETED)
    assert m.on(TimerFired(), 7.0) == [
        CancelDecode(1, 0),
        EndPrefill(1),
        Unplace(1),
        Suspect("p0", "DeadlineExceeded", peer="d0"),
        SetTimer(10, Limit.QUEUE),
        Place(2, ids("p0", "d0")),
    ]


def test_a_gap_between_tokens_moves_the_request() -> None:
    m = machine()
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    assert m.on(TimerFired(), 6.9) == [SetTimer(pytest.approx(0.1), Limit.IDLE)]  # type: ignore[arg-type]
    assert m.on(DecodeOutput(1, 0, 1), 6.95) == []
    assert m.on(TimerFired(), 7.0) == [SetTimer(pytest.approx(3.95), Limit.IDLE)]  # type: ignore[arg-type]
    assert m.on(TimerFired(), 11.0) == [
        CancelDecode(1, 0),
        Unplace(1),
        Suspect("d0", "DeadlineExceeded"),
        SetTimer(10, Limit.QUEUE),
        Place(2, ids("d0"), tokens_sent=2),
    ]


def test_choices_that_wait_for_the_first_one_have_their_own_time_for_a_first_token() -> None:
    m = machine(n=2)
    play(m, ARRIVED, PLACED, TICKETED)
    m.on(DecodeOutput(1, 0, 1), 6.9)  # 0.1 s before its limit; only now the second one starts
    assert [type(action) for action in m.on(TimerFired(), 7.0)] == [SetTimer]
    assert not m.ended
    m.on(DecodeOutput(1, 1, 1), 9.0)
    assert not m.ended


def test_a_choice_without_room_waits_for_those_that_run_and_makes_nobody_suspect() -> None:
    m = machine(n=2)
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    for tenth in range(1, 400):  # beyond every limit but the one for idleness, the budget included
        m.on(DecodeOutput(1, 0, 1), 3.0 + tenth / 10)
        if tenth % 30 == 0:
            assert all(isinstance(action, SetTimer) for action in m.on(TimerFired(), 3.0 + tenth / 10))
    assert m.on(DecodeOutput(1, 0, 1, finished=True), 43.0) == []
    assert all(isinstance(action, SetTimer) for action in m.on(TimerFired(), 47.9)), "its own time begins only now"
    lost = m.on(TimerFired(), 48.0)
    assert Suspect("d0", "DeadlineExceeded") in lost


def test_one_choice_that_hangs_is_noticed_while_another_streams() -> None:
    m = machine(n=2)
    play(m, ARRIVED, PLACED, TICKETED, FIRST, (3.0, DecodeOutput(1, 1, 1)))
    for tenth in range(1, 40):
        m.on(DecodeOutput(1, 0, 1), 3.0 + tenth / 10)
    finish = m.on(TimerFired(), 7.0)[-1]
    assert isinstance(finish, Finish)
    assert finish.outcome is Outcome.FAILED
    assert isinstance(finish.error, DeadlineExceeded)
    assert "idle limit of 4 s" in str(finish.error)


def test_retries_do_not_stretch_the_wait_for_the_first_token() -> None:
    """The budget is queue + prefill + first token = 35 s from arrival, however often another place is tried."""
    m = machine()
    m.on(Arrived(), 0.0)
    m.on(Placed(1, split()), 9.9)
    m.on(TimerFired(), 29.9)
    assert m.on(Placed(2, split("p1")), 33.0) == [StartPrefill(2, "p1")]
    actions = m.on(TimerFired(), 35.0)
    finish = actions[-1]
    assert actions[:-1] == [EndPrefill(2), Unplace(2), Suspect("p1", "DeadlineExceeded")]
    assert isinstance(finish, Finish)
    assert isinstance(finish.error, DeadlineExceeded)


def test_output_costs_no_action_and_no_timer() -> None:
    m = machine(max_tokens=1000)
    play(m, ARRIVED, PLACED, TICKETED, FIRST)
    assert all(m.on(DecodeOutput(1, 0, 1), 3.0 + i / 100) == [] for i in range(900))
