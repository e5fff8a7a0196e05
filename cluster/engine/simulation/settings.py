"""`engine.simulated` and `pools.*.simulated`: what a simulated engine is, from a ClusterConfig.

    engine:
      kind: simulated
      simulated: {times: roofline, hardware: H100, model: llama-3.1-8b, policy: chunked, max_num_seqs: 256}
    pools:
      decode: {simulated: {hardware: H200}}        # overrides, key by key

`engine.args` and `pools.*.engine_args` of vLLM count too where they mean the same (`VLLM_ARGUMENTS`), unless
`simulated` says otherwise. The live pools and the simulator build their engines from the same `EngineSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from cluster.config import ClusterConfig, Section
from cluster.engine.scheduler.config import Policy, Preemption, Reservation, SchedulerConfig, Speculation
from cluster.errors import ConfigError
from cluster.messages import Role, WorkerInfo
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import ModelShape, model_shape
from cluster.perf.profile import HostSlowdown, read_profile
from cluster.perf.roofline import RooflineTimes
from cluster.perf.times import LinearTimes, StepTimes
from cluster.perf.transfer import link_between

DEFAULT_MAX_MODEL_LEN = 131_072
DEFAULT_KV_BLOCKS = 32_768
DEFAULT_KV_BYTES_PER_TOKEN = 131_072
# What an engine keeps for activations, graphs and the runtime beside weights and KV.
RUNTIME_BYTES = 6 * 2**30
MEMORY_UTILIZATION = 0.92
VLLM_ARGUMENTS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size_tokens",
    "enable_prefix_caching": "prefix_caching",
}


class LinearSettings(Section):
    """See cluster/perf/times.py."""

    fixed_ms: float = Field(5.0, ge=0)
    per_sequence_ms: float = Field(0.086, ge=0)
    nominal_context_tokens: int = Field(2000, ge=1)
    per_prefill_token_us: float = Field(47.0, ge=0)
    transfer_gb_per_s: float = Field(25.0, gt=0)
    transfer_fixed_ms: float = Field(1.0, ge=0)

    def times(self) -> LinearTimes:
        return LinearTimes(
            self.fixed_ms / 1e3,
            self.per_sequence_ms / 1e3,
            self.nominal_context_tokens,
            self.per_prefill_token_us / 1e6,
            self.transfer_gb_per_s * 1e9,
            self.transfer_fixed_ms / 1e3,
        )


class SpeculationSettings(Section):
    k: int = Field(4, ge=1, le=64)
    acceptance: float = Field(0.7, ge=0, lt=1)
    draft_cost_ratio: float = Field(0.05, ge=0)


class FaultSettings(Section):
    """Faults that an engine has from its start. The same can be switched on a running engine (`Faults`)."""

    transfer_failure_share: float = Field(0.0, ge=0, le=1, description="share of pulls that fail")
    slowdown: float = Field(1.0, gt=0, description="multiplies every step's time")
    stall_after_s: float | None = Field(None, ge=0, description="makes no step any more")
    die_after_s: float | None = Field(None, ge=0)
    kv_events_lost_share: float = Field(0.0, ge=0, le=1, description="KV event batches that no subscriber gets")
    kv_events_doubled_share: float = Field(0.0, ge=0, le=1, description="batches that subscribers get twice")
    kv_events_late_share: float = Field(0.0, ge=0, le=1, description="batches that come after the one that follows")


class HostSlowdownSettings(Section):
    """See cluster/perf/profile.py."""

    prefill: float = Field(0.0, ge=0)
    decode: float = Field(0.0, ge=0)

    def value(self) -> HostSlowdown:
        return HostSlowdown(self.prefill, self.decode)


class SimulatedSettings(Section):
    """
    Attributes:
        times: `linear`, `roofline` (hardware and model), or the path of a profile that `pdserve fit` wrote. A line and
            a profile are of a whole replica, with all its ranks; the roofline knows no data-parallel ranks.
        hardware, model, weight_dtype, kv_dtype, link: of the roofline; dtypes below 16 bits are quantization.
        kv_blocks, kv_bytes_per_token: default: what the roofline's device has left beside the weights.
        startup_s: from creation to ready.
        speed: simulated seconds per real second, of a live engine.
        host_slowdown: all engines share one host, as CPU engines of one machine do. Of the simulator alone; `pdserve
            fit --url` measures it.
        step_variation: quantiles of how many times as long as they should decode steps take, evenly spaced from the
            smallest to the largest; a factor is drawn every second. Of the simulator alone; `pdserve fit` measures it.
        token_ids: output tokens are drawn from these ids, bounds included: plain pieces of a byte-level vocabulary.
    """

    times: str = "linear"
    linear: LinearSettings = LinearSettings()
    hardware: str = "H100"
    model: str = "llama-3.1-8b"
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    link: Literal["nvlink", "rdma", "tcp"] = "rdma"
    kv_blocks: int | None = Field(None, ge=1)
    kv_bytes_per_token: int | None = Field(None, ge=1)
    policy: Policy = Policy.CHUNKED
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(8192, ge=1)
    max_model_len: int | None = Field(None, ge=2)
    block_size_tokens: int = Field(16, ge=1)
    prefix_caching: bool = True
    preemption: Preemption = Preemption.RECOMPUTE
    reservation: Reservation = Reservation.PAGED
    watermark: float = Field(0.0, ge=0, lt=1)
    swap_gb_per_s: float = Field(25.0, gt=0)
    speculation: SpeculationSettings | None = None
    startup_s: float = Field(0.0, ge=0)
    speed: float = Field(1.0, gt=0)
    host_slowdown: HostSlowdownSettings | None = None
    step_variation: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(None, min_length=1)
    token_ids: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (300, 1999)
    seed: int = 0
    faults: FaultSettings = FaultSettings()

    @model_validator(mode="after")
    def _consistent(self) -> SimulatedSettings:
        if self.token_ids[0] >= self.token_ids[1]:
            raise ValueError(f"token_ids {list(self.token_ids)}: the first must be below the last")
        if self.policy is Policy.CHUNKED and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "not every sequence could decode"
            )
        return self


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One pool's engine: what the scheduler needs, what a step costs, what others are told."""

    role: Role
    settings: SimulatedSettings
    scheduler: SchedulerConfig
    times: StepTimes
    tp: int
    pp: int
    dp: int
    accelerator_type: str | None
    model: str

    @property
    def accelerators(self) -> int:
        """Of one replica: one a rank."""
        return self.tp * self.pp * self.dp

    def info(self, worker_id: str, incarnation: str, node: str = "", **more: Any) -> WorkerInfo:
        s = self.scheduler
        return WorkerInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            role=self.role,
            block_size_tokens=s.block_size_tokens,
            kv_total_blocks=s.kv_blocks,
            kv_bytes_per_token=s.kv_bytes_per_token,
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
            max_model_len=s.max_model_len,
            tp=self.tp,
            pp=self.pp,
            accelerators=self.accelerators,
            accelerator_type=self.accelerator_type,
            node=node,
            fingerprint={
                "model": self.model,
                "block_size": s.block_size_tokens,
                "cache_dtype": self.settings.kv_dtype or "auto",
                "max_model_len": s.max_model_len,
                "tp": self.tp,
                "pp": self.pp,
                "connector": "simulated",
            },
            **more,
        )


