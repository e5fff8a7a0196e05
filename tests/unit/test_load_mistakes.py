"""Mistakes around a load test: one line before anything is measured, and nothing lost that was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli import main
from cluster.errors import ConfigError, UserError
from cluster.goodput.timing import token_times
from cluster.messages import Outcome
from cluster.models.resolve import embedded_path
from loadtests import discover, scenario, session
from loadtests.discover import Served
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.runner import Run
from loadtests.sample import Sample
from loadtests.sources import read_prompts
from loadtests.tokenizer import find_tokenizer

WORKLOAD = {
    "duration_s": 5,
    "arrivals": {"process": "poisson", "rate_per_s": 1},
    "prompts": {"kind": "plain"},
}
STREAM = {"arrivals": WORKLOAD["arrivals"], "prompts": WORKLOAD["prompts"]}
CLOSED = WORKLOAD | {"arrivals": {"process": "closed", "users": 2}}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"workload": WORKLOAD} | changes), encoding="utf-8")
    return str(path)


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["loadtest", *arguments])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1, said
    return said


@pytest.fixture
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> Served:
        raise AssertionError("the endpoint was asked")

    monkeypatch.setattr(session, "discover", asked)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An endpoint whose runs end at once; the names of the runs."""
    runs: list[str] = []

    def run(_: Any, workload: Any, name: str, progress: Any = None) -> Run:
        runs.append(name)
        if name.startswith("sweep"):
            raise KeyboardInterrupt
        samples = [Sample(i, i * 0.1, sent_s=i * 0.1, outcome=Outcome.DONE, end_s=1 + i * 0.1) for i in range(30)]
        for s in samples:
            s.times = token_times(s.scheduled_s, [(s.scheduled_s + 0.1 * k, 1) for k in range(1, 4)])
        return Run(samples, [0.0] * 10, 4.0)

    monkeypatch.setattr(session, "discover", lambda *_: Served("http://nowhere", "m", None))
    monkeypatch.setattr(session, "fetch_records", lambda *_: [])
    monkeypatch.setattr(session, "fetch_json", lambda *_: None)
    monkeypatch.setattr(session.Session, "warm_up", lambda _: [])
    monkeypatch.setattr(session.Session, "run", run)
    return runs


@pytest.mark.usefixtures("nobody_is_asked")
def test_a_sweep_that_cannot_be_is_refused_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = line_of(capsys, write(tmp_path), "--sweep", "--out", str(tmp_path / "out"))
    assert "--sweep" in said
    assert "`sweep` section" in said
    said = line_of(capsys, write(tmp_path, workload=CLOSED, sweep={}), "--sweep", "--out", str(tmp_path / "out"))
    assert "closed loop" in said


def test_an_interrupted_sweep_leaves_the_run_on_disk(tmp_path: Path, endpoint: list[str]) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["loadtest", write(tmp_path, sweep={}), "--sweep", "--tokenizer", "words", "--out", str(out)])
    assert end.value.code == 130
    assert len(endpoint) == 2
    assert json.loads((out / "results.json").read_text())["summary"]["offered"] == 30
    assert (out / "report.html").is_file()


@pytest.mark.usefixtures("nobody_is_asked")
@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nowhere"])
def test_an_unusable_folder_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "file").write_text("mine")
    said = line_of(capsys, write(tmp_path), "--out", str(tmp_path / out))
    assert "--out" in said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", [".", "tokenizer.json", "../model/tokenizer.json"])
