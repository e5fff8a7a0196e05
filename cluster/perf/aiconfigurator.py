"""Step times from AIConfigurator's measured tables (an optional package, version 0.12.0).

It is asked once for a grid of prompts and decode batches of one (model, GPU, tp), in a process of its own: in this
environment where it is installed (`pip install pdserve[aiconfigurator]`), else in a virtual environment in the
user's cache (`make aiconfigurator`). The grid is kept in the cache; between its points seconds are interpolated
bilinearly in the logarithms. Answers are for kernels, without a server's host overhead.

A mixed step is composed: the prompts' own passes, of which all but one lose the fixed part, then the decode tokens
as more tokens of the same pass, then the read of their KV.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from cluster.errors import UserError
from cluster.perf.hardware import Hardware
from cluster.perf.model_shape import ModelShape
from cluster.perf.times import StepTimes
from cluster.perf.transfer import transfer_s

VERSION = "0.12.0"
SYSTEMS = {"A100-80G": "a100_sxm", "H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm"}
MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
}
NEW_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CACHED_TOKENS = (0, 512, 2048, 8192, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def cache_folder() -> Path:
    return Path.home() / ".cache" / "pdserve"


def interpreter() -> str:
    """A Python that can import AIConfigurator.

    Raises:
        UserError: there is none; the line says how to get one.
    """
    if importlib.util.find_spec("aiconfigurator_core"):
        return sys.executable
    own = cache_folder() / "aiconfigurator" / "bin" / "python"
    if own.exists():
        return str(own)
    raise UserError(
        f"times: AIConfigurator is not installed; run `make aiconfigurator` "
        f"or `pip install aiconfigurator-core=={VERSION}`, or use --times roofline"
    )


class Grid:
    """Seconds over two axes; bilinear in the logarithms, flat below the axes and linear beyond them."""

    def __init__(self, rows: Sequence[int], columns: Sequence[int], values: Sequence[float | None]) -> None:
        table = [list(values[i * len(columns) : (i + 1) * len(columns)]) for i in range(len(rows))]
        self.rows, self.columns = rows, columns
        self.table = [_fill(row) for row in table]

    def __call__(self, row: float, column: float) -> float:
        i, fy = _place(self.rows, row)
        j, fx = _place(self.columns, column)
        low = _blend(self.table[i][j], self.table[i][j + 1], fx)
        high = _blend(self.table[i + 1][j], self.table[i + 1][j + 1], fx)
        value = _blend(low, high, fy)
        beyond = max(1.0, row / self.rows[-1]) * max(1.0, column / self.columns[-1])
        return value * beyond


def _fill(row: list[float | None]) -> list[float]:
    """A table without an answer at a corner: repeat the nearest known value."""
    known = [(i, v) for i, v in enumerate(row) if v is not None and v > 0]
    if not known:
        raise UserError("times: AIConfigurator has no measurements for this model, GPU and tp; use --times roofline")
    return [min(known, key=lambda kv: abs(kv[0] - i))[1] if v is None or v <= 0 else v for i, v in enumerate(row)]


def _place(axis: Sequence[int], value: float) -> tuple[int, float]:
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    low, high = math.log(axis[i] + 1), math.log(axis[i + 1] + 1)
    return i, min(max((math.log(max(value, 0) + 1) - low) / (high - low), 0.0), 1.0)


def _blend(low: float, high: float, fraction: float) -> float:
    return math.exp((1 - fraction) * math.log(low) + fraction * math.log(high))


class AiconfiguratorTimes(StepTimes):
    """`StepTimes` of one replica from measured tables, at `tp` GPUs of one node."""

    def __init__(self, prefill: Grid, decode: Grid, device: Hardware, tp: int) -> None:
        self._prefill, self._decode, self._device, self._tp = prefill, decode, device, tp
        self._floor_s = prefill(1, 0)

    def step_s(
        self,
        prefill: Sequence[tuple[int, int]],
        decode_batch: int,
        decode_context_tokens: int,
        draft_tokens: int = 0,
    ) -> float:
        context = decode_context_tokens / decode_batch if decode_batch else 0.0
        if not prefill and not draft_tokens:
            return self._decode(decode_batch, context) if decode_batch else self._floor_s
        passes = [self._prefill(new, cached) for new, cached in prefill]
        total = sum(passes) - max(0, len(passes) - 1) * self._floor_s
        if decode_batch:
            new = sum(n for n, _ in prefill)
            more = decode_batch + draft_tokens
            longer = self._prefill(new + more, 0) - (self._prefill(new, 0) if new else 0.0)
            read_s = self._decode(decode_batch, context) - self._decode(decode_batch, CONTEXTS[0])
            total = max(total + max(0.0, longer) + max(0.0, read_s), self._decode(decode_batch, context))
        return total

    def transfer_s(self, kv_bytes: int) -> float:
        return transfer_s(kv_bytes, self._device.nic, self._tp)


def aiconfigurator_times(shape: ModelShape, device: Hardware, tp: int = 1) -> AiconfiguratorTimes:
    """Ask (or read from the cache) the grids of one layout.

    Raises:
        UserError: AIConfigurator is missing, or knows nothing of this model, GPU or tp.
    """
    shape.check_layout(tp)
    system, model = SYSTEMS.get(device.name), MODELS.get(shape.name)
    if system is None:
        raise UserError(f"gpu: AIConfigurator has no tables for {device.name}; it has {', '.join(SYSTEMS)}")
    if model is None:
        raise UserError(f"model: no AIConfigurator name is known for {shape.name}; known: {', '.join(MODELS)}")
    prefill, decode = _grids(model, system, tp)
    return AiconfiguratorTimes(prefill, decode, device, tp)


@lru_cache(maxsize=64)
def _grids(model: str, system: str, tp: int) -> tuple[Grid, Grid]:
    kept = cache_folder() / "aiconfigurator-tables" / f"{model.replace('/', '--')}_{system}_tp{tp}_{VERSION}.json"
    answer = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else None
    if answer is None:
        answer = _ask(model, system, tp)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(answer), encoding="utf-8")
    return Grid(NEW_TOKENS, CACHED_TOKENS, answer["prefill_s"]), Grid(BATCHES, CONTEXTS, answer["decode_s"])


def _ask(model: str, system: str, tp: int) -> dict[str, list[float | None]]:
    task = {
        "model": model,
        "system": system,
        "backend": "vllm",
        "tp": tp,
        "prefill": [[n, c] for n in NEW_TOKENS for c in CACHED_TOKENS],
        "decode": [[b, c] for b in BATCHES for c in CONTEXTS],
    }
    script = Path(__file__).with_name("aiconfigurator_sampler.py")
    done = subprocess.run(
        [interpreter(), str(script)], input=json.dumps(task), capture_output=True, text=True, timeout=300, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"times: AIConfigurator failed: {last}") from None
    if "error" in answer:
        raise UserError(f"times: AIConfigurator does not know {model} on {system} at tp={tp}: {answer['error'][:200]}")
    return {"prefill_s": answer["prefill_s"], "decode_s": answer["decode_s"]}
