"""Admission: bounds, fairness between tenants, priorities without starvation, room, deadlines, budgets."""

import random
from collections import Counter

import pytest

from cluster.config import AdmissionConfig, PlacementConfig
from cluster.messages import Placement, Rejection, Request, Role, Slo, WorkerInfo, WorkerSnapshot, WorkerState
from cluster.perf.times import LinearTimes
from router.admission import BURST_S, Admission, Admit, Forecast, Queue
from router.placement import Placer
from router.prefix_index import PrefixIndex

SLO = Slo(1.0, 0.05)
_ids = iter(range(10**9))


class Engine:
    """One engine of so many tokens a second and so many KV tokens; the gate of these tests."""

    def __init__(self, tokens_per_s: float = 10_000.0, kv_tokens: float = 1e9) -> None:
        self.tokens_per_s, self.kv_tokens = tokens_per_s, kv_tokens
        self.free_s, self.used = 0.0, 0.0
        self.refuse: Rejection | None = None

    def forecast(self, request: Request, now: float) -> Forecast | Rejection:
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


def test_budget_allows_a_burst_and_then_the_rate():
    engine = Engine(tokens_per_s=1e9)
    admission, _ = made(engine, tenant_tokens_per_s=1000.0)
    arrivals = [(i * 0.1, request(500, tenant="a", arrival_s=i * 0.1)) for i in range(600)]  # 5,000 tokens/s
    admitted, rejected = run(admission, engine, arrivals, until=61.0)
    tokens = 500 * len(admitted)
    assert tokens == pytest.approx(1000 * 60 + 1000 * BURST_S, rel=0.05)
    assert {r.status for r in rejected.values()} == {429}
    assert all(r.retry_after_s >= 1.0 for r in rejected.values())


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
