"""Simulated fleets follow the policy, and the same policy decides the same under Serve's contexts."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest

from cluster.autoscale_report.baselines import MeanLatency, QueueLength, scheduled, static
from cluster.autoscale_report.compare import key_figures
from cluster.autoscale_report.oracle import cheapest
from cluster.autoscaling.messages import Observation, PoolLoad, Settings
from cluster.autoscaling.serve_policy import GoodputPolicy
from cluster.config import parse
from cluster.goodput.feed import router_stats
from cluster.messages import Role
from cluster.sim.fleet import Fleet, Options
from cluster.sim.scaling import GoodputDriver, Scaler
from cluster.workload.arrival import Arrival

with warnings.catch_warnings():
    # Ray's own import warns about pydantic.
    warnings.simplefilter("ignore")
    from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
    from ray.serve.autoscaling_policy import _apply_autoscaling_config, replica_queue_length_autoscaling_policy
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

CONFIG = {
    "name": "sim",
    "slo": {"ttft_ms": 1000, "tpot_ms": 50},
    "engine": {
        "kind": "simulated",
        "simulated": {
            "block_size_tokens": 64,
            "kv_blocks": 4000,
            "max_num_seqs": 64,
            "linear": {"fixed_ms": 20, "per_sequence_ms": 0.5, "per_prefill_token_us": 200},
        },
    },
    "pools": {
        "prefill": {"replicas": {"min": 1, "max": 6, "initial": 1}},
        "decode": {"replicas": {"min": 1, "max": 6, "initial": 1}},
    },
    "autoscaling": {"policy": "goodput", "accelerators_max": 8, "startup_s": 20},
}


def arrivals(rate_per_s: float, until_s: float, prompt=1000, output=60, seed=0, start_s=0.0) -> list[Arrival]:
    rng, at_s, made = random.Random(seed), start_s, []
    while (at_s := at_s + rng.expovariate(rate_per_s)) < until_s:
        made.append(Arrival(at_s, ((len(made) + 1 + seed * 100_000, prompt),), output))
    return made


def fleet_with(config: dict, loads: list[Arrival]) -> Fleet:
    fleet = Fleet(parse(config), Options(keep_itl=False))
    for arrival in loads:
        fleet.kernel.at(arrival.at_s, fleet.arrive, arrival)
    return fleet


def scaled(config: dict, loads: list[Arrival], end_s: float, startup_s=20.0):
    fleet = fleet_with(config, loads)
    driver = GoodputDriver(Settings.from_config(fleet.config))
    seen: list[tuple[float, Observation]] = []

    def policy(observation: Observation, now: float):
        seen.append((now, observation))
        return driver(observation, now)

    scaler = Scaler(fleet, policy, interval_s=5.0, startup_s=startup_s, end_s=end_s)
    fleet.kernel.run()
    return fleet, scaler, driver, seen


def test_a_fleet_grows_with_its_load_and_shrinks_after_it():
    fleet, scaler, driver, _ = scaled(CONFIG, arrivals(9, 200), end_s=600)
    assert scaler.log.peak[Role.PREFILL] >= 3
    assert scaler.log.peak_accelerators <= 8
    assert driver.decisions[-1][1].targets == {Role.PREFILL: 1, Role.DECODE: 1}
    assert fleet.counters.running == 0
    assert fleet.counters.get("outcome", "done") == fleet.counters.started


def test_zero_and_back_serves_the_first_request():
    config = CONFIG | {"pools": {p: {"replicas": {"min": 0, "max": 3, "initial": 1}} for p in ("prefill", "decode")}}
    loads = [*arrivals(1, 30), *arrivals(1, 540, seed=1, start_s=500)]
    fleet, scaler, _, _ = scaled(config, loads, end_s=600)
    sizes = [tuple(targets.values()) for _, targets in scaler.log.changes]
    assert (0, 0) in sizes
    assert min(sizes[-1]) >= 1
    assert fleet.counters.get("outcome", "done") == fleet.counters.started


def test_what_starts_and_what_drains_is_paid_for():
    fleet = fleet_with(CONFIG, [Arrival(1.0, ((1, 500),), 3000)])
    plan = scheduled([(0.0, {Role.PREFILL: 1, Role.DECODE: 2}), (50.0, {Role.PREFILL: 1, Role.DECODE: 1})])
    scaler = Scaler(fleet, plan, interval_s=5.0, startup_s=30.0, end_s=100.0)
    fleet.kernel.run()
    assert scaler.log.held_s[Role.PREFILL] == pytest.approx(100)
    assert scaler.log.held_s[Role.DECODE] == pytest.approx(5 + 2 * 45 + 50, abs=5.1)
    assert scaler.log.reversals(Role.DECODE) == 1


class Metrics:
    """Contexts of Serve that tell what an observation tells. All totals are on one replica that never leaves."""

    def __init__(self) -> None:
        self.ids = {
            name: [ReplicaID(f"{name}{i}", DeploymentID(name, "sim")) for i in range(20)]
            for name in ("router", "prefill", "decode")
        }

    def contexts(self, seen: Observation, now: float) -> dict:
        draining = {role: load.draining for role, load in seen.pools.items()}
        router = router_stats(
            seen.requests, queue_depth=seen.queue_depth, oldest_wait_s=seen.oldest_wait_s, draining=draining
        )
        made = [self._context("router", 1, 1, router, now)]
        for role, load in seen.pools.items():
            row = {
                "busy_s": load.busy_s,
                "steps": load.steps,
                "sequence_steps": load.sequence_steps,
                "prompt_tokens": load.prompt_tokens,
                "running": load.running,
                "waiting": load.waiting,
                "queued_prefill_tokens": load.queued_prompt_tokens,
                "kv_used_blocks": load.kv_used_ratio,
                "kv_total_blocks": 1.0,
            }
            made.append(self._context(role.value, load.ready, load.ready + load.starting, row, now))
        return {c.deployment_id: c for c in made}

    def _context(self, name: str, ready: int, target: int, row: dict, now: float) -> AutoscalingContext:
        ids = self.ids[name][:ready]
        raw: dict = {}
        for metric, value in row.items():
            raw[metric] = {r: [TimeStampedValue(now, value if i == 0 else 0.0)] for i, r in enumerate(ids)}
        return AutoscalingContext(
            deployment_id=DeploymentID(name, "sim"),
            deployment_name=name,
            app_name="sim",
            current_num_replicas=ready,
            target_num_replicas=target,
            running_replicas=ids,
            total_num_requests=0,
            total_queued_requests=0,
            aggregated_metrics={},
            raw_metrics=raw,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=6,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now,
            config=None,
        )


def test_serve_and_simulator_decide_alike():
    loads = [
        *arrivals(2, 150),
        *arrivals(8, 260, seed=1, start_s=150),
        *arrivals(4, 500, output=600, seed=2, start_s=260),
    ]
    _, _, driver, seen = scaled(CONFIG, loads, end_s=500)
    policy, metrics = GoodputPolicy(CONFIG, publish=False), Metrics()
    live = []
    for now, observation in seen:
        targets, _ = policy(metrics.contexts(observation, now))
        live.append({Role(key.name): n for key, n in targets.items()})
    assert live == [decision.targets for _, decision in driver.decisions]
    assert len({tuple(t.values()) for t in live}) >= 4


def test_the_queue_length_baseline_is_serves_default():
    """The same ongoing requests give the same sizes as Serve's own policy with its own delays."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=9, target_ongoing_requests=4)
    serves = _apply_autoscaling_config(replica_queue_length_autoscaling_policy)
    ours = QueueLength({Role.DECODE: (1, 9)}, {Role.DECODE: 4.0}, look_back_s=1.0)
    rng, size, state, differences = random.Random(7), 2, {}, 0
    ongoing = 8.0
    for tick in range(600):
        now = 1e9 + 5.0 * tick
        if tick % 60 == 0:
            ongoing = float(rng.choice([1, 7, 9, 20, 33]))
        context = AutoscalingContext(
            deployment_id=DeploymentID("d", "a"),
            deployment_name="d",
            app_name="a",
            current_num_replicas=size,
            target_num_replicas=size,
            running_replicas=[],
            total_num_requests=ongoing,
            total_queued_requests=0,
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=9,
            policy_state=state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now,
            config=config,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.serve.autoscaling_policy.time.time", lambda now=now: now)
            wanted, state = serves(context)
        size = min(9, max(1, wanted))
        got = ours(Observation(decode=PoolLoad(2, running=ongoing)), now)
        differences += got[Role.DECODE] != size
    assert differences == 0


def test_mean_latency_moves_one_replica_at_a_time():
    fleet = fleet_with(CONFIG, arrivals(9, 150))
    policy = MeanLatency(
        fleet, {Role.PREFILL: (1, 6), Role.DECODE: (1, 6)}, high=dict.fromkeys(Role, 0.5), low=dict.fromkeys(Role, 0.1)
    )
    scaler = Scaler(fleet, policy, interval_s=5.0, startup_s=20.0, end_s=400.0)
    fleet.kernel.run()
    sizes = [targets[Role.PREFILL] for _, targets in scaler.log.changes]
    assert max(sizes) >= 3
    assert all(abs(b - a) <= 1 for a, b in itertools.pairwise(sizes))
    assert static(fleet)(None, 0.0) == {Role.PREFILL: 1, Role.DECODE: 1}


@pytest.mark.parametrize(("need", "most"), [((3, 2), (8, 8)), ((1, 1), (4, 4)), ((8, 8), (8, 8)), ((2, 6), (8, 8))])
def test_the_oracle_finds_the_smallest_size(need, most):
    asked = []

    def attainment(size):
        asked.append(size)
        return 1.0 if size[0] >= need[0] and size[1] >= need[1] else 0.5

    assert cheapest(attainment, most, 0.95, guess=(4, 4)) == need
    assert len(asked) == len(set(asked))


def test_the_oracle_takes_what_is_nearly_the_best_where_nothing_attains():
    size = cheapest(lambda s: min(0.8, 0.2 * min(s)), (9, 9), 0.95, guess=(1, 1))
    assert size == (4, 4)


def row(attainment: float, replica_h: float, reversals=0.0) -> dict:
    return {"attainment": attainment, "replica_h": replica_h, "reversals_per_h": reversals}


def test_key_figures_compare_at_equal_attainment():
    figures = key_figures(
        {
            "a": {
                "goodput": row(0.97, 10, 3),
                "queue length": row(0.96, 20),
                "mean latency": row(0.5, 5),
                "static": row(0.95, 16),
                "oracle": row(0.96, 9),
                "oracle, start-up": row(0.95, 9),
            },
            "b": {
                "goodput": row(0.80, 4),
                "queue length": row(0.85, 5),
                "mean latency": row(0.9, 8),
                "static": row(0.95, 8),
                "oracle": row(0.97, 2),
                "oracle, start-up": row(0.90, 2),
            },
        }
    )
    assert figures["attainment_min"] == 0.80
    assert figures["attainment_min_startup"] == 0.97
    assert figures["over_oracle_max"] == 2.0
    assert figures["reversals_per_h_max"] == 3
    assert figures["saved_vs_queue_length"] == round(1 - 14 / 25, 3)
    assert figures["saved_vs_queue_length_worst"] == 0.2
    assert (figures["saved_vs_mean_latency"], figures["saved_vs_mean_latency_workloads"]) == (0.5, 1)
