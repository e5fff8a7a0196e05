"""Admission: bounds, fairness between tenants, priorities without starvation, room, deadlines, budgets."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from cluster.config import AdmissionConfig, PlacementConfig
from cluster.messages import Placement, Rejection, Request, Role, Slo, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import LinearTimes
from router.admission import BURST_S, LOOKED_AT, PASSED_OVER, Admission, Admit, Forecast, Queue, share_of
from router.block_keys import block_keys
from router.fair_queue import FairQueue, Waiting
from router.gateway.checks import clamp_priority
from router.placement import Placer
from router.prefix_index import PrefixIndex

SLO = Slo(1.0, 0.05)
_ids = iter(range(10**9))


class Engine:
    """One engine of so many tokens a second and so many KV tokens; the gate of these tests. It counts forecasts."""

    def __init__(self, tokens_per_s: float = 10_000.0, kv_tokens: float = 1e9) -> None:
        self.tokens_per_s, self.kv_tokens = tokens_per_s, kv_tokens
        self.free_s, self.used, self.asked = 0.0, 0.0, 0
        self.refuse: Rejection | None = None

    def forecast(
        self, request: Request, now: float, ahead_s: Mapping[str, float] | None = None
    ) -> Forecast | Rejection:
        self.asked += 1
        if self.refuse is not None:
            return self.refuse
        if request.prompt_tokens > self.kv_tokens:
            return Rejection(400, "too large")
        wait = max(0.0, self.free_s - now)
        ready = wait + request.prompt_tokens / self.tokens_per_s
        room = 1e6 if self.used + request.prompt_tokens > self.kv_tokens else 0.0
        return Forecast(wait, ready, room, ready + 0.01, 0.0)

    def place(self, request: Request, now: float) -> None:
        self.free_s = max(self.free_s, now) + request.prompt_tokens / self.tokens_per_s
        self.used += request.prompt_tokens


def request(tokens: int = 1000, **changes) -> Request:
    base = {
        "request_id": f"r{next(_ids)}",
        "arrival_s": 0.0,
        "prompt_tokens": tokens,
        "max_output_tokens": 100,
        "slo": SLO,
    }
    return Request(**(base | changes))


def made(engine: Engine | None = None, **config) -> tuple[Admission, Engine]:
    engine = engine or Engine()
    return Admission(AdmissionConfig(**config), engine, SLO.ttft_s), engine


def drain(admission: Admission, engine: Engine, now: float) -> list[Request]:
    out = []
    while (r := admission.next(now)) is not None:
        engine.place(r, now)
        out.append(r)
    return out


def run(admission: Admission, engine: Engine, arrivals: list[tuple[float, Request]], until: float, step: float = 0.05):
    """Offer each arrival at its time, ask for the next every `step`. Returns ({id: admitted at}, {id: rejection})."""
    admitted: dict[str, float] = {}
    rejected: dict[str, Rejection] = {}
    arrivals, now, i = sorted(arrivals, key=lambda a: a[0]), 0.0, 0
    while now < until:
        while i < len(arrivals) and arrivals[i][0] <= now:
            at, r = arrivals[i]
            i += 1
            answer = admission.offer(r, at)
            if isinstance(answer, Admit):
                engine.place(r, at)
                admitted[r.request_id] = at
            elif isinstance(answer, Rejection):
                rejected[r.request_id] = answer
        for r in drain(admission, engine, now):
            admitted[r.request_id] = now
        for refusal in admission.refusals(now):
            rejected[refusal.request.request_id] = refusal.rejection
        now += step
    return admitted, rejected


def test_with_nothing_waiting_and_room_it_goes_at_once():
    admission, _ = made()
    assert admission.offer(request(), 0.0) == Admit()
    assert len(admission) == 0
    assert admission.next(0.0) is None


def test_beyond_the_engines_backlog_it_waits_in_the_router():
    admission, engine = made(backlog_fraction=0.25)
    for i in range(10):
        r = request(1000)  # 0.1 s each, 0.25 s may queue
        answer = admission.offer(r, 0.0)
        if i < 3:
            assert answer == Admit()
            engine.place(r, 0.0)
        else:
            assert answer == Queue(i - 3, 0.0 if i == 3 else None)
    assert drain(admission, engine, 0.0) == []
    assert len(drain(admission, engine, 0.1)) == 1
    assert len(drain(admission, engine, 0.5)) == 3


def test_the_queue_is_bounded_and_says_when_to_come_back():
    admission, engine = made(max_queue=5, retry_after_s=2.0)
    engine.free_s = 100.0
    answers = [admission.offer(request(), 0.0) for _ in range(7)]
    assert [type(a) for a in answers] == [Queue] * 5 + [Rejection] * 2
    assert answers[5].status == 503
    assert answers[5].retry_after_s >= 2.0
    assert len(admission) == 5


def test_a_flooding_tenant_makes_room_for_another():
    admission, engine = made(max_queue=10)
    engine.free_s = 100.0
    flood = [request(tenant="flood") for _ in range(10)]
    for r in flood:
        assert isinstance(admission.offer(r, 0.0), Queue)
    assert isinstance(admission.offer(request(tenant="flood"), 0.0), Rejection)
    for i in range(4):
        assert isinstance(admission.offer(request(tenant="quiet"), 0.0), Queue), i
    refused = admission.refusals(0.0)
    assert [r.request for r in refused] == flood[:-5:-1]  # its newest, one for each
    assert {r.rejection.status for r in refused} == {503}
    assert admission.waiting_by_tenant() == {"flood": 6, "quiet": 4}
    assert admission.refusals(0.0) == []


def test_limits_that_clients_set_hold_up_nobody_and_let_no_flood_through():
    """The engines always have a little queue: more than one request allows itself, less than the cluster does."""
    admission, engine = made(backlog_fraction=0.25)
    engine.free_s = 0.5
    impatient = [request(10, tenant="a", slo=Slo(0.001, 0.05)) for _ in range(3)]
    for r in (*impatient, polite := request(10, tenant="b", slo=Slo(10.0, 0.05))):
        assert isinstance(admission.offer(r, 0.0), Queue)
    engine.free_s = 1.2  # 0.2 s of work at any moment from 1.0 s on
    assert polite in drain(admission, engine, 1.0)
    engine.free_s = 100.0
    assert isinstance(admission.offer(request(slo=Slo(86_400.0, 0.05)), 2.0), Queue)


@pytest.mark.parametrize("budget", [None, 8000.0])
def test_one_tenants_long_prompts_do_not_set_anothers_latency(budget):
    """A sends 100k-token prompts at 8 times the engine's rate, B short ones at a tenth of it."""
    engine = Engine(tokens_per_s=100_000.0)
    admission, _ = made(engine, tenant_tokens_per_s=budget and budget * 10)
    arrivals = [(i * 0.125, request(100_000, tenant="a", arrival_s=i * 0.125)) for i in range(240)]
    arrivals += [(i * 0.1, request(1000, tenant="b", arrival_s=i * 0.1)) for i in range(300)]
    admitted, rejected = run(admission, engine, arrivals, until=35.0, step=0.01)
    waits = sorted(admitted[r.request_id] - at for at, r in arrivals if r.tenant == "b" and r.request_id in admitted)
    assert len(waits) == 300
    # One prompt of A in service (1 s), and B's own that gathered behind it, are all that B ever waits for.
    assert waits[int(len(waits) * 0.99)] <= 1.2
    if budget:
        assert any(r.status == 429 for r in rejected.values())


