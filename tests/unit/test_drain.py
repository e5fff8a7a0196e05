"""Which worker leaves, and when it may. Kind: drain is too short, or does not stop intake."""

from __future__ import annotations

from cluster.drain import Candidate, Drain, DrainState, victims
from cluster.messages import WorkerSnapshot, WorkerState


def worker(name: str, state: WorkerState = WorkerState.READY, hot: int = 0, **load: int) -> Candidate:
    return Candidate(WorkerSnapshot(name, "i", state, **load), hot)


def test_dead_then_starting_then_least_loaded_and_hot_prefixes_last() -> None:
    pool = [
        worker("hot", hot=50_000),
        worker("busy", running=8, waiting=3),
        worker("leases", open_leases=2),
        worker("idle"),
        worker("prefilling", queued_prefill_tokens=2000),
        worker("starting", WorkerState.STARTING),
        worker("leaving", WorkerState.DRAINING),
        worker("dead", WorkerState.DEAD),
    ]
    assert victims(pool, 99) == ["dead", "starting", "idle", "leases", "prefilling", "busy", "hot"]
    assert victims(pool, 2) == ["dead", "starting"]
    assert victims(pool, 0) == victims(pool, -1) == victims([], 3) == []


def test_the_order_of_the_candidates_does_not_matter() -> None:
    pool = [worker("b"), worker("a"), worker("c", running=1)]
    assert victims(pool, 2) == victims(pool[::-1], 2) == ["a", "b"]


def test_leases_keep_a_prefill_worker_alive() -> None:
    """Ten finished prefills whose KV is not pulled yet, then SIGTERM."""
    drain = Drain(limit_s=60, settle_s=0.5)
    assert drain.accepts
    drain.start(0.0)
    assert not drain.accepts
    for left in range(10, 0, -1):
        assert drain.observe(left, 10.0 - left) is DrainState.DRAINING
    assert drain.observe(0, 20.0) is DrainState.DRAINING
    assert drain.next_look_s() == 20.5
    assert drain.observe(0, 20.5) is DrainState.DRAINED
    assert drain.next_look_s() is None


def test_work_that_arrives_while_settling_is_waited_for() -> None:
    drain = Drain(limit_s=60, settle_s=0.5)
    drain.start(0.0)
    drain.observe(0, 1.0)
    assert drain.observe(1, 1.4) is DrainState.DRAINING
    assert drain.observe(0, 2.0) is DrainState.DRAINING
    assert drain.observe(0, 2.4) is DrainState.DRAINING
    assert drain.observe(0, 2.5) is DrainState.DRAINED


def test_the_limit_ends_the_wait_and_says_what_is_lost() -> None:
    drain = Drain(limit_s=10)
    drain.start(0.0)
    drain.start(5.0)
    assert drain.next_look_s() == 10.0
    assert drain.observe(3, 9.9) is DrainState.DRAINING
    assert drain.observe(3, 10.0) is DrainState.EXPIRED
    assert drain.left == 3
    assert drain.observe(0, 11.0) is DrainState.EXPIRED


def test_an_empty_worker_at_its_limit_is_drained() -> None:
    drain = Drain(limit_s=1, settle_s=5)
    drain.start(0.0)
    assert drain.observe(0, 1.0) is DrainState.DRAINED


def test_a_serving_worker_is_not_drained_by_being_idle() -> None:
    drain = Drain(limit_s=1)
    assert drain.observe(0, 100.0) is DrainState.SERVING
    assert drain.next_look_s() is None
