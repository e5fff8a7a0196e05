"""Open loop, closed loop and their honesty, against servers of known speed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cluster.messages import Outcome, Slo
from cluster.workload.spec import Workload, parse
from cluster.workload.text import TextWriter
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.parallel import run_job
from loadtests.results import closed_loop_note, summarize, validity
from loadtests.runner import Job, Run, Runner
from loadtests.scenario import FOLDER, ClientLimits, Validity
from loadtests.scripted_server import Seen, Step, refuse, serve, stream
from loadtests.tokenizer import PlainWords

pytestmark = pytest.mark.live

SLO = Slo(ttft_s=0.6, tpot_s=0.1)


def workload(process: str, **changes: Any) -> Workload:
    arrivals = {"process": process} | changes.pop("arrivals", {})
    prompts = {"kind": "plain", "prompt_tokens": 20, "output_tokens": 4}
    return parse({"arrivals": arrivals, "prompts": prompts, **changes})


def put(w: Workload, url: str, **limits: Any) -> Run:
    writer = RequestWriter(Endpoint(url, "m"), TextWriter(PlainWords()))
    return asyncio.run(Runner(Job(w, ClientLimits(**limits), "t"), writer).run())


def after(seconds: Callable[[int, Seen], float]) -> Callable[[int, Seen], Any]:
    return lambda i, seen: stream(4, first_s=seconds(i, seen), gap_s=0.001)


@pytest.mark.slow  # measures real time: needs a machine with nothing else to do
def test_waiting_inside_the_client_counts() -> None:
    """Server 0.5 s, 10 requests/s, 8 requests, one at a time: coordinated omission would report 0.5 s."""
    w = workload("constant", arrivals={"rate_per_s": 10}, requests=8)
    with serve(after(lambda *_: 0.5)) as server:
        run = put(w, server.url, max_in_flight=1)
    s = summarize(run.samples, SLO, run.length_s)
    assert 1.8 < s["ttft_s"]["mean"] < 2.3
    assert 0.48 < s["ttft_from_sent_s"]["mean"] < 0.7
    verdict = validity(run.samples, run.loop_late_s, Validity(), closed=False)
    assert not verdict["valid"]
    assert any("schedule lag" in reason for reason in verdict["reasons"])
    assert any("achieved" in reason for reason in verdict["reasons"])


def step_up(at: int) -> Callable[[int, Seen], float]:
    """Fast for the first `at` requests, slow after."""
    return lambda i, _: 0.02 if i < at else 1.5


@pytest.mark.slow  # measures real time: needs a machine with nothing else to do
def test_an_open_loop_keeps_its_rate_when_the_server_slows_down() -> None:
    w = workload("constant", arrivals={"rate_per_s": 30}, duration_s=4)
    with serve(after(step_up(60))) as server:
        run = put(w, server.url)
    verdict = validity(run.samples, run.loop_late_s, Validity(), closed=False)
    assert len(run.samples) == 120
    assert verdict["achieved_rate_per_s"] == pytest.approx(30, rel=0.02)
    sent = sorted(s.sent_s for s in run.samples)
    late = sum(1 for t in sent if t >= 2)
    assert late == pytest.approx(60, abs=2)
    assert all(s.outcome is Outcome.DONE for s in run.samples)


def test_a_closed_loop_slows_down_and_says_so() -> None:
    w = workload("closed", arrivals={"users": 3, "think_s": 0.05}, duration_s=4)
    with serve(after(step_up(60))) as server:
        run = put(w, server.url)
    note = closed_loop_note(run.samples)
    assert note is not None
    assert "the rate fell" in note
    assert validity(run.samples, run.loop_late_s, Validity(), closed=True)["loop"] == "closed"
    in_flight = max(sum(1 for s in run.samples if s.sent_s <= t < s.end_s) for t in (x.sent_s for x in run.samples))
    assert in_flight <= 3


def test_failures_count_in_goodput_and_not_in_latency() -> None:
    """Of 100: 40 good, 20 late first tokens, 10 slow tokens, 20 refused at once, 10 cut: goodput 0.40."""

    def script(i: int, _: Seen) -> Any:
        kind = i % 10
        if kind < 4:
            return stream(4, first_s=0.01, gap_s=0.005)
        if kind < 6:
            return stream(4, first_s=4.0, gap_s=0.005)
        if kind < 7:
            return stream(4, first_s=0.01, gap_s=2.0)
        if kind < 9:
            return refuse()
        whole: list[Step] = list(stream(4, first_s=0.01, gap_s=0.005))
        return [*whole[:5], None]

    # Far from both limits on either side: a machine that stands still for a second changes no verdict.
    slo = Slo(2.0, 1.0)
    w = workload("constant", arrivals={"rate_per_s": 50}, requests=100)
    with serve(script) as server:
        run = put(w, server.url)
    s = summarize(run.samples, slo, run.length_s)
    assert (s["offered"], s["good"], s["done"], s["rejected"], s["failed"]) == (100, 40, 70, 20, 10)
    assert s["attainment"] == 0.40
    assert s["misses"] == {"ttft": 20, "tpot": 10, "rejected": 20, "failed": 10}
    assert s["ttft_s"]["p50"] < 2.0, "refusals do not enter latency"
    assert s["ttft_adjusted_s"]["p95"] == float("inf")
    assert s["ttft_adjusted_s"]["p50"] < 4.0
    assert s["goodput_per_s"] == pytest.approx(40 / run.length_s)


def test_all_failed_is_no_throughput() -> None:
    with serve(lambda *_: refuse()) as server:
        run = put(workload("constant", arrivals={"rate_per_s": 100}, requests=20), server.url)
    s = summarize(run.samples, SLO, run.length_s)
    assert (s["throughput_per_s"], s["output_tokens_per_s"], s["attainment"], s["error_rate"]) == (0, 0, 0, 1)
    assert s["ttft_s"]["p50"] is None
    assert s["ttft_adjusted_s"]["p50"] == float("inf")


def test_what_still_runs_after_the_drain_is_a_miss() -> None:
    with serve(after(lambda i, _: 30.0 if i == 0 else 0.01)) as server:
        run = put(workload("constant", arrivals={"rate_per_s": 20}, requests=10), server.url, drain_s=0.5)
    s = summarize(run.samples, SLO, run.length_s)
    assert (s["offered"], s["good"], s["unfinished"]) == (10, 9, 1)
    assert s["attainment"] == 0.9


def test_processes_share_one_schedule() -> None:
    w = workload("poisson", arrivals={"rate_per_s": 40}, duration_s=3, seed=5)
    with serve(after(lambda *_: 0.01)) as server:
        alone = run_job(Job(w, ClientLimits(), "one"), Endpoint(server.url, "m"), "words", 1)
        shared = run_job(Job(w, ClientLimits(), "two"), Endpoint(server.url, "m"), "words", 2)
        prompts = [seen.body["messages"] for seen in server.seen]
    n = len(alone.samples)
    assert [s.scheduled_s for s in shared.samples] == [s.scheduled_s for s in alone.samples]
    assert [s.index for s in shared.samples] == list(range(n))
    assert all(s.outcome is Outcome.DONE for s in shared.samples)
    assert sorted(map(json.dumps, prompts[:n])) == sorted(map(json.dumps, prompts[n:]))
    assert max(s.lag_s for s in shared.samples) < 1.0


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`pdserve loadtest` with a sweep against a server that refuses, cuts and is slow at times."""
    numbers = count()

    def script(_: int, seen: Seen) -> Any:
        i = next(numbers)
        tokens = seen.body.get("max_completion_tokens", 8)
        if i % 11 == 7:
            return refuse()
        if i % 23 == 11:
            return [*list(stream(tokens))[:4], None]
        return stream(tokens, first_s=0.02 + 0.002 * (i % 50), gap_s=0.004, prompt_tokens=64, cached=16)

    folder = tmp_path_factory.mktemp("report")
    scenario = tmp_path_factory.mktemp("scenario") / "short.yaml"
    chosen = yaml.safe_load((FOLDER / "smoke.yaml").read_text())
    chosen["sweep"] = {"factors": [0.5, 2], "refine": 1, "duration_s": 2}
    scenario.write_text(yaml.safe_dump(chosen))
    with serve(script) as server:
        done = subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "cluster.cli",
                    "loadtest",
                    str(scenario),
                    "--host",
                    server.url,
                    "--out",
                    str(folder),
                ),
                *("--duration", "4", "--rate", "15", "--tokenizer", "words", "--sweep", "--json"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    return {"folder": folder, "json": json.loads(done.stdout)}


def test_the_command_prints_one_object_and_writes_every_file(report: dict[str, Any]) -> None:
    result, folder = report["json"], report["folder"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "report.html", "requests.csv", "results.json", "sweep.csv", "timeline.csv"
    ]  # fmt: skip
    on_disk = json.loads((folder / "results.json").read_text())
    assert on_disk == {k: v for k, v in result.items() if k != "files"}
    s = result["summary"]
    assert s["offered"] == s["done"] + s["rejected"] + s["failed"] + s["unfinished"]
    assert s["rejected"] > 0 < s["failed"]
    assert s["cached_share"] == 0.25
    assert len((folder / "requests.csv").read_text().splitlines()) == s["offered"] + 1
    assert len(result["sweep"]["steps"]) >= 2
    assert result["versions"]["pdserve"]
    assert result["seed"] == 1


def opened(page: Path, home: Path) -> tuple[str, list[str]]:
    """The page as Chromium built it, and what its console said."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={home}", "--enable-logging=stderr", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(home)},
    )
    assert done.returncode == 0
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.chromium
def test_the_page_opens_without_errors_and_every_plot_has_data(report: dict[str, Any], tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>there_is_no_such_function()</script>")
    assert opened(broken, tmp_path)[1], "an error would not be seen"
    page = report["folder"] / "report.html"
    dom, console = opened(page, tmp_path)
    assert not console, console
    figures = dom.split("<figure")[1:]
    assert len(figures) >= 13
    for figure in figures:
        title = figure.split("<figcaption>")[1].split("</figcaption>")[0]
        assert "no data" not in figure, title
        assert 'data-points="' in figure, title
        assert "NaN" not in figure, title
    text = page.read_text()
    assert "src=" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_server_is_shown_what_the_workload_says() -> None:
    w = parse(
        {
            "requests": 4,
            "arrivals": {"process": "constant", "rate_per_s": 50},
            "tenant": "acme",
            "priority": 3,
            "prompts": {"kind": "rag", "output_tokens": 6},
        }
    )
    with serve(after(lambda *_: 0.0)) as server:
        put(w, server.url)
        seen = server.seen
    assert {s.headers["x-tenant-id"] for s in seen} == {"acme"}
    assert len({s.headers["x-request-id"] for s in seen}) == 4
    body = seen[0].body
    assert body["max_completion_tokens"] == body["min_tokens"] == 6
    assert body["priority"] == 3
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    systems = {s.body["messages"][0]["content"] for s in seen}
    assert len(systems) == 1
    assert len(next(iter(systems)).split()) == 300
    assert np.isfinite([s.at_s for s in seen]).all()
