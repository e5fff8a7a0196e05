"""Workload: one YAML that says who asks what and when, the same for the simulator and a live endpoint.

    workload = load("loadtests/scenarios/chat.yaml")
    for arrival in workload.arrivals():        # sorted by time; same seed, same requests
        ...

One stream, or several (`streams:`) with their own tenants, rates and structures, or a trace (`trace:`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field, ValidationError, model_validator

from cluster.config import Section, SloConfig
from cluster.errors import ConfigError
from cluster.workload.arrival import Arrival, Prompt, cut
from cluster.workload.blocks import mix64
from cluster.workload.processes import Closed, OpenProcess, Process
from cluster.workload.structures import Content, Ids, Source, Structure
from cluster.workload.traces import Replay
from cluster.yaml_file import read_yaml


class Stream(Section):
    """Requests of one tenant with one structure and one arrival process, or a recorded trace."""

    name: str = ""
    tenant: str = "default"
    priority: int = 0
    arrivals: Process | None = None
    prompts: Structure | None = None
    trace: Replay | None = None

    @model_validator(mode="after")
    def _something_to_send(self) -> Stream:
        if self.trace is not None and (self.arrivals is not None or self.prompts is not None):
            raise ValueError("a trace brings its own arrivals and prompts; remove one of them")
        if self.trace is None and (self.arrivals is None or self.prompts is None):
            raise ValueError("give both `arrivals` and `prompts`, or a `trace`")
        return self


class Bounds(Section):
    """What the served model allows; longer requests are cut, not dropped, so that the rate stays."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    max_total_tokens: int | None = Field(None, ge=2, description="prompt plus output; the prompt is cut")

    def fit(self, content: Content) -> Content:
        prompt, output = content.prompt, content.output_tokens
        if self.max_output_tokens is not None:
            output = min(output, self.max_output_tokens)
        limit = self.max_prompt_tokens
        if self.max_total_tokens is not None:
            output = min(output, self.max_total_tokens - 1)
            rest = self.max_total_tokens - output
            limit = rest if limit is None else min(limit, rest)
        return (
            content
            if limit is None and output == content.output_tokens
            else Content(prompt if limit is None else cut(prompt, limit), output, content.session)
        )


