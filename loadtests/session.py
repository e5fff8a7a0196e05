"""A whole load test: discover, warm up, run, sweep, report. What `pdserve loadtest` does, without its printing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, UserError
from cluster.workload.spec import Bounds, Workload
from cluster.workload.text import TextWriter
from loadtests.discover import Served, discover, fetch_json, fetch_records
from loadtests.endpoint import Endpoint, RequestWriter
from loadtests.parallel import check_processes, run_job
from loadtests.report.build import build
from loadtests.results import highest_rate, summarize, validity
from loadtests.runner import Job, Run, warm_up
from loadtests.sample import Sample
from loadtests.scenario import Scenario, check_tenants
from loadtests.server_side import engine_numbers, joined
from loadtests.tokenizer import FileTokenizer, find_tokenizer

TEMPLATE_TOKENS = 64
"""Room kept for what a chat template adds to the prompt."""


def room_tokens(max_model_len: int, *, words: bool) -> int:
    """Tokens of prompt and output that fit; a third is kept free where prompts are plain words of unknown length."""
    return max(2, max_model_len - (max_model_len // 3 if words else 0) - TEMPLATE_TOKENS)


@dataclass(slots=True)
class Settings:
    """What the command line decides beyond the scenario."""

    host: str
    model: str | None = None
    tokenizer: str | None = None
    processes: int = 1
    sweep: bool = False
    api_key: str | None = None
    tenant_keys: dict[str, str] = field(default_factory=dict)
    command: str = ""


Say = Callable[[str], None]
ProgressFor = Callable[[str], Any]


def check(scenario: Scenario, settings: Settings) -> None:
    """Everything that can be wrong with a load test before anybody is asked.

    Raises:
        ConfigError: a sweep of what has no rate, more processes than requests in flight, a tenant that no header holds.
    """
    if settings.sweep and scenario.workload.closed:
        raise ConfigError(
            "--sweep", "this scenario is a closed loop, whose rate is the server's", "use an open process"
        )
    if settings.sweep and scenario.sweep is None:
        raise ConfigError(
            "--sweep", "this scenario has no `sweep` section", "add one, e.g. `sweep: {factors: [0.5, 2]}`"
        )
    check_processes(scenario.client, settings.processes)
    check_tenants(scenario)


class Session:
    """Holds the endpoint and the scenario as it will run there.

    Raises:
        UserError: what `check` finds, nobody answers at the endpoint, or the tokenizer cannot be read.
    """

    def __init__(self, scenario: Scenario, settings: Settings, say: Say) -> None:
        check(scenario, settings)
        self.settings, self.say = settings, say
        self.served: Served = discover(settings.host, settings.model, settings.api_key)
        tokenizer = find_tokenizer(settings.tokenizer, self.served.model)
        self.tokenizer = str(tokenizer.path) if isinstance(tokenizer, FileTokenizer) else "words"
        if not isinstance(tokenizer, FileTokenizer):
            say("no tokenizer for this model on this disk: prompts are plain words and their lengths approximate")
        self.text = TextWriter(tokenizer)
        self.scenario = scenario.model_copy(update={"workload": self._bounded(scenario.workload)})
        request = scenario.request
        self.endpoint = Endpoint(
            url=self.served.base_url,
            model=self.served.model,
            api=request.api,
            exact_output=request.exact_output,
            counts=request.counts,
            temperature=request.temperature,
            api_key=settings.api_key,
            tenant_header=request.tenant_header,
            tenant_keys=settings.tenant_keys,
        )

    def _bounded(self, workload: Workload) -> Workload:
        """The workload cut to what the model takes, where the endpoint says how much that is."""
        length = self.served.max_model_len
        if length is None:
            return workload
        room = room_tokens(length, words=self.tokenizer == "words")
        asked = workload.bounds
        limit = room if asked.max_total_tokens is None else min(room, asked.max_total_tokens)
        output = min(asked.max_output_tokens or room // 2, room // 2)
        bounds = Bounds(max_prompt_tokens=asked.max_prompt_tokens, max_output_tokens=output, max_total_tokens=limit)
        return workload.model_copy(update={"bounds": bounds})

    def warm_up(self) -> list[Sample]:
        """Raises UserError where not one warm-up request was answered."""
        warmup = self.scenario.warmup
        writer = RequestWriter(self.endpoint, self.text)
        samples = asyncio.run(warm_up(writer, self.scenario.workload, warmup, self.scenario.client))
        if samples and all(s.error for s in samples):
            raise UserError(f"no warm-up request succeeded at {self.served.base_url}: {samples[0].error}")
        return samples

    def run(self, workload: Workload, name: str, progress: Any = None) -> Run:
        job = Job(workload, self.scenario.client, name)
        return run_job(job, self.endpoint, self.tokenizer, self.settings.processes, progress)

    def measure(self, progress_for: ProgressFor) -> tuple[dict[str, Any], Run]:
        """Warm-up and run; the result document and the samples of the run."""
        s, workload = self.scenario, self.scenario.workload
        self.warm_up()
        started = datetime.now(UTC)
        run_id = f"lt-{started:%y%m%d%H%M%S}"
        with progress_for("run") as progress:
            run = self.run(workload, run_id, progress)
        result = build(
            s,
            run,
            url=self.served.base_url,
            model=self.served.model,
            tokenizer="plain words" if self.tokenizer == "words" else _folder_name(self.tokenizer),
            processes=self.settings.processes,
            command=self.settings.command,
            started_at=f"{started:%Y-%m-%d %H:%M:%S} UTC",
            run_id=run_id,
        )
        result |= joined(run.samples, fetch_records(self.served.base_url, self.settings.api_key), s, self._engine())
        return result, run

    def _engine(self) -> dict[str, float]:
        status = fetch_json(self.served.base_url, "/pdserve/status", self.settings.api_key)
        return engine_numbers(status) if isinstance(status, dict) else {}

    def sweep(self, at_one: dict[str, Any], progress_for: ProgressFor) -> dict[str, Any]:
        """Run at other rates, then bisect between the last that held the lowest goal and the first that did not."""
        plan = self.scenario.sweep
        assert plan is not None, "see check"
        steps = [] if plan.duration_s else [_step(1.0, at_one["summary"], at_one["validity"])]
        for factor in sorted(plan.factors):
            if not any(abs(step["factor"] - factor) < 1e-9 for step in steps):
                steps.append(self._at(factor, progress_for))
        for goal in sorted(plan.attainments):
            for _ in range(plan.refine):
                middle = _between(steps, goal)
                if middle is None:
                    break
                steps.append(self._at(middle, progress_for))
        steps.sort(key=lambda step: step["rate_per_s"])
        return {"steps": steps, "highest_rate_per_s": {str(g): highest_rate(steps, g) for g in plan.attainments}}

    def _at(self, factor: float, progress_for: ProgressFor) -> dict[str, Any]:
        s = self.scenario
        assert s.sweep is not None
        workload = s.workload.at_rate(factor)
        # Another seed for every step, and with it other prompts: those of the step before are in the cache by now.
        changes: dict[str, Any] = {"seed": s.workload.seed + round(1e4 * factor)}
        if s.sweep.duration_s is not None:
            changes["duration_s"] = s.sweep.duration_s
        with progress_for(f"{factor:g}x") as progress:
            run = self.run(workload.model_copy(update=changes), f"sweep-{factor:g}", progress)
        summary = summarize(run.samples, s.slo.to_slo(), run.length_s)
        return _step(factor, summary, validity(run.samples, run.loop_late_s, s.validity, closed=False))


def _folder_name(tokenizer_file: str) -> str:
    # The folder is made absolute and not the file: in a model cache the file is a link to where its name means nothing.
    return Path(tokenizer_file).parent.resolve().name


def _step(factor: float, summary: dict[str, Any], valid: dict[str, Any]) -> dict[str, Any]:
    return {
        "factor": factor,
        "rate_per_s": valid["planned_rate_per_s"] or 0.0,
        "offered": summary["offered"],
        "attainment": summary["attainment"],
        "goodput_per_s": summary["goodput_per_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "tpot_p99_s": summary["tpot_s"]["p99"],
        "itl_p99_s": summary["itl_s"]["p99"],
        "valid": valid["valid"],
    }


def _between(steps: list[dict[str, Any]], goal: float) -> float | None:
    """The factor half way between the last step that held the goal and the next that did not."""
    ordered = sorted((s for s in steps if s["attainment"] is not None), key=lambda s: s["factor"])
    for before, after in itertools.pairwise(ordered):
        if before["attainment"] >= goal > after["attainment"]:
            return float((before["factor"] + after["factor"]) / 2)
    return None
