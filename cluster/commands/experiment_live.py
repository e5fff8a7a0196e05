"""`pdserve experiment --live`: each combination as a cluster of its own on Ray, measured over HTTP.

A combination is started with `pdserve serve`, loaded by the load tests' own client for every rate and seed, and
stopped. Its engines are those of the file: simulated ones in real time, or vLLM with `engine: {kind: vllm}`.
"""

from __future__ import annotations

import itertools
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cluster.commands.output import err
from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.messages import RequestRecord, Stage
from cluster.planner.experiment import Measure
from cluster.planner.simulate import Run, accelerators, arrival_rate
from cluster.sim.fleet import Transfer
from cluster.workload.spec import Workload

STOP_S = 120.0


@contextmanager
def served(config: ClusterConfig) -> Iterator[Measure]:
    """Start `config`, yield what measures a workload on it, stop it.

    Raises:
        UserError: the cluster did not start, or its endpoint does not answer.
    """
    from cluster.runtime.local import free_port

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", by_alias=True)), encoding="utf-8")
        command = [sys.executable, "-m", "cluster.cli", "serve", str(path), "--json"]
        command += ["--port", str(free_port(config.router.http.host))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            url = _ready(process, config.engine.start_timeout_s + 120)
            numbers = itertools.count(1)
            yield lambda workload, seed: _measure(config, url, workload, seed, f"experiment-{next(numbers)}-{seed}")
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _ready(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The address that `pdserve serve --json` prints when it serves."""
    lines: queue.Queue[str] = queue.Queue()
    tail: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    stdout, stderr = process.stdout, process.stderr
    threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
    # Its progress must be read, or a full pipe would stop it.
    threading.Thread(target=lambda: tail.extend(stderr), daemon=True).start()
    try:
        first = lines.get(timeout=timeout_s)
    except queue.Empty:
        raise UserError(f"cluster: it did not start within {timeout_s:.0f} s") from None
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError):
        process.wait(timeout=STOP_S)
        last = next((line.strip() for line in reversed(tail) if line.strip()), "no output")
        raise UserError(f"cluster: it did not start: {last.removeprefix('pdserve: ')}") from None


def _measure(config: ClusterConfig, url: str, workload: Workload, seed: int, run_id: str) -> Run:
    from loadtests.discover import fetch_records
    from loadtests.scenario import RequestOptions, Scenario
    from loadtests.server_side import join
    from loadtests.session import Session, Settings

    scenario = Scenario(
        name="experiment",
        workload=workload.model_copy(update={"seed": seed, "slo": config.slo}),
        request=RequestOptions(api="tokens"),
    )
    session = Session(scenario, Settings(url), lambda text: err.print(text, style="dim"))
    session.warm_up()
    # Rates and seeds share prompts, and what one run left in the caches is not another's.
    session.endpoint = replace(session.endpoint, cache_salt=run_id)
    begin = time.perf_counter()
    run = session.run(session.scenario.workload, run_id)
    matched = join(run.samples, fetch_records(url), session.scenario)
    records = [matched.get(sample.request_id) or sample.record(config.slo.to_slo()) for sample in run.samples]
    count, price = accelerators(config)
    extra: dict[str, Any] = {"url": url}
    return Run(
        records=records,
        transfers=[_transfer(r) for r in records if r.transfer_bytes],
        offered=len(records),
        rate_rps=arrival_rate([r.arrival_s for r in records]),
        span_s=max(run.length_s, 1e-9),
        wall_s=time.perf_counter() - begin,
        events=0,
        preemptions=None,
        accelerators=count,
        price_per_hour=price,
        seed=seed,
        extra=extra,
    )


def _transfer(record: RequestRecord) -> Transfer:
    """As the router knows it: how long and how much; it ended before the first token."""
    end_s = record.arrival_s + (record.ttft_s or 0.0)
    length_s = record.stage_s.get(Stage.KV_TRANSFER, 0.0)
    source, target = record.prefill_worker or "", record.decode_worker or ""
    return Transfer(source, target, end_s - length_s, end_s, record.transfer_bytes)
