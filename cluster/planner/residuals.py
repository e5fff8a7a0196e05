"""The roofline beside AIConfigurator's measured tables: how far each GPU's shares of the peaks can be trusted.

`make roofline-residuals` prints the errors of the table in `cluster/perf/data/hardware.toml`; `--fit` also prints the
efficiencies that least squares on the logarithms would choose (bounded, soft L1, scipy's trust-region reflective).
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from statistics import median
from typing import Any

from cluster.errors import UserError
from cluster.perf import aiconfigurator as aic
from cluster.perf.hardware import Efficiency, Hardware, hardware
from cluster.perf.model_shape import ModelShape, model_shape
from cluster.perf.roofline import RooflineTimes

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
TP = (1, 2, 4, 8)
PROMPTS = (256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 4, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 4096, 16384)
KV_TOKENS = 1 << 20
UPPER = Efficiency(1.0, 0.75, 1.0, 1.0, 2e-4, 5e-3, 2e-4)

# shape, tp, (prompt chunks, batch, context tokens), measured seconds
Point = tuple[ModelShape, int, tuple[tuple[tuple[int, int], ...], int, int], float]


def points(device: Hardware) -> list[Point]:
    """Measured steps of every model and tp that the tables know."""
    found: list[Point] = []
    for name in MODELS:
        shape = model_shape(name)
        for tp in TP:
            try:
                measured = aic.aiconfigurator_times(shape, device, tp)
            except UserError:
                continue
            loads: list[tuple[tuple[tuple[int, int], ...], int, int]] = [(((p, 0),), 0, 0) for p in PROMPTS]
            loads += [((), b, b * c) for b in BATCHES for c in CONTEXTS if b * c <= KV_TOKENS]
            found += [(shape, tp, load, measured.step_s(*load)) for load in loads]
    return found


def errors(device: Hardware, measured: list[Point]) -> list[float]:
    """|roofline / measured - 1| of every point."""
    times: dict[tuple[str, int], RooflineTimes] = {}
    result = []
    for shape, tp, load, seconds in measured:
        model = times.setdefault((shape.name, tp), RooflineTimes(shape, device, tp))
        result.append(model.step_s(*load) / seconds - 1)
    return result


def fit(device: Hardware, measured: list[Point]) -> Efficiency:
    """Efficiencies with the smallest relative errors."""
    import numpy as np
    from scipy.optimize import least_squares

    names = [f.name for f in fields(Efficiency) if f.name != "source"]
    upper = np.array([getattr(UPPER, n) for n in names])

    def build(x: object) -> Hardware:
        values: dict[str, Any] = {n: float(v) for n, v in zip(names, np.asarray(x) * upper, strict=True)}
        return replace(device, efficiency=Efficiency(**values))

    start = np.array(
        [min(0.9, max(0.05, getattr(device.efficiency, n) / u)) for n, u in zip(names, upper, strict=True)]
    )
    low = np.full(len(names), 1e-9)
    low[:4] = 0.05
    solved = least_squares(
        lambda x: np.log1p(errors(build(x), measured)),
        start,
        bounds=(low, np.ones(len(names))),
        loss="soft_l1",
        f_scale=0.1,
    )
    return build(solved.x).efficiency


def main() -> None:
    key: dict[str, float] = {}
    print("| GPU | points | median error | 90th percentile | largest, at |\n|---|---|---|---|---|")
    for name in aic.SYSTEMS:
        device = hardware(name)
        measured = points(device)
        found = errors(device, measured)
        sizes = sorted(abs(e) for e in found)
        worst = max(range(len(found)), key=lambda i: abs(found[i]))
        shape, tp, (prefill, batch, context), _ = measured[worst]
        what = f"prompt of {prefill[0][0]}" if prefill else f"batch {batch} at {context // batch} tokens"
        p90 = sizes[round(0.9 * (len(sizes) - 1))]
        where = f"{found[worst]:+.0%}, {shape.name} tp{tp}, {what}"
        print(f"| {name} | {len(sizes)} | {median(sizes):.1%} | {p90:.1%} | {where} |")
        key |= {f"{name}_median": round(median(sizes), 4), f"{name}_p90": round(p90, 4)}
        if "--fit" in sys.argv[1:]:
            print(f"  fitted: {fit(device, measured)}")
    print(json.dumps(key))


if __name__ == "__main__":
    main()
