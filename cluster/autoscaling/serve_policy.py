"""The policy under Ray Serve's application-level autoscaling hook, in Serve's controller process.

Serve calls the policy object in its control loop with one context per deployment that has an autoscaling config;
`GoodputPolicy` turns their raw metrics into an `Observation`, asks `decide` every `interval_s`, and answers with
absolute targets. No I/O happens here: the latest decision is handed to a thread that publishes it.

Counters are summed over replicas by `Totals`, so a replica that leaves or restarts lowers nothing. `aggregated_metrics`
is a time-weighted mean and of no use for counters; the newest raw sample is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from cluster.autoscaling.messages import Decision, Observation, PoolLoad, Settings, StepCost, check_autoscaling
from cluster.autoscaling.policy import decide, initial
from cluster.autoscaling.serve_victims import LeastLoss
from cluster.config import ClusterConfig, parse
from cluster.goodput.accounting import Totals
from cluster.goodput.decisions import Publisher
from cluster.goodput.feed import REQUESTS, ROUTER_LOADS, WORKER_LOADS, WORKER_TOTALS
from cluster.messages import Role

log = logging.getLogger("ray.serve")

ROUTER = "router"
# Ten seconds between pushes, Serve's default, are too coarse: a request that wakes a pool would wait for the next one.
PUSH_S = 1.0
# Data older than this many push intervals is no data.
STALE_INTERVALS = 4


class GoodputPolicy:
    """Callable that Serve's controller makes once per application.

    Args (JSON, from `autoscaling_policy.policy_kwargs`):
        config: the ClusterConfig as a mapping.
        priors: step costs by pool from a performance model, each {step_s, per_sequence_s, per_prompt_token_s}.
        publish: whether decisions are published for `/metrics` and `pdserve status`.
    """

    def __init__(
        self, config: dict[str, Any], priors: dict[str, dict[str, float]] | None = None, publish: bool = True
    ) -> None:
        parsed = parse(config)
        self.settings = Settings.from_config(
            parsed, {Role(role): StepCost(**cost) for role, cost in (priors or {}).items()}
        )
        self._state = initial(self.settings)
        self._totals = {name: Totals() for name in (ROUTER, *(role.value for role in self.settings.pools))}
        self._decision: Decision | None = None
        self._decided_s = float("-inf")
        self._data_at_s: float | None = None
        self._publisher = Publisher(parsed.name) if publish else None
        self._least_loss: LeastLoss | None = None

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], None]:
        """Targets by deployment id. Never raises: an error holds what Serve has."""
        by_name = {ctx.deployment_name: (key, ctx) for key, ctx in contexts.items()}
        try:
            self._note_loads(contexts)
            targets = self._targets({name: ctx for name, (_, ctx) in by_name.items()})
        except Exception as e:
            log.exception("autoscaling: the policy failed; targets are held")
            self._tell_failure(e)
            targets = {}
        return {by_name[name][0]: n for name, n in targets.items() if name in by_name}, None

    def _tell_failure(self, e: Exception) -> None:
        """Once, where no decision was ever made: the age of its data is what alerts on an autoscaler that holds."""
        if self._decision is None and self._data_at_s is None:
            now = self._data_at_s = time.time()
            if self._publisher is not None:
                warning = f"the policy fails: {type(e).__name__}: {e}"
                nothing: dict[str, Any] = {"pools": {}, "figures": {}}
                self._publisher.publish({"at_s": now, "data_at_s": now, "warnings": [warning], **nothing})

    def _note_loads(self, contexts: Mapping[Any, Any]) -> None:
        """For the choice of which replicas leave, should this loop make a pool smaller."""
        if self._least_loss is None:
            from ray.serve._private.deployment_scheduler import DeploymentScheduler

            self._least_loss = LeastLoss()
            self._least_loss.install(DeploymentScheduler)
        for key, ctx in contexts.items():
            if ctx.deployment_name != ROUTER:
                self._least_loss.note(key, self._newest(ctx, ctx.current_time or time.time()))

    def _targets(self, contexts: dict[str, Any]) -> dict[str, int]:
        missing = [role.value for role in self.settings.pools if role.value not in contexts]
        if missing:
            return {}
        now = next(iter(contexts.values())).current_time or time.time()
        if now - self._decided_s >= self.settings.interval_s:
            seen = self.observe(contexts, now)
            before = self._decision
            self._state, self._decision = decide(self._state, seen, now)
            self._decided_s = now
            if self._state.seen is not None or self._data_at_s is None:
                # Without any data yet: since when it has been looked for.
                self._data_at_s = now
            self._say(before, self._decision, seen)
            if self._publisher is not None:
                self._publisher.publish(summary(self._decision, seen, now, self._data_at_s))
        assert self._decision is not None
        return {role.value: pool.target for role, pool in self._decision.pools.items()}

    def observe(self, contexts: Mapping[str, Any], now: float) -> Observation:
        """What the contexts of one control loop tell. Metrics that are too old count as missing."""
        router = contexts.get(ROUTER)
        requests: dict[str, float] | None = None
        loads: dict[str, float] = {}
        if router is not None:
            fresh = self._newest(router, now)
            self._add_totals(ROUTER, router, fresh, REQUESTS)
            # One router without data makes the sum of all routers unknown.
            if fresh and len(fresh) == len(router.running_replicas):
                requests = {k.removeprefix(REQUESTS): v for k, v in self._totals[ROUTER].sum().values.items()}
                for name in ROUTER_LOADS:
                    values = [row.get(name, 0.0) for row in fresh.values()]
                    loads[name] = sum(values) if name == "queue_depth" else max(values)
        pools = {
            role: self._pool(contexts[role.value], role, now, int(loads.get(f"draining_{role.value}", 0)))
            for role in self.settings.pools
        }
        return Observation(
            decode=pools[Role.DECODE],
            prefill=pools.get(Role.PREFILL),
            requests=requests,
            queue_depth=loads.get("queue_depth"),
            oldest_wait_s=loads.get("oldest_wait_s"),
        )

    def _pool(self, ctx: Any, role: Role, now: float, draining: int) -> PoolLoad:
        fresh = self._newest(ctx, now)
        self._add_totals(role.value, ctx, fresh, "")
        ready = len(ctx.running_replicas)
        known = len(fresh) == ready
        totals = self._totals[role.value].sum()
        load: dict[str, float | None] = dict.fromkeys(WORKER_LOADS)
        if known:
            load = {name: sum(row.get(name, 0.0) for row in fresh.values()) for name in WORKER_LOADS}
        blocks = load["kv_total_blocks"]
        # Before the first sample a total is unknown; a pool at zero keeps the totals of its gone replicas.
        seen = bool(totals.values)
        return PoolLoad(
            ready=ready,
            starting=max(0, ctx.target_num_replicas - ready),
            draining=draining,
            target=ctx.target_num_replicas,
            busy_s=totals.get("busy_s") if seen else None,
            steps=totals.get("steps") if seen else None,
            sequence_steps=totals.get("sequence_steps") if seen else None,
            prompt_tokens=totals.get("prompt_tokens") if seen else None,
            running=load["running"],
            waiting=load["waiting"],
            queued_prompt_tokens=load["queued_prefill_tokens"],
            kv_used_ratio=(load["kv_used_blocks"] or 0.0) / blocks if blocks else None,
        )

    def _newest(self, ctx: Any, now: float) -> dict[str, dict[str, float]]:
        """Newest sample of every metric, by replica; replicas whose newest is too old are left out."""
        rows: dict[str, dict[str, float]] = {}
        alive = {_name(replica) for replica in ctx.running_replicas}
        oldest_s = now - max(30.0, STALE_INTERVALS * self.settings.interval_s)
        for metric, by_replica in (ctx.raw_metrics or {}).items():
            for replica, series in by_replica.items():
                if series and _name(replica) in alive and series[-1].timestamp >= oldest_s:
                    rows.setdefault(_name(replica), {})[metric] = float(series[-1].value)
        return rows

    def _add_totals(self, deployment: str, ctx: Any, rows: dict[str, dict[str, float]], prefix: str) -> None:
        totals = self._totals[deployment]
        for replica, row in rows.items():
            if prefix:
                mine = {k: v for k, v in row.items() if k.startswith(prefix)}
            else:
                mine = {k: row[k] for k in WORKER_TOTALS if k in row}
            if mine:
                totals.update(replica, mine)
        totals.keep_only(_name(replica) for replica in ctx.running_replicas)

    def _say(self, before: Decision | None, decision: Decision, seen: Observation) -> None:
        """Log every change with its reason."""
        for role, pool in decision.pools.items():
            was = before.pools[role].target if before is not None else seen.pools[role].target
            if pool.target != was:
                log.info("autoscaling: %s %s -> %d: %s (%s)", role.value, was, pool.target, pool.reason, pool.why)
        for warning in decision.warnings:
            if before is None or warning not in before.warnings:
                log.warning("autoscaling: %s", warning)


def summary(decision: Decision, seen: Observation, now: float, data_at_s: float) -> dict[str, Any]:
    """A decision as JSON, for `/metrics` and `pdserve status`.

    Args:
        now: when it was made, seconds of the controller's wall clock.
        data_at_s: when the policy last had usable data, same clock. A decision without data only holds: it is no data.
    """
    return {
        "at_s": now,
        "data_at_s": data_at_s,
        "pools": {
            role.value: {
                "target": pool.target,
                "ready": seen.pools[role].ready,
                "starting": seen.pools[role].starting,
                "draining": seen.pools[role].draining,
                "reason": pool.reason,
                "why": pool.why,
                "need": pool.need,
            }
            for role, pool in decision.pools.items()
        },
        "warnings": list(decision.warnings),
        "figures": dict(decision.figures),
    }


def _name(replica: Any) -> str:
    return str(getattr(replica, "unique_id", replica))


def application_policy(config: ClusterConfig, priors: Mapping[Role, StepCost] | None = None) -> dict[str, Any] | None:
    """`autoscaling_policy` of the application in a Serve config; None where autoscaling is off.

    Raises:
        ConfigError: the policy would refuse the config.
    """
    check_autoscaling(config)
    if config.autoscaling.policy == "off":
        return None
    kwargs: dict[str, Any] = {"config": config.model_dump(mode="json", exclude_unset=True)}
    if priors:
        kwargs["priors"] = {
            role.value: {
                "step_s": cost.step_s,
                "per_sequence_s": cost.per_sequence_s,
                "per_prompt_token_s": cost.per_prompt_token_s,
            }
            for role, cost in priors.items()
        }
    return {"policy_function": f"{__name__}:{GoodputPolicy.__name__}", "policy_kwargs": kwargs}


def deployment_autoscaling(config: ClusterConfig, role: Role | None) -> dict[str, Any] | None:
    """`autoscaling_config` of a pool's deployment, or of the router's (`role` None); None where it is off.

    Serve's own delays and factors are neutral: hysteresis is the policy's. The router has as many replicas as
    configured, but needs an autoscaling config for its metrics to reach the policy. Replicas push them every
    `metrics_interval_s`; the environment variable that is to replace this field has no effect on replicas in Ray 2.60.

    Raises:
        ConfigError: the policy would refuse the config. A Serve config written by hand fails to deploy by this.
    """
    if config.autoscaling.policy == "off":
        return None
    check_autoscaling(config)
    shared = {
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "metrics_interval_s": min(PUSH_S, config.autoscaling.interval_s),
    }
    if role is None:
        n = config.router.replicas
        return {"min_replicas": n, "max_replicas": n, "initial_replicas": n, **shared}
    replicas = config.pool(role).replicas
    return {
        "min_replicas": replicas.min,
        "max_replicas": replicas.max,
        "initial_replicas": replicas.start,
        **shared,
    }