def test_the_report_names_the_tokenizers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: list[str], name: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(embedded_path() / "tokenizer.json", folder)
    monkeypatch.chdir(folder)
    main(["loadtest", write(tmp_path), "--tokenizer", name, "--out", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["tokenizer"] == "model"


def test_a_link_of_a_model_cache_keeps_its_folders_name(tmp_path: Path, endpoint: list[str]) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shutil.copy(embedded_path() / "tokenizer.json", blobs / "1f")
    (snapshot / "tokenizer.json").symlink_to(blobs / "1f")
    main(["loadtest", write(tmp_path), "--tokenizer", str(snapshot), "--out", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["tokenizer"] == "abc"


@pytest.mark.parametrize(
    ("sweep", "where"),
    [
        ({"factors": [0, 1]}, "sweep.factors.0"),
        ({"factors": [1, float("inf")]}, "sweep.factors.1"),
        ({"attainments": [0.9, 95]}, "sweep.attainments.1"),
        ({"attainments": [0]}, "sweep.attainments.0"),
    ],
)
def test_rates_and_goals_of_a_sweep_have_bounds(sweep: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        scenario.parse({"workload": WORKLOAD, "sweep": sweep})
    scenario.parse({"workload": WORKLOAD, "sweep": {"attainments": [1.0]}})


@pytest.mark.usefixtures("nobody_is_asked")
def test_more_processes_than_requests_in_flight_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(tmp_path, client={"max_in_flight": 3})
    said = line_of(capsys, name, "--processes", "4", "--out", str(tmp_path / "out"))
    assert "--processes: 4 is above client.max_in_flight 3" in said
    assert "at most 3" in said


@pytest.mark.usefixtures("nobody_is_asked")
@pytest.mark.parametrize("tenant", ["客户", "a\r\nx-admin: yes"])
def test_a_tenant_that_no_header_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tenant: str
) -> None:
    said = line_of(capsys, write(tmp_path, workload=WORKLOAD | {"tenant": tenant}), "--out", str(tmp_path / "out"))
    assert "workload.tenant" in said
    unnamed = {"workload": WORKLOAD | {"tenant": tenant}, "request": {"tenant_header": None}}
    scenario.check_tenants(scenario.parse(unnamed))
    named = {"workload": {"duration_s": 5, "streams": [STREAM, STREAM | {"tenant": tenant}]}}
    with pytest.raises(ConfigError, match=r"workload\.streams\.1\.tenant"):
        scenario.check_tenants(scenario.parse(named))


def test_a_key_that_no_header_holds_is_one_line_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "get", lambda *_, **__: pytest.fail("sent"))
    for key in ("schlüssel", "abc\r"):
        for ask in (
            lambda key=key: discover.discover("http://127.0.0.1:9", None, key),
            lambda key=key: discover.fetch_json("http://127.0.0.1:9", "/x", key),
        ):
            with pytest.raises(ConfigError, match="--api-key") as e:
                ask()
            assert key.strip() not in str(e.value)


def test_diagnose_refuses_such_a_key_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["diagnose", "http://127.0.0.1:9", "--api-key", "schlüssel"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "--api-key" in said
    assert "schlüssel" not in said


def test_ipv6_addresses_keep_their_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(url: str, **_: Any) -> httpx.Response:
        asked.append(str(httpx.URL(url)))
        return httpx.Response(200, json={"data": [{"id": "m"}]})

    monkeypatch.setattr(httpx, "get", get)
    served = discover.discover("http://[::1]:8000/v1")
    assert served.base_url == "http://[::1]:8000"
    assert asked == ["http://[::1]:8000/v1/models"]
    e = Endpoint(served.base_url, "m")
    assert (e.host, e.port) == ("::1", 8000)
    head = RequestWriter(e, None).request(b"{}", request_id="x")  # type: ignore[arg-type]
    assert b"host: [::1]:8000\r\n" in head


def test_an_address_that_httpx_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: Any, **__: Any) -> None:
        raise httpx.InvalidURL("Invalid port")

    monkeypatch.setattr(httpx, "get", get)
    with pytest.raises(UserError, match="--host"):
        discover.discover("http://127.0.0.1:9")
    assert discover.fetch_json("http://127.0.0.1:9", "/x") is None


def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"--tokenizer: .*is no tokenizer.*git lfs pull"):
        find_tokenizer(str(tmp_path), "m")


def test_a_log_of_prompts_may_be_counted_in_words(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps({"prompt": f"the same start, question {i}"}) for i in range(30)))
    named, default = read_prompts(log, "words"), read_prompts(log)
    assert named.evidence == default.evidence
    assert "words" in named.note
