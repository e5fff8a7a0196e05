"""Named numbers that symptoms are recognised by, from the records of a run. Pure.

A number that the records cannot give is absent, never zero: a rule that needs it is then not decided. Shares and
ratios have no unit. "Low load" and "high load" are the quarters of requests that decoded beside the fewest and the
most others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.diagnosis.prompt_order import prompt_evidence
from cluster.goodput.accounting import is_good, is_missed, miss_stage
from cluster.messages import Outcome, Path, RequestRecord, Slo, Stage
from cluster.workload.arrival import Prompt

MIN_REQUESTS = 20
SPIKE = 4.0
"""A gap between tokens is a spike from this many times the median on."""
FULL = 0.8
"""Share of time or memory from which a pool counts as full."""
BATCH_FULL = 0.7
"""The same for batch slots: while one request leaves and the next one's KV arrives, a slot holds nobody."""
COVERED = 0.95
"""Share of the served requests whose records must be known before what an engine did all the time can be said."""

Array = npt.NDArray[np.float64]
Evidence = dict[str, float]


def gather(
    records: Sequence[RequestRecord],
    slo: Slo,
    *,
    recorded: Sequence[RequestRecord] | None = None,
    prompts: Sequence[Prompt] = (),
    engine: Mapping[str, float] | None = None,
    block_size_tokens: int = 16,
) -> Evidence:
    """Everything that can be said of a run.

    Args:
        records: every request that ended. With `itl_s` where stalls are to be seen.
        recorded: those of them with the server's own stages, engines and cache hits, where the others have only a
            client's times; None: all. A server keeps its latest records only, and one of several routers its own.
        prompts: what was asked, in order of arrival; for reuse and prompt order.
        engine: counters and gauges of the engines, by the names in `docs/diagnose.md`; taken as they are.
    """
    found: Evidence = {"requests": float(len(records))}
    if len(records) >= MIN_REQUESTS:
        found |= _latency(records, slo)
        found |= _load(records, slo)
        found |= _misses(records, slo)
        found |= _gaps(records)
    known = records if recorded is None else recorded
    if len(known) >= MIN_REQUESTS:
        whole = _covers(known, records)
        found |= _stages(known, slo, whole=whole)
        found |= _cache(known)
        if whole and "itl_p50_s" in found:
            found |= _stalls(known, found["itl_p50_s"])
    if len(prompts) >= MIN_REQUESTS:
        found |= prompt_evidence(prompts, block_size_tokens)
    if engine:
        found |= {k: float(v) for k, v in engine.items()}
        if len(records) >= MIN_REQUESTS:
            found |= _occupancy(records, engine)
    return found | _derived(found)


def _latency(records: Sequence[RequestRecord], slo: Slo) -> Evidence:
    done = [r for r in records if r.outcome is Outcome.DONE]
    ttft = np.array([r.ttft_s for r in done if r.ttft_s is not None])
    tpot = np.array([r.tpot_s for r in done if r.tpot_s is not None and r.output_tokens > 1])
    found: Evidence = {
        "good_share": sum(map(is_good, records)) / len(records),
        "unserved_share": 1 - len(done) / len(records),
        "ttft_limit_s": slo.ttft_s,
        "tpot_limit_s": slo.tpot_s,
    }
    for name, values, limit in (("ttft", ttft, slo.ttft_s), ("tpot", tpot, slo.tpot_s)):
        if len(values):
            p50, p99 = map(float, np.percentile(values, (50, 99)))
            found |= {f"{name}_p50_s": p50, f"{name}_p99_s": p99}
            found |= {f"{name}_p50_over_limit": p50 / limit, f"{name}_p99_over_limit": p99 / limit}
    return found


