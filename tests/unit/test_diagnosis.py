"""Every rule of `pdserve diagnose`: a simulated cluster in which its symptom is present, and one in which it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.config import parse as parse_config
from cluster.diagnosis.evidence import Evidence, against_baseline, from_mapping, gather
from cluster.diagnosis.prompt_order import misplaced, prompt_evidence, reordered, reusable
from cluster.diagnosis.rules import Rule, examine, load_rules
from cluster.diagnosis.segments import segment
from cluster.messages import Path, RequestRecord, Role, Slo, Stage
from cluster.sim.fleet import Fleet
from cluster.workload.arrival import Arrival, count_tokens
from cluster.workload.spec import parse as parse_workload

SLO = {"ttft_ms": 1000, "tpot_ms": 30}


@dataclass(slots=True)
class Case:
    records: list[RequestRecord]
    arrivals: list[Arrival]
    engine: dict[str, float]
    slo: Slo

    def evidence(self) -> Evidence:
        return gather(self.records, self.slo, prompts=[a.prompt for a in self.arrivals], engine=self.engine)


def arrivals(rate: float, requests: int = 150, **prompts: Any) -> list[Arrival]:
    if "kind" not in prompts:
        prompts = {"kind": "plain", "prompt_tokens": 500, "output_tokens": 60} | prompts
    raw = {"requests": requests, "arrivals": {"process": "poisson", "rate_per_s": rate}, "prompts": prompts}
    return list(parse_workload(raw).arrivals())


def rising(low: float, high: float, requests: int, **prompts: Any) -> list[Arrival]:
    """A quiet phase, then a busy one."""
    quiet = arrivals(low, requests // 3, **prompts)
    start = quiet[-1].at_s + 5
    busy = arrivals(high, requests - len(quiet), **prompts)
    return quiet + [replace(a, at_s=start + a.at_s, prompt=((a.prompt[0][0] + 10**6, 1), *a.prompt)) for a in busy]


def cluster(
    slo: dict[str, float] | None = None,
    prefill: int = 0,
    decode: int = 1,
    decode_simulated: dict[str, Any] | None = None,
    **simulated: Any,
) -> ClusterConfig:
    def pool(replicas: int, **more: Any) -> dict[str, Any]:
        return {"replicas": {"min": replicas, "max": replicas}, **more}

    return parse_config(
        {
            "slo": slo or SLO,
            "engine": {"kind": "simulated", "simulated": {"max_num_seqs": 64, **simulated}},
            "pools": {
                "prefill": pool(prefill) if prefill else None,
                "decode": pool(decode, simulated=decode_simulated or {}),
            },
            "router": {"placement": {"conditional": False}},
        }
    )


def run(config: ClusterConfig, wanted: Iterable[Arrival]) -> Case:
    """A fleet until its last request; memory in use is sampled when somebody waits."""
    fleet = Fleet(config)
    wanted = list(wanted)
    shares: list[float] = []

    def sample() -> None:
        pool = [(w.snapshot(), w.info) for w in fleet.pool(Role.DECODE)]
        shares.extend(load.kv_used_blocks / info.kv_total_blocks for load, info in pool if load.waiting)
        if len(fleet.records) < len(wanted):
            fleet.kernel.after(0.5, sample)

    for a in wanted:
        fleet.kernel.at(a.at_s, fleet.arrive, a)
    fleet.kernel.after(0.5, sample)
    fleet.kernel.run()
    engine: dict[str, float] = {}
    for worker in fleet.pool(Role.DECODE):
        counters = worker.engine.scheduler.counters
        for name in ("preemptions", "slot_steps", "padded_slot_steps", "drafted_tokens", "accepted_draft_tokens"):
            engine[name] = engine.get(name, 0.0) + getattr(counters, name)
        engine["batch_slots"] = engine.get("batch_slots", 0.0) + worker.info.max_num_seqs
        capacity = worker.info.kv_total_blocks * worker.info.block_size_tokens
        engine["kv_capacity_tokens"] = engine.get("kv_capacity_tokens", 0.0) + capacity
    if shares:
        engine["kv_allocated_share"] = sorted(shares)[len(shares) // 2]
    assert len(fleet.records) == len(wanted)
    return Case(fleet.records, wanted, engine, config.slo.to_slo())


# Engines here are linear: 5 ms + 0.086 ms a sequence for a decode step, 47 us a prompt token (24 ms for 500).

SHARED = {"shared_tokens": 400}
UNEVEN = {"dist": "lognormal", "mean": 60, "sigma": 1.2, "min": 2, "max": 600}


@cache
def healthy() -> Case:
    return run(cluster(), arrivals(4, **SHARED))


@cache
def speculation(k: int, load: float) -> Case:
    chosen = {"k": k, "acceptance": 0.7} if k else None
    times = {"times": "roofline", "hardware": "H100", "model": "llama-3.1-8b", "kv_blocks": 60_000}
    config = cluster(slo={"ttft_ms": 5000, "tpot_ms": 100}, max_num_seqs=512, speculation=chosen, **times)
    return run(config, arrivals(load, 400, prompt_tokens=200, output_tokens=100))


def compared(load: float) -> Case:
    with_it, without = speculation(6, load), speculation(0, load)
    return replace(with_it, engine=with_it.engine | against_baseline(with_it.records, without.records))


def split(
    prefill: int, decode: int, rate: float, prompts: dict[str, Any] | None = None, requests: int = 150, **more: Any
) -> Case:
    chosen = prompts or {"prompt_tokens": 4000, "output_tokens": 40}
    return run(cluster(prefill=prefill, decode=decode, **more), arrivals(rate, requests, **chosen))


def with_predictions(predicted: int) -> Case:
    """What the router expected; the fleet's own router knows its engines' caches and is right."""
    case = healthy()
    records = [replace(r, predicted_cached_tokens=predicted if r.cached_tokens else 0) for r in case.records]
    return replace(case, records=records)


def held_by_the_router(share: float) -> Case:
    """Requests whose wait is in the router; the fleet's own router never waits at these loads."""
    case = healthy()
    records = [
        replace(r, ttft_s=(r.ttft_s or 0) + 2.0, stage_s={**r.stage_s, Stage.ROUTER_QUEUE: 2.0}, end_s=r.end_s + 2.0)
        if i < share * len(case.records)
        else r
        for i, r in enumerate(case.records)
    ]
    return replace(case, records=records)


