"""Priority of a measuring thread: taken where the system gives it, given back, and never inherited."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster.runtime.urgent import urgent

POLICY = "import os; print(os.sched_getscheduler(0))"


def policy() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def test_priority_is_taken_and_given_back() -> None:
    before = os.sched_getscheduler(0)
    with urgent() as granted:
        assert policy() == (os.SCHED_RR if granted else before)
        child = subprocess.run([sys.executable, "-c", POLICY], capture_output=True, text=True, check=True)
        assert int(child.stdout) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == before


def test_it_is_given_back_after_a_failure() -> None:
    before = os.sched_getscheduler(0)
    with pytest.raises(ValueError, match="of the work"), urgent():
        raise ValueError("of the work")
    assert os.sched_getscheduler(0) == before


def test_a_user_who_may_not_take_the_mark_off_again_is_left_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"policy": os.SCHED_OTHER}

    def set_policy(_pid: int, policy: int, _param: object) -> None:
        if state["policy"] & os.SCHED_RESET_ON_FORK and not policy & os.SCHED_RESET_ON_FORK:
            raise PermissionError("Operation not permitted")  # as Linux does without CAP_SYS_NICE
        state["policy"] = policy

    monkeypatch.setattr(os, "sched_setscheduler", set_policy)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _pid: state["policy"])
    with urgent() as granted:
        assert granted and state["policy"] & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
    assert state["policy"] & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER


def test_a_system_without_such_calls_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getscheduler")
    with urgent() as granted:
        assert not granted


def test_a_system_that_gives_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with urgent() as granted:
        assert not granted
