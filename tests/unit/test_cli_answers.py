"""What a person sees where an address is not a router's: one line and exit status 2."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.cli import main
from cluster.commands.status import _now
from cluster.errors import UserError
from cluster.runtime.local import fetch_status

STATUS: dict[str, Any] = {"pools": {}, "router": {}, "goodput": {}}


def answered(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def get(url: str, **_: Any) -> httpx.Response:
        return httpx.Response(200, text=json.dumps(answer), request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)


@pytest.mark.parametrize(
    "answer", [None, [], "ok", {}, {"status": "ok"}, {**STATUS, "pools": []}, {"pools": {}, "router": {}}]
)
def test_another_server_is_no_router(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: Any
) -> None:
    answered(monkeypatch, answer)
    line = "--url: no pdserve answers at http://here:1 (ValueError); start one with `pdserve serve CONFIG`"
    with pytest.raises(UserError) as caught:
        fetch_status("http://here:1")
    assert str(caught.value) == line
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", "http://here:1"])
    assert ended.value.code == 2
    assert line in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("url", ["http://[", "http://host:port", "ftp://host", "host"])
def test_an_address_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match="no pdserve answers at"):
        fetch_status(url)


def test_a_router_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, STATUS)
    assert fetch_status("http://here:1") == STATUS


def test_status_takes_an_address_as_people_write_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def get(url: str, **_: Any) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, text=json.dumps(STATUS), request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    for url in ("http://here:8000/", "here:8000", "http://here:8000/v1"):
        main(["status", "--json", "--url", url])
    assert asked == ["http://here:8000/pdserve/status"] * 3
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["status", "--json", "--watch"])
    assert "--watch: is for people" in " ".join(capsys.readouterr().err.split())


def test_watching_goes_on_while_a_router_is_replaced() -> None:
    def gone() -> dict[str, Any]:
        raise UserError("--url: no pdserve answers at http://here:1")

    assert "no pdserve answers" in str(_now(gone))
