"""Locust's side without Locust's network: whose limits and whose share, mistakes that end a test, cut connections."""

from __future__ import annotations

import json
import logging
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import ConfigError, UserError
from cluster.goodput.timing import token_times
from cluster.messages import Outcome, Slo
from loadtests.discover import Served
from loadtests.endpoint import Endpoint
from loadtests.sample import Sample
from loadtests.scripted_server import HEAD, event, framed
from loadtests.tally import Tally

# Locust patches sockets and threads of the process that imports it, which here is the test runner's.
with pytest.MonkeyPatch.context() as _patch, warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _patch.setenv("LOCUST_SKIP_MONKEY_PATCH", "1")
    import gevent
    from locust.argument_parser import LocustArgumentParser
    from locust.event import Events
    from locust.runners import LocalRunner, MasterRunner, WorkerNode, WorkerNodes, WorkerRunner

    from loadtests import locust_control, locust_wiring, locustfile
    from loadtests.locust_client import GeventClient
    from loadtests.locust_control import Control
    from loadtests.locust_plan import scenario_of, share_of, shares, slo_of
    from loadtests.session import TEMPLATE_TOKENS, room_tokens


ROOT = Path(__file__).resolve().parents[2]


class Spoken:
    """What the runners of these tests have instead of a network."""

    greenlet = None

    def __init__(self, name: str = "") -> None:
        self.client_id = name
        self.said: list[tuple[str, Any]] = []
        self.ended: list[str] = []
        self.custom_messages: dict[str, Any] = {}
        self.clients = WorkerNodes()
        self.worker_indexes: dict[str, int] = {}
        self.worker_index_max = 0

    def send_message(self, msg_type: str, data: Any = None, client_id: str | None = None) -> None:
        self.said.append((msg_type, data))

    def quit(self) -> None:
        self.ended.append("quit")

    def stop(self) -> None:
        self.ended.append("stop")


class Local(Spoken, LocalRunner): ...


class Worker(Spoken, WorkerRunner): ...


class Master(Spoken, MasterRunner): ...


def options(**changes: Any) -> SimpleNamespace:
    chosen: dict[str, Any] = {
        "pd_scenario": "",
        "pd_ttft_ms": None,
        "pd_tpot_ms": None,
        "pd_out": "",
        "pd_model": "",
        "pd_tokenizer": "words",
        "pd_drain": 0.1,
        "pd_api_key": "",
        "pd_loop": "open",
        "headless": True,
    }
    return SimpleNamespace(**chosen | changes)


def environment(runner: Any, **changes: Any) -> Any:
    return SimpleNamespace(
        parsed_options=options(**changes),
        runner=runner,
        events=Events(),
        host="http://127.0.0.1:9",
        user_classes=[locustfile.ChatUser, locustfile.ScenarioUser],
        web_ui=None,
        process_exit_code=None,
    )


@pytest.fixture(autouse=True)
def endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locust_control, "discover", lambda *_, **__: Served("http://127.0.0.1:9", "m", None))


@pytest.fixture
def started() -> Iterator[Any]:
    """Begins a control, and ends what it began."""
    begun: list[Control] = []

    def start(control: Control) -> Control:
        begun.append(control)
        control.begin()
        return control

    yield start
    for control in begun:
        control.drain()


def scenario_file(folder: Path, **workload: Any) -> str:
    arrivals = {"process": "constant", "rate_per_s": 1000}
    prompts = {"kind": "plain", "prompt_tokens": 9, "output_tokens": 4}
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"workload": {"requests": 6, "arrivals": arrivals, "prompts": prompts, **workload}}))
    return str(path)


def answered(i: int, ttft_s: float = 0.3) -> Sample:
    s = Sample(i, 0.0, sent_s=0.0, status=200, outcome=Outcome.DONE, counted="usage")
    s.times = token_times(0.0, [(ttft_s + 0.01 * k, 1) for k in range(5)])
    s.end_s = ttft_s + 0.05
    return s


def test_the_options_are_the_ones_that_are_read() -> None:
    parser = LocustArgumentParser()
    locustfile.options(parser)
    parsed = parser.parse_args(["--pd-scenario", "smoke", "--pd-ttft-ms", "100"])
    assert slo_of(parsed, scenario_of(parsed)) == Slo(0.1, 0.1)
    assert set(vars(options())) - set(vars(parsed)) == {"headless"}  # Locust's own


def test_no_page_holds_the_key() -> None:
    parser = LocustArgumentParser()
    locustfile.options(parser)
    parser.parse_args(["--pd-api-key", "secret"])
    assert "pd_api_key" not in parser.args_included_in_web_ui
    assert "pd_tokenizer" in vars(parser.parse_args([]))


