"""What all users of one Locust process share: endpoint, prompts, client, tally; and how tallies meet on the master.

Workers send their whole tally with Locust's regular report and once more when they have drained. The master keeps
the latest of each worker, so what it shows is the pooled truth; see `tally.py`.
"""

from __future__ import annotations

import json
import logging
import time
from itertools import islice
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Group
from locust.env import Environment
from locust.event import EventHook
from locust.runners import LocalRunner, MasterRunner, WorkerRunner

from cluster.config import SloConfig
from cluster.errors import UserError
from cluster.messages import Outcome
from cluster.workload.arrival import Arrival
from cluster.workload.spec import Bounds, Workload
from cluster.workload.structures import Agent, Chat
from cluster.workload.text import TextWriter
from loadtests import scenario as scenarios
from loadtests.discover import discover
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.locust_client import GeventClient
from loadtests.report.build import strict
from loadtests.sample import UNFINISHED, Sample
from loadtests.scenario import Scenario
from loadtests.session import TEMPLATE_TOKENS
from loadtests.tally import Tally, merged
from loadtests.tokenizer import find_tokenizer

log = logging.getLogger("pdserve")
LAG_PERIOD_S = 0.02

sample_event = EventHook()
"""Fires once per request with `name`, `sample` (loadtests.sample.Sample) and `good`, on the process that sent it."""


