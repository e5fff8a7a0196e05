"""Rules for every test: unit tests start nothing, sleep never and stay off the network."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _unit_tests_stay_pure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "/tests/unit/" not in str(request.node.path):
        return

    def refuse(what: str):
        def raiser(*args: object, **kwargs: object):
            raise AssertionError(f"a unit test may not {what}")

        return raiser

    monkeypatch.setattr(time, "sleep", refuse("sleep"))
    monkeypatch.setattr(socket.socket, "connect", refuse("touch the network"))
    ray = __import__("sys").modules.get("ray")
    if ray is not None:
        monkeypatch.setattr(ray, "init", refuse("start Ray"))


@pytest.fixture
def shared_dir() -> Path:
    """Folder with traces, schemas and reference figures; the project works without it."""
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}: reference data is not on this machine")
    return SHARED
