"""Options and helpers that the `pdserve plan` subcommands share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import UserError

if TYPE_CHECKING:
    from cluster.perf.hardware import Hardware
    from cluster.perf.model_shape import ModelShape

Model = Annotated[
    str, typer.Option(help="llama-3.1-8b, llama-3.1-70b, llama-2-7b, qwen3-32b, or a folder with a config.json")
]
Gpu = Annotated[str, typer.Option(help="A100-40G, A100-80G, H100, H200, B200 or MI300X")]
Tp = Annotated[int, typer.Option(min=1, help="tensor parallelism of one replica")]
Pp = Annotated[int, typer.Option(min=1, help="pipeline stages of one replica")]
Weights = Annotated[str | None, typer.Option(help="data type of the weights, e.g. fp8, int4; default the model's")]
Kv = Annotated[str | None, typer.Option(help="data type of the KV cache, e.g. fp8; default 16 bits")]
Times = Annotated[str, typer.Option(help="step times: roofline, profile (needs --profile) or aiconfigurator")]
ProfileFile = Annotated[str | None, typer.Option("--profile", help="file written by `pdserve fit`")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """One line a row, as wide as its values: a folded table cannot be read, a long line can."""
    from cluster.planner.plots import show

    cells = [columns, *([show(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(title)
    for row in cells:
        aligned = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  " + "  ".join(aligned).rstrip())


def model_and_gpu(model: str, gpu: str) -> tuple[ModelShape, Hardware]:
    from cluster.perf.hardware import hardware
    from cluster.perf.model_shape import model_shape

    return model_shape(model), hardware(gpu)


def milliseconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name}: {value} ms is not above 0")
    return value / 1e3
