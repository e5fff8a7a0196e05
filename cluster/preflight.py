"""What must hold before anything is started: checked from the configuration and the model's `config.json` alone.

Both `pdserve check` and `pdserve serve` call `preflight`. It loads no weights and imports neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.autoscaling.messages import check_autoscaling
from cluster.config import ClusterConfig
from cluster.engine.simulation.settings import EngineSpec, engine_spec
from cluster.engine.vllm.arguments import RESERVED
from cluster.engine.vllm.environment import runs_on_cpu
from cluster.errors import ConfigError, UserError
from cluster.layout import ReplicaLayout, replica_layout
from cluster.messages import Role
from cluster.models.hf_config import hf_config
from cluster.models.resolve import SMOLLM2, SMOLLM2_PADDED, resolve
from cluster.perf.model_shape import ModelShape, from_config, model_shape
from kv_transfer.compatibility import Refusal, check_pair, configured

# The CPU attention kernel's block sizes, as the NIXL connector requires them.
CPU_BLOCK_MULTIPLE = 32
CPU_BLOCK_DEFAULT = 128
GPU_BLOCK_DEFAULT = 16
# Arguments of vLLM's engine that are counted with here.
WHOLE_NUMBERS = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
)
UTILIZATION = "gpu_memory_utilization"


class Incompatible(UserError):
    """The two pools cannot exchange KV. One line; `refusals` has every reason."""

    def __init__(self, refusals: list[Refusal]) -> None:
        self.refusals = refusals
        super().__init__(f"these pools cannot exchange KV: {'; also '.join(map(str, refusals))}")


@dataclass(frozen=True, slots=True)
class Preflight:
    """A configuration that can be started, as far as it can be known.

    Attributes:
        shape: of the model, or of the one that simulated engines stand for.
        max_model_len: tokens of prompt plus output.
        block_size: KV block, tokens.
        specs: simulated engines by pool; empty with real ones.
    """

    config: ClusterConfig
    shape: ModelShape
    on_cpu: bool
    layouts: Mapping[Role, ReplicaLayout]
    max_model_len: int
    block_size: int
    kv_dtype: str
    specs: Mapping[Role, EngineSpec] = field(default_factory=dict)


def preflight(config: ClusterConfig) -> Preflight:
    """Check pools, layouts and their compatibility.

    Raises:
        ConfigError: a value that cannot be used; the line has its path.
        Incompatible: prefill and decode cannot exchange KV; both values are named.
    """
    facts = _simulated(config) if config.engine.kind == "simulated" else _real(config)
    check_autoscaling(config)
    return facts


def _real(config: ClusterConfig) -> Preflight:
    hf = hf_config(config.model)
    try:
        shape = from_config(hf, name=config.model.id)
    except UserError as e:
        raise ConfigError("model.id", str(e)) from None
    if not config.colocated:
        _refuse(config, *(configured(config, role, hf) for role in (Role.PREFILL, Role.DECODE)))
    on_cpu = runs_on_cpu(config)
    layouts = {role: replica_layout(config, role, on_cpu=on_cpu) for role in roles(config)}
    for role in layouts:
        _layout_fits_model(config, role, shape)
    _budget(config, layouts)
    length = max_model_len(config, shape)
    args = {**config.engine.args, **config.pools.decode.engine_args}
    _arguments(config)
    default = CPU_BLOCK_DEFAULT if on_cpu else GPU_BLOCK_DEFAULT
    block = whole_number(config, Role.DECODE, "block_size") or default
    if on_cpu and not config.colocated and block % CPU_BLOCK_MULTIPLE:
        raise ConfigError(
            _argument_path(config, Role.DECODE, "block_size"),
            f"{block} is no multiple of {CPU_BLOCK_MULTIPLE}",
            f"on CPU a split needs blocks of a multiple of {CPU_BLOCK_MULTIPLE} tokens",
        )
    return Preflight(config, shape, on_cpu, layouts, length, block, kv_dtype(config, shape, args))


def _simulated(config: ClusterConfig) -> Preflight:
    """Simulated engines say themselves what they are; the served model only gives them a tokenizer."""
    resolve(config.model)
    specs = {role: engine_spec(config, role) for role in roles(config)}
    if not config.colocated:
        _refuse(config, *(specs[role].info("", "").fingerprint for role in (Role.PREFILL, Role.DECODE)))
    layouts = {role: replica_layout(config, role, on_cpu=True) for role in specs}
    _budget(config, layouts)
    decode = specs[Role.DECODE]
    shape = model_shape(decode.settings.model)
    return Preflight(
        config,
        shape,
        True,
        layouts,
        decode.scheduler.max_model_len,
        decode.scheduler.block_size_tokens,
        decode.settings.kv_dtype or shape.cache_dtype,
        specs,
    )


def _refuse(config: ClusterConfig, prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    refusals = check_pair(prefill, decode, tp_pairs=config.kv_transfer.tp_pairs)
    if refusals:
        raise Incompatible(refusals)


def roles(config: ClusterConfig) -> Iterator[Role]:
    if not config.colocated:
        yield Role.PREFILL
    yield Role.DECODE


def max_model_len(config: ClusterConfig, shape: ModelShape) -> int:
    """Raises ConfigError above the model's own context."""
    length = config.model.max_model_len or shape.max_context
    if length > shape.max_context:
        raise ConfigError("model.max_model_len", f"{length} is above the model's context of {shape.max_context} tokens")
    return length