def jittery() -> Case:
    """Every fortieth gap of each request is stretched, by nobody's prefill."""
    case = healthy()
    records = []
    for r in case.records:
        gaps = [g * 40 if i % 40 == 20 else g for i, g in enumerate(r.itl_s)]
        records.append(replace(r, itl_s=gaps, path=Path.SPLIT, end_s=r.arrival_s + (r.ttft_s or 0) + sum(gaps)))
    return replace(case, records=records)


PRESENT: dict[str, Callable[[], Case]] = {
    "batch-too-large": lambda: run(
        cluster(slo={"ttft_ms": 5000, "tpot_ms": 12}, max_num_seqs=256, linear={"per_prefill_token_us": 1}),
        rising(5, 60, 400, prompt_tokens=2000, output_tokens=200),
    ),
    "slow-engine": lambda: run(
        cluster(linear={"fixed_ms": 40, "per_sequence_ms": 0.01, "per_prefill_token_us": 1}), arrivals(1, 60)
    ),
    "static-batching": lambda: run(
        cluster(policy="static", max_num_seqs=16, slo={"ttft_ms": 500, "tpot_ms": 30}),
        arrivals(12, 200, output_tokens=UNEVEN),
    ),
    "launch-bound": lambda: run(
        cluster(max_num_seqs=8, linear={"fixed_ms": 10, "per_sequence_ms": 0.001, "per_prefill_token_us": 1}),
        rising(2, 25, 300, prompt_tokens=50),
    ),
    "memory-reserved": lambda: run(
        cluster(reservation="contiguous", max_model_len=8192, kv_blocks=2048, slo={"ttft_ms": 500, "tpot_ms": 30}),
        arrivals(8, 150, output_tokens=200),
    ),
    "kv-exhausted": lambda: run(
        cluster(kv_blocks=600, max_num_seqs=256, slo={"ttft_ms": 500, "tpot_ms": 100}),
        arrivals(12, 200, prompt_tokens=300, output_tokens=400),
    ),
    "prefill-stalls": lambda: run(
        cluster(policy="continuous", max_num_batched_tokens=8192, slo={"ttft_ms": 2000, "tpot_ms": 200}),
        arrivals(3, 150, prompt_tokens=4000, output_tokens=150),
    ),
    "stalls-without-prefill": jittery,
    "repeated-prefill": lambda: run(cluster(prefix_caching=False), arrivals(4, **SHARED)),
    "prompt-order": lambda: run(cluster(), arrivals(2, kind="rag", system_tokens=1000, varying_first=True)),
    "cache-key-mismatch": lambda: with_predictions(500),
    "over-capacity": lambda: run(cluster(max_num_seqs=8), arrivals(30, 300, output_tokens=100)),
    "speculation-costs": lambda: compared(150),
    "prefill-queue": lambda: split(1, 2, 5.5),
    "prefill-too-slow": lambda: split(3, 2, 1, slo={"ttft_ms": 150, "tpot_ms": 30}),
    "transfer-bound": lambda: split(2, 2, 0.5, linear={"transfer_gb_per_s": 0.4}),
    "decode-admission": lambda: split(
        2, 1, 4, {"prompt_tokens": 500, "output_tokens": 300}, 60, decode_simulated={"max_num_seqs": 4}
    ),
    "router-queue": lambda: held_by_the_router(0.3),
}