def test_equal_tenants_get_equal_tokens_not_equal_requests():
    engine = Engine(tokens_per_s=10_000.0)
    admission, _ = made(engine, max_queue=4000)
    arrivals = [(0.0, request(4000, tenant="long")) for _ in range(200)]
    arrivals += [(0.0, request(500, tenant="short")) for _ in range(1600)]
    admitted, _ = run(admission, engine, arrivals, until=20.0)
    tokens = Counter()
    for _, r in arrivals:
        if r.request_id in admitted:
            tokens[r.tenant] += r.prompt_tokens
    assert tokens["long"] == pytest.approx(tokens["short"], rel=0.1)
    assert sum(tokens.values()) >= 0.95 * 200_000


def test_a_tenant_that_was_idle_has_nothing_saved_up():
    engine = Engine(tokens_per_s=10_000.0)
    admission, _ = made(engine, backlog_fraction=0.005)
    patient = Slo(60.0, 0.05)
    arrivals = [(i * 0.05, request(1000, tenant="steady", arrival_s=i * 0.05, slo=patient)) for i in range(200)]
    arrivals += [(5.0, request(1000, tenant="late", arrival_s=5.0, slo=patient)) for _ in range(50)]
    admitted, _ = run(admission, engine, arrivals, until=12.0)
    share = Counter(r.tenant for _, r in arrivals if 5.0 <= admitted.get(r.request_id, -1) < 10.0)
    assert share["steady"] == pytest.approx(share["late"], abs=4)


def test_priorities_are_strict_until_someone_starves():
    admission, engine = made(starvation_s=5.0, max_queue=10_000)
    engine.free_s = 1e9
    low = [request(priority=5) for _ in range(20)]
    for r in low:
        admission.offer(r, 0.0)
    high = [request(priority=0) for _ in range(40)]
    for r in high:
        admission.offer(r, 1.0)
    engine.free_s, engine.tokens_per_s = 0.0, 1e12
    first = [admission.next(4.0).priority for _ in range(10)]
    assert first == [0] * 10
    later = [admission.next(5.5).priority for _ in range(20)]
    assert later == [5, 0] * 10
    assert sorted(r.priority for r in drain(admission, engine, 6.0)) == [0] * 20 + [5] * 10


def test_two_starving_classes_both_move():
    admission, engine = made(starvation_s=1.0, max_queue=10_000)
    engine.free_s = 1e9
    for priority in (0, 1, 2):
        for _ in range(30):
            admission.offer(request(priority=priority), 0.0)
    engine.free_s, engine.tokens_per_s = 0.0, 1e12
    taken = Counter(admission.next(2.0).priority for _ in range(30))
    assert taken[0] == 15
    assert taken[1] + taken[2] == 15