def _load(records: Sequence[RequestRecord], slo: Slo) -> Evidence:
    """How latency moves with concurrency, and whether work piles up."""
    found: Evidence = {}
    decoding = [r for r in records if r.ttft_s is not None and r.tpot_s and r.output_tokens > 4]
    if len(decoding) >= MIN_REQUESTS:
        starts = np.array([r.arrival_s + (r.ttft_s or 0.0) for r in decoding])
        tpot = np.array([r.tpot_s or 0.0 for r in decoding])
        ends = starts + tpot * np.array([r.output_tokens - 1 for r in decoding])
        middle = (starts + ends) / 2
        beside = _alive(starts, ends, middle)
        order = np.argsort(beside, kind="stable")
        quarter = max(5, len(order) // 4)
        low, high = order[:quarter], order[-quarter:]
        found["concurrency_low"] = float(beside[low].mean())
        found["concurrency_high"] = float(beside[high].mean())
        found["tpot_low_load_s"] = float(np.median(tpot[low]))
        found["tpot_high_load_s"] = float(np.median(tpot[high]))
        found["tpot_growth"] = found["tpot_high_load_s"] / max(found["tpot_low_load_s"], 1e-9)
        found["tpot_low_load_over_limit"] = found["tpot_low_load_s"] / slo.tpot_s
    arrivals = np.sort([r.arrival_s for r in records])
    ends = np.sort([r.end_s for r in records])
    window = float(arrivals[-1] - arrivals[0])
    if window > 0:
        in_window = int(np.searchsorted(ends, arrivals[-1], side="right"))
        found["offered_per_s"] = len(records) / window
        found["completed_per_s"] = in_window / window
        found["completed_over_offered"] = in_window / len(records)
        at = arrivals[0] + window * np.array([1 / 3, 2 / 3, 1.0])
        waiting = np.searchsorted(arrivals, at, side="right") - np.searchsorted(ends, at, side="right")
        found["in_flight_early"], found["in_flight_late"] = float(waiting[0]), float(waiting[2])
        found["in_flight_growth"] = float(waiting[2] / max(1, waiting[0]))
    return found


def _occupancy(records: Sequence[RequestRecord], engine: Mapping[str, float]) -> Evidence:
    """How full memory and batch really are, from what each request held and for how long."""
    held = [r for r in records if r.ttft_s is not None]
    if not held:
        return {}
    starts = np.array([r.arrival_s + (r.ttft_s or 0.0) for r in held])
    ends = np.array([max(r.end_s, r.arrival_s + (r.ttft_s or 0.0)) for r in held])
    prompt = np.array([r.prompt_tokens for r in held], dtype=np.float64)
    output = np.array([r.output_tokens for r in held], dtype=np.float64)
    # The middle of the run: start and end of it are empty by nature.
    times = np.quantile(np.concatenate([starts, ends]), np.linspace(0.25, 0.75, 40))
    alive = (starts[None, :] <= times[:, None]) & (times[:, None] < ends[None, :])
    found: Evidence = {}
    if engine.get("batch_slots"):
        used = alive.sum(axis=1) / engine["batch_slots"]
        found["batch_full_share"], found["batch_used_share"] = float((used >= 0.9).mean()), float(used.mean())
    if engine.get("kv_capacity_tokens"):
        grown = np.clip((times[:, None] - starts) / np.maximum(ends - starts, 1e-9), 0, 1)
        tokens = (alive * (prompt + output * grown)).sum(axis=1)
        found["kv_live_share"] = float(np.median(tokens) / engine["kv_capacity_tokens"])
    return found


def _alive(starts: Array, ends: Array, at: Array) -> Array:
    started = np.searchsorted(np.sort(starts), at, side="right")
    ended = np.searchsorted(np.sort(ends), at, side="right")
    return (started - ended).astype(np.float64)


def _covers(known: Sequence[RequestRecord], records: Sequence[RequestRecord]) -> bool:
    """Whether hardly any request that was served while the known ones arrived is missing among them."""
    first_s, last_s = min(r.arrival_s for r in known), max(r.arrival_s for r in known)
    served = sum(first_s <= r.arrival_s <= last_s and r.ttft_s is not None for r in records)
    return sum(r.ttft_s is not None for r in known) >= COVERED * served


def _late(records: Sequence[RequestRecord], slo: Slo) -> list[RequestRecord]:
    """Misses at the first token."""
    return [r for r in records if is_missed(r) and (r.ttft_s is None or r.ttft_s > slo.ttft_s)]


def _misses(records: Sequence[RequestRecord], slo: Slo) -> Evidence:
    late, missed = len(_late(records, slo)), sum(map(is_missed, records))
    return {"ttft_missed_share": late / len(records), "tpot_missed_share": (missed - late) / len(records)}


def _stages(records: Sequence[RequestRecord], slo: Slo, *, whole: bool) -> Evidence:
    """Shares of the late first tokens by stage: only where stages were recorded.

    Args:
        whole: no record is missing between these, so that a time without one was idle.
    """
    if not any(r.stage_s for r in records):
        return {}
    late = _late(records, slo)
    found: Evidence = {"split_share": sum(r.path is Path.SPLIT for r in records) / len(records)}
    if whole:
        found["prefill_utilization"] = _prefill_utilization(records)
    for stage in Stage:
        spent = [r.stage_s.get(stage, 0.0) for r in records if r.ttft_s is not None]
        found[f"{stage.value}_p50_s"] = float(np.median(spent)) if spent else 0.0
        if late:
            found[f"late_by_{stage.value}"] = sum(miss_stage(r) is stage for r in late) / len(late)
    return found


def _prefill_utilization(records: Sequence[RequestRecord]) -> float:
    """Share of the time between first and last arrival in which an engine that prefills was doing so."""
    window = (min(r.arrival_s for r in records), max(r.arrival_s for r in records))
    spans: dict[str, list[tuple[float, float]]] = {}
    for r in records:
        compute_s = r.stage_s.get(Stage.PREFILL_COMPUTE, 0.0)
        start = r.arrival_s + r.stage_s.get(Stage.ROUTER_QUEUE, 0.0) + r.stage_s.get(Stage.PREFILL_QUEUE, 0.0)
        worker = r.prefill_worker if r.path is Path.SPLIT else r.decode_worker
        if worker is None:
            continue  # it never had an engine, rejected or failed before
        spans.setdefault(worker, []).append((max(start, window[0]), min(start + compute_s, window[1])))
    busy = 0.0
    for mine in spans.values():
        until = window[0]
        for start, end in sorted(mine):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
    return busy / max(1e-9, (window[1] - window[0]) * max(1, len(spans)))


def _gaps(records: Sequence[RequestRecord]) -> Evidence:
    """Gaps between tokens, and how many are far longer than usual."""
    with_gaps = [r for r in records if r.itl_s and r.ttft_s is not None]
    if len(with_gaps) < MIN_REQUESTS:
        return {}
    gaps = np.concatenate([np.asarray(r.itl_s) for r in with_gaps])
    p50, p99 = map(float, np.percentile(gaps, (50, 99)))
    found: Evidence = {"itl_p50_s": p50, "itl_p99_s": p99, "itl_p99_over_p50": p99 / max(p50, 1e-9)}
    return found | {"spike_share": float((gaps > SPIKE * max(p50, 1e-9)).mean())}


def _stalls(records: Sequence[RequestRecord], p50_s: float) -> Evidence:
    """Whether gaps much longer than the median line up with other requests' prefills on the same engine."""
    with_gaps = [r for r in records if r.itl_s and r.ttft_s is not None]
    if len(with_gaps) < MIN_REQUESTS:
        return {}
    gaps = np.concatenate([np.asarray(r.itl_s) for r in with_gaps])
    starts = np.concatenate([r.arrival_s + (r.ttft_s or 0) + np.cumsum([0.0, *r.itl_s[:-1]]) for r in with_gaps])
    place: Sequence[str | None] = [r.decode_worker for r in with_gaps]
    where = np.repeat(np.arange(len(with_gaps)), [len(r.itl_s) for r in with_gaps])
    spikes = np.flatnonzero(gaps > SPIKE * max(p50_s, 1e-9))
    if len(spikes) < 5:
        return {}
    found: Evidence = {}
    prefills = _prefills(records)
    usual = np.flatnonzero(gaps <= 2 * p50_s)
    rng = np.random.default_rng(0)
    for name, chosen in (("spike_beside_prefill", spikes), ("gap_beside_prefill", usual)):
        some = chosen if len(chosen) <= 2000 else rng.choice(chosen, 2000, replace=False)
        hits = sum(_covered(prefills, place[where[i]], starts[i], starts[i] + gaps[i]) for i in some)
        found[f"{name}_share"] = hits / max(1, len(some))
    return found


def _prefills(records: Sequence[RequestRecord]) -> dict[str | None, Array]:
    """Per engine that decodes: ends of prefills that ran there. Split prefills run elsewhere and stall nobody."""
    ends: dict[str | None, list[float]] = {}
    for r in records:
        if r.ttft_s is not None and r.path is not Path.SPLIT:
            ends.setdefault(r.decode_worker, []).append(r.arrival_s + r.ttft_s)
    return {worker: np.sort(times) for worker, times in ends.items()}


def _covered(prefills: Mapping[str | None, Array], worker: str | None, start: float, end: float) -> bool:
    """Whether a prefill on that engine ended inside the gap: its first token comes out with the late ones."""
    times = prefills.get(worker)
    if times is None:
        return False
    slack = 0.05 * (end - start) + 1e-6
    return bool(np.searchsorted(times, end + slack) > np.searchsorted(times, start + slack))


def _cache(records: Sequence[RequestRecord]) -> Evidence:
    prompt = sum(r.prompt_tokens for r in records if r.ttft_s is not None)
    if not prompt:
        return {}
    cached = sum(r.cached_tokens for r in records if r.ttft_s is not None)
    found: Evidence = {"cached_share": cached / prompt, "prompt_tokens": float(prompt)}
    predicted = sum(r.predicted_cached_tokens for r in records if r.ttft_s is not None)
    if any(r.path is not None for r in records):
        found["predicted_cached_share"] = predicted / prompt
    return found


def _derived(found: Evidence) -> Evidence:
    """Differences and ratios of other numbers, so that rules stay comparisons."""
    out: Evidence = {}

    def both(a: str, b: str) -> bool:
        return a in found and b in found

    if both("spike_beside_prefill_share", "gap_beside_prefill_share"):
        out["spike_prefill_lift"] = found["spike_beside_prefill_share"] - found["gap_beside_prefill_share"]
    if both("reusable_share", "cached_share"):
        out["unused_reuse_share"] = found["reusable_share"] - found["cached_share"]
        # Unique tokens are those an endless cache would still compute.
        unique = 1 - found["reusable_share"]
        out["computed_over_unique"] = (1 - found["cached_share"]) / max(unique, 1e-9)
    if both("predicted_cached_share", "cached_share"):
        out["predicted_beyond_actual"] = found["predicted_cached_share"] - found["cached_share"]
    out |= _who_is_waited_for(found)
    if both("preemptions", "requests"):
        out["preemptions_per_request"] = found["preemptions"] / max(1.0, found["requests"])
    if both("concurrency_low", "concurrency_high"):
        out["concurrency_spread"] = found["concurrency_high"] / max(1.0, found["concurrency_low"])
    if both("padded_slot_steps", "slot_steps"):
        out["idle_slot_share"] = found["padded_slot_steps"] / max(1.0, found["slot_steps"])
    if both("accepted_draft_tokens", "drafted_tokens") and found["drafted_tokens"] > 0:
        out["accepted_share"] = found["accepted_draft_tokens"] / found["drafted_tokens"]
    return out


def _who_is_waited_for(found: Evidence) -> Evidence:
    """Late first tokens by the pool that they waited for.

    A router that admits by room holds requests back when a pool is full: that wait belongs to the pool. Only what it
    holds while both pools have room is its own.
    """
    held = found.get("late_by_router_queue")
    if held is None or "prefill_utilization" not in found:
        return {}
    prefill_full = found["prefill_utilization"] >= FULL
    out = {"late_for_prefill": found["late_by_prefill_queue"] + (held if prefill_full else 0.0)}
    slots, memory = found.get("batch_used_share"), found.get("kv_live_share")
    known = slots is not None or memory is not None
    decode_full = (slots or 0.0) >= BATCH_FULL or (memory or 0.0) >= FULL
    out["late_for_decode"] = found["late_by_decode_queue"] + (held if decode_full and not prefill_full else 0.0)
    if prefill_full or known:
        out["late_for_router"] = 0.0 if prefill_full or decode_full else held
    return out


def against_baseline(run: Sequence[RequestRecord], without: Sequence[RequestRecord]) -> Evidence:
    """Speed-up of TPOT by a feature (speculation): the same workload with it and without it.

    Speed-ups at low and high load compare the requests that decoded beside the fewest and the most others.
    """
    slo = Slo(1.0, 1.0)
    a, b = _load(run, slo), _load(without, slo)
    if "tpot_low_load_s" not in a or "tpot_low_load_s" not in b:
        return {}
    return {
        "speedup_low_load": b["tpot_low_load_s"] / max(a["tpot_low_load_s"], 1e-9),
        "speedup_high_load": b["tpot_high_load_s"] / max(a["tpot_high_load_s"], 1e-9),
    }


def from_mapping(raw: Mapping[str, Any]) -> RequestRecord:
    """A record as it travels in JSON (`/pdserve/records`)."""
    known = {k: v for k, v in raw.items() if k in RequestRecord.__dataclass_fields__}
    slo = known.pop("slo")
    return RequestRecord(
        **{
            **known,
            "slo": Slo(slo["ttft_s"], slo["tpot_s"], slo.get("itl_p99_s")),
            "outcome": Outcome(known["outcome"]),
            "path": None if known.get("path") is None else Path(known["path"]),
            "itl_s": known.get("itl_s") or [],
            "stage_s": {Stage(k): float(v) for k, v in (known.get("stage_s") or {}).items()},
        }
    )