def engine_spec(config: ClusterConfig, role: Role) -> EngineSpec:
    """The simulated engine of one pool.

    Raises:
        ConfigError: a key or value that cannot be used.
        UserError: a model that this layout or this device cannot hold.
    """
    pool = config.pool(role)
    settings = _settings(config, role)
    layout = pool.layout
    max_model_len = settings.max_model_len or config.model.max_model_len or DEFAULT_MAX_MODEL_LEN
    kv_blocks = settings.kv_blocks or DEFAULT_KV_BLOCKS
    kv_bytes = settings.kv_bytes_per_token or DEFAULT_KV_BYTES_PER_TOKEN
    times: StepTimes
    if settings.times == "linear":
        times = settings.linear.times()
    elif settings.times == "roofline":
        if layout.dp > 1:
            raise ConfigError(
                f"pools.{role.value}.layout.dp",
                f"{layout.dp}: the roofline knows no data-parallel ranks",
                "use as many replicas, or a profile of such a replica (simulated.times: FILE)",
            )
        shape, device = model_shape(settings.model), hardware(settings.hardware)
        times = RooflineTimes(
            shape,
            device,
            layout.tp,
            layout.pp,
            settings.weight_dtype,
            settings.kv_dtype,
            link_between(device, settings.link),
        )
        kv_bytes = settings.kv_bytes_per_token or shape.kv_bytes_per_token(1, 1, settings.kv_dtype)
        kv_blocks = settings.kv_blocks or _kv_blocks(shape, settings, layout.tp, layout.pp, role)
    else:
        times = read_profile(settings.times, layout.tp, layout.pp).times()
    speculation = settings.speculation
    scheduler = SchedulerConfig(
        kv_blocks=kv_blocks,
        policy=settings.policy,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size_tokens=settings.block_size_tokens,
        prefix_caching=settings.prefix_caching,
        preemption=settings.preemption,
        reservation=settings.reservation,
        watermark=settings.watermark,
        kv_bytes_per_token=kv_bytes,
        swap_bytes_per_s=settings.swap_gb_per_s * 1e9,
        speculation=Speculation(speculation.k, speculation.acceptance, speculation.draft_cost_ratio)
        if speculation
        else None,
    )
    accelerator = pool.accelerator or (settings.hardware if settings.times == "roofline" else None)
    return EngineSpec(role, settings, scheduler, times, layout.tp, layout.pp, layout.dp, accelerator, config.model.id)


