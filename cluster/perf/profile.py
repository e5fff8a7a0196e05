"""A fitted profile: step times of one engine as it was measured, with provenance and residuals.

The model is linear in what an iteration does,
`t = fixed + chunk * prompt chunks + token * tokens + prompt_token * prompt tokens + pair * attended pairs + sequence *
batch + context * KV tokens read`, where `tokens` counts prompt, decode and draft tokens and a chunk of n new tokens
behind c cached ones attends `n * (c + n / 2)` pairs. Where decoding a few tokens costs no more than reading the
weights, `prompt_token` is what a prompt's token costs beyond that. A file is JSON or YAML; it states what was
measured, on what, with which command, and how well it fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import UserError
from cluster.perf.times import StepTimes

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds a step, a token, an attended pair, a decoding sequence, a KV token read, a prompt chunk; a transfer and
    its byte; a prompt token beyond `token_s`."""

    fixed_s: float
    token_s: float
    pair_s: float
    sequence_s: float
    context_token_s: float
    chunk_s: float = 0.0
    transfer_fixed_s: float = 0.0
    transfer_byte_s: float = 0.0
    prompt_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Residuals:
    """Relative errors |fitted / measured - 1| over the samples."""

    samples: int
    median: float
    p90: float
    max: float


@dataclass(frozen=True, slots=True)
class HostSlowdown:
    """By how much longer an engine's steps take for each other engine of the same host that computes meanwhile (0.3:
    30%). Engines on CPU share caches, memory bandwidth or execution units; GPUs do not."""

    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What `pdserve fit` writes.

    Attributes:
        provenance: model, engine and version, device, layout, data types, host, command, time, and any scaling
            (sampled layers); free-form strings and numbers.
        residuals: by kind of step: `prefill`, `decode`, `all`; `held_out` where samples were kept apart.
        host_slowdown: None: not measured.
        step_variation: quantiles, evenly spaced from the smallest to the largest, of how many times as long as fitted
            the decode steps of one batch took on average. Empty: not measured.
    """

    coefficients: Coefficients
    provenance: Mapping[str, Any] = field(default_factory=dict)
    residuals: Mapping[str, Residuals] = field(default_factory=dict)
    host_slowdown: HostSlowdown | None = None
    step_variation: tuple[float, ...] = ()

    def times(self) -> ProfileTimes:
        return ProfileTimes(self.coefficients)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "coefficients": asdict(self.coefficients),
            "provenance": dict(self.provenance),
            "residuals": {kind: asdict(r) for kind, r in self.residuals.items()},
            "host_slowdown": asdict(self.host_slowdown) if self.host_slowdown else None,
            "step_variation": list(self.step_variation),
        }


class ProfileTimes(StepTimes):
    """`StepTimes` from a profile's coefficients."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        decode_batch: int,
        decode_context_tokens: int,
        draft_tokens: int = 0,
    ) -> float:
        c = self.coefficients
        prompt, pairs = 0, 0.0
        for new, context in prefill:
            prompt += new
            pairs += new * (context + 0.5 * new)
        return (
            c.fixed_s
            + c.chunk_s * len(prefill)
            + c.token_s * (prompt + decode_batch + draft_tokens)
            + c.prompt_token_s * prompt
            + c.pair_s * pairs
            + c.sequence_s * decode_batch
            + c.context_token_s * decode_context_tokens
        )

    def decode_run_s(self, decode_batch: int, decode_context_tokens: int, steps: int) -> list[float]:
        first = self.step_s((), decode_batch, decode_context_tokens)
        growth = self.coefficients.context_token_s * decode_batch
        return [first + i * growth for i in range(steps)]

    def transfer_s(self, kv_bytes: int) -> float:
        return self.coefficients.transfer_fixed_s + self.coefficients.transfer_byte_s * kv_bytes


def write_profile(profile: Profile, path: str | Path) -> None:
    """JSON, or YAML where the name ends in .yaml or .yml."""
    path = Path(path)
    data = profile.to_dict()
    text = yaml.safe_dump(data, sort_keys=False) if path.suffix in (".yaml", ".yml") else json.dumps(data, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"out: {path} cannot be written ({e.strerror})") from None


def read_profile(path: str | Path, tp: int | None = None, pp: int | None = None) -> Profile:
    """Read a profile.

    Args:
        tp, pp: the layout it is for. A profile has one layout, and its times say nothing of another; one that does not
            tell its layout is believed.

    Raises:
        UserError: the file is missing, of another format or layout, or a key or number in it is missing, unknown or
            negative.
    """
    try:
        data = _parse(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"profile: {path} cannot be read ({e.strerror}); write one with `pdserve fit`") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError(f"profile: {path} is neither JSON nor YAML") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"profile: {path} is not a profile of format {FORMAT}; write one with `pdserve fit`")
    raw = data.get("coefficients")
    known = {f.name for f in fields(Coefficients)}
    if not isinstance(raw, dict) or not known >= set(raw) or not {"fixed_s", "token_s"} <= set(raw):
        raise UserError(f"profile: {path}: coefficients must be {', '.join(sorted(known))}")
    _require_numbers(path, "coefficients", raw)
    provenance = _mapping(path, "provenance", data.get("provenance"))
    residuals: dict[str, Residuals] = {}
    for kind, value in _mapping(path, "residuals", data.get("residuals")).items():
        errors = _mapping(path, f"residuals.{kind}", value)
        _require_keys(path, f"residuals.{kind}", errors, Residuals)
        _require_numbers(path, f"residuals.{kind}", errors)
        residuals[str(kind)] = Residuals(**errors)
    slowdown = None
    if data.get("host_slowdown") is not None:
        shares = _mapping(path, "host_slowdown", data["host_slowdown"])
        _require_keys(path, "host_slowdown", shares, HostSlowdown)
        _require_numbers(path, "host_slowdown", shares)
        slowdown = HostSlowdown(**shares)
    variation = data.get("step_variation") or []
    if not isinstance(variation, list):
        raise UserError(f"profile: {path}: step_variation is {variation!r}, not a list")
    _require_numbers(path, "step_variation", dict(enumerate(variation)))
    measured = {name: provenance.get(name, asked) for name, asked in (("tp", tp), ("pp", pp))}
    if measured != {"tp": tp or measured["tp"], "pp": pp or measured["pp"]}:
        raise UserError(
            f"profile: {path} was measured at tp={measured['tp']} pp={measured['pp']}, not tp={tp} pp={pp};"
            " use that layout or the roofline's times"
        )
    values = {"pair_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0, **{k: float(v) for k, v in raw.items()}}
    return Profile(Coefficients(**values), provenance, residuals, slowdown, tuple(map(float, variation)))


def _parse(text: str) -> Any:
    """JSON first: YAML takes a number that JSON writes as `1e-05` for a string."""
    try:
        return json.loads(text)
    except ValueError:
        return yaml.safe_load(text)


def _mapping(path: str | Path, where: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"profile: {path}: {where} is {value!r}, not a mapping")
    return value or {}


def _require_keys(path: str | Path, where: str, raw: Mapping[str, Any], of: type) -> None:
    known = {f.name for f in fields(of)}
    if set(raw) != known:
        raise UserError(f"profile: {path}: {where} must be {', '.join(sorted(known))}")


def _require_numbers(path: str | Path, where: str, raw: Mapping[Any, Any]) -> None:
    for name, v in raw.items():
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 <= v < math.inf:
            raise UserError(f"profile: {path}: {where}.{name} is {v!r}, not a number of at least 0")
