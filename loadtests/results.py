"""From samples to the figures of a report. Pure: samples in, plain values out.

Percentiles are exact (linear interpolation between ranks, like numpy and `vllm bench serve`); counts, goodput and
attainment come from `cluster.goodput`, the module that the router and the simulator count with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.goodput.accounting import GoodputCounters, is_good, is_missed, miss_stage
from cluster.messages import Outcome, RequestRecord, Slo, Stage
from loadtests.sample import UNFINISHED, Sample
from loadtests.scenario import Validity

QUANTILES = (50, 90, 95, 99)
Array = npt.NDArray[np.float64]


def quantiles(values: Sequence[float] | Array) -> dict[str, float | None]:
    """p50, p90, p95, p99, mean, max; None where there is no value."""
    names = [f"p{q}" for q in QUANTILES]
    if len(values) == 0:
        return dict.fromkeys([*names, "mean", "max"])
    array = np.asarray(values, dtype=np.float64)
    found: dict[str, float | None] = dict(zip(names, map(float, np.percentile(array, QUANTILES)), strict=True))
    return found | {"mean": float(array.mean()), "max": float(array.max())}


def adjusted_quantiles(values: Sequence[float], unserved: int) -> dict[str, float | None]:
    """Percentiles where each request that was not served counts as infinitely late (`inf`)."""
    padded = np.sort(np.concatenate([np.asarray(values, dtype=np.float64), np.full(unserved, np.inf)]))
    if len(padded) == 0:
        return {f"p{q}": None for q in QUANTILES}
    # Nearest rank: interpolating towards infinity would turn every quantile near the border into infinity or NaN.
    return {f"p{q}": float(padded[max(0, math.ceil(q / 100 * len(padded)) - 1)]) for q in QUANTILES}


def pooled(lists: Iterable[Sequence[float] | Array]) -> Array:
    arrays = [np.asarray(values, dtype=np.float64) for values in lists if len(values)]
    return np.concatenate(arrays) if arrays else np.empty(0)


def miss_reason(sample: Sample, record: RequestRecord) -> str | None:
    """What the client saw of a miss: `ttft`, `tpot`, `itl`, `rejected`, `failed` or `unfinished`; None for none."""
    if not is_missed(record):
        return None
    if record.outcome is Outcome.REJECTED:
        return "rejected"
    if record.outcome is not Outcome.DONE:
        return "unfinished" if sample.error == UNFINISHED else "failed"
    if record.ttft_s is None or record.ttft_s > record.slo.ttft_s:
        return "ttft"
    return "tpot" if record.tpot_s is not None and record.tpot_s > record.slo.tpot_s else "itl"


def summarize(samples: Sequence[Sample], slo: Slo, length_s: float) -> dict[str, Any]:
    """Key figures of a set of requests. Rates are over `length_s`, the time to the end of the last request."""
    records = [s.record(slo) for s in samples]
    counters = GoodputCounters()
    for record in records:
        counters.count(record)
    done = [s for s in samples if s.outcome is Outcome.DONE]
    unserved = len(samples) - len(done)
    ttft = [s.ttft_s for s in done if s.ttft_s is not None]
    length_s = max(length_s, 1e-9)
    prompt_tokens = sum(s.prompt_tokens or 0 for s in done)
    cached = [s.cached_tokens for s in done if s.cached_tokens is not None]
    outcomes = Counter(UNFINISHED if s.outcome is None or s.error == UNFINISHED else s.outcome.value for s in samples)
    reasons = Counter(filter(None, map(miss_reason, samples, records)))
    return {
        "offered": len(samples),
        "done": outcomes["done"],
        "rejected": outcomes["rejected"],
        "failed": outcomes["failed"],
        "unfinished": outcomes[UNFINISHED],
        "good": counters.good,
        "attainment": counters.attainment,
        "error_rate": unserved / len(samples) if samples else None,
        "goodput_per_s": counters.good / length_s,
        "throughput_per_s": len(done) / length_s,
        "output_tokens_per_s": sum(s.times.tokens for s in done) / length_s,
        "prompt_tokens_per_s": prompt_tokens / length_s,
        "output_tokens": sum(s.times.tokens for s in done),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(cached) if cached else None,
        "cached_share": sum(cached) / prompt_tokens if cached and prompt_tokens else None,
        "ttft_s": quantiles(ttft),
        "ttft_adjusted_s": adjusted_quantiles(ttft, unserved),
        "ttft_from_sent_s": quantiles([t - (s.lag_s or 0.0) for s in done if (t := s.ttft_s) is not None]),
        "tpot_s": quantiles([s.tpot_s for s in done if s.tpot_s is not None]),
        "itl_s": quantiles(pooled(s.times.itl_s for s in done)),
        "e2e_s": quantiles([s.e2e_s for s in done if s.e2e_s is not None]),
        "misses": dict(reasons),
        "errors": dict(Counter(s.error for s in samples if s.error).most_common(8)),
        "token_counts": sorted({s.counted for s in done}),
    }


def validity(
    samples: Sequence[Sample],
    loop_late_s: Sequence[float],
    limits: Validity,
    *,
    closed: bool,
    planned: int | None = None,
) -> dict[str, Any]:
    """Whether the generator, not the server, shaped the numbers; each reason with its figure and bound."""
    lag = quantiles([s.lag_s for s in samples if s.lag_s is not None])
    loop = quantiles(loop_late_s)
    scheduled = [s.scheduled_s for s in samples]
    sent = [s.sent_s for s in samples if s.sent_s is not None]
    planned_rate = _rate(scheduled, len(samples) if planned is None else planned)
    achieved_rate = _rate(sent, len(sent))
    reasons: list[str] = []
    if (lag["p99"] or 0.0) * 1e3 > limits.schedule_lag_p99_ms:
        reasons.append(
            f"schedule lag p99 {1e3 * (lag['p99'] or 0):.0f} ms is above {limits.schedule_lag_p99_ms:g} ms: "
            "requests left late"
        )
    if (loop["p99"] or 0.0) * 1e3 > limits.loop_lag_p99_ms:
        reasons.append(
            f"loop lag p99 {1e3 * (loop['p99'] or 0):.0f} ms is above {limits.loop_lag_p99_ms:g} ms: "
            "the client's processor was the bottleneck"
        )
    share = achieved_rate / planned_rate if planned_rate and achieved_rate else None
    if not closed and share is not None and share < limits.achieved_rate:
        reasons.append(
            f"achieved {achieved_rate:.3g} of {planned_rate:.3g} requests/s ({100 * share:.1f}%), "
            f"below {100 * limits.achieved_rate:g}%"
        )
    return {
        "valid": not reasons,
        "reasons": reasons,
        "loop": "closed" if closed else "open",
        "schedule_lag_s": lag,
        "loop_lag_s": loop,
        "planned_rate_per_s": planned_rate,
        "achieved_rate_per_s": achieved_rate,
    }


def _rate(times: Sequence[float], count: int) -> float | None:
    span = max(times) - min(times) if times else 0.0
    return (count - 1) / span if span > 0 and count > 1 else None


def closed_loop_note(samples: Sequence[Sample]) -> str | None:
    """A closed loop slows down with its server; say so where it did."""
    sent = sorted(s.sent_s for s in samples if s.sent_s is not None)
    if len(sent) < 8 or sent[-1] <= sent[0]:
        return None
    middle = (sent[0] + sent[-1]) / 2
    first = sum(1 for t in sent if t <= middle)
    second = len(sent) - first
    if second >= 0.9 * first:
        return None
    half = middle - sent[0]
    return (
        f"the rate fell from {first / half:.3g} to {second / half:.3g} requests/s because users waited for a slower "
        "server; an open loop would have shown the queue"
    )


def over_time(samples: Sequence[Sample], slo: Slo, length_s: float, bins: int = 40) -> list[dict[str, Any]]:
    """Figures per interval: requests by their scheduled time, tokens by their own, in-flight at the interval's end."""
    if not samples or length_s <= 0:
        return []
    width = _nice(length_s / bins)
    count = math.ceil(length_s / width)
    members: list[list[Sample]] = [[] for _ in range(count)]
    for s in samples:
        members[min(int(s.scheduled_s / width), count - 1)].append(s)
    edges = np.arange(count + 1) * width
    tokens, _ = np.histogram(pooled(token_ends(s) for s in samples), edges)
    started = np.sort([s.scheduled_s for s in samples])
    ended = np.sort([s.end_s for s in samples if s.end_s is not None])
    rows = []
    for i, group in enumerate(members):
        records = [s.record(slo) for s in group]
        good, missed = sum(map(is_good, records)), sum(map(is_missed, records))
        ttft = quantiles([s.ttft_s for s in group if s.ttft_s is not None])
        end = float(edges[i + 1])
        arriving = bool(group) or edges[i] < started[-1]  # after the last arrival there is no rate to speak of
        rows.append(
            {
                "start_s": float(edges[i]),
                "end_s": end,
                "offered_per_s": len(group) / width if arriving else None,
                "goodput_per_s": good / width if arriving else None,
                "attainment": good / (good + missed) if good + missed else None,
                "ttft_p50_s": ttft["p50"],
                "ttft_p99_s": ttft["p99"],
                "in_flight": int(np.searchsorted(started, end) - np.searchsorted(ended, end)),
                "output_tokens_per_s": float(tokens[i]) / width,
            }
        )
    return rows