# The refutation of each, where it can be simulated: the same look for another reason.
ABSENT: dict[str, Callable[[], Case]] = {
    "batch-too-large": lambda: case("slow-engine", True),
    "slow-engine": lambda: case("batch-too-large", True),
    "static-batching": lambda: run(
        cluster(policy="continuous", max_num_seqs=16, slo={"ttft_ms": 500, "tpot_ms": 30}),
        arrivals(12, 200, output_tokens=UNEVEN),
    ),
    "launch-bound": lambda: run(
        cluster(max_num_seqs=8, linear={"fixed_ms": 4, "per_sequence_ms": 2, "per_prefill_token_us": 1}),
        rising(2, 25, 300, prompt_tokens=2000),
    ),
    "memory-reserved": lambda: case("kv-exhausted", True),
    "kv-exhausted": lambda: case("memory-reserved", True),
    "prefill-stalls": lambda: run(
        cluster(policy="chunked", max_num_batched_tokens=256, slo={"ttft_ms": 2000, "tpot_ms": 200}),
        arrivals(3, 150, prompt_tokens=4000, output_tokens=150),
    ),
    "stalls-without-prefill": lambda: case("prefill-stalls", True),
    "repeated-prefill": healthy,
    "prompt-order": lambda: run(cluster(), arrivals(2, kind="rag", system_tokens=1000)),
    "cache-key-mismatch": lambda: with_predictions(400),
    "over-capacity": healthy,
    "speculation-costs": lambda: compared(2),
    "prefill-queue": lambda: case("decode-admission", True),
    "prefill-too-slow": lambda: case("prefill-queue", True),
    "transfer-bound": lambda: case("prefill-queue", True),
    "decode-admission": lambda: case("transfer-bound", True),
    "router-queue": lambda: case("prefill-queue", True),
}


@cache
def case(rule: str, present: bool) -> Case:
    return (PRESENT if present else ABSENT)[rule]()


def explain(rule: str, evidence: Evidence) -> str:
    finding = next(f for f in examine(evidence) if f.rule.id == rule)
    numbers = {k: round(v, 4) for k, v in evidence.items()}
    return f"{finding.verdict}: failed {finding.failed}, missing {finding.missing}; {numbers}"


def test_every_rule_has_both_cases() -> None:
    assert {rule.id for rule in load_rules()} == set(PRESENT) == set(ABSENT)


@pytest.mark.parametrize("rule", sorted(PRESENT))
def test_present(rule: str) -> None:
    evidence = case(rule, True).evidence()
    assert rule in {f.rule.id for f in examine(evidence) if f.verdict == "present"}, explain(rule, evidence)