def test_what_does_not_fit_is_passed_over_and_then_waited_for():
    engine = Engine(tokens_per_s=1e9, kv_tokens=10_000)
    admission, _ = made(engine, starvation_s=5.0)
    engine.used = 5000
    patient = Slo(60.0, 0.05)
    big = request(9000, tenant="big", slo=patient)
    assert isinstance(admission.offer(big, 0.0), Queue)
    small = [request(500, tenant=f"s{i}", slo=patient) for i in range(6)]
    for r in small:
        admission.offer(r, 0.0)
    assert drain(admission, engine, 1.0) == small
    more = request(500, slo=patient)
    admission.offer(more, 6.0)
    assert drain(admission, engine, 6.0) == []  # nobody takes the room that the starving one waits for
    engine.used = 0
    assert drain(admission, engine, 7.0) == [big, more]


class Engines:
    """A gate of several engines with a wait each; a request runs on the one that its tenant is called."""

    def __init__(self, **waits_s: float) -> None:
        self.waits_s, self.no_room = waits_s, set()
        self.asked = 0

    def forecast(
        self, request: Request, now: float, ahead_s: Mapping[str, float] | None = None
    ) -> Forecast | Rejection:
        self.asked += 1
        worker = request.tenant.split("-")[0]
        wait = (ahead_s or {}).get(worker, self.waits_s[worker])
        room = 1e6 if request.tenant in self.no_room else 0.0
        return Forecast(wait, wait + 0.01, room, wait + 0.02, 0.0, worker, min(self.waits_s.values()))


def two_engines(config: AdmissionConfig | None = None, **waits_s: float) -> tuple[Admission, Engines]:
    engines = Engines(**waits_s)
    return Admission(config or AdmissionConfig(), engines, SLO.ttft_s), engines


def test_a_busy_engine_holds_up_those_that_wait_for_it_and_nobody_else():
    admission, engines = two_engines(a=0.3, b=0.0)
    for_a = [request(tenant="a") for _ in range(3)]
    for_b = [request(tenant="b") for _ in range(2)]
    for r in (*for_a, *for_b):
        assert isinstance(admission.offer(r, 0.0), Queue)
    assert [admission.next(0.0) for _ in range(3)] == [*for_b, None]
    engines.waits_s["a"] = 0.2  # in their order, although the second one was not asked for until now
    assert [admission.next(0.1) for _ in range(4)] == [*for_a, None]


def test_with_a_queue_on_every_engine_one_forecast_says_so():
    admission, engines = two_engines(a=0.3, b=0.26)
    for i in range(20):
        admission.offer(request(tenant="ab"[i % 2]), 0.0)
    engines.asked = 0
    assert admission.next(0.0) is None
    assert engines.asked == 1


def test_a_long_line_for_one_engine_costs_few_forecasts_and_is_looked_past():
    admission, engines = two_engines(a=0.3, b=0.0)
    for _ in range(100):
        admission.offer(request(tenant="a"), 0.0)
        assert admission.next(0.0) is None  # as after each arrival
    last = request(tenant="b")
    admission.offer(last, 0.0)
    engines.asked = 0
    assert admission.next(0.0) == last
    assert engines.asked == 2


def test_a_line_that_nobody_has_looked_at_is_looked_past_in_a_few_looks():
    admission, engines = two_engines(a=0.3, b=0.0)
    for _ in range(40):
        admission.offer(request(tenant="a"), 0.0)
    last = request(tenant="b-later", priority=1)
    admission.offer(last, 0.0)
    found = []
    for _ in range(6):
        engines.asked = 0
        found.append(admission.next(0.0))
        assert engines.asked <= PASSED_OVER + 1 + 2, "and one of each busy engine"
    assert last in found


def test_an_idle_engine_is_found_behind_any_number_of_busy_ones():
    busy = [f"busy{i}" for i in range(12)]
    admission, _ = two_engines(idle=0.0, **dict.fromkeys(busy, 0.3))
    for name in (*busy, *busy):
        assert isinstance(admission.offer(request(tenant=name), 0.0), Queue)
    free = request(tenant="idle")
    admission.offer(free, 0.0)
    assert admission.next(0.0) is free


def test_a_late_request_that_is_owed_a_place_does_not_stand_in_its_own_way():
    admission, engines = two_engines(a=0.3, b=0.0)
    asked: list[tuple[str, Mapping[str, float]]] = []
    ask = engines.forecast

    def watched(r: Request, now: float, ahead_s: Mapping[str, float] | None = None) -> Forecast | Rejection:
        asked.append((r.request_id, dict(ahead_s or {})))
        forecast = ask(r, now, ahead_s)
        assert isinstance(forecast, Forecast)
        return replace(forecast, ready_s=forecast.wait_s + 0.5)

    engines.forecast = watched  # type: ignore[method-assign]
    late = request(tenant="a")
    admission.offer(late, 0.0)
    admission._classes[0].set_late(admission._waiting[late.request_id])
    admission._classes[0].passed = 31
    asked.clear()
    assert admission.next(100.0) is None
    assert asked == [(late.request_id, {})]


