"""What the autoscaling policy is told and what it answers. Plain data, shared by the live adapter and the simulator.

"Missing" and "zero" are different things here: a number that could not be measured is None, and None means hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.config import ClusterConfig, PoolConfig
from cluster.errors import ConfigError
from cluster.messages import Role, Slo


@dataclass(frozen=True, slots=True)
class StepCost:
    """What an engine's busy time is made of: seconds a step, a sequence in a step, a computed prompt token."""

    step_s: float
    per_sequence_s: float
    per_prompt_token_s: float


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Bounds of one pool.

    Attributes:
        accelerators: of one replica (tp x pp x dp).
        max_num_seqs: sequences that one replica runs at most; None: no bound known.
        prior: step cost from a performance model, believed until enough of it was measured.
    """

    min: int
    max: int
    accelerators: int = 1
    max_num_seqs: int | None = None
    prior: StepCost | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the policy is configured with. `prefill` None means colocated.

    Attributes:
        late_last: routers serve requests that are late already after those in time (`router.admission`).

    Raises:
        ConfigError: a combination that would flap or cannot be met.
    """

    slo: Slo
    decode: PoolSettings
    prefill: PoolSettings | None = None
    attainment: float = 0.95
    accelerators_max: int | None = None
    interval_s: float = 5.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 120.0
    look_back_s: float = 60.0
    min_samples: int = 20
    startup_s: float = 60.0
    late_last: bool = True

    def __post_init__(self) -> None:
        if self.downscale_delay_s < self.look_back_s:
            raise ConfigError(
                "autoscaling.downscale_delay_s",
                f"{self.downscale_delay_s:g} is below look_back_s {self.look_back_s:g}: pools would flap",
                f"use at least {self.look_back_s:g}",
            )
        floor = sum(pool.min * pool.accelerators for pool in self.pools.values())
        if self.accelerators_max is not None and floor > self.accelerators_max:
            raise ConfigError(
                "autoscaling.accelerators_max",
                f"{self.accelerators_max} cannot hold the minimum replicas, which need {floor}",
                "raise it or lower pools.*.replicas.min",
            )

    @property
    def pools(self) -> dict[Role, PoolSettings]:
        """Prefill first: the order in which ties are broken."""
        return (
            {Role.DECODE: self.decode}
            if self.prefill is None
            else {
                Role.PREFILL: self.prefill,
                Role.DECODE: self.decode,
            }
        )

    @classmethod
    def from_config(cls, config: ClusterConfig, priors: Mapping[Role, StepCost] | None = None) -> Settings:
        scaling, priors = config.autoscaling, priors or {}

        def pool(role: Role, of: PoolConfig) -> PoolSettings:
            seqs = of.engine_args.get("max_num_seqs", config.engine.args.get("max_num_seqs"))
            if seqs is not None and config.engine.kind == "vllm":
                seqs *= of.layout.dp  # vLLM's is of each data-parallel rank
            cost = of.layout.ranks
            return PoolSettings(of.replicas.min, of.replicas.max, cost, seqs, priors.get(role))

        prefill = config.pools.prefill
        return cls(
            slo=config.slo.to_slo(),
            decode=pool(Role.DECODE, config.pools.decode),
            prefill=None if prefill is None else pool(Role.PREFILL, prefill),
            attainment=config.slo.attainment,
            accelerators_max=scaling.accelerators_max,
            interval_s=scaling.interval_s,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            look_back_s=scaling.look_back_s,
            min_samples=scaling.min_samples,
            startup_s=scaling.startup_s,
            late_last=config.router.admission.late_last or config.router.admission.reject_unattainable,
        )


def check_autoscaling(config: ClusterConfig) -> None:
    """Refuse what the policy will refuse; nothing is checked where autoscaling is off.

    The policy itself is made in Serve's controller. That only logs an error and then sizes the pools by Serve's own
    rules, so whatever leads there has to ask first.

    Raises:
        ConfigError: see `Settings`.
    """
    if config.autoscaling.policy != "off":
        Settings.from_config(config)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool now. The totals are monotone over all its replicas, those gone included (see `LoadMeter`).

    Attributes:
        ready, starting, draining: replicas; all three hold accelerators.
        target: replicas that are asked for at present, by whomever; None where nobody knows.
        busy_s: replica-seconds spent in engine steps.
        steps: engine steps.
        sequence_steps: output tokens produced, i.e. generating sequences summed over the steps.
        prompt_tokens: prompt tokens computed.
        running, waiting: sequences in all engines now.
        queued_prompt_tokens: accepted and not computed yet.
        kv_used_ratio: used share of the KV blocks of the ready replicas.
    """

    ready: int
    starting: int = 0
    draining: int = 0
    target: int | None = None
    busy_s: float | None = None
    steps: float | None = None
    sequence_steps: float | None = None
    prompt_tokens: float | None = None
    running: float | None = None
    waiting: float | None = None
    queued_prompt_tokens: float | None = None
    kv_used_ratio: float | None = None

    @property
    def held(self) -> int:
        return self.ready + self.starting + self.draining


@dataclass(frozen=True, slots=True)
class Observation:
    """The cluster now.

    Attributes:
        requests: `GoodputCounters.values` summed over all routers, those gone included; None: source unhealthy.
        queue_depth, oldest_wait_s: requests that wait in the routers, and the longest wait; None: unknown.
    """

    decode: PoolLoad
    prefill: PoolLoad | None = None
    requests: Mapping[str, float] | None = None
    queue_depth: float | None = None
    oldest_wait_s: float | None = None

    @property
    def pools(self) -> dict[Role, PoolLoad]:
        return (
            {Role.DECODE: self.decode}
            if self.prefill is None
            else {
                Role.PREFILL: self.prefill,
                Role.DECODE: self.decode,
            }
        )


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """A pool's absolute target. `reason` is one word of `REASONS`, `why` the same with its figures."""

    target: int
    reason: str
    why: str
    need: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Targets for all pools. `warnings` are states that replicas cannot fix or that a person should see."""

    pools: dict[Role, PoolDecision]
    warnings: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def targets(self) -> dict[Role, int]:
        return {role: pool.target for role, pool in self.pools.items()}


REASONS = (
    "demand",  # arrivals at the entrance against measured capacity
    "queue",  # work that already waits
    "concurrency",  # sequences in the engines against what a step may hold
    "kv",  # KV blocks
    "misses",  # requests missed their SLO in this pool's stages although demand seemed covered
    "wake",  # from zero
    "idle",  # to the minimum
    "steady",  # within the hysteresis
    "delay",  # waiting for a delay to pass
    "budget",  # held back by the shared accelerators
    "maximum",  # the pool's max is less than it needs
    "minimum",  # the pool's min is more than it needs
    "no data",  # hold
)