def token_ends(sample: Sample) -> Array:
    """When each token arrived."""
    if sample.times.first_s is None:
        return np.empty(0)
    return sample.times.first_s + np.cumsum([0.0, *sample.times.itl_s])


def _nice(width: float) -> float:
    power = 10 ** math.floor(math.log10(width))
    return float(next(power * step for step in (1, 2, 5, 10) if power * step >= width))


def cdf(values: Sequence[float] | Array, points: int = 200) -> list[tuple[float, float]]:
    """(value, share at or below) at evenly spaced ranks, with both ends."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    if n == 0:
        return []
    ranks = np.unique(np.linspace(0, n - 1, min(points, n)).round().astype(int))
    return [(float(ordered[i]), (int(i) + 1) / n) for i in ranks]


def misses_by_stage(records: Mapping[str, RequestRecord]) -> dict[str, int]:
    """The server's own attribution of each miss, for records joined by request id."""
    counted = Counter(stage for r in records.values() if (stage := miss_stage(r)) is not None)
    return {stage.value: counted.get(stage, 0) for stage in Stage}


def by_group(samples: Sequence[Sample], key: str, slo: Slo, length_s: float) -> dict[str, dict[str, Any]]:
    """`summarize` per tenant or per stream, where there is more than one."""
    groups: dict[str, list[Sample]] = {}
    for s in samples:
        groups.setdefault(str(getattr(s, key)), []).append(s)
    return {name: summarize(group, slo, length_s) for name, group in sorted(groups.items())} if len(groups) > 1 else {}


def highest_rate(steps: Sequence[Mapping[str, Any]], attainment: float) -> float | None:
    """The highest measured rate that kept `attainment`, with every lower one keeping it too; None where none did.

    A step that the generator could not drive proves nothing and is left out.
    """
    held: float | None = None
    for step in sorted(steps, key=lambda s: s["rate_per_s"]):
        if not step["valid"] or step["attainment"] is None:
            continue
        if step["attainment"] < attainment:
            break
        held = float(step["rate_per_s"])
    return held