class Workload(Section):
    """Streams of requests, their seed, when to stop, and the SLO they are judged by."""

    name: str = "workload"
    description: str = ""
    seed: int = 0
    duration_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="no arrivals after this time")
    requests: int | None = Field(None, ge=1, description="stop after this many arrivals")
    slo: SloConfig | None = None
    bounds: Bounds = Bounds()
    arrivals_: Process | None = Field(None, alias="arrivals")
    prompts: Structure | None = None
    trace: Replay | None = None
    tenant: str = "default"
    priority: int = 0
    streams: tuple[Stream, ...] = ()

    @model_validator(mode="after")
    def _one_form(self) -> Workload:
        single = self.arrivals_ is not None or self.prompts is not None or self.trace is not None
        if single and self.streams:
            raise ValueError("`streams` and top-level `arrivals`, `prompts` or `trace` exclude each other")
        if not self.streams:
            # Checked here so that the mistake is found when the file is read.
            Stream(arrivals=self.arrivals_, prompts=self.prompts, trace=self.trace)
        if self.duration_s is None and self.requests is None and any(s.trace is None for s in self.all_streams):
            raise ValueError("give `duration_s` or `requests`: the arrivals never end")
        if len({isinstance(s.arrivals, Closed) for s in self.all_streams}) > 1:
            raise ValueError("open and closed arrivals in one workload: its latencies would mean two things")
        return self

    @property
    def all_streams(self) -> tuple[Stream, ...]:
        return self.streams or (
            Stream(
                name=self.name,
                tenant=self.tenant,
                priority=self.priority,
                arrivals=self.arrivals_,
                prompts=self.prompts,
                trace=self.trace,
            ),
        )

    @property
    def closed(self) -> bool:
        """Whether any stream is a closed loop, whose times only a server can give."""
        return any(isinstance(s.arrivals, Closed) for s in self.all_streams)

    def at_rate(self, factor: float) -> Workload:
        """The same requests, `factor` times as fast; closed loops keep their users."""
        streams = []
        for s in self.all_streams:
            if s.trace is not None:
                rate = s.trace.rate_per_s
                change = {"speed": s.trace.speed * factor} if rate is None else {"rate_per_s": rate * factor}
                streams.append(s.model_copy(update={"trace": s.trace.model_copy(update=change)}))
            elif isinstance(s.arrivals, Closed):
                streams.append(s)
            else:
                assert s.arrivals is not None
                streams.append(s.model_copy(update={"arrivals": s.arrivals.scaled(factor)}))
        single = {"arrivals_": None, "prompts": None, "trace": None}
        return self.model_copy(update={"streams": tuple(streams), **single})

    def arrivals(self, *, seed: int | None = None, base: Path | None = None) -> Iterator[Arrival]:
        """Every request in order of time. `base`: the folder that relative trace paths start from.

        Raises:
            ConfigError: a closed loop, which has no times of its own (see `sources`), or a trace that cannot be read.
        """
        if self.closed:
            raise ConfigError("arrivals.process", "closed: times depend on the server", "use an open process")
        chosen = self.seed if seed is None else seed
        feeds = [self._feed(s, i, chosen, base) for i, s in enumerate(self.all_streams)]
        merged: Iterator[Arrival] = feeds[0] if len(feeds) == 1 else heapq.merge(*feeds, key=lambda a: a.at_s)
        if self.duration_s is not None:
            end = self.duration_s
            merged = takewhile(lambda a: a.at_s < end, merged)
        return merged if self.requests is None else islice(merged, self.requests)

    def source(self, index: int = 0, *, seed: int | None = None, part: int = 0) -> Source:
        """The structure of one stream, for a closed loop that asks for the next request when it is ready.

        Args:
            part: which of several generators asks. They share system prompts, corpora and files, and nothing else.
        """
        stream = self.all_streams[index]
        if stream.prompts is None:
            raise ConfigError("trace", "cannot drive a closed loop", "use `prompts`")
        chosen = self.seed if seed is None else seed
        ids, rng = Ids(chosen, index), Random(f"{chosen}/{index}/content")
        source = stream.prompts.source(ids, rng)
        if part:
            ids.branch(part)
            rng.seed(f"{chosen}/{index}/content/{part}")
        return _Bounded(source, self.bounds)

    def _feed(self, stream: Stream, index: int, seed: int, base: Path | None) -> Iterator[Arrival]:
        times_rng = Random(f"{seed}/{index}/times")
        fit = self.bounds.fit
        if stream.trace is not None:
            for a in stream.trace.arrivals(times_rng, _load_trace(stream.trace, base)):
                prompt, output, _ = fit(Content(_reseeded(a.prompt, seed), a.output_tokens))
                yield Arrival(a.at_s, prompt, output, stream.tenant, stream.priority, 0, index)
            return
        assert isinstance(stream.arrivals, OpenProcess)
        source = self.source(index, seed=seed)
        for at_s in stream.arrivals.times(times_rng):
            prompt, output, session = source.next(at_s)
            yield Arrival(at_s, prompt, output, stream.tenant, stream.priority, session, index)


def _reseeded(prompt: Prompt, seed: int) -> Prompt:
    """A recorded prompt in other words: the same sharing within a seed, and nothing in common with another seed, whose
    prompts an earlier run may have left in a cache. Seed 0 keeps the recorded content ids."""
    if seed == 0:
        return prompt
    key = mix64(seed)
    return tuple((mix64(content ^ key) >> 3, tokens) for content, tokens in prompt)


class _Bounded:
    def __init__(self, inner: Source, bounds: Bounds) -> None:
        self._inner, self._fit = inner, bounds.fit

    def next(self, at_s: float) -> Content:
        return self._fit(self._inner.next(at_s))


@lru_cache(maxsize=4)
def _load_trace(trace: Replay, base: Path | None) -> list[Arrival]:
    return trace.load(base)


def load(path: str | Path) -> Workload:
    """Read a workload's YAML. Raises ConfigError with the first mistake."""
    return parse(read_yaml(path))


def parse(raw: Any) -> Workload:
    """Validate a mapping. Raises ConfigError with the first mistake."""
    if not isinstance(raw, dict):
        raise ConfigError("workload", f"is a {type(raw).__name__}, not a mapping", "start with `arrivals:`")
    try:
        return Workload.model_validate(raw)
    except ValidationError as e:
        first = min(e.errors(include_url=False), key=lambda m: m["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"]) or "workload"
        if first["type"] == "extra_forbidden":
            raise ConfigError(where, "unknown key", "see docs/loadtests.md") from None
        value = "" if isinstance(first["input"], dict) else f"{first['input']!r}: "
        raise ConfigError(where, value + first["msg"].removeprefix("Value error, ")) from None
