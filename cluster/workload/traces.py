"""Recorded arrivals: Mooncake's JSON lines (block hashes of 512 tokens) and Azure's CSV (lengths only).

Both formats may be gzipped. Times start at 0; `Replay` slices, speeds up, thins and shortens them.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
from pydantic import Field, model_validator

from cluster.config import Section
from cluster.errors import ConfigError
from cluster.workload.arrival import Arrival, Prompt

MOONCAKE_BLOCK_TOKENS = 512


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as e:
        raise ConfigError(str(path), f"cannot be read ({e})", "give a trace file, .gz or plain") from e


def mooncake_prompt(input_length: int, hash_ids: list[int]) -> Prompt:
    """Segments of 512 tokens, one per hash; the last holds the rest."""
    if not hash_ids:
        return ((0, input_length),)
    last = input_length - MOONCAKE_BLOCK_TOKENS * (len(hash_ids) - 1)
    if not 0 < last <= MOONCAKE_BLOCK_TOKENS:
        raise ValueError(f"input_length {input_length} does not fit {len(hash_ids)} blocks of 512 tokens")
    return (*((h, MOONCAKE_BLOCK_TOKENS) for h in hash_ids[:-1]), (hash_ids[-1], last))


def read_mooncake(path: str | Path) -> list[Arrival]:
    """Every request of a trace in Mooncake's format: timestamp (ms), input_length, output_length, hash_ids.

    Raises:
        ConfigError: file and line that cannot be used.
    """
    path = Path(path)
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    arrivals: list[Arrival] = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            prompt = mooncake_prompt(row.input_length, row.hash_ids)
        except (msgspec.DecodeError, ValueError) as e:
            raise ConfigError(f"{path}:{number}", str(e), "one JSON object a line, Mooncake's fields") from e
        arrivals.append(Arrival(row.timestamp / 1e3, prompt, max(1, row.output_length)))
    return _from_zero(path, arrivals)


def read_azure(path: str | Path) -> list[Arrival]:
    """Every request of a trace in Azure's format: TIMESTAMP, ContextTokens, GeneratedTokens. Prompts share nothing.

    Raises:
        ConfigError: file and line that cannot be used.
    """
    path = Path(path)
    lines = _read(path).decode("utf-8", errors="replace").splitlines()
    try:
        rows = iter(list(csv.reader(lines)))
    except csv.Error as e:
        raise ConfigError(str(path), f"is no CSV file ({e})", "expected TIMESTAMP,ContextTokens,GeneratedTokens") from e
    header = [name.strip().lower() for name in next(rows, [])]
    if header != ["timestamp", "contexttokens", "generatedtokens"]:
        raise ConfigError(
            f"{path}:1", f"header {','.join(header)!r}", "expected TIMESTAMP,ContextTokens,GeneratedTokens"
        )
    arrivals: list[Arrival] = []
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            stamp, context, generated = row
            # Seven decimals: datetime takes six; the seventh is kept by adding it as seconds.
            whole, _, fraction = stamp.partition(".")
            at_s = datetime.fromisoformat(whole.replace(" ", "T") + "+00:00").timestamp() + float(f"0.{fraction or 0}")
            prompt = ((number, max(1, int(context))),)
            arrivals.append(Arrival(at_s, prompt, max(1, int(generated))))
        except ValueError as e:
            raise ConfigError(f"{path}:{number}", str(e), "expected TIMESTAMP,ContextTokens,GeneratedTokens") from e
    return _from_zero(path, arrivals)


def _from_zero(path: Path, arrivals: list[Arrival]) -> list[Arrival]:
    if not arrivals:
        raise ConfigError(str(path), "holds no requests")
    arrivals.sort(key=lambda a: a.at_s)
    start = arrivals[0].at_s
    return [Arrival(a.at_s - start, a.prompt, a.output_tokens) for a in arrivals]


def resolve_traces(workload: Any, folder: Path) -> None:
    """Let relative trace paths of a workload as YAML has it start at `folder`, wherever the command is run."""
    if not isinstance(workload, dict):
        return
    streams = workload.get("streams")
    for holder in [workload, *(streams if isinstance(streams, list) else [])]:
        trace = holder.get("trace") if isinstance(holder, dict) else None
        if isinstance(trace, dict) and isinstance(trace.get("path"), str):
            trace["path"] = str((folder / trace["path"]).resolve())


class Replay(Section):
    """A trace as a workload.

    Attributes:
        format: `mooncake` or `azure`; told from the file's name where it is not given.
        start_s, length_s: the slice of the trace (trace time) that is played.
        speed: 2 plays the slice in half its time.
        rate_per_s: sets the speed so that this mean rate results; excludes `speed`.
        keep: share of requests kept, chosen by the seed.
        spread_s: adds a uniform time up to this to each arrival. Mooncake's timestamps come in ticks of 3 s with
            about ten requests each; 3.0 undoes the bunching that the recording added.
        token_scale: multiplies every segment's and output's length (at least 1 token each).
    """

    path: str
    format: Literal["mooncake", "azure", "auto"] = "auto"
    start_s: float = Field(0.0, ge=0)
    length_s: float | None = Field(None, gt=0)
    speed: float = Field(1.0, gt=0, allow_inf_nan=False)
    rate_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    keep: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    spread_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    token_scale: float = Field(1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_clock(self) -> Replay:
        if self.rate_per_s is not None and self.speed != 1.0:
            raise ValueError("speed and rate_per_s are both set; give one")
        return self

    def load(self, base: Path | None = None) -> list[Arrival]:
        """The trace as recorded. `base` is the folder that a relative path starts from."""
        path = Path(self.path) if base is None else base / self.path
        azure = self.format == "azure" or (self.format == "auto" and ".csv" in path.name)
        return read_azure(path) if azure else read_mooncake(path)

    def arrivals(self, rng: Random, recorded: list[Arrival]) -> Iterator[Arrival]:
        """The slice, in order of time, from 0."""
        end = float("inf") if self.length_s is None else self.start_s + self.length_s
        chosen = [a for a in recorded if self.start_s <= a.at_s < end]
        if self.keep < 1:
            chosen = [a for a in chosen if rng.random() < self.keep]
        if not chosen:
            raise ConfigError("trace.start_s", f"no request between {self.start_s:g} s and {end:g} s", "move the slice")
        times = [a.at_s - self.start_s + (rng.uniform(0, self.spread_s) if self.spread_s else 0.0) for a in chosen]
        span = max(times) or 1.0
        speed = self.speed if self.rate_per_s is None else self.rate_per_s * span / len(chosen)
        for i in sorted(range(len(times)), key=times.__getitem__):
            a = chosen[i]
            yield Arrival(times[i] / speed, self._resized(a.prompt), max(1, round(a.output_tokens * self.token_scale)))

    def _resized(self, prompt: Prompt) -> Prompt:
        if self.token_scale == 1.0:
            return prompt
        return tuple((content, max(1, round(tokens * self.token_scale))) for content, tokens in prompt)
