"""From two sets of records to the errors of one against the other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from cluster.goodput.accounting import is_good
from cluster.messages import Outcome, RequestRecord

FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load on one side; latencies of the requests that were served."""

    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of the requests for which both sides decided alike. Engines have names of their own on each side, so
    the pairing of names that agrees best is taken."""

    path: float
    prefill: float
    decode: float


def figures(records: Sequence[RequestRecord]) -> Figures:
    done = [r for r in records if r.outcome is Outcome.DONE and r.ttft_s is not None]
    ttft = np.array([r.ttft_s for r in done], dtype=float)
    tpot = np.array([r.tpot_s for r in done if r.output_tokens > 1], dtype=float)
    t50, t99, o50, o99 = (float(np.percentile(v, q)) for v in (ttft, tpot) for q in (50, 99))
    return Figures(len(records), t50, t99, o50, o99, sum(map(is_good, records)) / len(records))


def errors(simulated: Figures, live: Figures) -> dict[str, float]:
    """Relative errors of the simulator, signed; attainment in points."""
    out = {name: getattr(simulated, name) / getattr(live, name) - 1 for name in FIGURES}
    out["attainment_points"] = 100 * (simulated.attainment - live.attainment)
    return out


def largest(rows: Sequence[dict[str, float]], quantile: str) -> float:
    """The largest error of TTFT and TPOT at `p50` or `p99`, over all loads."""
    return max(abs(row[name]) for row in rows for name in FIGURES if quantile in name)


def agreement(simulated: Sequence[RequestRecord], live: Sequence[RequestRecord]) -> Agreement:
    """Both in the order of their requests."""
    same_path = sum(s.path is r.path for s, r in zip(simulated, live, strict=True))
    return Agreement(
        same_path / len(live),
        _alike([s.prefill_worker for s in simulated], [r.prefill_worker for r in live]),
        _alike([s.decode_worker for s in simulated], [r.decode_worker for r in live]),
    )


def weighted(parts: Sequence[tuple[Agreement, int]]) -> Agreement:
    """Of several loads, by their numbers of requests. A cluster names its engines anew: each load is paired alone."""
    total = sum(requests for _, requests in parts)
    return Agreement(*(sum(getattr(a, n) * k for a, k in parts) / total for n in Agreement.__slots__))


def _alike(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Share of positions that agree once the names of `a` are paired with those of `b`; None pairs with None."""
    left, right = sorted({x for x in a if x is not None}), sorted({y for y in b if y is not None})
    counts = np.zeros((len(left), len(right)))
    both_none = 0
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            both_none += x is y
        else:
            counts[left.index(x), right.index(y)] += 1
    rows, columns = linear_sum_assignment(-counts)
    return (both_none + float(counts[rows, columns].sum())) / max(1, len(a))