# Limits.


def test_a_worker_judges_by_the_limits_of_the_master(started: Any, tmp_path: Path) -> None:
    worker = Control(environment(Worker("a")))
    assert worker.slo.ttft_s == 0.5
    name = scenario_file(tmp_path, slo={"ttft_ms": 700, "tpot_ms": 40})
    # What a "spawn" message brings.
    sent = {"pd_ttft_ms": 100.0, "pd_scenario": name, "pd_run": 7, "pd_shares": {"a": 0}}
    vars(worker.options).update(sent)
    started(worker)
    assert worker.slo == Slo(0.1, 0.04)
    assert worker.scenario is not None
    for i in range(20):
        worker.tally.add("x", answered(i))
    master = Control(environment(Master(), pd_scenario=name, pd_ttft_ms=100.0, pd_run=7))
    master.begin_master()
    master.receive("a", worker.to_wire(), final=True)
    assert master.summary()["offered"] == 20
    assert master.summary()["attainment"] == 0.0


def test_other_limits_are_refused_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    theirs = Tally(Slo(0.5, 0.05))
    theirs.add("x", answered(1))
    with pytest.raises(UserError, match="TTFT 500 ms, TPOT 50 ms, the master by TTFT 100 ms"):
        Tally.from_wire(Slo(0.1, 0.05), json.loads(json.dumps(theirs.to_wire())))
    master = Control(environment(Master(), pd_ttft_ms=100.0, pd_run=7))
    master.begin_master()
    for name in ("a", "b"):
        master.receive(name, {"run": 7, "tally": theirs.to_wire()}, final=False)
    gevent.sleep(0)
    assert master.environment.process_exit_code == 2
    assert master.environment.runner.ended == ["quit"]
    assert len(caplog.records) == 1


def test_a_report_of_another_test_counts_for_nothing() -> None:
    master = Control(environment(Master(), pd_run=7))
    master.begin_master()
    old = Tally(master.slo)
    old.add("x", answered(1))
    master.receive("a", {"run": 6, "tally": old.to_wire()}, final=False)
    assert master.summary()["offered"] == 0
    master.receive("a", {"run": 7, "tally": old.to_wire()}, final=True)
    assert master.summary()["offered"] == 1
    assert master.drained == {"a"}


@pytest.mark.parametrize("value", [0, -5.0, "soon", "nan"])
def test_limits_are_above_zero(value: Any) -> None:
    with pytest.raises(ConfigError, match="--pd-ttft-ms"):
        slo_of(options(pd_ttft_ms=value), None)
    assert slo_of(options(pd_ttft_ms="250", pd_tpot_ms=""), None) == Slo(0.25, 0.05)


# Shares.


def test_shares_are_dealt_to_those_who_are_there() -> None:
    dealt = shares(["a", "c", "f"])
    assert [share_of(dealt, name) for name in ("a", "c", "f", "late")] == [(0, 3), (1, 3), (2, 3), None]
    assert share_of(None, None) == (0, 1)