def test_who_chose_a_busy_engine_is_asked_again_where_another_became_free():
    admission, engines = two_engines(a=0.3, b=0.24)
    stays, moves = request(tenant="a"), request(tenant="a-2")
    for r in (stays, moves):
        admission.offer(r, 0.0)
    assert admission.next(0.0) is None
    asked: list[str] = []
    ask = engines.forecast

    def watched(r: Request, now: float, ahead_s: Mapping[str, float] | None = None) -> Forecast | Rejection:
        asked.append(r.request_id)
        return ask(r, now, ahead_s)

    engines.forecast = watched  # type: ignore[method-assign]
    engines.waits_s["b"] = 0.23  # hardly another figure: only the first is asked for
    assert admission.next(0.01) is None
    assert asked == [stays.request_id]
    engines.waits_s["b"] = 0.0
    assert admission.next(0.2) is None
    assert asked[1:] == [stays.request_id, moves.request_id]


def test_late_requests_for_a_busy_engine_leave_an_idle_one_to_the_late_behind_them():
    admission, engines = two_engines(a=0.3, b=0.3)
    late = [request(tenant=t) for t in ("a", "a", "b", "b")]
    for r in late:
        admission.offer(r, 0.0)
    engines.waits_s["b"] = 0.0
    assert admission.next(1.5) == late[2]
    engines.waits_s |= {"a": 0.2, "b": 0.1}  # neither idles: one forecast says so
    engines.asked = 0
    assert admission.next(1.6) is None
    assert engines.asked == 1


def test_requests_behind_late_ones_that_cannot_go_are_seen():
    admission, engines = two_engines(a=0.3, b=0.3)
    for _ in range(2 * LOOKED_AT):
        admission.offer(request(tenant="a"), 0.0)
    lower = request(tenant="b", priority=3, arrival_s=1.4)
    admission.offer(lower, 1.4)
    engines.waits_s |= {"a": 0.1, "b": 0.1}
    assert admission.next(1.5) == lower


def test_a_starving_priority_gets_its_places_while_others_wait_for_a_busy_engine():
    admission, engines = two_engines(AdmissionConfig(starvation_s=5.0, late_last=False), a=0.3, b=0.3)
    for priority, tenant, count in ((0, "a", 5), (1, "b", 20), (2, "b", 20)):
        for _ in range(count):
            admission.offer(request(tenant=tenant, priority=priority), 5.0 if priority == 1 else 0.0)
    engines.waits_s["b"] = 0.0
    assert [admission.next(6.0).priority for _ in range(8)] == [2, 1] * 4


def test_the_forecasts_of_one_look_are_bounded_whatever_the_priorities():
    admission, engine = made(max_queue=2000)
    engine.free_s = 0.5
    for priority in range(1000):
        admission.offer(request(tenant=f"t{priority}", priority=priority), 0.0)
    engine.asked = 0
    assert admission.next(0.45) is not None
    assert engine.asked == 1
    engine.free_s = 1.65  # some queue, so nothing late may go, and each priority has a late request
    engine.asked = 0
    assert admission.next(1.5) is None
    assert engine.asked <= PASSED_OVER + 1
    for priority in range(1000):
        admission.offer(request(tenant=f"t{priority}", priority=priority, arrival_s=1.6), 1.6)
    engine.free_s = 2.7  # each new one is about to be too late, and that takes a forecast
    engine.asked = 0
    assert admission.next(2.55) is None
    assert engine.asked <= PASSED_OVER + 1


def test_a_waiting_request_that_fits_nowhere_any_more_is_refused_and_holds_up_nobody():
    admission, engine = made(Engine(kv_tokens=10_000), tenant_tokens_per_s=1000.0)
    engine.free_s = 0.5
    large, small = request(9000, tenant="large"), request(500, tenant="small")
    for r in (large, small):
        assert isinstance(admission.offer(r, 0.0), Queue)
    engine.kv_tokens = 5000  # the larger engine has left
    assert admission.next(0.4) == small
    assert [(r.request, r.rejection.status) for r in admission.refusals(0.4)] == [(large, 400)]
    assert len(admission) == 0
    assert isinstance(admission.offer(request(4000, tenant="large"), 0.4), Admit), "it has paid for nothing"


def placer_of(prefills: int, decodes: int = 1, **changes) -> Placer:
    placer = Placer(PlacementConfig(conditional=False), lambda _: LinearTimes(), PrefixIndex(), visible_after_s=0.0)
    for i in range(prefills + decodes):
        role, name = (Role.PREFILL, f"p{i}") if i < prefills else (Role.DECODE, f"d{i - prefills}")
        base = {"block_size_tokens": 16, "kv_total_blocks": 20_000, "kv_bytes_per_token": 131_072}
        base |= {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 32_768}
        placer.add_worker(WorkerInfo(name, "1", role, **(base | changes)), 0.0)
        placer.set_index_exact(name, True)
    return placer


def tokens_request(tokens: list[int], **changes) -> Request:
    return request(len(tokens), block_keys=block_keys(tokens, 16), **changes)


def hot_prefix(rng: random.Random) -> tuple[Placer, list[int]]:
    """Two prefill engines: p0 holds a prefix of 0.39 s and has 0.3 s of work, p1 idles."""
    placer, prefix = placer_of(2), [rng.randrange(150_000) for _ in range(8192)]
    placer.index.store("p0", block_keys(prefix, 16))
    tokens = int((0.3 - LinearTimes().fixed_s) / LinearTimes().per_prefill_token_s)
    placer.on_snapshot(WorkerSnapshot("p0", "1", WorkerState.READY, queued_prefill_tokens=tokens), 0.0)
    assert placer.find("p0").backlog_s(0.0) == pytest.approx(0.3, abs=0.001)
    return placer, prefix


