"""Shadow scoring and the decision log."""

import json
import random

import pytest

from cluster.config import PlacementConfig
from cluster.messages import (
    Outcome,
    Path,
    Placement,
    Request,
    RequestRecord,
    Role,
    Slo,
    Stage,
    WorkerInfo,
    WorkerSnapshot,
)
from cluster.messages import WorkerState as State
from cluster.perf.times import LinearTimes
from router.block_keys import block_keys
from router.decision_file import DecisionFile
from router.decision_log import Watch
from router.placement import Placer
from router.prefix_index import PrefixIndex

SLO = Slo(2.0, 0.05)


def cluster(policy: str = "cost", prefills: int = 3, sink=None) -> Placer:
    times = LinearTimes()
    placer = Placer(
        PlacementConfig(policy=policy, conditional=False), lambda _: times, PrefixIndex(), colocated=not prefills
    )
    for role, n in ((Role.PREFILL, prefills), (Role.DECODE, 3)):
        for i in range(n):
            info = WorkerInfo(f"{role.value[0]}{i}", "1", role, 16, 20_000, 131_072, 256, 8192, 32_768)
            placer.add_worker(info, 0.0)
            placer.set_index_exact(info.worker_id, True)
    placer.watch = Watch(shadow=True, sink=sink)
    return placer


def traffic(placer: Placer, seed: int, requests: int = 200) -> None:
    rng = random.Random(seed)
    documents = [[rng.randrange(10**5) for _ in range(2000)] for _ in range(8)]
    now = 0.0
    for i in range(requests):
        now += rng.expovariate(20.0)
        tokens = rng.choice(documents) + [rng.randrange(10**5) for _ in range(200)]
        keys = block_keys(tokens, 16)
        r = Request(f"r{i}", now, len(tokens), 100, SLO, keys)
        place = placer.place(r, now, rng)
        assert isinstance(place, Placement)
        placer.index.store(place.prefill or place.decode, keys)
        if i >= 20:
            placer.on_prefilled(f"r{i - 20}", now, 0)
            placer.on_end(f"r{i - 20}", now)
        name = rng.choice("pd") + str(rng.randrange(3))
        placer.on_snapshot(WorkerSnapshot(name, "1", State.READY, i, 2, 0, rng.randrange(5000), 500), now)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("running", ["cost", "round_robin"])
def test_the_cost_policy_has_the_least_regret_whoever_runs(seed, running):
    placer = cluster(running)
    traffic(placer, seed)
    scores = placer.watch.summary()["policies"]
    assert set(scores) == {"running", "cost", "round_robin", "least_loaded", "power_of_two", "approximate"}
    assert {s["decisions"] for s in scores.values()} == {200}
    others = [s["regret_s"] for name, s in scores.items() if name not in ("cost", "running")]
    assert scores["cost"]["regret_s"] < 0.2 * min(others)
    assert all(s["regret_s"] >= 0 for s in scores.values())
    assert scores["cost"]["cached_tokens"] > scores["round_robin"]["cached_tokens"]
    if running == "cost":
        assert scores["running"]["regret_s"] < 0.2 * min(others)
        assert scores["running"]["agreed"] == 1.0
    else:
        assert scores["running"]["regret_s"] > 2 * scores["cost"]["regret_s"]


def test_shadow_scoring_changes_no_decision():
    outcomes = []
    for watched in (True, False):
        placer, rng = cluster(), random.Random(7)
        if not watched:
            placer.watch = None
        places = []
        for i in range(100):
            tokens = [rng.randrange(20) for _ in range(400)]
            places.append(placer.place(Request(f"r{i}", 0.0, 400, 50, SLO, block_keys(tokens, 16)), 0.0, rng))
        outcomes.append(places)
    assert outcomes[0] == outcomes[1]


def test_colocated_clusters_are_scored_too():
    placer = cluster(prefills=0)
    traffic(placer, 1, 50)
    assert placer.watch.summary()["policies"]["round_robin"]["decisions"] == 50


