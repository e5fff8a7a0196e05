"""What a topology is made of, and which layouts are possible at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cluster.errors import UserError
from cluster.perf.model_shape import ModelShape
from kv_transfer.compatibility import check_layouts


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """One replica: tp x pp GPUs of one type."""

    gpu: str
    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"{self.gpu} tp{self.tp}" + (f" pp{self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal replicas."""

    layout: Layout
    replicas: int

    @property
    def gpus(self) -> int:
        return self.replicas * self.layout.gpus

    def __str__(self) -> str:
        return f"{self.replicas} x {self.layout}"


@dataclass(frozen=True, slots=True)
class Topology:
    """Colocated pools serve both phases and share the traffic by what each can take; otherwise one pool a phase.

    `chunk_tokens` is the prompt budget of a mixed step: None computes a prompt in one step.
    """

    prefill: Pool | None = None
    decode: Pool | None = None
    colocated: tuple[Pool, ...] = ()
    chunk_tokens: int | None = None

    @property
    def kind(self) -> str:
        if self.prefill is not None:
            return "split"
        return "colocated" if self.chunk_tokens is None else f"chunked {self.chunk_tokens}"

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.colocated or tuple(p for p in (self.prefill, self.decode) if p is not None)

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    def gpus_by_type(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for pool in self.pools:
            used[pool.layout.gpu] = used.get(pool.layout.gpu, 0) + pool.gpus
        return used

    def __str__(self) -> str:
        if self.prefill is not None:
            return f"P {self.prefill} + D {self.decode}"
        chunk = "" if self.chunk_tokens is None else f", chunk {self.chunk_tokens}"
        return " + ".join(str(pool) for pool in self.colocated) + chunk


def require_pair(shape: ModelShape, prefill: Layout, decode: Layout) -> None:
    """Whether KV of one layout can be read by the other: by the rules that live engines are paired by, and everything
    that the connector can do (`kv_transfer.tp_pairs: connector`).

    Raises:
        UserError: the pair cannot exchange KV.
    """
    heads = {"kv_heads": shape.kv_heads, "latent": shape.latent}
    sides = ({"tp": layout.tp, "pp": layout.pp, **heads} for layout in (prefill, decode))
    refusals = check_layouts(*sides, tp_pairs="connector")
    if refusals:
        raise UserError(f"{shape.name}: {refusals[0]}")


_POOL = re.compile(r"(?P<role>[PDC])(?P<n>\d+)tp(?P<tp>\d+)(?:pp(?P<pp>\d+))?(?::(?P<gpu>[\w-]+))?(?:@(?P<chunk>\d+))?")


def parse_topology(text: str, gpus: list[str]) -> Topology:
    """`P4tp2+D2tp4`, `C4tp4@512` (both phases, chunks of 512), `P4tp1:H100+D1tp8:A100-80G`.

    Args:
        gpus: types there are; a pool without one takes the first.

    Raises:
        UserError: it does not read like one, or names a type that is not there.
    """
    pools: dict[str, Pool] = {}
    chunk: int | None = None
    for part in text.replace(" ", "").split("+"):
        match = _POOL.fullmatch(part)
        if match is None or match["role"] in pools or int(match["n"]) < 1:
            raise UserError(f"only: {part!r} is not a pool; write e.g. P4tp2+D2tp4 or C4tp4@512")
        gpu = match["gpu"] or gpus[0]
        if gpu not in gpus:
            raise UserError(f"only: {gpu!r} is not among the GPUs there are: {', '.join(gpus)}")
        if match["chunk"] and match["role"] != "C":
            raise UserError(f"only: {part!r}: chunks belong to a pool that does both phases, e.g. C4tp4@512")
        chunk = int(match["chunk"]) if match["chunk"] else chunk
        pools[match["role"]] = Pool(Layout(gpu, int(match["tp"]), int(match["pp"] or 1)), int(match["n"]))
    if set(pools) == {"C"}:
        return Topology(colocated=(pools["C"],), chunk_tokens=chunk)
    if set(pools) == {"P", "D"}:
        return Topology(prefill=pools["P"], decode=pools["D"])
    raise UserError(f"only: {text!r} needs one P and one D pool, or one C pool")