def new(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(150_000) for _ in range(count)]


def test_a_request_that_waits_for_its_prefix_does_not_keep_a_cold_one_from_an_idle_engine():
    rng = random.Random(2)
    placer, prefix = hot_prefix(rng)
    admission = Admission(AdmissionConfig(), placer, 1.0)
    hot, cold = tokens_request(prefix + new(16, rng)), tokens_request(new(100, rng))
    assert isinstance(admission.offer(hot, 0.0), Queue)
    assert admission.next(0.0) is None
    assert isinstance(admission.offer(cold, 0.0), Queue)
    assert admission.next(0.0) == cold
    assert placer.place(cold, 0.0, rng).prefill == "p1"
    assert admission.next(0.0) is None
    assert admission.next(0.06) == hot
    assert placer.place(hot, 0.06, rng).prefill == "p0"


def test_a_hot_prefix_moves_once_those_that_wait_for_it_cost_more_than_computing_it_again():
    """Each costs p0 6 ms behind 0.3 s; computing all of it on p1 takes 0.4 s. So about 16 wait for p0."""
    rng = random.Random(3)
    placer, prefix = hot_prefix(rng)
    admission = Admission(AdmissionConfig(), placer, 1.0)
    hot = [tokens_request(prefix + new(16, rng)) for _ in range(40)]
    moved = None
    for waiting, r in enumerate(hot):
        assert isinstance(admission.offer(r, 0.0), Queue)
        moved = admission.next(0.0)
        if moved is not None:
            assert moved == r, "those before it keep their turn"
            assert 14 <= waiting <= 18
            break
    place = placer.place(moved, 0.0, rng)
    assert (place.prefill, place.predicted_cached_tokens) == ("p1", 0)
    # From now on p1 computes the prefix, and its queue is too long for more.
    assert admission.next(0.0) is None
    assert placer.find("p1").backlog_s(0.0) == pytest.approx(0.4, abs=0.01)
    # A retry of the request is a decision of its own.
    placer.on_end(moved.request_id, 0.0)
    assert placer.place(moved, 0.0, rng).prefill == "p0"


def test_a_request_that_can_never_be_served_is_refused_at_once():
    admission, _ = made(Engine(kv_tokens=100))
    answer = admission.offer(request(1000), 0.0)
    assert isinstance(answer, Rejection)
    assert answer.status == 400


def test_with_no_worker_requests_are_refused_at_once():
    admission, engine = made()
    engine.refuse = Rejection(503, "no decode worker is ready", 1.0)
    assert admission.offer(request(), 0.0) == engine.refuse


def test_or_wait_for_one_where_pools_scale_to_zero():
    admission, engine = made(wait_for_workers=True)
    engine.refuse = Rejection(503, "no decode worker is ready", 1.0)
    r = request()
    assert isinstance(admission.offer(r, 0.0), Queue)
    assert admission.next(1.0) is None
    engine.refuse = None
    assert admission.next(2.0) == r


def test_unattainable_deadlines_are_refused_early_and_only_if_configured():
    for reject in (True, False):
        admission, engine = made(reject_unattainable=reject, retry_after_s=0.5)
        engine.free_s = 3.0
        answer = admission.offer(request(), 0.0)
        if reject:
            assert isinstance(answer, Rejection)
            assert answer.status == 503
            assert answer.retry_after_s == pytest.approx(2.11)
            # After that time it would have made it.
            assert not isinstance(admission.offer(request(arrival_s=2.12), 2.12), Rejection)
            # A patient client is let in where an impatient one is not: the limits are each request's own.
            assert not isinstance(admission.offer(request(slo=Slo(10.0, 0.05)), 0.0), Rejection)
        else:
            assert isinstance(answer, Queue)


def test_the_deadline_counts_the_queue_before_it_and_what_passed_in_it():
    admission, engine = made(reject_unattainable=True, backlog_fraction=0.1)
    arrivals = [(i * 0.02, request(1000, arrival_s=i * 0.02)) for i in range(300)]
    admitted, rejected = run(admission, engine, arrivals, until=8.0, step=0.01)
    assert len(admitted) + len(rejected) == 300
    assert 50 <= len(admitted) <= 80  # the engine serves 10 a second for 6 s
    late = [admitted[r.request_id] - at for at, r in arrivals if r.request_id in admitted]
    assert max(late) <= 1.0
    assert {r.status for r in rejected.values()} == {503}


def overload(rate_per_s: float, seconds: float, until: float, **config) -> tuple[list[float], list[float]]:
    """Prompts of a tenth of a second each. Returns when each was given a place, and its wait."""
    admission, engine = made(max_queue=10_000, **config)
    arrivals = [(i / rate_per_s, request(arrival_s=i / rate_per_s)) for i in range(int(rate_per_s * seconds))]
    admitted, rejected = run(admission, engine, arrivals, until=until, step=0.01)
    assert not rejected
    at = [admitted.get(r.request_id, float("inf")) for _, r in arrivals]
    return at, [a - arrival for a, (arrival, _) in zip(at, arrivals, strict=True)]


