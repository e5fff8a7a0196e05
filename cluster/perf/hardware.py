"""Accelerators as data: peaks, bandwidths, memory, links and prices, from `data/hardware.toml`.

Every figure there carries its source; nothing about a device is written in code.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from cluster.errors import UserError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What kernels reach of a device's peaks, and the costs that do not shrink with the work.

    Attributes:
        gemm: share of the compute peak in large matrix products.
        attention: share of the compute peak in prompt attention.
        hbm: share of the memory bandwidth in reads of weights and KV.
        link: share of the link's bandwidth in an all-reduce.
        layer_s: fixed cost of one layer: kernels too small to fill the device.
        step_s: fixed cost of one step: launch, sampling, bookkeeping.
        all_reduce_s: latency of one all-reduce of an empty message.
        source: how these were found, with residuals.
    """

    gemm: float
    attention: float
    hbm: float
    link: float
    layer_s: float
    step_s: float
    all_reduce_s: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection, per accelerator."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator type. `flops` holds dense peaks per data type."""

    name: str
    vendor: str
    memory_bytes: int
    hbm_bytes_per_s: float
    flops: Mapping[str, float]
    link: Link
    nic: Link
    gpus_per_node: int
    price_per_hour: float
    price_source: str
    price_date: str
    source: str
    efficiency: Efficiency

    def peak_flops(self, dtype: str) -> float:
        """Dense peak of a data type; a type without its own units runs at the 16-bit rate (weight-only formats)."""
        return self.flops.get(dtype, self.flops["bfloat16"])


def _build(name: str, raw: Mapping[str, Any]) -> Hardware:
    fields = dict(raw)
    return Hardware(
        name=name,
        link=Link(**fields.pop("link")),
        nic=Link(**fields.pop("nic")),
        efficiency=Efficiency(**fields.pop("efficiency")),
        **fields,
    )


@cache
def table() -> dict[str, Hardware]:
    """Every known accelerator, by name."""
    text = files("cluster.perf").joinpath("data/hardware.toml").read_text(encoding="utf-8")
    return {name: _build(name, raw) for name, raw in tomllib.loads(text).items()}


_ALIASES = {"A100": "A100-80G", "A100-80GB": "A100-80G", "A100-40GB": "A100-40G"}


def hardware(name: str) -> Hardware:
    """One accelerator. Case and a form-factor suffix do not matter: `h100`, `H100-SXM`.

    Raises:
        UserError: there is no such entry; the line lists those that exist.
    """
    wanted = name.upper().replace("_", "-").removesuffix("-SXM")
    wanted = _ALIASES.get(wanted, wanted)
    known = table()
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(f"gpu: {name!r} is not in the hardware table; {hint}known: {', '.join(known)}")
