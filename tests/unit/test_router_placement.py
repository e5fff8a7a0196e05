"""Placement on the pure policy: affinity against load, TPOT, room, local prefills, reservations."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from cluster.config import PlacementConfig
from cluster.messages import (
    Outcome,
    Path,
    Placement,
    Rejection,
    Request,
    RequestRecord,
    Role,
    Slo,
    Stage,
    WorkerInfo,
    WorkerSnapshot,
    WorkerState,
)
from cluster.perf.online import OnlineTimes
from cluster.perf.times import LinearTimes
from router.block_keys import block_keys, namespace
from router.cost import TIE_FRACTION, TIE_S
from router.placement import Placer
from router.prefix_index import PrefixIndex

BLOCK = 16
TIMES = LinearTimes()
SLO = Slo(2.0, 0.05)


def info(name: str, role: Role, **changes) -> WorkerInfo:
    base = {
        "worker_id": name,
        "incarnation": "1",
        "role": role,
        "block_size_tokens": BLOCK,
        "kv_total_blocks": 20_000,
        "kv_bytes_per_token": 131_072,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8_192,
        "max_model_len": 32_768,
    }
    return WorkerInfo(**(base | changes))


def cluster(prefills: int = 4, decodes: int = 4, config: PlacementConfig | None = None, **kwargs) -> Placer:
    placer = Placer(config or PlacementConfig(), lambda _: TIMES, PrefixIndex(), **kwargs)
    for i in range(prefills):
        placer.add_worker(info(f"p{i}", Role.PREFILL), 0.0)
        placer.set_index_exact(f"p{i}", True)
    for i in range(decodes):
        placer.add_worker(info(f"d{i}", Role.DECODE), 0.0)
        placer.set_index_exact(f"d{i}", True)
    return placer


SPLIT_ONLY = PlacementConfig(conditional=False)
_ids = iter(range(10**9))


def request(tokens: list[int] | int, rng: random.Random | None = None, *, output: int = 200, **changes) -> Request:
    """A request for given tokens, or for that many new ones."""
    if isinstance(tokens, int):
        tokens = [(rng or random).randrange(150_000) for _ in range(tokens)]
    space = changes.pop("space", b"")
    base = {
        "request_id": f"r{next(_ids)}",
        "arrival_s": 0.0,
        "prompt_tokens": len(tokens),
        "max_output_tokens": output,
        "slo": SLO,
        "block_keys": block_keys(tokens, BLOCK, space),
    }
    return Request(**(base | changes))


def snapshot(name: str, **changes) -> WorkerSnapshot:
    return WorkerSnapshot(name, "1", changes.pop("state", WorkerState.READY), **changes)


def placed(placer: Placer, r: Request, now: float, rng: random.Random, **kwargs) -> Placement:
    place = placer.place(r, now, rng, **kwargs)
    assert isinstance(place, Placement), place
    return place


def new(n: int, rng: random.Random) -> list[int]:
    return [rng.randrange(150_000) for _ in range(n)]


# -- affinity and load, one formula ------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [100, 500])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_hot_prefix_spreads(seed, warm, tail):
    """All requests share a 2k prefix, 64 concurrent, whether or not one worker already holds it."""
    rng = random.Random(seed)
    placer, prefix = cluster(config=SPLIT_ONLY), new(2048, rng)
    if warm:
        placer.index.store("p0", block_keys(prefix, BLOCK))
    prefill, decode = Counter(), Counter()
    for _ in range(64):
        place = placed(placer, request(prefix + new(tail, rng)), 0.0, rng)
        prefill[place.prefill] += 1
        decode[place.decode] += 1
    assert max(decode.values()) / 16 <= 1.5
    backlogs = [w.backlog_s(0.0) for w in placer.pool(Role.PREFILL)]
    assert max(backlogs) / (sum(backlogs) / 4) <= 1.5
    if tail == 500 or not warm:
        assert max(prefill.values()) / 16 <= 1.5
    # Three more workers compute the prefix at most once each: what is computed twice is bounded.
    assert sum(w.backlog_s(0.0) for w in placer.pool(Role.PREFILL)) <= 64 * TIMES.step_s([(tail + 16, 0)], 0, 0) + (
        4 * TIMES.step_s([(2048, 0)], 0, 0)
    )


def test_cold_prompt_goes_to_the_idle_worker_however_large_its_tree():
    rng = random.Random(1)
    placer = cluster(prefills=2, config=SPLIT_ONLY)
    for _ in range(50):
        placer.index.store("p1", block_keys(new(2000, rng), BLOCK))
    placer.on_snapshot(snapshot("p0", running=1, waiting=29, queued_prefill_tokens=30_000), 0.0)
    placer.on_snapshot(snapshot("p1"), 0.0)
    for _ in range(5):
        r = request(1000, rng)
        assert placed(placer, r, 0.0, rng).prefill == "p1"
        placer.on_end(r.request_id, 0.0)


def test_a_hot_neighbour_does_not_switch_affinity_off():
    rng = random.Random(2)
    placer, prefix = cluster(config=SPLIT_ONLY), new(2048, rng)
    placer.index.store("p2", block_keys(prefix, BLOCK))
    placer.on_snapshot(snapshot("p0", running=8, waiting=42, queued_prefill_tokens=50_000), 0.0)
    for _ in range(10):
        r = request(prefix + new(64, rng))
        place = placed(placer, r, 0.0, rng)
        assert place.prefill == "p2"
        assert place.predicted_cached_tokens == 2048
        placer.on_end(r.request_id, 0.0)


@pytest.mark.parametrize("config", [SPLIT_ONLY, PlacementConfig()])
@pytest.mark.parametrize("colocated", [False, True])
def test_sequential_unrelated_prompts_use_all_workers(config, colocated):
    rng = random.Random(3)
    placer = cluster(prefills=0 if colocated else 4, config=config, colocated=colocated)
    used, now = Counter(), 0.0
    for _ in range(40):
        now += 10.0
        r = request(1500, rng, arrival_s=now)
        place = placed(placer, r, now, rng)
        used[place.prefill or place.decode] += 1
        placer.on_prefilled(r.request_id, now + 0.1, 0)
        placer.on_first_token(r.request_id, now + 0.2)
        placer.on_end(r.request_id, now + 1)
    assert len(used) == 4
    assert max(used.values()) <= 20


def test_a_prefix_moves_when_its_queue_costs_more_than_computing_it_again():
    rng = random.Random(4)
    placer, prefix = cluster(prefills=2, config=SPLIT_ONLY), new(2048, rng)
    placer.index.store("p0", block_keys(prefix, BLOCK))
    again = TIMES.step_s([(2048, 0)], 0, 0)
    for queue, expected in ((0.5 * again, "p0"), (2.0 * again, "p1")):
        tokens = int(queue / TIMES.per_prefill_token_s)
        placer.on_snapshot(snapshot("p0", queued_prefill_tokens=tokens), 0.0)
        assert placer.choose(request(prefix + new(64, rng)), 0.0, rng).prefill.name == expected


@pytest.mark.parametrize("seed", range(3))
def test_conversations_stay_and_spread(seed):
    """20 conversations x 5 turns with one system prompt: turns 2-5 find their blocks, conversations spread."""
    rng = random.Random(seed)
    placer, system, now = cluster(config=SPLIT_ONLY), new(300, rng), 0.0
    histories = [system + new(100, rng) for _ in range(20)]
    first: dict[int, str] = {}
    found = total = 0
    for turn in range(5):
        for i in rng.sample(range(20), 20):
            now += 0.03
            r = request(histories[i], arrival_s=now)
            place = placed(placer, r, now, rng)
            held = placer.index.longest_match(r.block_keys).get(place.prefill, 0)
            if turn:
                total += 1
                found += held * BLOCK >= len(histories[i]) - 200 - BLOCK
            first.setdefault(i, place.prefill)
            placer.index.store(place.prefill, r.block_keys)
            placer.on_prefilled(r.request_id, now + 0.02, held * BLOCK)
            placer.on_first_token(r.request_id, now + 0.03)
            histories[i] = histories[i] + new(200, rng)
            placer.index.store(place.decode, block_keys(histories[i], BLOCK)[:-1])
            placer.on_end(r.request_id, now + 0.5)
    assert found / total >= 0.95
    assert max(Counter(first.values()).values()) / 5 <= 1.5


@pytest.mark.parametrize("pool", ["split", "local", "colocated"])
def test_new_conversations_spread_although_one_engine_has_the_system_prompt(pool):
    """One at a time, so that no queue ever pushes them apart; each engine computes the system prompt once."""
    rng = random.Random(26)
    config = SPLIT_ONLY if pool == "split" else PlacementConfig()
    placer = cluster(prefills=4 if pool != "colocated" else 0, config=config, colocated=pool == "colocated")
    system, now, used, computed = new(320, rng), 0.0, Counter(), Counter()
    for _ in range(40):
        now += 20.0
        r = request(system + new(60, rng), arrival_s=now)
        place = placed(placer, r, now, rng)
        assert (place.prefill is None) == (pool != "split")
        worker = place.prefill or place.decode
        used[worker] += 1
        computed[worker] += place.predicted_cached_tokens < 320
        placer.index.store(worker, r.block_keys)
        placer.index.store(place.decode, r.block_keys)
        placer.on_prefilled(r.request_id, now + 0.1, 0)
        placer.on_first_token(r.request_id, now + 0.1)
        placer.on_end(r.request_id, now + 1.0)
    assert max(used.values()) / 10 <= 1.5
    assert set(computed.values()) == {1}


def test_a_private_history_is_never_computed_again_for_balance():
    rng = random.Random(27)
    placer, system = cluster(config=SPLIT_ONLY), new(320, rng)
    history = system + new(160, rng)
    for i in range(30):
        placer.index.store(f"p{i % 4}", block_keys(system + new(160, rng), BLOCK))
    placer.index.store("p1", block_keys(history, BLOCK))
    for _ in range(20):
        r = request(history + new(40, rng))
        assert placed(placer, r, 0.0, rng).prefill == "p1"
        placer.on_end(r.request_id, 0.0)


def test_a_long_shared_document_is_not_copied_for_balance():
    rng = random.Random(28)
    placer, document = cluster(config=SPLIT_ONLY), new(8000, rng)
    for _ in range(3):
        placer.index.store("p1", block_keys(document + new(64, rng), BLOCK))
    for _ in range(5):
        r = request(document + new(64, rng))
        assert placed(placer, r, 0.0, rng).prefill == "p1"
        placer.on_end(r.request_id, 0.0)


def test_prefixes_that_are_being_computed_count():
    rng = random.Random(5)
    placer, prefix = cluster(config=SPLIT_ONLY), new(4096, rng)
    one = placed(placer, request(prefix + new(64, rng)), 0.0, rng)
    two = placed(placer, request(prefix + new(64, rng)), 0.01, rng)
    # Waiting for the first to finish costs as much as computing it elsewhere, but nothing is computed twice.
    assert two.predicted_cached_tokens in (0, 4096)
    assert two.predicted_ttft_s < one.predicted_ttft_s + 0.05


# -- tenants, epochs --------------------------------------------------------------------------------------------


def test_another_tenant_is_not_drawn_by_the_same_tokens():
    rng = random.Random(6)
    placer, tokens = cluster(prefills=2, config=SPLIT_ONLY), new(512, rng)
    a, b = namespace("salt-of-a"), namespace("salt-of-b")
    for worker in ("p0", "d0"):
        placer.index.store(worker, block_keys(tokens, BLOCK, a))
    mine = placer.choose(request(tokens, space=a), 0.0, rng)
    assert mine.prefill.name == "p0"
    assert mine.cached_tokens == 496  # the last token is always computed, and with it its block
    theirs = [placer.choose(request(tokens, space=b), 0.0, rng) for _ in range(40)]
    assert {c.cached_tokens for c in theirs} == {0}
    assert {c.prefill.name for c in theirs} == {"p0", "p1"}
    assert {c.decode.name for c in theirs} == {"d0", "d1", "d2", "d3"}


def test_a_restarted_or_removed_worker_is_empty_before_the_next_decision():
    rng = random.Random(7)
    placer, tokens = cluster(prefills=2, config=SPLIT_ONLY), new(1024, rng)
    placer.index.store("p0", block_keys(tokens, BLOCK))
    assert placer.choose(request(tokens), 0.0, rng).prefill.name == "p0"
    placer.add_worker(info("p0", Role.PREFILL, incarnation="2"), 1.0)
    assert placer.choose(request(tokens), 1.0, rng).cached_tokens == 0
    placer.on_snapshot(snapshot("p0", queued_prefill_tokens=10**6), 1.0)  # of the old incarnation: ignored
    assert placer.find("p0").backlog_s(1.0) == 0.0
    placer.remove_worker("p0", 2.0)
    assert placer.index.held_blocks("p0") == 0
    assert {placer.choose(request(tokens), 2.0, rng).prefill.name for _ in range(20)} == {"p1"}


def test_only_ready_workers_that_did_not_fail_this_request():
    rng = random.Random(8)
    placer = cluster()
    placer.on_snapshot(snapshot("p0", state=WorkerState.DRAINING), 0.0)
    placer.on_snapshot(snapshot("d1", state=WorkerState.DEAD), 0.0)
    for _ in range(50):
        place = placed(placer, request(3000, rng), 0.0, rng, exclude=frozenset({"p1", "d2"}))
        assert place.prefill in {"p2", "p3"}
        assert place.decode in {"d0", "d3"}
    placer.on_snapshot(snapshot("p0"), 0.0)
    assert any(placer.choose(request(3000, rng), 0.0, rng).prefill.name == "p0" for _ in range(20))


# -- TPOT, room, local ------------------------------------------------------------------------------------------


def test_pairs_that_break_tpot_are_avoided_even_if_faster():
    rng = random.Random(9)
    placer, tokens = cluster(prefills=1, decodes=2, config=SPLIT_ONLY), new(8000, rng)
    placer.index.store("d0", block_keys(tokens, BLOCK))  # nothing to transfer to d0
    slow = int((0.045) / TIMES.per_sequence_s * TIMES.nominal_context_tokens / BLOCK)
    placer.on_snapshot(snapshot("d0", running=200, kv_used_blocks=min(slow, 19_000)), 0.0)
    loose, tight = Slo(2.0, 10.0), Slo(2.0, 0.016)
    assert placer.choose(request(tokens, slo=loose), 0.0, rng).decode.name == "d0"
    choice = placer.choose(request(tokens, slo=tight), 0.0, rng)
    assert choice.decode.name == "d1"
    assert choice.inside_tpot


def test_a_tighter_neighbour_limits_what_joins_it():
    rng = random.Random(10)
    placer = cluster(prefills=1, decodes=2, config=SPLIT_ONLY)
    tight = request(2000, rng, slo=Slo(2.0, 0.00515))
    home = placed(placer, tight, 0.0, rng).decode
    other = "d1" if home == "d0" else "d0"
    placer.on_snapshot(snapshot(other, running=30, kv_used_blocks=4_000), 0.0)
    # `other` is the slower engine, but one more sequence would push the tight request over its limit.
    assert placer.choose(request(2000, rng, slo=Slo(2.0, 0.05)), 0.0, rng).decode.name == other
    placer.on_end(tight.request_id, 1.0)
    assert placer.choose(request(2000, rng, slo=Slo(2.0, 0.05)), 1.0, rng).decode.name == home


def test_a_client_cannot_keep_others_off_an_engine_by_asking_for_the_impossible():
    rng = random.Random(29)
    for limit, promised in ((1e-6, 0.0), (0.0051, 0.05)):
        placer = cluster(prefills=1, decodes=1, config=SPLIT_ONLY, promised_tpot_s=promised)
        placed(placer, request(2000, rng, slo=Slo(2.0, limit)), 0.0, rng)
        assert placer.choose(request(2000, rng), 0.0, rng).inside_tpot


def test_with_no_pair_inside_tpot_the_least_bad_is_taken_and_said_so():
    rng = random.Random(11)
    placer = cluster(config=SPLIT_ONLY)
    choice = placer.choose(request(2000, rng, slo=Slo(2.0, 1e-6)), 0.0, rng)
    assert not choice.inside_tpot


def test_decode_without_room_is_waited_for_and_a_prompt_that_never_fits_is_refused():
    rng = random.Random(12)
    placer = cluster(decodes=2, config=SPLIT_ONLY)
    full = snapshot("d0", running=100, kv_used_blocks=19_950)
    placer.on_snapshot(full, 0.0)
    r = request(2000, rng)
    assert placer.choose(r, 0.0, rng).decode.name == "d1"
    assert placer.forecast(r, 0.0).room_s == 0.0
    placer.on_snapshot(snapshot("d1", running=256, kv_used_blocks=100), 0.0)
    assert placer.forecast(r, 0.0).room_s > 0.0
    waiting = placer.choose(r, 0.0, rng)
    assert waiting.ttft_s >= placer.forecast(r, 0.0).room_s
    refused = placer.place(request(400_000, rng), 0.0, rng)
    assert isinstance(refused, Rejection)
    assert refused.status == 400
    assert placer.reserved == 0


@pytest.mark.parametrize("config", [SPLIT_ONLY, PlacementConfig()])
def test_more_answers_than_an_engine_holds_at_once_are_no_reason_to_refuse(config):
    """They are sequences of their own, which are preempted in the engine. Choices that it cannot run are one."""
    rng = random.Random(31)
    placer = cluster(prefills=1, decodes=1, config=config)
    placer.model.output_tokens.value = 2000.0
    d = placer.find("d0")
    r = request(100, rng, n=200, output=4000)  # 25,000 blocks of answers
    assert placer.forecast(r, 0.0).room_s == 0.0, "all of an empty engine is enough"
    placed(placer, r, 0.0, rng)
    assert d.free_blocks == 0
    other = placer.forecast(request(100, rng, n=200), 0.0)
    assert 0.0 < other.room_s < 3600.0
    placer.on_end(r.request_id, 0.0)
    assert (d.free_blocks, d.free_sequences) == (20_000, 256)
    refused = placer.place(request(100, rng, n=257), 0.0, rng)
    assert (refused.status, refused.reason) == (
        400,
        "n: 257 choices are more than the 256 sequences of any decode worker",
    )


def test_another_try_at_a_place_keeps_what_admission_saw():
    rng = random.Random(33)
    placer = cluster(prefills=2, decodes=1, config=SPLIT_ONLY)
    prefix = new(2048, rng)
    placer.index.store("p0", block_keys(prefix, BLOCK))
    r = request(prefix + new(16, rng), rng)
    assert placer.forecast(r, 0.0, {"p0": 5.0}).worker == "p1"
    assert [placed(placer, r, 0.0, rng).prefill for _ in range(2)] == ["p1", "p1"]
    placer.on_end(r.request_id, 0.0)
    assert placed(placer, r, 0.0, rng).prefill == "p0"


def test_a_prompt_must_leave_one_block_for_its_answer():
    rng = random.Random(32)
    placer = Placer(SPLIT_ONLY, lambda _: TIMES, PrefixIndex())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        placer.add_worker(info(name, role, kv_total_blocks=100), 0.0)
    for output in (1, 200):
        r = request(99 * BLOCK, rng, output=output)
        assert placed(placer, r, 0.0, rng).prefill == "p0"
        placer.on_end(r.request_id, 0.0)
        assert placer.place(request(99 * BLOCK + 1, rng, output=output), 0.0, rng).status == 400


def test_reservations_fill_decode_before_any_snapshot():
    rng = random.Random(13)
    placer = Placer(SPLIT_ONLY, lambda _: TIMES, PrefixIndex())
    placer.add_worker(info("p0", Role.PREFILL), 0.0)
    for i in range(3):
        placer.add_worker(info(f"d{i}", Role.DECODE, max_num_seqs=10), 0.0)
    placer.model.output_tokens.value = 4000.0  # long answers: no sequence is free before the prompts are computed
    used = Counter(placed(placer, request(1000, rng, output=4000), 0.0, rng).decode for _ in range(30))
    assert set(used.values()) == {10}
    assert placer.forecast(request(1000, rng), 0.0).room_s > 0


def test_short_and_cached_prompts_are_prefilled_by_decode_and_long_ones_are_split():
    rng = random.Random(14)
    placer = cluster()
    assert placed(placer, request(100, rng), 0.0, rng).path is Path.LOCAL_SHORT
    assert placed(placer, request(6000, rng), 0.0, rng).path is Path.SPLIT
    tokens = new(6000, rng)
    placer.index.store("d2", block_keys(tokens, BLOCK))
    place = placed(placer, request(tokens), 0.0, rng)
    assert (place.path, place.decode, place.prefill) == (Path.LOCAL_CACHED, "d2", None)
    assert placer.paths == {Path.LOCAL_SHORT: 1, Path.SPLIT: 1, Path.LOCAL_CACHED: 1}


def test_the_local_threshold_follows_the_tpot_limit():
    """A step with the whole prompt must fit the limit: 0.05 s is about 850 tokens here, 0.02 s about 210."""
    rng = random.Random(15)

    def longest_local(limit: float) -> int:
        lengths = range(50, 3000, 50)
        slo = Slo(2.0, limit)
        local = [n for n in lengths if cluster().choose(request(n, rng, slo=slo), 0.0, rng).path is Path.LOCAL_SHORT]
        return max(local, default=0)

    longest = [longest_local(limit) for limit in (0.02, 0.05, 0.1)]
    for limit, tokens in zip((0.02, 0.05, 0.1), longest, strict=True):
        step = TIMES.step_s([(tokens, 0)], 1, 100)
        assert 0.5 * limit < step <= limit
    assert all(a < b for a, b in pairwise(longest))


def test_many_local_prefills_are_held_back_by_the_mean_tpot():
    rng = random.Random(16)
    placer = cluster(decodes=1)
    paths = Counter(placed(placer, request(300, rng, output=50), 0.0, rng).path for _ in range(100))
    assert paths[Path.LOCAL_SHORT] > 3
    assert paths[Path.SPLIT] > 50


def test_conditional_off_always_splits():
    rng = random.Random(17)
    placer = cluster(config=SPLIT_ONLY)
    assert {placed(placer, request(50, rng), 0.0, rng).path for _ in range(10)} == {Path.SPLIT}


@pytest.mark.parametrize("policy", ["local", "fail"])
def test_no_prefill_worker_is_a_policy_and_prefill_comes_back_without_restart(policy):
    rng = random.Random(18)
    placer = cluster(prefills=1, config=PlacementConfig(no_prefill_worker=policy))
    placer.remove_worker("p0", 0.0)
    place = placer.place(request(6000, rng), 0.0, rng)
    if policy == "local":
        assert place.path is Path.LOCAL_NO_PREFILL
        assert place.prefill is None
    else:
        assert place == Rejection(503, "no prefill worker is ready", 1.0)
    placer.add_worker(info("p0", Role.PREFILL), 1.0)
    assert placed(placer, request(6000, rng), 1.0, rng).path is Path.SPLIT


def test_no_decode_worker_is_503_with_retry_after():
    placer = cluster(decodes=0)
    rejected = placer.place(request(100), 0.0, random.Random(0))
    assert isinstance(rejected, Rejection)
    assert (rejected.status, rejected.retry_after_s) == (503, 1.0)


def test_after_a_failed_transfer_the_decode_engine_computes():
    rng = random.Random(19)
    place = placed(cluster(), request(6000, rng), 0.0, rng, local_only=True)
    assert (place.path, place.prefill) == (Path.LOCAL_RETRY, None)


def test_colocated_uses_the_same_formula_on_one_pool():
    rng = random.Random(20)
    placer, prefix = cluster(prefills=0, colocated=True), new(2048, rng)
    placer.index.store("d1", block_keys(prefix, BLOCK))
    place = placed(placer, request(prefix + new(100, rng)), 0.0, rng)
    assert (place.path, place.decode, place.predicted_cached_tokens) == (Path.COLOCATED, "d1", 2048)
    used = Counter(placed(placer, request(prefix + new(400, rng)), 0.0, rng).decode for _ in range(63))
    assert max(used.values()) / 16 <= 1.5


def test_near_pairs_win_once_far_transfers_have_been_seen_to_be_slow():
    rng = random.Random(21)
    placer = Placer(SPLIT_ONLY, lambda _: TIMES, PrefixIndex())
    for i in range(4):
        placer.add_worker(info(f"p{i}", Role.PREFILL, node=f"n{i}", rack=f"k{i // 2}"), 0.0)
        placer.add_worker(info(f"d{i}", Role.DECODE, node=f"n{i}", rack=f"k{i // 2}"), 0.0)

    def same(part: str) -> int:
        choices = [placer.choose(request(4000, rng), 0.0, rng) for _ in range(40)]
        return sum(getattr(c.prefill.info, part) == getattr(c.decode.info, part) for c in choices)

    assert same("node") < 30
    size = 4000 * 131_072
    for _ in range(10):  # the engines that ended a request did not make the transfer that it measured
        moved = RequestRecord("x", Outcome.DONE, SLO, 0.0, 1.0, prefill_worker="p0", decode_worker="d0", migrations=1)
        moved.transfer_bytes, moved.stage_s = size, {Stage.KV_TRANSFER: 20 * TIMES.transfer_s(size)}
        placer.observe(moved)
    assert all(mean.samples == 0 for mean in placer.model.distance_factor.values())
    for p, d, slowdown in (("p0", "d0", 1.0), ("p0", "d1", 3.0), ("p0", "d2", 10.0)):
        for _ in range(10):
            stages = {Stage.KV_TRANSFER: slowdown * TIMES.transfer_s(size)}
            record = RequestRecord("x", Outcome.DONE, SLO, 0.0, 1.0, prefill_worker=p, decode_worker=d)
            record.transfer_bytes, record.stage_s = size, stages
            placer.observe(record)
    assert same("node") == 40
    # A busy neighbour loses to an idle engine in the rack, and that one to nobody farther away.
    for i in (0, 2):
        placer.on_snapshot(snapshot(f"p{i}", queued_prefill_tokens=20_000), 0.0)
        placer.on_snapshot(snapshot(f"p{i + 1}", queued_prefill_tokens=0), 0.0)
    assert same("rack") == 40


# -- guesses where events are off --------------------------------------------------------------------------------


def test_without_events_placements_are_remembered_marked_and_corrected():
    rng = random.Random(22)
    placer = cluster(prefills=2, config=SPLIT_ONLY)
    for name in ("p0", "p1"):
        placer.set_index_exact(name, False)
    assert not any(view.index_exact for view in placer.workers(Role.PREFILL, 0.0))
    tokens = new(1600, rng)
    r = request(tokens)
    home = placed(placer, r, 0.0, rng).prefill
    placer.on_prefilled(r.request_id, 0.1, 0)
    placer.on_end(r.request_id, 0.2)
    again = request(tokens + new(50, rng))
    place = placed(placer, again, 1.0, rng)
    assert (place.prefill, place.predicted_cached_tokens) == (home, 1600)
    # The engine had evicted all but 160 tokens: the guess is corrected before the prompt is remembered again.
    placer.on_prefilled(again.request_id, 1.1, 160)
    assert (placer.predicted_cached_tokens, placer.actual_cached_tokens) == (1600, 160)
    placer.on_end(again.request_id, 1.2)
    assert placer.index.longest_match(again.block_keys)[home] == len(again.block_keys)
    # Exact from now on: guesses are gone, events alone write the index.
    placer.set_index_exact(home, True)
    assert placer.index.held_blocks(home) == 0


def test_guesses_are_bounded_by_the_engines_cache():
    rng = random.Random(23)
    placer = Placer(SPLIT_ONLY, lambda _: TIMES, PrefixIndex())
    placer.add_worker(info("p0", Role.PREFILL, kv_total_blocks=500), 0.0)
    placer.add_worker(info("d0", Role.DECODE), 0.0)
    first = request(1600, rng)
    for r in [first, *(request(1600, rng) for _ in range(10))]:
        placed(placer, r, 0.0, rng)
        placer.on_prefilled(r.request_id, 0.1, 0)
        placer.on_end(r.request_id, 0.1)
    assert placer.index.held_blocks("p0") == 500
    assert placer.index.longest_match(first.block_keys).get("p0", 0) == 0


# -- properties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(15))
def test_the_choice_is_the_best_pair_of_all(seed):
    """Against brute force over every pair with the same predictions: least TTFT among pairs inside TPOT, but ties."""
    rng = random.Random(seed)
    placer, prompts = cluster(5, 4, SPLIT_ONLY), [new(3000, rng) for _ in range(6)]
    for worker in [*(f"p{i}" for i in range(5)), *(f"d{i}" for i in range(4))]:
        for prompt in rng.sample(prompts, 2):
            placer.index.store(worker, block_keys(prompt[: rng.randrange(3000)], BLOCK))
    for i in range(5):
        placer.on_snapshot(snapshot(f"p{i}", queued_prefill_tokens=rng.randrange(6000)), 0.0)
    for i in range(4):
        used = rng.randrange(20_500)
        placer.on_snapshot(snapshot(f"d{i}", running=rng.randrange(250), kv_used_blocks=used), 0.0)
    for _ in range(20):
        r = request(rng.choice(prompts)[: rng.randrange(100, 3000)], slo=Slo(2.0, rng.choice([0.01, 0.02, 0.05])))
        q = placer.question(r)
        every = [
            placer.model.predict(q, p, d, 0.0, Path.SPLIT)
            for p in placer.pool(Role.PREFILL)
            for d in placer.pool(Role.DECODE)
        ]
        choice = placer.choose(r, 0.0, rng)
        mine = placer.model.predict(q, choice.prefill, choice.decode, 0.0, Path.SPLIT)
        assert choice.ttft_s == pytest.approx(mine.ttft_s)
        assert choice.tpot_s == pytest.approx(mine.tpot_s)
        inside = [c for c in every if c.inside_tpot]
        if inside:
            best = min(c.ttft_s for c in inside)
            assert mine.inside_tpot
            assert mine.ttft_s <= best + 2 * max(TIE_S, TIE_FRACTION * best)
        else:
            assert mine.tpot_s == pytest.approx(min(c.tpot_s for c in every))
        placed(placer, r, 0.0, rng)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_loaded", "power_of_two", "approximate"])
def test_every_reservation_is_released_exactly_once(seed, policy):
    """Any order of events, repeated and late ones, dying workers: at the end nothing is held."""
    rng = random.Random(seed)
    placer = cluster(config=PlacementConfig(policy=policy))
    live: list[str] = []
    ended: list[str] = []
    now = 0.0
    for step in range(400):
        now += rng.random() * 0.05
        action = rng.random()
        if action < 0.4:
            r = request(rng.randrange(1, 3000), rng, n=rng.choice([1, 1, 1, 4]))
            if isinstance(placer.place(r, now, rng), Placement):
                live.append(r.request_id)
                if rng.random() < 0.1:
                    placer.place(r, now, rng)  # a second attempt without an end in between
        elif action < 0.55 and live:
            placer.on_prefilled(rng.choice(live + ended), now, rng.randrange(100))
        elif action < 0.7 and live:
            placer.on_first_token(rng.choice(live + ended), now)
        elif action < 0.9 and live:
            placer.on_end(done := live.pop(rng.randrange(len(live))), now)
            ended.append(done)
            placer.on_end(rng.choice(ended), now)
        elif action < 0.97:
            name = rng.choice(["p0", "p1", "d0", "d1"])
            placer.on_snapshot(snapshot(name, steps=step, running=3, queued_prefill_tokens=rng.randrange(3000)), now)
        else:
            name = rng.choice(["p1", "d1"])
            placer.remove_worker(name, now)
            placer.add_worker(info(name, Role(("decode", "prefill")[name[0] == "p"]), incarnation=str(step)), now)
    for request_id in live:
        placer.on_end(request_id, now)
    assert placer.reserved == 0
    assert not placer._pending
    for role in Role:
        for worker in placer.pool(role):
            assert not worker.own
            assert worker.leases == 0
            assert worker.tightest_tpot_s == float("inf")
            placer.on_snapshot(WorkerSnapshot(worker.name, worker.info.incarnation, WorkerState.READY), now)
            assert worker.free_blocks == worker.info.kv_total_blocks
            assert worker.free_sequences == worker.info.max_num_seqs
            assert worker.backlog_s(now) == 0.0


def test_a_snapshot_replaces_reservations_once_it_can_know_them():
    rng = random.Random(24)
    placer = cluster(prefills=1, decodes=1, config=SPLIT_ONLY, visible_after_s=0.02)
    r = request(2000, rng)
    placed(placer, r, 1.0, rng)
    p, d = placer.find("p0"), placer.find("d0")
    work = TIMES.step_s([(2000, 0)], 0, 0)
    placer.on_snapshot(snapshot("p0"), 1.01)  # left before the request arrived there
    assert p.backlog_s(1.01) == pytest.approx(work)
    placer.on_snapshot(snapshot("p0", running=1, queued_prefill_tokens=1000), 1.03)
    assert p.backlog_s(1.03) == pytest.approx(TIMES.step_s([(1000, 0)], 0, 0))
    # The decode engine hears of the request only with the ticket.
    placer.on_snapshot(snapshot("d0"), 5.0)
    assert d.sequences == 1
    placer.on_prefilled(r.request_id, 5.0, 0)
    placer.on_snapshot(snapshot("d0", running=1, kv_used_blocks=126), 5.03)
    assert (d.sequences, d.used_blocks) == (1, 126)


def test_decode_steps_are_measured_from_snapshots_and_teach_the_model():
    """An engine twice as slow as the prior says: after some runs of pure decode steps TPOT is predicted right."""
    rng = random.Random(30)
    online = OnlineTimes(TIMES)
    placer = Placer(SPLIT_ONLY, lambda _: online, PrefixIndex())
    placer.add_worker(info("p0", Role.PREFILL), 0.0)
    placer.add_worker(info("d0", Role.DECODE), 0.0)
    before = placer.choose(request(2000, rng), 0.0, rng).tpot_s
    now, steps = 0.0, 0
    for run in range(60):
        batch = 1 + run % 20
        used = batch * 125
        for _ in range(20):
            now += 2 * TIMES.step_s((), batch, used * BLOCK) + rng.uniform(-0.5e-3, 0.5e-3)
            steps += 1
            placer.on_snapshot(snapshot("d0", steps=steps, running=batch, kv_used_blocks=used), now)
        now += 0.5  # a prompt is computed in between: not a decode step
        steps += 1
        placer.on_snapshot(snapshot("d0", steps=steps, running=batch, queued_prefill_tokens=500), now)
    placer.on_snapshot(snapshot("d0", steps=steps), now)
    assert placer.choose(request(2000, rng), now, rng).tpot_s == pytest.approx(2 * before, rel=0.1)


def test_a_burst_between_snapshots_is_spread():
    rng = random.Random(25)
    placer = cluster(config=SPLIT_ONLY)
    for i in range(4):
        placer.on_snapshot(snapshot(f"p{i}"), 0.0)
        placer.on_snapshot(snapshot(f"d{i}"), 0.0)
    places = [placed(placer, request(1000, rng), 0.001, rng) for _ in range(40)]
    assert max(Counter(p.prefill for p in places).values()) == 10
    assert max(Counter(p.decode for p in places).values()) <= 15


def test_one_token_is_the_prefill_engines_own():
    placer = cluster(1, 1)
    short = placer.place(request(40, random.Random(1), output=200), 0.0, random.Random(1))
    one = placer.place(request(40, random.Random(2), output=1), 0.0, random.Random(1))
    assert short.path is not Path.SPLIT, "a short prompt is computed where it is decoded"
    assert one.path is Path.SPLIT and one.prefill is not None


def test_one_token_neither_waits_for_decode_nor_takes_anything_of_it():
    rng = random.Random(33)
    placer = cluster(2, 1)
    placer.on_snapshot(snapshot("d0", running=256, kv_used_blocks=20_000), 0.0)
    placer.model.output_tokens.value = 4000.0
    one, more = request(4000, rng, output=1), request(4000, rng, output=2)
    assert placer.forecast(more, 0.0).room_s > placer.forecast(more, 0.0).ready_s
    forecast = placer.forecast(one, 0.0)
    work = TIMES.step_s([(4000, 0)], 0, 0)
    assert forecast.room_s == 0.0
    assert forecast.ttft_s == pytest.approx(work)  # no transfer, no step of decode
    d = placer.find("d0")
    before = (d.free_sequences, d.free_blocks, d.recent(0.0), d.tightest_tpot_s)
    place = placed(placer, one, 0.0, rng)
    assert place.predicted_ttft_s == pytest.approx(work)
    assert not d.own
    assert (d.free_sequences, d.free_blocks, d.recent(0.0), d.tightest_tpot_s) == before
    p = placer.find(place.prefill)
    assert (p.leases, p.free_blocks) == (1, 20_000 - 250)
    assert placed(placer, request(4000, rng, output=1), 0.0, rng).prefill != place.prefill
    placer.on_first_token(one.request_id, 0.1)
    assert (p.leases, p.free_blocks) == (0, 20_000)
    placer.on_end(one.request_id, 0.2)
    assert (d.free_sequences, d.free_blocks) == before[:2]


def test_one_token_is_remembered_where_it_was_computed():
    rng = random.Random(34)
    placer = cluster(2, 1)
    for name in ("p0", "p1", "d0"):
        placer.set_index_exact(name, False)
    one = request(1600, rng, output=1)
    home = placed(placer, one, 0.0, rng).prefill
    placer.on_first_token(one.request_id, 0.1)
    placer.on_end(one.request_id, 0.1)
    assert placer.index.longest_match(one.block_keys) == {home: 100}


def test_one_token_needs_no_decode_engine_that_could_hold_its_prompt():
    rng = random.Random(35)
    placer = cluster(1, 0)
    placer.add_worker(info("d0", Role.DECODE, kv_total_blocks=50), 0.0)
    assert placed(placer, request(1600, rng, output=1), 0.0, rng).prefill == "p0"
    assert placer.place(request(1600, rng), 0.0, rng).status == 400


def test_what_waits_in_the_router_counts_like_a_queue():
    rng = random.Random(36)
    placer, prefix = cluster(2, 1, SPLIT_ONLY), new(2048, rng)
    placer.index.store("p0", block_keys(prefix, BLOCK))
    r = request(prefix + new(16, rng))
    again = TIMES.step_s([(2064, 0)], 0, 0)
    there = placer.forecast(r, 0.0, {"p0": 0.5 * again})
    assert (there.worker, there.wait_s, there.least_wait_s) == ("p0", 0.5 * again, 0.0)
    elsewhere = placer.forecast(r, 0.0, {"p0": 2 * again})
    assert (elsewhere.worker, elsewhere.wait_s) == ("p1", 0.0)
    assert placed(placer, r, 0.0, rng).prefill == "p1", "as it was let through"
    # Nobody is drawn to an engine for which others wait, where that is as good as another.
    tie = request(prefix + new(16, rng))
    for queued in (0.99 * again, again, 1.01 * again):
        placer.on_snapshot(snapshot("p1"), 10.0)
        expected = placer.forecast(tie, 10.0, {"p0": queued}).worker
        assert placed(placer, tie, 10.0, rng).prefill == expected
        placer.on_end(tie.request_id, 10.0)