def test_in_an_overload_all_that_the_engines_do_is_in_time():
    for late_last, least, most in ((True, 170, 230), (False, 10, 40)):
        at, waits = overload(20.0, 20.0, until=45.0, late_last=late_last)
        # The engine serves ten a second and 20 come. In order of arrival everybody is late by the same time.
        assert least <= sum(wait <= 1.0 - 0.11 for wait in waits) <= most
        assert max(at) < 42.0, "the others are served too"


def test_late_requests_get_a_place_now_and_then_once_they_have_waited_long():
    at, waits = overload(15.0, 60.0, until=60.0, starvation_s=5.0)
    late = sorted(a for a, wait in zip(at, waits, strict=True) if wait > 1.0 and a < 60.0)
    assert late[0] >= 5.0
    assert len(late) / (55.0 * 10.0) == pytest.approx(1 / 32, abs=0.01)
    oldest_first = [a for a, wait in zip(at, waits, strict=True) if wait > 1.0 and a < 60.0]
    assert oldest_first == late


def test_late_requests_take_only_time_that_nobody_in_time_needs():
    admission, engine = made()
    engine.free_s = 2.0
    late = [request() for _ in range(4)]
    assert all(isinstance(admission.offer(r, 0.0), Queue) for r in late)
    assert drain(admission, engine, 2.0) == late[:1]  # the engine idles; a second one would make others wait
    in_time = [request(arrival_s=2.05) for _ in range(2)]
    assert [admission.offer(r, 2.05) for r in in_time] == [Queue(0, None), Queue(1, None)]
    assert drain(admission, engine, 2.05) == in_time
    assert drain(admission, engine, 2.2) == []
    assert drain(admission, engine, 2.3) == late[1:2]


def test_a_request_whose_turn_came_too_late_is_refused_and_not_computed():
    admission, engine = made(reject_unattainable=True, tenant_tokens_per_s=1e5)
    engine.free_s = 0.5
    first, second = request(1000), request(4000)
    assert [type(admission.offer(r, 0.0)) for r in (first, second)] == [Queue, Queue]
    assert drain(admission, engine, 0.6) == [first]
    assert drain(admission, engine, 0.75) == []  # 0.4 s of work for a limit that is 0.25 s away
    assert [(r.request, r.rejection.status) for r in admission.refusals(0.75)] == [(second, 503)]
    assert len(admission) == 0


def test_a_flood_makes_its_own_requests_late_and_nobody_elses():
    admission, engine = made(max_queue=10_000)
    flood = [(i * 0.02, request(tenant="flood", arrival_s=i * 0.02)) for i in range(500)]
    quiet = [(i * 0.25, request(tenant="quiet", arrival_s=i * 0.25)) for i in range(40)]
    admitted, _ = run(admission, engine, flood + quiet, until=10.0, step=0.01)
    in_time = Counter(r.tenant for at, r in flood + quiet if admitted.get(r.request_id, 99.0) - at <= 0.89)
    assert in_time["quiet"] == 40
    assert in_time["flood"] >= 50


def test_a_flood_with_a_priority_of_its_own_is_held_to_its_share():
    """Without the gateway's limit the flood would be a class before everybody's."""
    body = {"priority": -1}
    clamp_priority(body, 0)
    admission, engine = made(max_queue=10_000)
    flood = [(i * 0.02, request(tenant="flood", arrival_s=i * 0.02, priority=body["priority"])) for i in range(500)]
    quiet = [(i * 0.25, request(tenant="quiet", arrival_s=i * 0.25)) for i in range(40)]
    admitted, _ = run(admission, engine, flood + quiet, until=10.0, step=0.01)
    in_time = Counter(r.tenant for at, r in flood + quiet if admitted.get(r.request_id, 99.0) - at <= 0.89)
    assert in_time["quiet"] == 40


def test_budget_allows_a_burst_and_then_the_rate():
    engine = Engine(tokens_per_s=1e9)
    admission, _ = made(engine, tenant_tokens_per_s=1000.0)
    arrivals = [(i * 0.1, request(500, tenant="a", arrival_s=i * 0.1)) for i in range(600)]  # 5,000 tokens/s
    admitted, rejected = run(admission, engine, arrivals, until=61.0)
    tokens = 500 * len(admitted)
    assert tokens == pytest.approx(1000 * 60 + 1000 * BURST_S, rel=0.05)
    assert {r.status for r in rejected.values()} == {429}
    assert all(r.retry_after_s >= 1.0 for r in rejected.values())


def test_several_routers_keep_one_budget_together():
    config = AdmissionConfig(tenant_tokens_per_s=1000.0, max_queue=101)
    routers = [Admission(share_of(config, 2), Engine(tokens_per_s=1e9), SLO.ttft_s) for _ in range(2)]
    admitted = 0
    for i in range(600):  # 5,000 tokens/s
        now = i * 0.1
        admitted += isinstance(routers[i % 2].offer(request(500, tenant="a", arrival_s=now), now), Admit)
    assert 500 * admitted == pytest.approx(1000 * 60 + 1000 * BURST_S, rel=0.05)
    assert [r.config.max_queue for r in routers] == [51, 51]
    assert share_of(config, 1) == config
    assert share_of(AdmissionConfig(max_queue=1), 4).max_queue == 1


