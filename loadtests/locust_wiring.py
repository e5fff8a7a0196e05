"""Ties `Control` to Locust's events and messages: on a process of its own, on a worker, on the master.

    worker -> master   `pdserve` in each report      the tally so far
                       pdserve_played                its share of the schedule has ended
                       pdserve_final                 the tally after the drain
                       pdserve_failed                a mistake: the master ends the test for all
    master -> worker   pdserve_drain                 send nothing more, wait for what runs

Locust logs what a listener raises and carries on, so no listener here raises for a mistake of the user.
"""

from __future__ import annotations

import time
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from cluster.errors import UserError
from loadtests.locust_control import Control
from loadtests.locust_plan import shares


def install(environment: Environment) -> None:
    """Wire one environment: local, master or worker.

    Raises:
        UserError: the options ask for what cannot be done. A worker says so when a test starts: it has the master's
            options from then on.
    """
    control = Control(environment)
    environment.pdserve = control
    runner, events = environment.runner, environment.events
    if isinstance(runner, MasterRunner):
        _install_master(control, runner)
    elif isinstance(runner, WorkerRunner):
        _install_worker(control, runner)
    elif isinstance(runner, LocalRunner):
        events.test_start.add_listener(lambda **_: control.begin())
        events.test_stopping.add_listener(lambda **_: control.drain())
    if not isinstance(runner, WorkerRunner):
        events.quit.add_listener(lambda **_: control.report())  # after Locust's own tables
        if environment.web_ui is not None:
            environment.web_ui.app.add_url_rule("/pdserve.json", "pdserve", control.summary)


def _install_worker(control: Control, runner: WorkerRunner) -> None:
    events = control.environment.events

    def report(client_id: str, data: dict[str, Any]) -> None:  # noqa: ARG001
        data["pdserve"] = control.to_wire()

    def drain(**_: Any) -> None:
        control.drain()
        runner.send_message("pdserve_final", control.to_wire())

    events.test_start.add_listener(lambda **_: control.begin())
    events.report_to_master.add_listener(report)
    runner.register_message("pdserve_drain", drain, concurrent=True)


def _install_master(control: Control, runner: MasterRunner) -> None:
    events = control.environment.events
    played: set[str] = set()

    def start(**_: Any) -> None:
        played.clear()
        clients = runner.clients
        there = [client.id for client in (*clients.ready, *clients.spawning, *clients.running)]
        # Both travel to the workers with the other options.
        control.options.pd_shares = shares(sorted(there, key=runner.get_worker_index))
        control.options.pd_run = time.time_ns()
        control.begin_master()

    def stopping(**_: Any) -> None:
        expected = set(runner.clients)
        runner.send_message("pdserve_drain")
        with gevent.Timeout(control.drain_s + 10, exception=False):
            while not expected <= control.drained:
                gevent.sleep(0.05)

    def worker_report(client_id: str, data: dict[str, Any]) -> None:
        if "pdserve" in data and client_id not in control.drained:
            control.receive(client_id, data["pdserve"], final=False)

    events.test_start.add_listener(start)
    events.test_stopping.add_listener(stopping)
    events.worker_report.add_listener(worker_report)

    def on_played(environment: Environment, msg: Any, **_: Any) -> None:  # noqa: ARG001
        played.add(msg.node_id)
        if control.options.headless and played >= set(control.options.pd_shares) & set(runner.clients):
            gevent.spawn(runner.quit)

    def on_final(environment: Environment, msg: Any, **_: Any) -> None:  # noqa: ARG001
        control.receive(msg.node_id, msg.data, final=True)

    def on_failed(environment: Environment, msg: Any, **_: Any) -> None:  # noqa: ARG001
        control.fail(UserError(str(msg.data)))

    runner.register_message("pdserve_played", on_played)
    runner.register_message("pdserve_final", on_final)
    runner.register_message("pdserve_failed", on_failed)