def play(control: Control, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that this process plays."""
    sent: list[float] = []
    assert control.scenario is not None
    monkeypatch.setattr(control, "prepare", lambda a, **_: (Sample(0, a.at_s), b""))
    monkeypatch.setattr(control, "send_later", lambda name, sample, request: sent.append(sample.scheduled_s))
    control._play(control.scenario.workload)
    return sent


def test_workers_play_every_request_once_and_a_late_one_plays_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = scenario_file(tmp_path)
    master = Master()
    master_environment = environment(master, pd_scenario=name)
    locust_wiring.install(master_environment)
    # One of three left before the test began: its number is not given again.
    for worker in ("a", "b", "c"):
        master.get_worker_index(worker)
    for worker in ("a", "c"):
        master.clients[worker] = WorkerNode(worker)
    master_environment.events.test_start.fire(environment=master_environment)
    chosen = master_environment.parsed_options
    played = {}
    for number, worker in ((0, "a"), (2, "c"), (3, "late")):
        runner = Worker(worker)
        runner.worker_index = number
        control = Control(environment(runner, **vars(chosen)))
        control._choose()
        played[worker] = play(control, monkeypatch)
        assert [what for what, _ in runner.said] == (["pdserve_played"] if worker != "late" else [])
    assert sorted(played["a"] + played["c"]) == pytest.approx([i / 1000 for i in range(6)])
    assert played["late"] == []
    # The end does not wait for those without a share.
    master.clients["late"] = WorkerNode("late")
    for worker in ("a", "c"):
        assert master.ended == []
        master.custom_messages["pdserve_played"][0](environment=None, msg=SimpleNamespace(node_id=worker))
        gevent.sleep(0)
    assert master.ended == ["quit"]
    assert not caplog.records


def test_one_process_plays_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control(environment(Local(), pd_scenario=scenario_file(tmp_path)))
    assert len(play(control, monkeypatch)) == 6
    assert control.environment.runner.ended == ["quit"]


# Mistakes.


def no_such_host(*_: Any, **__: Any) -> Served:
    raise UserError("--host: nobody\nanswers")


def test_a_wrong_host_ends_a_headless_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(locust_control, "discover", no_such_host)
    local = environment(Local())
    locust_wiring.install(local)
    local.events.test_start.fire(environment=local)
    gevent.sleep(0)
    assert local.runner.ended == ["quit"]
    assert local.process_exit_code == 2
    assert [r.getMessage() for r in caplog.records] == ["--host: nobody answers"]
    user = locustfile.ChatUser.__new__(locustfile.ChatUser)
    user.environment = local
    user.on_start()
    with pytest.raises(locustfile.StopUser):
        user.ask()


def test_with_a_web_ui_the_next_test_may_succeed(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    local = environment(Local(), headless=False)
    control = Control(local)
    with monkeypatch.context() as wrong:
        wrong.setattr(locust_control, "discover", no_such_host)
        control.begin()
    gevent.sleep(0)
    assert (local.runner.ended, local.process_exit_code, control.failed) == (["stop"], None, True)
    started(control)
    assert not control.failed
    assert not control.stopping.is_set()


def test_a_workers_mistake_is_the_masters_to_tell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locust_control, "discover", no_such_host)
    master = environment(Master())
    locust_wiring.install(master)
    for name in ("a", "b"):
        worker = environment(Worker(name))
        locust_wiring.install(worker)
        worker.events.test_start.fire(environment=worker)
        ((what, said),) = worker.runner.said
        assert what == "pdserve_failed"
        message = SimpleNamespace(node_id=name, data=said)
        master.runner.custom_messages[what][0](environment=master, msg=message)
    gevent.sleep(0)
    assert master.runner.ended == ["quit"]
    assert master.process_exit_code == 2
    assert [r.getMessage() for r in caplog.records] == ["--host: nobody answers"]


def test_a_trace_that_cannot_be_read_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace.jsonl").write_text("not a trace\n")
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"workload": {"trace": {"path": "trace.jsonl"}}}))
    local = environment(Local(), pd_scenario=str(path))
    control = Control(local)
    assert control.scenario is not None
    control._play(control.scenario.workload)
    gevent.sleep(0)
    assert local.runner.ended == ["quit"]
    assert local.process_exit_code == 2
    assert "trace.jsonl:1" in caplog.text


def test_scenarios_that_cannot_be_played_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed = scenario_file(tmp_path, arrivals={"process": "closed", "users": 2})
    for name, said in ((closed, "closed loop"), ("nope", "neither a scenario nor a file")):
        with pytest.raises(ConfigError, match=f"--pd-scenario: .*{said}"):
            scenario_of(options(pd_scenario=name))
        caplog.clear()
        with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as end:
            locustfile.set_up(environment(Local(), pd_scenario=name))
        assert end.value.code == 2
        assert len(caplog.records) == 1


def test_an_unusable_folder_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as end:
        locustfile.set_up(environment(Local(), pd_out=str(tmp_path / "file")))
    assert end.value.code == 2


def test_users_are_chosen_where_the_options_are_known(tmp_path: Path) -> None:
    name = scenario_file(tmp_path)
    for runner, chosen, users in (
        (Local(), "", ["ChatUser"]),
        (Local(), name, ["ScenarioUser"]),
        (Worker("a"), "", ["ChatUser", "ScenarioUser"]),
    ):
        there = environment(runner, pd_scenario=chosen)
        locustfile.set_up(there)
        assert [c.__name__ for c in there.user_classes] == users


def test_locust_itself_ends_with_one_line_and_status_2() -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--pd-scenario", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    mistakes = [line for line in done.stderr.splitlines() if "/ERROR/" in line or "Traceback" in line]
    assert len(mistakes) == 1, done.stderr
    assert "--pd-scenario: 'nope' is neither a scenario nor a file" in mistakes[0]


def test_a_scenario_keeps_its_client(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def known(*words: Any, **more: Any) -> Served:
        asked.append((*words, more))
        return Served("http://127.0.0.1:9", "m", 4096)

    monkeypatch.setattr(locust_control, "discover", known)
    chosen = {"pd_scenario": scenario_file(tmp_path, requests=1), "pd_drain": None, "pd_api_key": "secret"}
    path = Path(chosen["pd_scenario"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"client": {"drain_s": 0.2, "total_s": 7}}))
    control = started(Control(environment(Local(), **chosen)))
    assert asked == [("http://127.0.0.1:9", None, "secret", {"key_option": "--pd-api-key"})]
    assert control.writer.endpoint.api_key == "secret"
    assert (control.drain_s, control.client._limits.total_s) == (0.2, 7)
    assert control.max_tokens == room_tokens(4096, words=True) == 4096 - 4096 // 3 - TEMPLATE_TOKENS


@pytest.mark.parametrize(
    ("changes", "line"),
    [({"pd_drain": "soon"}, "--pd-drain: 'soon' is no number"), ({"pd_drain": -1}, "--pd-drain: -1 is no number")],
)
def test_a_drain_is_a_number_of_seconds(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        Control(environment(Local(), **changes))


def test_what_locust_cannot_keep_is_refused(tmp_path: Path) -> None:
    path = Path(scenario_file(tmp_path))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"client": {"max_in_flight": 3}}))
    with pytest.raises(ConfigError, match=r"^--pd-scenario: .* \(client.max_in_flight\).*; use `pdserve loadtest`"):
        Control(environment(Local(), pd_scenario=str(path)))


# Connections.


class Socket:
    """Gives its reads in order; an exception is raised."""

    def __init__(self, *reads: bytes | OSError) -> None:
        self.reads = list(reads)

    def sendall(self, data: bytes) -> None:
        pass

    def recv(self, most: int) -> bytes:
        read = self.reads.pop(0)
        if isinstance(read, OSError):
            raise read
        return read

    def close(self) -> None:
        pass


RESET = ConnectionResetError(104, "Connection reset by peer")
WHOLE = HEAD + framed(event("a", 1) + event("b", 2, "stop") + b"data: [DONE]\n\n")


def request(*sockets: Socket, idle: Socket | None = None) -> Sample:
    client = GeventClient(Endpoint("http://127.0.0.1:9", "m"), lambda: 1.0)
    connections = iter(sockets)
    client._connect = lambda: next(connections)  # type: ignore[assignment, method-assign, return-value]
    if idle is not None:
        client._idle.append(idle)  # type: ignore[arg-type]
    return client.send(Sample(0, 0.0), b"")


def test_a_reset_is_judged_by_what_had_arrived() -> None:
    s = request(Socket(WHOLE, RESET))
    assert (s.outcome, s.error, s.times.tokens) == (Outcome.DONE, "", 2)
    s = request(Socket(HEAD + framed(event("a", 1)), RESET))
    assert (s.outcome, s.error) == (Outcome.FAILED, "cut: no finish reason")
    s = request(Socket(RESET))
    assert (s.outcome, s.error) == (Outcome.FAILED, "connection closed before the headers")


def test_a_refusal_under_tls_says_why() -> None:
    refused = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
    s = request(Socket(refused))
    assert s.outcome is Outcome.FAILED and s.error.startswith("TLS: ") and "CERTIFICATE_REQUIRED" in s.error
    assert request(Socket(HEAD + framed(event("a", 1)), refused)).error == "cut: no finish reason"


def test_a_reset_of_a_kept_connection_says_nothing_of_the_request() -> None:
    s = request(Socket(WHOLE + b"0\r\n\r\n"), idle=Socket(RESET))
    assert (s.outcome, s.reconnects) == (Outcome.DONE, 1)
    s = request(idle=Socket(HEAD + framed(event("a", 1)), RESET))
    assert s.error == "cut: no finish reason"


def test_a_connect_without_a_message_says_its_kind() -> None:
    client = GeventClient(Endpoint("http://127.0.0.1:9", "m"), lambda: 1.0)

    def refuse() -> Any:
        raise TimeoutError

    client._connect = refuse  # type: ignore[method-assign]
    assert client.send(Sample(0, 0.0), b"").error == "connect: TimeoutError"


def test_what_workers_report_before_the_first_test_counts_for_nothing() -> None:
    master = Control(environment(Master(), pd_ttft_ms=100))
    fresh = Control(environment(Worker("w1"), pd_ttft_ms=100))
    master.receive("w1", fresh.to_wire(), final=False)
    assert not master.failed and not master.tallies