def test_a_prompt_larger_than_the_burst_is_possible_and_then_paid_for():
    admission, _ = made(Engine(tokens_per_s=1e9), tenant_tokens_per_s=1000.0)
    assert admission.offer(request(100_000, tenant="a"), 0.0) == Admit()
    answer = admission.offer(request(10, tenant="a"), 1.0)
    assert isinstance(answer, Rejection)
    assert answer.retry_after_s == pytest.approx(89.01)
    assert admission.offer(request(10, tenant="b"), 1.0) == Admit()
    assert admission.offer(request(10, tenant="a"), 91.0) == Admit()


def test_cancelling_gives_the_place_and_the_budget_back():
    admission, engine = made(tenant_tokens_per_s=1000.0)
    engine.free_s = 100.0
    r = request(10_000, tenant="a")
    assert isinstance(admission.offer(r, 0.0), Queue)
    assert isinstance(admission.offer(request(10_000, tenant="a"), 0.0), Rejection)
    assert admission.remove(r.request_id)
    assert not admission.remove(r.request_id)
    assert isinstance(admission.offer(request(10_000, tenant="a"), 0.0), Queue)


def test_tenants_and_priorities_that_come_and_go_cost_no_memory():
    admission, engine = made(Engine(tokens_per_s=1e9), tenant_tokens_per_s=1e6, max_queue=10)
    for i in range(20_000):
        engine.free_s = 0.0 if i % 2 else 1e9
        r = request(10, tenant=f"t{i}", priority=i, arrival_s=float(i))
        if isinstance(admission.offer(r, float(i)), Queue):
            admission.remove(r.request_id)
    for i in range(20_000):
        engine.free_s = 20_000.1 + i  # never quite idle
        admission.offer(request(10, tenant=f"t{i}"), 20_000.0 + i)
    assert len(admission._classes) <= 65
    assert max(len(c.in_time.finish) for c in admission._classes.values()) <= 2 * 4096 + 64
    assert len(admission._buckets) <= 1024


@pytest.mark.parametrize("seed", range(25))
def test_random_traffic_ends_every_request_once_in_bounded_memory(seed):
    rng = random.Random(seed)
    engine = Engine(tokens_per_s=10_000.0, kv_tokens=40_000)
    config = {
        "max_queue": rng.choice([3, 30, 300]),
        "reject_unattainable": rng.random() < 0.5,
        "starvation_s": 2.0,
        "late_last": rng.random() < 0.7,
        "tenant_tokens_per_s": rng.choice([None, 5000.0]),
    }
    admission, _ = made(engine, **config)
    waiting: dict[str, Request] = {}
    running: list[Request] = []
    offered = 0
    ended: Counter[str] = Counter()
    now = 0.0
    for _ in range(1500):
        now += rng.expovariate(20.0)
        action = rng.random()
        if action < 0.5:
            r = request(
                rng.choice([100, 1000, 20_000]),
                tenant=rng.choice("abc"),
                priority=rng.choice([0, 0, 1, 7]),
                arrival_s=now,
                slo=Slo(rng.choice([0.5, 5.0, 60.0]), 0.05),
            )
            offered += 1
            answer = admission.offer(r, now)
            if isinstance(answer, Queue):
                waiting[r.request_id] = r
            elif isinstance(answer, Admit):
                engine.place(r, now)
                running.append(r)
                ended[r.request_id] += 1
            else:
                ended[r.request_id] += 1
        elif action < 0.6 and waiting:
            gone = rng.choice(list(waiting))
            assert admission.remove(gone)
            del waiting[gone]
            ended[gone] += 1
        elif running and action < 0.9:
            engine.used -= running.pop(rng.randrange(len(running))).prompt_tokens
        for r in drain(admission, engine, now):
            running.append(waiting.pop(r.request_id))
            ended[r.request_id] += 1
        for refusal in admission.refusals(now):
            del waiting[refusal.request.request_id]
            ended[refusal.request.request_id] += 1
        assert len(admission) == len(waiting) <= config["max_queue"]
        assert admission.waiting_by_tenant() == Counter(r.tenant for r in waiting.values())
        for lane in [lane for queue in admission._classes.values() for lane in (queue.in_time, queue.late)]:
            kept = len(lane._order) + sum(len(line.waiting) for line in lane.lines.values())
            assert kept <= 64 + 3 * (4 + 16) + 8 * lane.size
    # Progress: with arrivals over and every answer ended, all that waits goes.
    for _ in range(5000):
        now += 0.5
        engine.used = 0
        for r in drain(admission, engine, now):
            waiting.pop(r.request_id)
            ended[r.request_id] += 1
        for refusal in admission.refusals(now):
            del waiting[refusal.request.request_id]
            ended[refusal.request.request_id] += 1
        if not waiting:
            break
    assert not waiting
    assert len(admission) == 0
    assert not admission._active()
    assert len(ended) == offered
    assert set(ended.values()) <= {1}