def kv_dtype(config: ClusterConfig, shape: ModelShape, args: Mapping[str, Any]) -> str:
    """Type of the KV cache's values, by its bytes: any fp8 is `fp8`."""
    cache = str(args.get("kv_cache_dtype", "auto"))
    if cache != "auto":
        return "fp8" if cache.startswith("fp8") else cache
    if config.model.dtype != "auto":
        return config.model.dtype
    # vLLM computes a 32-bit checkpoint in 16 bits, and quantized weights leave the cache at 16 bits.
    return shape.dtype if shape.dtype in ("float16", "bfloat16") else "bfloat16"


def whole_number(config: ClusterConfig, role: Role, name: str) -> int | None:
    """One of `WHOLE_NUMBERS` as a pool's engines get it; None where it is left to vLLM.

    Raises:
        ConfigError: it is no whole number, or below 1.
    """
    value = {**config.engine.args, **config.pool(role).engine_args}.get(name)
    if value is None:
        return None
    try:
        number = int(value)
        whole = number == float(value) and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        path = _argument_path(config, role, name)
        raise ConfigError(path, f"{value!r} is no whole number", "write all its digits, without a unit")
    if number < 1:
        raise ConfigError(_argument_path(config, role, name), f"{number} is below the minimum 1")
    return number


def memory_utilization(config: ClusterConfig, role: Role) -> float | None:
    """Share of a GPU's memory that a pool's engines may take; None where it is left to vLLM.

    Raises:
        ConfigError: it is no number in (0, 1].
    """
    value = {**config.engine.args, **config.pool(role).engine_args}.get(UTILIZATION)
    if value is None:
        return None
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1 or isinstance(value, bool):
        path = _argument_path(config, role, UTILIZATION)
        raise ConfigError(path, f"{value!r} is no number in (0, 1]", "give a share of the GPU's memory, e.g. 0.9")
    return share


def _argument_path(config: ClusterConfig, role: Role, name: str) -> str:
    return f"pools.{role}.engine_args.{name}" if name in config.pool(role).engine_args else f"engine.args.{name}"


def _layout_fits_model(config: ClusterConfig, role: Role, shape: ModelShape) -> None:
    layout = config.pool(role).layout
    try:
        shape.check_layout(layout.tp, layout.pp)
    except UserError as e:
        field, _, problem = str(e).partition(": ")
        remedy = f"use `model.id: {SMOLLM2_PADDED}`" if config.model.id == SMOLLM2 else ""
        raise ConfigError(f"pools.{role}.layout.{field}", problem, remedy) from None


def _budget(config: ClusterConfig, layouts: Mapping[Role, ReplicaLayout]) -> None:
    budget = config.autoscaling.accelerators_max
    if budget is None:
        return
    least = sum(layout.accelerators * config.pool(role).replicas.min for role, layout in layouts.items())
    if least > budget:
        raise ConfigError(
            "autoscaling.accelerators_max",
            f"{budget} is below the {least} accelerators of the pools' minima",
            "raise it or lower pools.*.replicas.min",
        )


def _arguments(config: ClusterConfig) -> None:
    sources = [("engine.args", config.engine.args)]
    sources += [(f"pools.{role}.engine_args", config.pool(role).engine_args) for role in roles(config)]
    for path, args in sources:
        for name in RESERVED:
            if name in args:
                raise ConfigError(
                    f"{path}.{name}", "is set by pdserve", "use model:, pools.*.layout or kv_transfer: instead"
                )
    for role in roles(config):
        memory_utilization(config, role)
        for name in WHOLE_NUMBERS:
            whole_number(config, role, name)
