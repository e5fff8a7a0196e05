"""What all users of one Locust process share: endpoint, prompts, client, tally; and how tallies meet on the master.

Workers send their whole tally with Locust's regular report and once more when they have drained. The master keeps
the latest of each worker, so what it shows is the pooled truth; see `tally.py`. A mistake of the user ends the test
with one line, on whichever process it is found.
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
from locust.runners import MasterRunner, WorkerRunner

from cluster.errors import UserError
from cluster.folder import make_folder
from cluster.messages import Outcome, Slo
from cluster.workload.arrival import Arrival
from cluster.workload.spec import Bounds, Workload
from cluster.workload.structures import Agent, Chat
from cluster.workload.text import TextWriter
from loadtests.discover import discover
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.lag import missed
from loadtests.locust_client import GeventClient
from loadtests.locust_plan import drain_of, scenario_of, share_of, slo_of
from loadtests.report.build import strict
from loadtests.sample import UNFINISHED, Sample
from loadtests.scenario import Scenario
from loadtests.session import room_tokens
from loadtests.tally import Tally, merged
from loadtests.tokenizer import FileTokenizer, find_tokenizer

log = logging.getLogger("pdserve")
LAG_PERIOD_S = 0.02

sample_event = EventHook()
"""Fires once per request with `name`, `sample` (loadtests.sample.Sample) and `good`, on the process that sent it."""


class Control:
    """One per Locust environment; `Control.of(environment)` finds it.

    Raises:
        UserError: the options ask for what cannot be done. Not on a worker: its options come with the first test.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.options: Any = environment.parsed_options
        self.scenario: Scenario | None = None
        self.failed = False
        self.run = 0
        if isinstance(environment.runner, WorkerRunner):
            self.tally, self.drain_s = Tally(_NOTHING_SCENARIO.slo.to_slo()), 0.0
        else:
            if self.options.pd_out:
                make_folder(Path(self.options.pd_out), "--pd-out")
            self._choose()
        self.tallies: dict[str, Tally] = {}
        self.in_flight = Group()
        self.stopping = Event()
        self.drained: set[str] = set()
        self._start = time.perf_counter()
        self._sources: dict[str, Any] = {}
        self._numbers = iter(range(10**12))
        self._found_for: Any = None
        self._watcher: gevent.Greenlet | None = None

    @classmethod
    def of(cls, environment: Environment) -> Control:
        control: Control = environment.pdserve
        return control

    def _choose(self) -> None:
        # By the options as they are now: whoever starts a test over the web can change them, and a worker has the
        # master's only once a test starts.
        self.scenario = scenario_of(self.options)
        self.tally = Tally(slo_of(self.options, self.scenario))
        self.drain_s = drain_of(self.options, self.scenario)

    @property
    def slo(self) -> Slo:
        return self.tally.slo

    def clock(self) -> float:
        """Seconds since this process began the test."""
        return time.perf_counter() - self._start

    @property
    def part(self) -> int:
        """This process among all that ever took part: for what must differ between any two of them."""
        return max(0, getattr(self.environment.runner, "worker_index", 0))

    # Life of a test on a process that sends.

    def begin(self) -> None:
        """A test starts: read the options, find the endpoint, forget the test before. A mistake ends the test."""
        self.failed, self.run = False, int(getattr(self.options, "pd_run", 0))
        self.tally, self.in_flight, self.stopping = Tally(self.slo), Group(), Event()
        self._sources.clear()
        try:
            self._choose()
            self._find_endpoint()
        except UserError as mistake:
            self.fail(mistake)
            return
        self._start = time.perf_counter()
        self._watcher = gevent.spawn(self._watch_lag)
        if self.scenario is not None:
            gevent.spawn(self._play, self.bounded(self.scenario.workload))

    def fail(self, mistake: UserError) -> None:
        """End the test for a mistake of the user: one line and exit status 2. A worker leaves that to the master."""
        self.stopping.set()
        if self.failed:
            return  # every worker may find the same mistake
        self.failed = True
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            runner.send_message("pdserve_failed", str(mistake))
            return
        log.error("%s", str(mistake).replace("\n", " "))
        if runner is None:
            return
        if self.options.headless:
            self.environment.process_exit_code = 2
            gevent.spawn(runner.quit)
        else:
            gevent.spawn(runner.stop)

    def _play(self, workload: Workload) -> None:
        try:
            self._play_share(workload)
        except UserError as mistake:
            self.fail(mistake)

    def _play_share(self, workload: Workload) -> None:
        """This process's share of a scenario's schedule, then word that it is done."""
        dealt = getattr(self.options, "pd_shares", None)
        share = share_of(dealt, getattr(self.environment.runner, "client_id", None))
        if share is None:
            return
        streams = workload.all_streams
        for a in islice(workload.arrivals(), share[0], None, share[1]):
            stream = streams[a.stream]
            sample, request = self.prepare(a, alternate=isinstance(stream.prompts, Chat | Agent))
            if self.stopping.wait(timeout=max(0.0, a.at_s - self.clock())):
                return
            self.send_later(stream.name or workload.name, sample, request)
        self.in_flight.join(timeout=self.drain_s)
        runner = self.environment.runner
        if isinstance(runner, WorkerRunner):
            runner.send_message("pdserve_played")
        elif self.options.headless and runner is not None:
            runner.quit()

    def _find_endpoint(self) -> None:
        o = self.options
        host = self.environment.host or "http://127.0.0.1:8000"
        wanted = (host, o.pd_model, o.pd_tokenizer, o.pd_scenario, o.pd_api_key)
        if self._found_for == wanted:
            return
        served = discover(host, o.pd_model or None, o.pd_api_key or None, key_option="--pd-api-key")
        tokenizer = find_tokenizer(o.pd_tokenizer or None, served.model)
        scenario = self.scenario or _NOTHING_SCENARIO
        request = scenario.request
        endpoint = Endpoint(
            served.base_url,
            served.model,
            api=request.api,
            exact_output=request.exact_output,
            counts=request.counts,
            temperature=request.temperature,
            api_key=o.pd_api_key or None,
            tenant_header=request.tenant_header,
        )
        self.writer = RequestWriter(endpoint, TextWriter(tokenizer))
        self.client = GeventClient(endpoint, self.clock, scenario.client.to_limits())
        length, words = served.max_model_len, not isinstance(tokenizer, FileTokenizer)
        self.max_tokens = None if length is None else room_tokens(length, words=words)
        self._found_for = wanted

    def _watch_lag(self) -> None:
        sketch = self.tally.extra["loop_lag_s"]
        while True:
            before = self.clock()
            gevent.sleep(LAG_PERIOD_S)
            for late_s in missed(self.clock() - before - LAG_PERIOD_S, LAG_PERIOD_S):
                sketch.add(late_s)

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
        self.in_flight.join(timeout=self.drain_s)
        self.in_flight.kill(block=True, timeout=2)
        if self._watcher is not None:
            self._watcher.kill(block=False)

    # Where tallies meet.

    def begin_master(self) -> None:
        """A test starts on the workers: forget the test before. A mistake in the options ends it."""
        self.failed, self.run = False, self.options.pd_run
        self.tallies.clear()
        self.drained.clear()
        try:
            self._choose()
        except UserError as mistake:
            self.fail(mistake)

    def to_wire(self) -> dict[str, Any]:
        """What a worker reports."""
        return {"run": self.run, "tally": self.tally.to_wire()}

    def total(self) -> Tally:
        """All processes' requests."""
        if isinstance(self.environment.runner, MasterRunner):
            return merged(self.slo, self.tallies.values())
        return self.tally

    def receive(self, client_id: str, wire: dict[str, Any], *, final: bool) -> None:
        """A worker's report. One of another test, or of before the first one, counts for nothing."""
        if self.run and wire["run"] == self.run:
            try:
                self.tallies[client_id] = Tally.from_wire(self.slo, wire["tally"])
            except UserError as mistake:
                self.fail(mistake)
        if final:
            self.drained.add(client_id)

    def summary(self) -> dict[str, Any]:
        total = self.total()
        out = strict(total.summary())
        limits = (self.scenario or _NOTHING_SCENARIO).validity
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
        """The last words of a headless run, and summary.json where a folder was named. A failed run has none."""
        if self.failed:
            return
        summary = self.summary()
        if self.options.pd_out:
            (Path(self.options.pd_out) / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        if not summary["valid"]:
            log.warning("invalid run, the load generator was the bottleneck: %s", "; ".join(summary["reasons"]))
        keys = ("loop", "valid", "offered", "good", "attainment", "goodput_per_s", "output_tokens_per_s", "error_rate")
        quantiles = {f"{k[:-2]}_{p}_s": summary[k][p] for k in ("ttft_s", "tpot_s", "itl_s") for p in ("p50", "p99")}
        print(json.dumps({k: summary[k] for k in keys} | quantiles), flush=True)


_NOTHING_SCENARIO = Scenario.model_validate(
    {
        "workload": {
            "requests": 1,
            "arrivals": {"process": "constant", "rate_per_s": 1},
            "prompts": {"kind": "plain"},
        }
    }
)
