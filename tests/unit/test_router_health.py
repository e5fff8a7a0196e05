"""Which workers a router trusts. Kinds: dead worker stays attractive; peer restarted on the same address."""

from __future__ import annotations

import random

from router.health import Change, Health, Trust


def never(_: str) -> bool:
    return False


def always(_: str) -> bool:
    return True


def health() -> Health:
    h = Health(silent_s=5, stall_s=10, look_every_s=0.5)
    h.up("w", "i1")
    return h


def look_until(h: Health, owes, start: float, end: float, hear: bool = True, steps=None) -> list[Change]:
    changes: list[Change] = []
    now = start
    while now < end - 1e-9:
        now += 0.5
        if hear:
            h.heard("w", steps(now) if steps else 0, now)
        changes += h.look(owes, now)
    return changes


def test_a_worker_that_was_never_asked_may_be_silent() -> None:
    h = health()
    assert look_until(h, never, 0, 100, hear=False) == []


def test_silence_after_a_question_loses_the_worker_and_speech_brings_it_back() -> None:
    h = health()
    h.asked("w", -1.0)
    h.heard("w", 0, 0.0)
    assert look_until(h, never, 0, 4.5, hear=False) == []
    assert h.look(never, 5.0) == [Change("w", Trust.LOST, "silent for 5.0 s")]
    assert h.look(never, 5.5) == []
    h.heard("w", 1, 5.7)
    assert h.look(never, 6.0) == [Change("w", Trust.USED, "answers")]


def test_a_silent_worker_is_tried_by_one_request_after_a_while_that_doubles() -> None:
    """A worker makes its link when a call comes: after a cut it may be well and, unused, never say so."""
    h = health()
    h.asked("w", -1.0)
    h.heard("w", 0, 0.0)
    now, waits = 0.0, []

    def look_until_it_is(trust: Trust) -> float:
        nonlocal now
        for _ in range(100):
            now += 0.5
            h.look(never, now)
            if h.trust("w") is trust:
                return now
        raise AssertionError(f"it is never {trust} again")

    for _ in range(4):
        lost_s = look_until_it_is(Trust.LOST)
        waits.append(look_until_it_is(Trust.USED) - lost_s)
        now += 0.25
        assert h.asked("w", now) == Change("w", Trust.AVOIDED, "one request tries it")
        assert h.asked("w", now) is None
        h.look(never, now + 0.25)
        assert h.trust("w") is Trust.AVOIDED
    assert waits == [1, 2, 4, 8]
    h.heard("w", 1, now + 0.3)
    assert h.look(never, now + 0.5) == [Change("w", Trust.USED, "answers")]
    changes = look_until(h, never, now + 0.5, now + 6.5, hear=False)
    assert [c.trust for c in changes] == [Trust.LOST, Trust.USED], "its word has ended the row: a second again"


def test_a_worker_without_a_link_owes_no_message_until_it_is_asked() -> None:
    h = health()
    h.asked("w", -1.0)
    h.heard("w", 0, 0.0)
    assert h.unlinked("w", 1.0) == Change("w", Trust.AVOIDED, "the link broke")
    assert look_until(h, never, 1.0, 100, hear=False) == [Change("w", Trust.USED, "answers")]
    assert h.asked("w", 100.0) is None
    assert look_until(h, never, 100, 114.5, hear=False) == [], "the first word may take longer again"
    assert look_until(h, never, 114.5, 115.0, hear=False)[0].trust is Trust.LOST


def test_with_nobody_else_left_a_silent_worker_is_tried_at_once_and_by_one_request_at_a_time() -> None:
    h = health()
    h.asked("w", -1.0)
    h.heard("w", 0, 0.0)
    h.look(never, 5.0)
    assert h.take_back("w") == Change("w", Trust.USED, "nobody else is left")
    assert h.take_back("w") is None
    h.asked("w", 5.1)
    assert h.take_back("w") is None, "a request tries it"
    h.heard("w", 0, 5.2)
    h.look(never, 5.5)
    assert h.trust("w") is Trust.USED


def test_a_worker_that_answers_and_makes_no_step_is_not_taken_back() -> None:
    h = health()
    assert look_until(h, always, 0, 10.5)[0].trust is Trust.LOST
    assert h.take_back("w") is None


