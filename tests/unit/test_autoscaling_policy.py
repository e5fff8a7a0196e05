"""The faults that autoscalers of this field have had, each as a case of `decide`, in a queueing model of the pools."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from cluster.autoscaling.messages import REASONS, Decision, Observation, PoolLoad, PoolSettings, Settings
from cluster.autoscaling.policy import decide, initial
from cluster.errors import ConfigError
from cluster.goodput.accounting import GoodputCounters, within_promise
from cluster.messages import Outcome, Path, RequestRecord, Role, Slo, Stage

SLO = Slo(ttft_s=2.0, tpot_s=0.05)
TICK_S, STEP_S = 5.0, 0.1
PREFILL_TOKENS_PER_S = 4000.0
DECODE_STEP_S, DECODE_SEQUENCE_S = 0.02, 0.001


def config(**changes) -> Settings:
    base = Settings(
        slo=SLO,
        prefill=PoolSettings(1, 10),
        decode=PoolSettings(1, 10, max_num_seqs=64),
        startup_s=20,
    )
    return replace(base, **changes)


@dataclass
class Pool:
    """Replicas with a start-up time. Work is fluid: prefill is one queue, decode shares its steps."""

    ready: int
    startup_s: float = 20.0
    starts: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    steps: float = 0.0
    sequence_steps: float = 0.0
    prompt_tokens: float = 0.0

    def set_target(self, target: int, now: float) -> None:
        while self.ready + len(self.starts) < target:
            self.starts.append(now + self.startup_s)
        while self.ready + len(self.starts) > target:
            if self.starts:
                self.starts.pop()
            else:
                self.ready -= 1

    def tick(self, now: float) -> None:
        came = [s for s in self.starts if s <= now]
        self.starts = [s for s in self.starts if s > now]
        self.ready += len(came)


class Plant:
    """A split cluster around `decide`: requests (arrival, prompt, output) in, targets out.

    kv_sequences: decode sequences whose KV one replica holds.
    """

    def __init__(self, policy: Settings, prefill: int = 1, decode: int = 1, kv_sequences: float = 1e9) -> None:
        self.pools = {Role.PREFILL: Pool(prefill), Role.DECODE: Pool(decode)}
        self.state, self.counters, self.now = initial(policy), GoodputCounters(), 0.0
        self.to_prefill: deque = deque()
        self.to_decode: deque = deque()
        self.running: list[list[float]] = []
        self.decisions: list[Decision] = []
        self.kv_sequences = kv_sequences
        self.data_lost = False
        self.targets_seen: list[tuple[int, int]] = []

    def run(self, seconds: float, rate=0.0, prompt=2000, output=100) -> None:
        """Constant arrivals, `rate(now)` or a number, for a time."""
        end_s, owed = self.now + seconds, 0.0
        while self.now < end_s - 1e-9:
            owed += (rate(self.now) if callable(rate) else rate) * STEP_S
            while owed >= 1:
                owed -= 1
                self.counters.start(prompt_tokens=prompt)
                self.to_prefill.append([self.now, prompt, output, float(prompt)])
            self._advance()

    def _advance(self) -> None:
        self.now = round(self.now + STEP_S, 6)
        prefill, decode = self.pools[Role.PREFILL], self.pools[Role.DECODE]
        for pool in (prefill, decode):
            pool.tick(self.now)
        budget = prefill.ready * PREFILL_TOKENS_PER_S * STEP_S
        while budget > 0 and self.to_prefill:
            head = self.to_prefill[0]
            done = min(head[3], budget)
            head[3] -= done
            budget -= done
            prefill.prompt_tokens += done
            prefill.busy_s += done / PREFILL_TOKENS_PER_S
            prefill.steps += done / 2000
            if head[3] <= 1e-9:
                self.to_decode.append((*self.to_prefill.popleft()[:3], self.now))
        while self.to_decode and len(self.running) < decode.ready * min(64, self.kv_sequences):
            arrival, prompt, output, prefilled = self.to_decode.popleft()
            self.running.append([arrival, prompt, output, prefilled, self.now, float(output)])
        if decode.ready and self.running:
            batch = len(self.running) / decode.ready
            step_s = DECODE_STEP_S + DECODE_SEQUENCE_S * batch
            steps = STEP_S / step_s
            active = min(decode.ready, len(self.running))
            decode.busy_s += STEP_S * active
            decode.steps += steps * active
            decode.sequence_steps += steps * len(self.running)
            for r in self.running:
                r[5] -= steps
            for r in [r for r in self.running if r[5] <= 0]:
                self.running.remove(r)
                self._finish(r)
        if round(self.now / TICK_S, 6) % 1 == 0:
            self._control()

    def _finish(self, r) -> None:
        arrival, prompt, output, prefilled, decoding, _ = r
        compute_s = prompt / PREFILL_TOKENS_PER_S
        stages = {
            Stage.PREFILL_QUEUE: max(0.0, prefilled - arrival - compute_s),
            Stage.PREFILL_COMPUTE: compute_s,
            Stage.DECODE_QUEUE: decoding - prefilled,
        }
        self.counters.finish(
            RequestRecord(
                "r",
                Outcome.DONE,
                self.state.settings.slo,
                arrival,
                self.now,
                path=Path.SPLIT,
                prefill_worker="p",
                prompt_tokens=prompt,
                output_tokens=int(output),
                ttft_s=decoding - arrival,
                tpot_s=(self.now - decoding) / max(1, output - 1),
                stage_s=stages,
            )
        )

    def observe(self) -> Observation:
        loads = {}
        for role, pool in self.pools.items():
            decode = role is Role.DECODE
            loads[role] = PoolLoad(
                ready=pool.ready,
                starting=len(pool.starts),
                busy_s=pool.busy_s,
                steps=pool.steps,
                sequence_steps=pool.sequence_steps,
                prompt_tokens=pool.prompt_tokens,
                running=len(self.running) if decode else min(len(self.to_prefill), pool.ready),
                waiting=len(self.to_decode) if decode else max(0, len(self.to_prefill) - pool.ready),
                queued_prompt_tokens=0.0 if decode else sum(r[3] for r in self.to_prefill),
                kv_used_ratio=min(1.0, len(self.running) / max(1e-9, pool.ready * self.kv_sequences))
                if decode
                else 0.0,
            )
        return Observation(
            prefill=loads[Role.PREFILL],
            decode=loads[Role.DECODE],
            requests=None if self.data_lost else dict(self.counters.values),
            queue_depth=0.0,
            oldest_wait_s=0.0,
        )

    def _control(self) -> None:
        self.state, decision = decide(self.state, self.observe(), self.now)
        self.decisions.append(decision)
        for role, target in decision.targets.items():
            self.pools[role].set_target(target, self.now)
        self.targets_seen.append(self.targets)

    @property
    def targets(self) -> tuple[int, int]:
        decided = self.decisions[-1].targets
        return decided[Role.PREFILL], decided[Role.DECODE]

    def changes(self, since: int = 0) -> int:
        seen = self.targets_seen[since:]
        return sum(a != b for a, b in itertools.pairwise(seen))


def observed(prefill=None, decode=None, **fields) -> Observation:
    base = {"requests": {"started": 0.0}, "queue_depth": 0.0, "oldest_wait_s": 0.0}
    return Observation(prefill=prefill or PoolLoad(1), decode=decode or PoolLoad(1), **(base | fields))


# ---- no traffic, no data


def test_no_traffic_scales_down_to_the_minimum():
    plant = Plant(config(), prefill=5, decode=5)
    plant.run(50, rate=5)
    plant.run(60)
    assert plant.targets == (5, 5), "the delay has not passed"
    plant.run(300)
    assert plant.targets == (1, 1)


def test_lost_data_holds_and_is_not_zero():
    plant = Plant(config())
    plant.run(300, rate=6)
    before = plant.targets
    assert before > (1, 1)
    plant.data_lost = True
    plant.run(400)
    assert plant.targets == before
    assert plant.decisions[-1].pools[Role.PREFILL].reason == "no data"
    plant.data_lost = False
    plant.run(100)
    assert plant.targets == before, "a gap in the data restarts the delay"


def test_clamps_hold_without_data():
    state = initial(config(prefill=PoolSettings(2, 4), decode=PoolSettings(1, 3)))
    seen = replace(observed(PoolLoad(1), PoolLoad(9)), requests=None)
    for tick in range(1, 21):
        state, decision = decide(state, seen, float(tick))
        assert decision.targets == {Role.PREFILL: 2, Role.DECODE: 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, "5", None, True])
@pytest.mark.parametrize("where", ["requests", "queue_depth", "oldest_wait_s", "ready"])
def test_impossible_numbers_hold(bad, where):
    state = initial(config())
    state, first = decide(state, observed(PoolLoad(3), PoolLoad(2)), 1.0)
    if where == "requests":
        seen = observed(PoolLoad(3), PoolLoad(2), requests={"started": bad})
    elif where == "ready":
        seen = observed(PoolLoad(bad), PoolLoad(2))
    else:
        seen = observed(PoolLoad(3), PoolLoad(2), **{where: bad})
    state, decision = decide(state, seen, 6.0)
    assert decision.targets == first.targets == {Role.PREFILL: 3, Role.DECODE: 2}
    assert decision.warnings


@pytest.mark.parametrize("bad", [math.nan, -5.0, "x"])
def test_impossible_engine_numbers_are_missing(bad):
    state = initial(config())
    for tick in range(1, 40):
        load = PoolLoad(2, busy_s=bad, steps=bad, sequence_steps=bad, running=bad, kv_used_ratio=bad)
        state, decision = decide(state, observed(load, load), 5.0 * tick)
        assert set(decision.targets.values()) <= {1, 2}


def test_a_clock_that_stands_still_holds():
    state, _ = decide(initial(config()), observed(), 5.0)
    _, decision = decide(state, observed(), 5.0)
    assert decision.pools[Role.DECODE].reason == "no data"


# ---- start


def test_no_runaway_while_replicas_start():
    policy = config(prefill=PoolSettings(2, 10), decode=PoolSettings(2, 10))
    plant = Plant(policy, prefill=0, decode=0)
    for pool in plant.pools.values():
        pool.startup_s = 120
    plant.run(400)
    assert set(plant.targets_seen) == {(2, 2)}


def test_traffic_that_arrives_while_replicas_start_does_not_multiply():
    policy = config(prefill=PoolSettings(2, 10), decode=PoolSettings(2, 10))
    plant = Plant(policy, prefill=0, decode=0)
    for pool in plant.pools.values():
        pool.startup_s = 120
    plant.run(115, rate=1)
    assert max(p for p, _ in plant.targets_seen) <= 4
    plant.run(500, rate=1)
    assert plant.targets == (2, 2)


# ---- flapping


def test_constant_load_changes_nothing():
    plant = Plant(config(), prefill=2, decode=2)
    plant.run(600, rate=2.8)
    settled = len(plant.targets_seen)
    plant.run(2500, rate=2.8)
    assert plant.changes(since=settled) == 0


def test_random_arrivals_of_constant_rate_rarely_change_anything():
    rng = random.Random(4)
    plant = Plant(config(), prefill=4, decode=3)

    def poisson(_now: float) -> float:
        return rng.gauss(6.0, math.sqrt(6.0 * STEP_S) / STEP_S)

    plant.run(600, rate=poisson)
    settled = len(plant.targets_seen)
    plant.run(1800, rate=poisson)
    assert plant.changes(since=settled) <= 2


def test_square_wave_changes_at_most_once_a_period():
    policy = config(look_back_s=60, downscale_delay_s=60)
    plant = Plant(policy, prefill=2, decode=2)
    plant.run(300, rate=lambda now: 6.0 if now % 60 < 30 else 1.0)
    settled = len(plant.targets_seen)
    plant.run(600, rate=lambda now: 6.0 if now % 60 < 30 else 1.0)
    assert plant.changes(since=settled) <= 10


def test_two_controllers_decide_as_one():
    plant = Plant(config())
    states = [initial(config()), initial(config())]
    plant.run(20, rate=6)
    for _ in range(60):
        plant.run(5, rate=6)
        answers = []
        for i, state in enumerate(states):
            states[i], decision = decide(state, plant.observe(), plant.now)
            answers.append(decision.targets)
        assert answers[0] == answers[1]


def test_a_delay_below_the_look_back_is_refused():
    with pytest.raises(ConfigError, match=r"downscale_delay_s: 30 is below look_back_s 60"):
        config(downscale_delay_s=30)


# ---- the wrong bottleneck


def test_full_decode_kv_scales_decode_and_not_prefill():
    plant = Plant(config(), prefill=3, decode=1, kv_sequences=10)
    plant.run(400, rate=4)
    assert plant.targets[1] > 1
    assert plant.targets[0] <= 3
    late = plant.counters.missed_by_stage()
    assert late.get(Stage.DECODE_QUEUE, 0) > 0, "TTFT is what missed"
    assert any(d.pools[Role.DECODE].reason in ("kv", "concurrency") for d in plant.decisions)


def test_kv_at_95_percent_adds_one_decode():
    load = PoolLoad(2, running=20, waiting=1, kv_used_ratio=0.95)
    state = initial(config())
    for tick in range(1, 8):
        state, decision = decide(state, observed(PoolLoad(1), load, requests={"started": 9.0}), 5.0 * tick)
    assert decision.targets == {Role.PREFILL: 1, Role.DECODE: 3}
    assert decision.pools[Role.DECODE].reason in ("kv", "steady")


def test_prompt_heavy_burst_scales_prefill():
    plant = Plant(config(), prefill=1, decode=2)
    plant.run(300, rate=1, prompt=2000, output=50)
    plant.run(120, rate=6, prompt=4000, output=10)
    assert plant.targets[0] >= 6
    assert plant.targets[1] <= 2


def test_output_heavy_shift_scales_decode():
    plant = Plant(config(), prefill=2, decode=1)
    plant.run(300, rate=1, prompt=2000, output=50)
    plant.run(240, rate=4, prompt=200, output=800)
    assert plant.targets[1] >= 4
    assert plant.targets[0] <= 2


def test_a_budget_is_never_exceeded_and_split_the_same_way_every_time():
    runs = []
    for _ in range(2):
        policy = config(accelerators_max=8, prefill=PoolSettings(1, 8), decode=PoolSettings(1, 8, max_num_seqs=64))
        plant = Plant(policy)
        for rate, prompt, output in ((5, 4000, 50), (4, 500, 700), (5, 4000, 50), (9, 4000, 400)):
            for _ in range(24):
                plant.run(10, rate=rate, prompt=prompt, output=output)
                held = sum(p.ready + len(p.starts) for p in plant.pools.values())
                assert held <= 8
                assert min(plant.targets) >= 1
        runs.append(plant.targets_seen)
    assert runs[0] == runs[1]
    assert any(p + d == 8 for p, d in runs[0])
    assert max(p for p, _ in runs[0]) > 5
    assert max(d for _, d in runs[0]) > 4


def test_minimum_replicas_above_the_budget_are_refused():
    with pytest.raises(ConfigError, match="accelerators_max: 3 cannot hold"):
        config(
            accelerators_max=3, prefill=PoolSettings(1, 2, accelerators=2), decode=PoolSettings(1, 2, accelerators=2)
        )


def test_a_pool_waits_for_accelerators_that_the_other_still_drains():
    policy = config(accelerators_max=8, upscale_delay_s=0)
    state = initial(policy)
    busy = PoolLoad(3, draining=2, running=400, waiting=200, kv_used_ratio=0.99)
    for tick in range(1, 8):
        state, decision = decide(state, observed(PoolLoad(3), busy, requests={"started": 9.0}), 5.0 * tick)
        assert decision.targets[Role.PREFILL] + decision.targets[Role.DECODE] + 2 <= 8


# ---- the invisible queue


def test_overload_is_seen_at_the_entrance():
    policy = config(decode=PoolSettings(1, 10, max_num_seqs=256))
    plant = Plant(policy, prefill=1, decode=4)
    plant.run(100, rate=1, prompt=2000, output=20)
    before = len(plant.decisions)
    plant.run(4 * TICK_S, rate=10, prompt=2000, output=20)
    assert plant.decisions[before + 2].targets[Role.PREFILL] >= 5


def test_a_closed_loop_that_throttles_itself_scales_by_its_wait():
    state, started, done = initial(config()), 0.0, 0.0
    ready, targets = 1, []
    for tick in range(1, 30):
        started += 2.0 * ready * TICK_S
        done = max(0.0, started - 50)
        load = PoolLoad(ready, busy_s=done / 2, steps=done, sequence_steps=0.0, prompt_tokens=done * 2000)
        wait_s = max(0.0, 50 / (2.0 * ready) - 0.5)
        requests = {
            "started": started,
            "started_prompt_tokens": started * 2000,
            "outcome{done}": done,
            "served": done,
            "served_prompt_tokens": done * 2000,
            "computed_tokens{prefill}": done * 2000,
            "prefill_legs": done,
            "output_tokens": done,
        }
        seen = observed(load, PoolLoad(2), requests=requests, queue_depth=48.0 / ready, oldest_wait_s=wait_s)
        state, decision = decide(state, seen, TICK_S * tick)
        targets.append(decision.targets[Role.PREFILL])
        ready = targets[-1]
    assert targets[-1] >= 5


def test_refused_requests_do_not_make_the_demand_look_small():
    """Ten a second come, two are served, eight are refused at the door: what all ten need is asked for."""
    plant = Plant(config(), prefill=1, decode=2)
    for tick in range(1, 25):
        for i in range(50):
            plant.counters.start(prompt_tokens=2000)
            stages = {Stage.PREFILL_QUEUE: 0.1, Stage.PREFILL_COMPUTE: 0.5}
            served = {"prefill_worker": "p", "ttft_s": 0.7, "tpot_s": 0.02, "output_tokens": 100, "stage_s": stages}
            outcome, fields = (Outcome.DONE, served) if i < 10 else (Outcome.REJECTED, {})
            at_s = tick * TICK_S
            plant.counters.finish(RequestRecord("r", outcome, SLO, at_s, at_s, prompt_tokens=2000, **fields))
        pool = plant.pools[Role.PREFILL]
        pool.busy_s, pool.steps, pool.prompt_tokens = 5.0 * tick, 10.0 * tick, 20_000.0 * tick
        plant.now = tick * TICK_S
        plant.state, decision = decide(plant.state, plant.observe(), plant.now)
    assert decision.targets[Role.PREFILL] >= 5
    assert decision.figures["arrivals_per_s"] == pytest.approx(10.0)


def refusing(status: int | None, refused: int) -> tuple[Plant, Decision]:
    """Two requests a second are served by one prefill replica, and so many are turned away beside them."""
    plant = Plant(config(), prefill=1, decode=2)
    for tick in range(1, 25):
        at_s = tick * TICK_S
        for i in range(int((2 + refused) * TICK_S)):
            plant.counters.start(prompt_tokens=2000)
            stages = {Stage.PREFILL_QUEUE: 0.1, Stage.PREFILL_COMPUTE: 0.5}
            served = {"prefill_worker": "p", "ttft_s": 0.7, "tpot_s": 0.02, "output_tokens": 100, "stage_s": stages}
            outcome, fields = (Outcome.DONE, served) if i < 10 else (Outcome.REJECTED, {"status": status})
            plant.counters.finish(RequestRecord("r", outcome, SLO, at_s, at_s, prompt_tokens=2000, **fields))
        pool = plant.pools[Role.PREFILL]
        pool.busy_s, pool.steps, pool.prompt_tokens = 5.0 * tick, 10.0 * tick, 20_000.0 * tick
        plant.now = at_s
        plant.state, decision = decide(plant.state, plant.observe(), plant.now)
    return plant, decision


def test_what_a_tenants_budget_refuses_is_no_demand():
    """Ten a second come, eight are beyond a budget (429): replicas would not admit one of them more."""
    _, alone = refusing(None, refused=0)
    plant, beside = refusing(429, refused=8)
    assert beside.targets == alone.targets
    assert beside.figures["arrivals_per_s"] == pytest.approx(2.0)
    assert beside.figures["attainment"] == 1.0
    assert max(pool.factor for pool in plant.state.pools.values()) <= 1.0
    plant, rejected = refusing(503, refused=8)
    assert rejected.targets[Role.PREFILL] > alone.targets[Role.PREFILL]
    assert plant.state.pools[Role.PREFILL].factor > 1.0


# ---- what replicas cannot fix


@pytest.mark.parametrize("told", ["promised", "own"])
def test_a_limit_that_clients_set_for_themselves_is_no_reason_for_replicas(told):
    """4% of the clients ask for a millisecond per token."""
    counters, state, factors = GoodputCounters(), initial(config()), []
    for tick in range(1, 80):
        for i in range(25):
            stages = {Stage.PREFILL_QUEUE: 0.1, Stage.PREFILL_COMPUTE: 0.5}
            own = Slo(SLO.ttft_s, 0.001) if i == 0 else SLO
            served = {"prefill_worker": "p", "ttft_s": 0.7, "tpot_s": 0.02, "output_tokens": 100, "stage_s": stages}
            r = RequestRecord("r", Outcome.DONE, own, 0.0, 3.0, prompt_tokens=2000, **served)
            counters.count(within_promise(r, SLO) if told == "promised" else r)
        state, _ = decide(state, observed(PoolLoad(3), PoolLoad(3), requests=dict(counters.values)), TICK_S * tick)
        factors.append(state.pools[Role.DECODE].factor)
    assert (max(factors) > 1.0) == (told == "own"), "what routers told before is what this guards against"


def test_an_unattainable_limit_warns_and_does_not_scale():
    slo = Slo(ttft_s=0.05, tpot_s=0.05)
    plant = Plant(config(slo=slo), prefill=1, decode=1)
    plant.run(1200, rate=0.1, prompt=320, output=20)
    assert plant.targets == (1, 1)
    assert max(p for p, _ in plant.targets_seen) == 1
    assert sum("unattainable" in w for w in plant.decisions[-1].warnings) == 1


def test_a_change_by_somebody_else_is_reported_and_undone():
    plant = Plant(config(), prefill=2, decode=2)
    plant.run(300, rate=3)
    decided = plant.targets[0]
    seen = plant.observe()
    changed = replace(seen, prefill=replace(seen.prefill, ready=decided + 3, target=decided + 3))
    state, decision = decide(plant.state, changed, plant.now + 5)
    assert decision.targets[Role.PREFILL] == decided
    assert decision.warnings == (f"prefill pool was set to {decided + 3} by somebody else, not {decided}",)
    _, decision = decide(state, replace(seen, prefill=replace(seen.prefill, target=decided)), plant.now + 10)
    assert decision.warnings == ()


# ---- zero and back


def test_zero_and_back_wakes_both_pools():
    policy = config(prefill=PoolSettings(0, 4), decode=PoolSettings(0, 4, max_num_seqs=64))
    plant = Plant(policy, prefill=2, decode=2)
    plant.run(100, rate=1)
    plant.run(600)
    assert plant.targets == (0, 0)
    plant.run(2 * TICK_S, rate=1)
    assert plant.targets == (1, 1)
    assert plant.decisions[-1].pools[Role.DECODE].reason in ("wake", "steady")
    plant.run(60)
    assert plant.counters.running == 0


def test_one_request_wakes_one_replica_however_old_the_news_of_it_is():
    """Routers tell of their queue now and then: the same wait is seen again after the replica has come."""
    state = initial(config(prefill=PoolSettings(0, 4), decode=PoolSettings(0, 4)))
    waits = {"requests": {"started": 1.0}, "queue_depth": 1.0, "oldest_wait_s": 10.0}
    targets = []
    for tick, ready in enumerate((0, 0, 1, 1), 1):
        starting = 1 if tick == 2 else 0
        pool = PoolLoad(ready, starting)
        state, decision = decide(state, observed(pool, pool, **waits), TICK_S * tick)
        targets.append(tuple(decision.targets.values()))
    assert set(targets) == {(1, 1)}


# ---- feedback


def test_misses_beyond_what_demand_explains_add_a_replica():
    """The queueing formula believes in an even load; an uneven one misses, and feedback makes room."""
    state, done = initial(config()), 0.0
    for tick in range(1, 80):
        done += 20
        requests = {
            "started": done,
            "started_prompt_tokens": done * 1000,
            "outcome{done}": done,
            "good": done * 0.8,
            "missed": done * 0.2,
            "missed_stage{prefill_queue}": done * 0.2,
            "served": done,
            "served_prompt_tokens": done * 1000,
            "computed_tokens{prefill}": done * 1000,
            "prefill_computed_tokens_squared": done * 1e6,
            "prefill_legs": done,
            "output_tokens": done * 10,
        }
        load = PoolLoad(2, busy_s=done * 0.25, steps=done, sequence_steps=0.0, prompt_tokens=done * 1000)
        state, decision = decide(state, observed(load, PoolLoad(1), requests=requests), TICK_S * tick)
    assert decision.targets[Role.PREFILL] > 2
    assert any(state.pools[Role.PREFILL].factor > f for f in (1.2,))


def test_an_over_sized_pool_shrinks_while_all_is_well():
    plant = Plant(config(), prefill=8, decode=8)
    plant.run(900, rate=4, prompt=2000, output=100)
    assert plant.counters.attainment == 1.0
    assert plant.targets[0] <= 4
    assert plant.targets[1] <= 3


def test_the_slo_is_kept_at_a_steady_load():
    plant = Plant(config())
    plant.run(400, rate=7, prompt=2000, output=100)
    before = plant.counters.copy()
    plant.run(1200, rate=7, prompt=2000, output=100)
    assert plant.counters.since(before).attainment >= 0.95
    assert plant.targets[0] <= 6


# ---- any order of anything


def any_load(rng: random.Random) -> PoolLoad:
    def maybe(high: float) -> float | None:
        return rng.choice([None, 0.0, rng.uniform(0, high), high, math.nan, -1.0])

    return PoolLoad(
        ready=rng.randrange(12),
        starting=rng.randrange(5),
        draining=rng.randrange(3),
        target=rng.choice([None, rng.randrange(12)]),
        busy_s=maybe(1e6),
        steps=maybe(1e6),
        sequence_steps=maybe(1e6),
        prompt_tokens=maybe(1e9),
        running=maybe(1e4),
        waiting=maybe(1e4),
        queued_prompt_tokens=maybe(1e8),
        kv_used_ratio=maybe(1.0),
    )


def any_observation(rng: random.Random) -> Observation:
    keys = ("started", "started_prompt_tokens", "outcome{done}", "good", "missed", "served", "output_tokens")
    more = ("missed_stage{prefill_queue}", "computed_tokens{prefill}", "prefill_legs", "used{tpot:inf}")
    requests = {key: rng.uniform(0, 1e7) for key in (*keys, "served_prompt_tokens", *more) if rng.random() < 0.7}
    return Observation(
        prefill=any_load(rng),
        decode=any_load(rng),
        requests=requests if rng.random() < 0.9 else None,
        queue_depth=rng.choice([0.0, rng.uniform(0, 1e5), None]),
        oldest_wait_s=rng.choice([0.0, rng.uniform(0, 1e4)]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_bounds_and_budget_hold_whatever_is_observed(seed):
    rng = random.Random(seed)
    least_p, least_d, cost_p, cost_d = rng.randrange(4), rng.randrange(4), rng.randint(1, 2), rng.randint(1, 4)
    budget = rng.choice([None, rng.randint(18, 30)])
    policy = config(
        prefill=PoolSettings(least_p, least_p + 4, accelerators=cost_p),
        decode=PoolSettings(least_d, least_d + 6, accelerators=cost_d),
        accelerators_max=budget,
        upscale_delay_s=rng.choice([0, 10]),
    )
    state = initial(policy)
    for tick in range(1, 30):
        state, decision = decide(state, any_observation(rng), tick * TICK_S)
        p, d = decision.targets[Role.PREFILL], decision.targets[Role.DECODE]
        assert least_p <= p <= least_p + 4
        assert least_d <= d <= least_d + 6
        if budget is not None:
            assert p * cost_p + d * cost_d <= budget
        assert all(pool.why and pool.reason in REASONS for pool in decision.pools.values())