class Control:
    """One per Locust environment; `Control.of(environment)` finds it."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.options: Any = environment.parsed_options
        self.scenario: Scenario | None = None
        if self.options.pd_scenario:
            self.scenario = scenarios.load(scenarios.find(self.options.pd_scenario))
        self.slo = self._slo().to_slo()
        self.tally = Tally(self.slo)
        self.tallies: dict[str, Tally] = {}
        self.in_flight = Group()
        self.stopping = Event()
        self.drained: set[str] = set()
        self._start = time.perf_counter()
        self._sources: dict[str, Any] = {}
        self._numbers = iter(range(10**12))
        self._ready = False
        self._watcher: gevent.Greenlet | None = None

    @classmethod
    def of(cls, environment: Environment) -> Control:
        control: Control = environment.pdserve
        return control

    def _slo(self) -> SloConfig:
        o = self.options
        base = self.scenario.slo if self.scenario is not None else SloConfig()
        changes = {"ttft_ms": o.pd_ttft_ms, "tpot_ms": o.pd_tpot_ms}
        return base.model_copy(update={k: v for k, v in changes.items() if v is not None})

    def clock(self) -> float:
        """Seconds since this process began the test."""
        return time.perf_counter() - self._start

    @property
    def part(self) -> int:
        return max(0, getattr(self.environment.runner, "worker_index", 0))

    @property
    def parts(self) -> int:
        return max(1, int(getattr(self.options, "pd_workers", None) or 1))

    # Life of a test on a process that sends.

    def begin(self) -> None:
        """A test starts: find the endpoint, forget the test before."""
        self.tally = Tally(self.slo)
        self.in_flight, self.stopping = Group(), Event()
        self._sources.clear()
        self._find_endpoint()
        self._start = time.perf_counter()
        self._watcher = gevent.spawn(self._watch_lag)
        if self.scenario is not None:
            gevent.spawn(self._play, self.bounded(self.scenario.workload))

    def _play(self, workload: Workload) -> None:
        """This process's share of a scenario's schedule, then word that it is done."""
        streams = workload.all_streams
        for a in islice(workload.arrivals(), self.part, None, self.parts):
            stream = streams[a.stream]
            sample, request = self.prepare(a, alternate=isinstance(stream.prompts, Chat | Agent))
            if self.stopping.wait(timeout=max(0.0, a.at_s - self.clock())):
                return
            self.send_later(stream.name or workload.name, sample, request)
        self.in_flight.join(timeout=self.options.pd_drain)
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            runner.send_message("pdserve_played")
        elif self.options.headless and runner is not None:
            runner.quit()

    def _find_endpoint(self) -> None:
        if self._ready:
            return
        o = self.options
        try:
            served = discover(self.environment.host or "http://127.0.0.1:8000", o.pd_model or None)
            text = TextWriter(find_tokenizer(o.pd_tokenizer or None, served.model))
        except UserError as mistake:
            log.error("%s", mistake)
            self.environment.process_exit_code = 2
            raise
        request = (self.scenario or Scenario(workload=_NOTHING)).request
        endpoint = Endpoint(
            served.base_url,
            served.model,
            api=request.api,
            exact_output=request.exact_output,
            counts=request.counts,
            temperature=request.temperature,
            tenant_header=request.tenant_header,
        )
        self.writer = RequestWriter(endpoint, text)
        self.client = GeventClient(endpoint, self.clock)
        self.max_tokens = None if served.max_model_len is None else served.max_model_len - TEMPLATE_TOKENS
        self._ready = True

    def _watch_lag(self) -> None:
        sketch = self.tally.extra["loop_lag_s"]
        while True:
            before = self.clock()
            gevent.sleep(LAG_PERIOD_S)
            sketch.add(max(0.0, self.clock() - before - LAG_PERIOD_S))

    def bounded(self, workload: Workload) -> Workload:
        """The workload cut to what the model takes."""
        if self.max_tokens is None:
            return workload
        b = workload.bounds
        total = min(self.max_tokens, b.max_total_tokens or self.max_tokens)
        output = min(total // 2, b.max_output_tokens or total // 2)
        bounds = Bounds(max_prompt_tokens=b.max_prompt_tokens, max_output_tokens=output, max_total_tokens=total)
        return workload.model_copy(update={"bounds": bounds})

    def source(self, kind: str, workload: Workload) -> Any:
        """One prompt structure per user class and process, so that its users share conversations and prefixes."""
        if kind not in self._sources:
            self._sources[kind] = self.bounded(workload).source(part=self.part)
        return self._sources[kind]

    def prepare(self, arrival: Arrival, *, alternate: bool) -> tuple[Sample, bytes]:
        """Write a request ahead of its time."""
        index = next(self._numbers)
        request_id = f"locust-{self.part}-{index}"
        body = self.writer.body(arrival.prompt, arrival.output_tokens, alternate=alternate, priority=arrival.priority)
        sample = Sample(
            index,
            arrival.at_s,
            tenant=arrival.tenant,
            priority=arrival.priority,
            session=arrival.session,
            asked_prompt_tokens=arrival.prompt_tokens,
            asked_output_tokens=arrival.output_tokens,
            request_id=request_id,
        )
        return sample, self.writer.request(body, request_id=request_id, tenant=arrival.tenant)

    def send(self, name: str, sample: Sample, request: bytes) -> Sample:
        """Send now and wait for the end; counts whatever came of it."""
        try:
            self.client.send(sample, request)
        finally:
            self._count(name, sample)
        return sample

    def send_later(self, name: str, sample: Sample, request: bytes) -> None:
        """Send now without waiting: nobody in an open loop does."""
        self.in_flight.spawn(self.send, name, sample, request)

    def _count(self, name: str, sample: Sample) -> None:
        good = self.tally.add(name, sample)
        self._rows(name, sample, good)
        sample_event.fire(name=name, sample=sample, good=good)

    def _rows(self, name: str, sample: Sample, good: bool) -> None:
        end_s = sample.end_s if sample.end_s is not None else self.clock()
        self.environment.events.request.fire(
            request_type="E2E",
            name=name,
            response_time=1e3 * (end_s - sample.scheduled_s),
            response_length=sample.times.tokens,
            exception=None if sample.outcome is Outcome.DONE else RuntimeError(sample.error or UNFINISHED),
            context={},
        )
        if sample.outcome is not Outcome.DONE:
            return
        # Straight into the entries: these are views of the same request, and the totals must count it once.
        stats = self.environment.stats
        for row, value in (("TTFT", sample.ttft_s), ("TPOT", sample.tpot_s)):
            if value is not None:
                stats.get(name, row).log(1e3 * value, 0)
        itl = stats.get(name, "ITL")
        for gap_s in sample.times.itl_s:
            itl.log(1e3 * gap_s, 0)
        stats.get(name, "output tokens").log(sample.times.tokens, 0)
        if sample.cached_tokens is not None:
            stats.get(name, "cached tokens").log(sample.cached_tokens, 0)
        if good:
            stats.get(name, "good").log(1e3 * (end_s - sample.scheduled_s), 0)

    def drain(self) -> None:
        """Send nothing more, wait for what runs, and count what does not end as unfinished."""
        self.stopping.set()
        self.in_flight.join(timeout=self.options.pd_drain)
        self.in_flight.kill(block=True, timeout=2)
        if self._watcher is not None:
            self._watcher.kill(block=False)

    # Where tallies meet.

    def total(self) -> Tally:
        """All processes' requests."""
        if isinstance(self.environment.runner, MasterRunner):
            return merged(self.slo, self.tallies.values())
        return self.tally

    def receive(self, client_id: str, wire: dict[str, Any], *, final: bool) -> None:
        self.tallies[client_id] = Tally.from_wire(self.slo, wire)
        if final:
            self.drained.add(client_id)

    def summary(self) -> dict[str, Any]:
        total = self.total()
        out = strict(total.summary())
        limits = (self.scenario or Scenario(workload=_NOTHING)).validity
        reasons = []
        for name, limit_ms in (
            ("schedule_lag_s", limits.schedule_lag_p99_ms),
            ("loop_lag_s", limits.loop_lag_p99_ms),
        ):
            p99 = total.extra[name].quantile(0.99)
            if p99 is not None and 1e3 * p99 > limit_ms:
                reasons.append(f"{name.removesuffix('_s')} p99 {1e3 * p99:.0f} ms is above {limit_ms:g} ms")
        loop = "open" if self.scenario is not None else self.options.pd_loop
        return {"loop": loop, "valid": not reasons, "reasons": reasons, **out}

    def report(self) -> None:
        """The last words of a headless run, and summary.json where a folder was named."""
        summary = self.summary()
        if self.options.pd_out:
            folder = Path(self.options.pd_out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        if not summary["valid"]:
            log.warning("invalid run, the load generator was the bottleneck: %s", "; ".join(summary["reasons"]))
        keys = ("loop", "valid", "offered", "good", "attainment", "goodput_per_s", "output_tokens_per_s", "error_rate")
        quantiles = {f"{k[:-2]}_{p}_s": summary[k][p] for k in ("ttft_s", "tpot_s", "itl_s") for p in ("p50", "p99")}
        print(json.dumps({k: summary[k] for k in keys} | quantiles), flush=True)


_NOTHING = Workload.model_validate(
    {"requests": 1, "arrivals": {"process": "constant", "rate_per_s": 1}, "prompts": {"kind": "plain"}}
)


def install(environment: Environment) -> None:
    """Wire one environment: local, master or worker."""
    control = Control(environment)
    environment.pdserve = control
    runner, events = environment.runner, environment.events
    if isinstance(runner, MasterRunner):
        _install_master(control, runner)
    elif isinstance(runner, WorkerRunner):
        events.test_start.add_listener(lambda **_: control.begin())
        events.report_to_master.add_listener(
            lambda client_id, data: data.__setitem__("pdserve", control.tally.to_wire())  # noqa: ARG005
        )

        def drain(**_: Any) -> None:
            control.drain()
            runner.send_message("pdserve_final", control.tally.to_wire())

        runner.register_message("pdserve_drain", drain, concurrent=True)
    elif isinstance(runner, LocalRunner):
        events.test_start.add_listener(lambda **_: control.begin())
        events.test_stopping.add_listener(lambda **_: control.drain())
    if not isinstance(runner, WorkerRunner):
        events.quit.add_listener(lambda **_: control.report())  # after Locust's own tables
        if environment.web_ui is not None:
            environment.web_ui.app.add_url_rule("/pdserve.json", "pdserve", control.summary)


def _install_master(control: Control, runner: MasterRunner) -> None:
    events = control.environment.events
    done: set[str] = set()

    def start(**_: Any) -> None:
        control.tallies.clear()
        control.drained.clear()
        done.clear()
        # Travels to the workers with the other options: each drives its share of a schedule.
        control.options.pd_workers = max(1, runner.worker_count)

    def stopping(**_: Any) -> None:
        expected = set(runner.clients)
        runner.send_message("pdserve_drain")
        with gevent.Timeout(control.options.pd_drain + 10, exception=False):
            while not expected <= control.drained:
                gevent.sleep(0.05)

    def worker_report(client_id: str, data: dict[str, Any]) -> None:
        if "pdserve" in data and client_id not in control.drained:
            control.receive(client_id, data["pdserve"], final=False)

    events.test_start.add_listener(start)
    events.test_stopping.add_listener(stopping)
    events.worker_report.add_listener(worker_report)

    def played(environment: Environment, msg: Any, **_: Any) -> None:  # noqa: ARG001
        done.add(msg.node_id)
        if control.options.headless and done >= set(runner.clients):
            gevent.spawn(runner.quit)

    runner.register_message("pdserve_played", played)
    runner.register_message(
        "pdserve_final",
        lambda environment, msg, **_: control.receive(msg.node_id, msg.data, final=True),  # noqa: ARG005
    )
