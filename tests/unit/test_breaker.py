"""The breaker over pairs of workers. Kind: peer restarted on the same address."""

from __future__ import annotations

import random

from router.breaker import Breaker, BreakerState

PAIR = ("p0", "d0")


def breaker() -> Breaker:
    return Breaker(failures=2, open_s=1.0, max_open_s=4.0, probe_s=5.0)


def opened(at_s: float = 0.0) -> Breaker:
    b = breaker()
    b.failed(PAIR, at_s)
    b.failed(PAIR, at_s)
    return b


def test_failures_in_a_row_open_it_and_it_says_so_once() -> None:
    b = breaker()
    assert not b.failed(PAIR, 0.0)
    assert b.allows(PAIR, 0.0)
    assert b.failed(PAIR, 0.1)
    assert not b.failed(PAIR, 0.2)
    assert not b.allows(PAIR, 0.5)
    assert b.allows(("p0", "d1"), 0.5)
    assert b.opened == 1


def test_a_success_between_failures_starts_the_row_anew() -> None:
    b = breaker()
    for now in range(10):
        assert not b.failed(PAIR, now)
        b.succeeded(PAIR, now)
    assert b.state(PAIR, 10) is BreakerState.CLOSED


def test_a_dead_worker_opens_at_once() -> None:
    b = breaker()
    assert b.failed(("p0",), 0.0, fatal=True)
    assert not b.allows(("p0",), 0.5)


def test_one_probe_at_a_time_decides() -> None:
    b = opened()
    assert b.state(PAIR, 0.99) is BreakerState.OPEN
    assert b.state(PAIR, 1.0) is BreakerState.HALF_OPEN
    assert b.allows(PAIR, 1.0)
    b.begin(PAIR, 1.0)
    assert not b.allows(PAIR, 1.1)
    b.succeeded(PAIR, 1.2)
    assert b.state(PAIR, 1.2) is BreakerState.CLOSED
    assert b.not_closed(1.2) == {}


def test_a_failed_probe_doubles_the_wait_up_to_its_limit() -> None:
    b, now, waits = opened(), 0.0, []
    for _ in range(5):
        start = now
        while not b.allows(PAIR, now):
            now += 0.25
        waits.append(now - start)
        b.begin(PAIR, now)
        assert b.failed(PAIR, now)
    assert waits == [1, 2, 4, 4, 4]


def test_a_probe_without_an_answer_is_not_waited_for_for_ever() -> None:
    b = opened()
    b.begin(PAIR, 1.0)
    assert not b.allows(PAIR, 5.9)
    assert b.allows(PAIR, 6.0)


def test_an_answer_from_before_the_failures_does_not_close_it() -> None:
    b = opened()
    b.succeeded(PAIR, 0.5)
    assert b.state(PAIR, 0.5) is BreakerState.OPEN


def test_a_new_incarnation_is_a_new_peer() -> None:
    b = breaker()
    b.seen("p0", "i1")
    b.seen("d0", "i1")
    b.failed(PAIR, 0.0)
    b.failed(PAIR, 0.0)
    b.failed(("p1", "d1"), 0.0, fatal=True)
    assert not b.seen("d0", "i1")
    assert not b.allows(PAIR, 0.1)
    assert b.seen("d0", "i2")
    assert b.allows(PAIR, 0.1)
    assert b.not_closed(0.1) == {("p1", "d1"): BreakerState.OPEN}


def test_a_worker_that_left_leaves_nothing_behind() -> None:
    b = opened()
    b.seen("p0", "i1")
    b.gone("p0")
    assert not b._entries
    assert not b.seen("p0", "i2")


def test_any_history_lets_a_healthy_pair_back_within_the_longest_wait() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        b, now = breaker(), 0.0
        for _ in range(rng.randrange(40)):
            now += rng.random() * 2
            if b.allows(PAIR, now):
                b.begin(PAIR, now)
            rng.choice((lambda: b.failed(PAIR, now), lambda: b.succeeded(PAIR, now), lambda: None))()  # noqa: B023
        now += 5.0  # the longest of max_open_s and probe_s
        assert b.allows(PAIR, now)
        b.begin(PAIR, now)
        b.succeeded(PAIR, now)
        assert b.state(PAIR, now) is BreakerState.CLOSED