def _settings(config: ClusterConfig, role: Role) -> SimulatedSettings:
    common, own = config.engine.simulated, config.pool(role).simulated
    vllm, pool_vllm = _of_vllm(config.engine.args), _of_vllm(config.pool(role).engine_args)
    try:
        return SimulatedSettings.model_validate({**vllm, **common, **pool_vllm, **own})
    except ValidationError as e:
        first = min(e.errors(include_url=False), key=lambda m: m["type"] != "extra_forbidden")
        loc = first["loc"]
        base = f"pools.{role.value}.simulated" if loc and loc[0] in own else "engine.simulated"
        path = ".".join([base, *(str(part) for part in loc)])
        if first["type"] == "extra_forbidden":
            raise ConfigError(path, "unknown key", "known keys: " + ", ".join(SimulatedSettings.model_fields)) from None
        message = first["msg"].removeprefix("Value error, ")
        problem = message if isinstance(first["input"], dict) else f"{first['input']!r}: {message.lower()}"
        raise ConfigError(path, problem) from None


def _of_vllm(args: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's own arguments that mean the same here, so that one file describes the live and the simulated cluster."""
    return {ours: args[theirs] for theirs, ours in VLLM_ARGUMENTS.items() if theirs in args}


def _kv_blocks(shape: ModelShape, settings: SimulatedSettings, tp: int, pp: int, role: Role) -> int:
    """Blocks that fit beside the weights, on the GPU that holds most."""
    device = hardware(settings.hardware)
    weights = shape.weight_bytes(settings.weight_dtype) / (tp * pp)
    room = device.memory_bytes * MEMORY_UTILIZATION - weights - RUNTIME_BYTES
    blocks = int(room // (shape.kv_bytes_per_token(tp, pp, settings.kv_dtype) * settings.block_size_tokens))
    if blocks < 1:
        raise ConfigError(
            f"pools.{role.value}.layout",
            f"{shape.name} takes {weights / 2**30:.1f} GiB a GPU at tp={tp} pp={pp}; {settings.hardware} has "
            f"{device.memory_bytes / 2**30:.1f} GiB, nothing is left for KV",
            "raise tp or pp, or quantize with weight_dtype",
        )
    return blocks