@pytest.mark.parametrize("rule", sorted(ABSENT))
def test_not_present(rule: str) -> None:
    evidence = case(rule, False).evidence()
    assert rule in {f.rule.id for f in examine(evidence) if f.verdict == "absent"}, explain(rule, evidence)


def test_a_healthy_cluster_shows_nothing() -> None:
    assert [f.rule.id for f in examine(healthy().evidence()) if f.verdict == "present"] == []


def test_what_is_not_known_is_undecided_and_named() -> None:
    records = [replace(r, stage_s={}, itl_s=[]) for r in case("prefill-queue", True).records]
    findings = {f.rule.id: f for f in examine(gather(records, Slo(1.0, 0.03)))}
    assert findings["prefill-queue"].verdict == "undecided"
    assert "late_for_prefill" in findings["prefill-queue"].missing
    assert findings["over-capacity"].verdict in ("present", "absent")
    few = gather(records[:5], Slo(1.0, 0.03))
    assert few == {"requests": 5.0}
    assert {f.verdict for f in examine(few)} == {"undecided"}


def test_one_condition_that_fails_decides_whatever_is_missing() -> None:
    rule = load_rules()[0].model_copy(update={"when": ("a > 1", "b > 1", "a < c")})
    assert examine({"a": 0.0}, [rule])[0].verdict == "absent"
    assert examine({"a": 2.0, "b": 2.0}, [rule])[0].missing == ("c",)
    assert examine({"a": 2.0, "b": 2.0, "c": 3.0}, [rule])[0].verdict == "present"
    with pytest.raises(ValueError, match="no comparison"):
        Rule.model_validate(rule.model_dump() | {"when": ["a >> 1"]})


def test_prompt_order_counts_what_reordering_saves() -> None:
    common = (7, 320)
    prompts = [((100 + i, 50), common, (500 + i, 20)) for i in range(40)]
    (part,) = misplaced(prompts)
    assert (part.content, part.tokens, part.position_tokens, part.prompts) == (7, 320, 50, 40)
    better = [reordered(p, [part]) for p in prompts]
    assert better[0] == (common, (100, 50), (500, 20))
    assert reusable(prompts, 16) == 0
    assert reusable(better, 16) == 39 * 320
    assert misplaced(better) == []
    assert misplaced([((i, 400), (1000 + i, 400)) for i in range(40)]) == []


def test_common_parts_of_real_prompts_are_found_wherever_they_stand() -> None:
    rng = Random(1)
    words = [f"w{i}" for i in range(5000)]
    template = rng.sample(words, 200)
    bad = [[f"date{i}", *rng.sample(words, 6 + i % 5), *template, *rng.sample(words, 20)] for i in range(60)]
    good = [[*template, *rng.sample(words, 30)] for i in range(60)]
    behind, front = segment(bad), segment(good)
    for prompts, texts in ((behind, bad), (front, good)):
        assert [count_tokens(p) for p in prompts] == [len(t) for t in texts]
    (part,) = misplaced(behind)
    assert part.tokens == pytest.approx(200, abs=2)
    assert 7 <= part.position_tokens <= 11
    assert part.prompts == 60
    assert misplaced(front) == []
    wrong, right = prompt_evidence(behind), prompt_evidence(front)
    assert wrong["reusable_share"] == 0
    assert wrong["reorder_share"] > 0.7
    assert right["reusable_share"] > 0.7
    assert right["reorder_share"] == 0
    verdicts = [{f.rule.id: f.verdict for f in examine(e)}["prompt-order"] for e in (wrong, right)]
    assert verdicts == ["present", "absent"]


def test_prompts_that_share_nothing_stay_whole() -> None:
    rng = Random(1)
    prompts = segment([[rng.random() for _ in range(100)] for _ in range(30)])
    assert [len(p) for p in prompts] == [1] * 30
    assert len({p[0][0] for p in prompts}) == 30
    assert segment([[], ["a"], ["a"], ["a"]])[0] == ()


def test_records_come_back_from_json() -> None:
    record = healthy().records[3]
    raw = asdict(record) | {"itl_s": None, "client_request_id": "x"}
    assert from_mapping(raw) == replace(record, itl_s=[])