def test_the_first_word_may_take_longer() -> None:
    h = health()
    h.asked("w", 0.0)
    assert look_until(h, never, 0, 14.5, hear=False) == []
    assert h.look(never, 15.0) == [Change("w", Trust.LOST, "silent for 15.0 s")]


def test_an_idle_engine_need_not_step_and_a_busy_one_must() -> None:
    h = health()
    assert look_until(h, never, 0, 60) == []
    assert look_until(h, always, 60, 90, steps=int) == []
    assert look_until(h, always, 90, 99.5, steps=lambda _: 90) == []
    assert look_until(h, always, 99.5, 101, steps=lambda _: 90) == [
        Change("w", Trust.LOST, "no engine step for 10.0 s")
    ]


def test_a_stalled_engine_is_tried_again_after_a_while() -> None:
    h = health()
    changes = look_until(h, always, 0, 10.5)
    assert [c.trust for c in changes] == [Trust.LOST]
    changes = look_until(h, never, 10.5, 13)
    assert [c.trust for c in changes] == [Trust.AVOIDED, Trust.USED]


def test_a_failed_request_avoids_the_worker_for_a_while_that_doubles() -> None:
    h, now, waits = health(), 0.0, []
    for _ in range(4):
        change = h.suspect("w", "WorkerLost", None, now)
        assert change == Change("w", Trust.AVOIDED, "WorkerLost")
        assert h.suspect("w", "WorkerLost", None, now) is None
        since = now
        while h.trust("w") is not Trust.USED:
            now += 0.25
            h.heard("w", 0, now)
            h.look(never, now)
        waits.append(now - since)
    assert waits == [1, 2, 4, 8]
    h.served("w", None, now)
    h.suspect("w", "WorkerLost", None, now)
    h.look(never, now + 1)
    assert h.trust("w") is Trust.USED


def test_a_failed_transfer_blames_the_pair_only() -> None:
    h = health()
    assert h.suspect("w", "TransferFailed", "d", 0.0) is None
    assert h.pairs.allows(("w", "d"), 0.0)
    assert h.suspect("w", "TransferFailed", "d", 0.1) is None
    assert not h.pairs.allows(("w", "d"), 0.2)
    assert h.look(never, 0.3) == []
    h.pairs.begin(("w", "d"), 1.5)
    h.served("d", "w", 1.6)
    assert h.pairs.allows(("w", "d"), 1.7)


def test_a_new_incarnation_starts_clean() -> None:
    h = health()
    h.asked("w", 0.0)
    h.suspect("w", "EngineFailed", None, 0.0)
    h.suspect("w", "TransferFailed", "d", 0.0)
    h.suspect("w", "TransferFailed", "d", 0.0)
    h.up("w", "i1")
    assert h.trust("w") is Trust.AVOIDED
    h.up("w", "i2")
    assert h.trust("w") is Trust.USED
    assert h.pairs.allows(("w", "d"), 0.1)
    assert look_until(h, always, 0, 60, hear=False) == []


def test_who_left_is_forgotten() -> None:
    h = health()
    h.asked("w", 0.0)
    h.down("w")
    assert look_until(h, always, 0, 60, hear=False) == []
    assert h.suspect("w", "WorkerLost", None, 60.0) is None
    h.heard("w", 1, 61.0)
    assert h.trust("w") is None


def test_a_router_that_was_stopped_itself_blames_nobody() -> None:
    h = health()
    assert look_until(h, always, 0, 5, steps=int) == []
    assert h.look(always, 65.0) == []
    h.heard("w", 6, 65.1)
    assert h.look(always, 65.5) == []
    assert look_until(h, always, 65.5, 71, hear=False)[0].trust is Trust.LOST


def test_any_history_ends_in_use_once_the_worker_is_well() -> None:
    rng = random.Random(11)
    for _ in range(200):
        h, now, steps = health(), 0.0, 0
        for _ in range(60):
            now += 0.5
            kind = rng.randrange(6)
            if kind == 0:
                h.suspect("w", "WorkerLost", rng.choice((None, "d")), now)
            elif kind == 1:
                steps += 1
                h.heard("w", steps, now)
            elif kind == 2:
                h.asked("w", now)
            elif kind == 3:
                h.served("w", None, now)
            h.look(rng.choice((always, never)), now)
        for _ in range(70):  # the longest wait is 30 s
            now += 0.5
            steps += 1
            h.heard("w", steps, now)
            h.look(always, now)
        assert h.trust("w") is Trust.USED
