"""The simulator's side: the whole live session again in virtual time, from its first probe to its last request.

The router learns its engines' times from the same requests in the same order (the live one from those of a fit between
two loads as well). Beside the engines' steps a live request
pays for the layers around them. Two constants stand for those, both from the probes alone, which met an idle cluster:
`hop_s` for each message between router and engine, `edge_s` between the client and the router.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cluster.config import ClusterConfig
from cluster.messages import Outcome, Path, RequestRecord, Slo, Stage
from cluster.perf.fitting import fit_transfer
from cluster.sim.fleet import Fleet, Options
from cluster.workload.arrival import Arrival
from loadtests.fidelity.plan import Plan


@dataclass(frozen=True, slots=True)
class Overheads:
    """Fixed times of the layers around the engines, measured on an idle cluster."""

    hop_s: float
    edge_s: float


def live_records(run: dict[str, Any], slo: Slo) -> list[RequestRecord]:
    """What the client measured, with the server's decisions, in the order of the schedule."""
    return [
        RequestRecord(
            request_id=str(i),
            outcome=Outcome(row["outcome"]) if row["outcome"] else Outcome.FAILED,
            slo=slo,
            arrival_s=row["at_s"],
            end_s=row["at_s"],
            path=Path(row["path"]) if row["path"] else None,
            prefill_worker=row["prefill_worker"],
            decode_worker=row["decode_worker"],
            cached_tokens=row["cached_tokens"] or 0,
            transfer_bytes=row["transfer_bytes"] or 0,
            output_tokens=row["tokens"],
            ttft_s=row["ttft_s"],
            tpot_s=row["tpot_s"],
            stage_s={Stage(k): v for k, v in (row["stage_s"] or {}).items()},
        )
        for i, row in enumerate(run["requests"])
    ]


def play(
    config: ClusterConfig, plan: Plan, session: dict[str, Any], overheads: Overheads, seed: int
) -> dict[int, list[RequestRecord]]:
    """Records of each of the session's runs by their load, in the order of their schedules."""
    options = Options(seed=seed, call_s=overheads.hop_s, reply_s=overheads.hop_s, learn=True, max_repeats=1)
    fleet = Fleet(config, options)
    counts: dict[int, int] = {}

    def arrive(arrival: Arrival) -> None:
        fleet.arrive(arrival)

    for run in session["runs"]:
        arrivals = list(_shifted(plan.workload_of(run["load"]).arrivals(), run["start_s"]))
        counts[run["load"]] = len(arrivals)
        for arrival in arrivals:
            fleet.kernel.at(arrival.at_s, arrive, arrival)
    fleet.kernel.run()
    by_id = {int(r.request_id): r for r in fleet.records}
    ordered = [_seen_by_client(by_id[i + 1], overheads) for i in range(len(by_id))]
    out, first = {}, 0
    for load, count in counts.items():
        out[load] = ordered[first : first + count]
        first += count
    return out


def measured_overheads(config: ClusterConfig, plan: Plan, session: dict[str, Any]) -> Overheads:
    """From the probes: half of what a split request's prefill call takes beyond its compute, then what is left.

    Only what engines do not compute counts, so that step times which do not fit are not hidden in a constant.
    """
    probes = session["runs"][0]
    live = live_records(probes, config.slo.to_slo())
    waits = [r.stage_s[Stage.PREFILL_QUEUE] for r in live if r.path is Path.SPLIT and Stage.PREFILL_QUEUE in r.stage_s]
    hop_s = median(waits) / 2 if waits else 0.0
    simulated = play(config, plan, {"runs": [probes]}, Overheads(hop_s, 0.0), 0)[0]
    left = [_around(a) - _around(b) for a, b in zip(live, simulated, strict=True) if a.ttft_s and b.ttft_s]
    return Overheads(hop_s, max(0.0, median(left)))


def _around(record: RequestRecord) -> float:
    """TTFT without what engines computed."""
    computed = (record.stage_s.get(stage, 0.0) for stage in (Stage.PREFILL_COMPUTE, Stage.DECODE_STEP))
    return (record.ttft_s or 0.0) - sum(computed)


def measured_transfer(session: dict[str, Any]) -> tuple[float, float]:
    """Fixed seconds and seconds a byte of a KV transfer, from the probes' own stages."""
    samples = []
    for row in session["runs"][0]["requests"]:
        seconds = (row["stage_s"] or {}).get(Stage.KV_TRANSFER.value)
        if seconds and row["transfer_bytes"]:
            samples.append((row["transfer_bytes"], seconds))
    return fit_transfer(samples)


def _shifted(arrivals: Iterator[Arrival], by_s: float) -> Iterator[Arrival]:
    return (replace(a, at_s=a.at_s + by_s) for a in arrivals)


def _seen_by_client(record: RequestRecord, overheads: Overheads) -> RequestRecord:
    if record.ttft_s is None:
        return record
    return replace(record, ttft_s=record.ttft_s + overheads.edge_s)
