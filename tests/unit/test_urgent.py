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


def test_a_system_that_gives_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with urgent() as granted:
        assert not granted