@pytest.mark.parametrize("seed", range(10))
def test_requests_for_one_engine_keep_their_order_and_none_waits_for_an_engine_without_a_queue(seed):
    """Random arrivals and departures on three engines, each look as the drivers make it: until there is nobody."""
    rng = random.Random(seed)
    admission, engines = two_engines(AdmissionConfig(late_last=False, starvation_s=1e9), a=0.0, b=0.0, c=0.0)
    waiting: dict[str, Request] = {}
    given: dict[tuple[str, int], list[float]] = {}
    now = 0.0

    def place(r: Request) -> None:
        engines.waits_s[r.tenant] += rng.choice([0.02, 0.2])
        given.setdefault((r.tenant, r.priority), []).append(r.arrival_s)

    for step in range(400):
        passed = rng.expovariate(20.0) + 2.0 * (step % 100 == 99)
        now += passed
        for name in engines.waits_s:
            engines.waits_s[name] = max(0.0, engines.waits_s[name] - passed)
        r = request(rng.choice([10, 3000]), tenant=rng.choice("aaaabc"), priority=rng.choice([0, 0, 2]), arrival_s=now)
        answer = admission.offer(r, now)
        if isinstance(answer, Admit):
            place(r)
        else:
            waiting[r.request_id] = r
        if waiting and rng.random() < 0.1:
            admission.remove(waiting.pop(rng.choice(list(waiting))).request_id)
        for _ in range(len(waiting) // PASSED_OVER + 1):  # each look asks for some that no look has asked for
            while (found := admission.next(now)) is not None:
                place(waiting.pop(found.request_id))
        open_engines = {name for name, wait in engines.waits_s.items() if wait <= 0.25}
        assert not open_engines & {r.tenant for r in waiting.values()} or len(waiting) > LOOKED_AT
    assert all(arrivals == sorted(arrivals) for arrivals in given.values())
    assert len(given) >= 5
    assert len(admission._known) <= len(waiting) == len(admission)


@pytest.mark.parametrize("seed", range(10))
def test_the_walk_along_a_lane_is_in_fair_order_though_some_leave_it_meanwhile(seed):
    rng = random.Random(seed)
    queue = FairQueue()
    everyone: dict[str, list[Waiting]] = {}
    for i in range(200):
        tenant = rng.choice("abcdefgh")
        waiting = Waiting(request(tenant=tenant), rng.choice([5.0, 7.0, 11.0]), float(i))
        queue.add(waiting)
        everyone.setdefault(tenant, []).append(waiting)
        if rng.random() < 0.3:
            taken = everyone[tenant].pop(0)
            queue.take(taken)
        everyone = {t: line for t, line in everyone.items() if line}
    expected = []
    for tenant, line in everyone.items():
        start = queue.in_time.lines[tenant].start
        for waiting in line:
            expected.append((start, waiting))
            start += waiting.cost
    walked = list(queue.in_time.in_order())
    assert len(walked) == len(expected) == queue.size
    starts = {id(waiting): start for start, waiting in expected}
    assert [starts[id(w)] for w in walked] == sorted(starts.values())
    seen = []
    for waiting in queue.in_time.in_order():
        seen.append(waiting)
        if rng.random() < 0.3:
            queue.leave(waiting)
        elif rng.random() < 0.3:
            queue.set_late(waiting)
        if rng.random() < 0.2 and (others := [w for w in walked if not w.gone and w not in seen]):
            queue.leave(rng.choice(others))
    assert len({id(w) for w in seen}) == len(seen)
    assert set(map(id, seen)) >= {id(w) for w in walked if not w.gone}


def test_prefill_is_held_back_while_decode_has_no_room():
    """The real placer as the gate: requests wait in the router, none is refused, all are served in the end."""
    rng = random.Random(1)
    placer = Placer(PlacementConfig(conditional=False), lambda _: LinearTimes(), PrefixIndex(), visible_after_s=0.0)
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        placer.add_worker(WorkerInfo(name, "1", role, 16, 700, 131_072, 64, 8192, 32_768), 0.0)
    placer.model.output_tokens.value = 1000.0
    admission = Admission(AdmissionConfig(), placer, 60.0)
    requests = [request(2000, max_output_tokens=1000, slo=Slo(60.0, 0.05)) for _ in range(12)]
    answers = [admission.offer(r, 0.0) for r in requests[:1]]
    assert answers == [Admit()]
    placed = {requests[0].request_id}
    assert isinstance(placer.place(requests[0], 0.0, rng), Placement)
    for r in requests[1:]:
        answer = admission.offer(r, 0.0)
        if isinstance(answer, Admit):
            assert isinstance(placer.place(r, 0.0, rng), Placement)
            placed.add(r.request_id)
    # 700 blocks hold three requests of 188; the rest waits although the prefill engine idles.
    assert len(placed) == 3
    assert len(admission) == 9
    now = 0.0
    finished: set[str] = set()
    while len(finished) < 12:
        now += 5.0
        assert now < 200.0
        done = sorted(placed - finished)[0]
        placer.on_prefilled(done, now, 0)
        placer.on_first_token(done, now)
        placer.on_end(done, now)
        finished.add(done)
        placer.on_snapshot(WorkerSnapshot("p0", "1", WorkerState.READY), now)
        while (r := admission.next(now)) is not None:
            assert isinstance(placer.place(r, now, rng), Placement)
            placed.add(r.request_id)
        assert len(placed - finished) <= 3
