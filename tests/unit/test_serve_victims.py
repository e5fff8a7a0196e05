"""Which replicas Serve stops when a pool shrinks. Kind: drain is too short: the least is lost where little runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.autoscaling.serve_victims import LeastLoss


@dataclass(frozen=True)
class Id:
    unique_id: str


class Scheduler:
    """As much of Serve's as is replaced: it takes the newest, those that start before any other."""

    def __init__(self, running: str, starting: str = "") -> None:
        self._running_replicas = {"decode": {Id(name): "node" for name in running}}
        self._starting = [Id(name) for name in starting]

    def _get_replicas_to_stop(self, deployment_id: Any, max_num_to_stop: int, **_: Any) -> set[Id]:
        return set([*self._starting, *list(self._running_replicas[deployment_id])[::-1]][:max_num_to_stop])


LOADS = {
    "a": {"running": 9.0},
    "b": {},
    "c": {"open_leases": 3.0},
    "d": {"running": 1.0, "queued_prefill_tokens": 4000.0},
}


@pytest.fixture
def scheduler() -> type[Scheduler]:
    return type("Fresh", (Scheduler,), {})


def chosen(scheduler: Scheduler, count: int, **more: Any) -> list[str]:
    return sorted(r.unique_id for r in scheduler._get_replicas_to_stop("decode", count, **more))


def test_the_least_loaded_leave_and_those_that_start_before_any(scheduler: type[Scheduler]) -> None:
    least = LeastLoss()
    least.install(scheduler)
    assert chosen(scheduler("abcd"), 2) == ["c", "d"], "nothing is known yet: Serve's own"
    least.note("decode", LOADS)
    assert chosen(scheduler("abcd"), 1) == ["b"]
    assert chosen(scheduler("abcd"), 2) == ["b", "c"]
    assert chosen(scheduler("abcd"), 4) == ["a", "b", "c", "d"]
    assert chosen(scheduler("abcd", starting="x"), 1) == ["x"]
    assert chosen(scheduler("abcd", starting="x"), 2) == ["b", "x"]


def test_a_replica_that_has_told_nothing_yet_leaves_first(scheduler: type[Scheduler]) -> None:
    least = LeastLoss()
    least.install(scheduler)
    least.note("decode", LOADS)
    assert chosen(scheduler("abcdn"), 1) == ["n"]


def test_another_policy_takes_over_and_gangs_are_left_to_serve(scheduler: type[Scheduler]) -> None:
    old, new = LeastLoss(), LeastLoss()
    old.note("decode", {name: {} for name in "abcd"})
    for one in (old, new, new):
        one.install(scheduler)
    new.note("decode", LOADS)
    assert chosen(scheduler("abcd"), 1) == ["b"]
    assert chosen(scheduler("abcd"), 1, gang_id_by_replica={}) == ["d"]


def test_a_serve_that_looks_different_is_left_alone(caplog: pytest.LogCaptureFixture, scheduler) -> None:
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        logging.getLogger("ray.serve").propagate = True
        LeastLoss().install(type("Other", (), {}))
    assert "_get_replicas_to_stop" in caplog.text
    least = LeastLoss()
    least.install(scheduler)
    least.note("decode", LOADS)
    strange = scheduler("abcd")
    strange._running_replicas = {"decode": [1, 2]}  # type: ignore[dict-item]
    assert strange._get_replicas_to_stop("decode", 1) == {2}


def test_serves_own_class_has_what_is_replaced() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve._private.deployment_scheduler import DeploymentScheduler
    assert callable(DeploymentScheduler._get_replicas_to_stop)