def record(request_id: str, **changes) -> RequestRecord:
    base = {
        "request_id": request_id,
        "outcome": Outcome.DONE,
        "slo": SLO,
        "arrival_s": 0.0,
        "end_s": 2.0,
        "path": Path.SPLIT,
        "prefill_worker": "p0",
        "decode_worker": "d0",
        "prompt_tokens": 400,
        "cached_tokens": 160,
        "predicted_cached_tokens": 160,
        "predicted_ttft_s": 0.2,
        "ttft_s": 0.25,
        "tpot_s": 0.01,
        "output_tokens": 30,
        "stage_s": {Stage.PREFILL_COMPUTE: 0.2},
    }
    return RequestRecord(**(base | changes))


def test_one_json_line_per_request_with_inputs_scores_choice_and_outcome(tmp_path):
    log = DecisionFile(str(tmp_path / "log" / "decisions-{router}.jsonl"), "r1")
    placer, rng = cluster(sink=log), random.Random(1)
    for i in range(3):
        place = placer.place(Request(f"r{i}", 0.0, 400, 50, SLO, block_keys([i] * 400, 16)), 0.5, rng)
        placer.observe(record(f"r{i}", prefill_worker=place.prefill, decode_worker=place.decode))
    placer.observe(record("unknown"))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log" / "decisions-r1.jsonl").read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["r0", "r1", "r2"]
    first = lines[0]
    assert (first["ttft_s"], first["predicted_ttft_s"], first["cached_tokens"]) == (0.25, 0.2, 160)
    assert first["stage_s"] == {"prefill_compute": 0.2}
    (decision,) = first["decisions"]
    assert decision["prefill"] == first["prefill"]
    assert {c["worker"] for c in decision["prefill_candidates"]} == {"p0", "p1", "p2"}
    assert {c["worker"] for c in decision["decode_candidates"]} == {"d0", "d1", "d2"}
    chosen = next(c for c in decision["prefill_candidates"] if c["worker"] == decision["prefill"])
    assert chosen["rank_s"] == min(c["rank_s"] for c in decision["prefill_candidates"])
    assert set(decision["shadow"]) == {"running", "cost", "round_robin", "least_loaded", "power_of_two", "approximate"}
    assert placer.watch._open == {}


def test_retries_are_decisions_of_one_entry():
    entries = []
    placer, rng = cluster(sink=entries.append), random.Random(2)
    r = Request("r", 0.0, 400, 50, SLO, block_keys([1] * 400, 16))
    one = placer.place(r, 0.0, rng)
    two = placer.place(r, 0.1, rng, exclude=frozenset({one.prefill}))
    placer.observe(record("r"))
    assert [d["prefill"] for d in entries[0]["decisions"]] == [one.prefill, two.prefill]


def test_accuracy_compares_predictions_with_the_engines_own_count():
    placer = cluster()
    placer.observe(record("a"))
    placer.observe(record("b", cached_tokens=0, ttft_s=0.4))
    placer.observe(record("c", outcome=Outcome.CANCELLED))
    accuracy = placer.watch.summary()["accuracy"]
    assert accuracy["requests"] == 2
    assert (accuracy["predicted_cached_tokens"], accuracy["actual_cached_tokens"]) == (320, 160)
    assert accuracy["exact_hits"] == 0.5
    assert accuracy["ttft_error_s"] == pytest.approx(0.125)


def test_the_log_is_bounded_and_a_bad_disk_ends_it_quietly(tmp_path, caplog):
    log = DecisionFile(str(tmp_path / "d.jsonl"), max_bytes=1000)
    for i in range(100):
        log({"request_id": f"r{i:04}", "pad": "x" * 50})
    log.close()
    sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    assert set(sizes) == {"d.jsonl", "d.jsonl.1"}
    assert max(sizes.values()) <= 1000
    (tmp_path / "file").write_text("")
    broken = DecisionFile(str(tmp_path / "file" / "d.jsonl"))
    broken({"request_id": "x"})
    assert "cannot be opened" in caplog.text
