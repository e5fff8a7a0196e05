"""What the server knows of the requests that a client measured: stages, engines, cache hits; and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from cluster.diagnosis.evidence import from_mapping, gather
from cluster.messages import RequestRecord
from loadtests.results import misses_by_stage
from loadtests.sample import Sample
from loadtests.scenario import Scenario


def join(samples: Sequence[Sample], raw: Sequence[Mapping[str, Any]], scenario: Scenario) -> dict[str, RequestRecord]:
    """The client's times with the server's stages, by the client's request id.

    Judged by the scenario's SLO. Time that the client saw and no stage owns was spent before the router's clock
    began (network, gateway, the client) and counts as the router's queue, as in cluster/goodput.
    """
    slo = scenario.slo.to_slo()
    theirs = {str(r["client_request_id"]): r for r in raw if r.get("client_request_id")}
    found: dict[str, RequestRecord] = {}
    for s in samples:
        entry = theirs.get(s.request_id)
        if entry is None:
            continue
        mine = s.record(slo)
        found[s.request_id] = replace(
            from_mapping(entry),
            slo=slo,
            outcome=mine.outcome,
            arrival_s=mine.arrival_s,
            end_s=mine.end_s,
            ttft_s=mine.ttft_s,
            tpot_s=mine.tpot_s,
            itl_s=mine.itl_s,
            output_tokens=mine.output_tokens,
        )
    return found


def joined(
    samples: Sequence[Sample], raw: Sequence[Mapping[str, Any]], scenario: Scenario, engine: Mapping[str, float]
) -> dict[str, Any]:
    """`evidence` for `pdserve diagnose`, and `misses_by_stage` where the server gave its records."""
    slo = scenario.slo.to_slo()
    matched = join(samples, raw, scenario)
    records = [matched.get(s.request_id) or s.record(slo) for s in samples]
    workload = scenario.workload
    prompts = [] if workload.closed else [a.prompt for a in workload.arrivals()]
    # What the server said nothing of has no stages: counted with the others, its time would be the router's queue.
    recorded = list(matched.values()) or None
    if not matched and not any(s.cached_tokens is not None for s in samples):
        # Nobody said how much came from a cache: silence is not zero.
        evidence = gather(records, slo, prompts=prompts, engine=engine)
        for name in ("cached_share", "unused_reuse_share", "computed_over_unique", "predicted_beyond_actual"):
            evidence.pop(name, None)
    else:
        evidence = gather(records, slo, recorded=recorded, prompts=prompts, engine=engine)
    out: dict[str, Any] = {"evidence": evidence}
    if matched:
        out["misses_by_stage"] = {"joined": len(matched), "stages": misses_by_stage(matched)}
    return out


def engine_numbers(status: Mapping[str, Any]) -> dict[str, float]:
    """Capacities of the decode pool from `/pdserve/status`, under the names that rules use."""
    replicas = status.get("pools", {}).get("decode", {}).get("replicas", [])
    found: dict[str, float] = {}
    for name, fields in (
        ("batch_slots", ["max_num_seqs"]),
        ("kv_capacity_tokens", ["kv_total_blocks", "block_size_tokens"]),
    ):
        values = [prod(r[f] for f in fields) for r in replicas if all(isinstance(r.get(f), int) for f in fields)]
        if values and len(values) == len(replicas):
            found[name] = float(sum(values))
    blocks = [(r.get("kv_used_blocks"), r.get("kv_total_blocks")) for r in replicas]
    if blocks and all(isinstance(u, int) and isinstance(t, int) and t for u, t in blocks):
        found["kv_used_share_now"] = sum(u for u, _ in blocks) / sum(t for _, t in blocks)
    return found
