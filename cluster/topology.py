"""The resolved topology of a configuration: replicas, bundles, ranks, ports, memory and pairs. Pure.

Memory of a GPU is divided as the planner does (cluster/planner/capacity.py); on CPU a rank's KV space is
`engine.cpu.kvcache_gib`. Concurrency is counted at `max_model_len`, the worst case: real sequences are shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import ConfigError, UserError
from cluster.layout import ReplicaLayout
from cluster.messages import Role
from cluster.perf.hardware import Hardware, hardware
from cluster.perf.roofline import RooflineTimes
from cluster.planner.capacity import GIB, EngineLimits, memory_budget, slo_batch_cap
from cluster.preflight import Preflight, memory_utilization, whole_number
from kv_transfer.heads import heads_of, reads
from kv_transfer.settings import PORTS_PER_DP_RANK, ports_needed

CPU_RANK = "CPU rank"
CPU_MAX_NUM_SEQS = 256
# The connector renews a lease every sixth of it, in whole seconds.
RENEWALS_PER_LEASE = 6


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """KV of one replica. `space_bytes` is None where it is not known before the engine runs.

    Attributes:
        bytes_per_token_per_rank: on one GPU (or CPU rank).
        bytes_per_token: over all ranks; more than the model's own where ranks hold copies of a KV head.
        weights_bytes_per_rank: None where they are quantized in a way that is not sized here.
        sequences: at `max_model_len`, from memory.
        slo_sequences: largest decode batch at that length whose step keeps the TPOT; None without a hardware model.
        limit: which of them binds.
    """

    bytes_per_token_per_rank: int
    bytes_per_token: int
    weights_bytes_per_rank: int | None
    space_bytes: int | None = None
    blocks: int | None = None
    tokens: int | None = None
    sequences: int | None = None
    slo_sequences: int | None = None
    max_num_seqs: int | None = None
    concurrency: int | None = None
    limit: str | None = None


@dataclass(frozen=True, slots=True)
class PoolTopology:
    role: Role
    replicas_min: int
    replicas_max: int
    replicas_start: int
    layout: ReplicaLayout
    kv_heads_per_rank: int
    memory: PoolMemory
    ports_per_replica: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything `pdserve check` shows. `accelerators`: type -> (at the minima, at the maxima)."""

    pools: Mapping[Role, PoolTopology]
    accelerators: Mapping[str, tuple[int, int]]
    pairs: tuple[int, int]
    sources: Mapping[int, Mapping[int, list[int]]]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Machine:
    """What is there to run on. None: not known.

    Attributes:
        accelerators: type -> count, of the whole cluster.
        cores, memory_bytes: of this machine; only engines on CPU use them.
    """

    accelerators: Mapping[str, int] | None = None
    cores: int | None = None
    memory_bytes: int | None = None


def topology(facts: Preflight, machine: Machine) -> Topology:
    """Resolve a configuration that passed `preflight`.

    Raises:
        ConfigError: the weights do not fit, or the KV space holds not one sequence of `max_model_len`.
    """
    pools = {role: _pool(facts, role) for role in facts.layouts}
    accelerators: dict[str, tuple[int, int]] = {}
    for pool in pools.values():
        name = pool.layout.accelerator_type or ("GPU" if pool.layout.uses_gpu else CPU_RANK)
        low, high = accelerators.get(name, (0, 0))
        each = pool.layout.accelerators
        accelerators[name] = (low + each * pool.replicas_min, high + each * pool.replicas_max)
    pairs, sources = (0, 0), {}
    if Role.PREFILL in pools:
        prefill, decode = pools[Role.PREFILL], pools[Role.DECODE]
        pairs = (prefill.replicas_min * decode.replicas_min, prefill.replicas_max * decode.replicas_max)
        sources = head_sources(facts)
    warnings = list(_warnings(facts, pools, accelerators, machine))
    return Topology(pools, accelerators, pairs, sources, warnings)


def head_sources(facts: Preflight) -> dict[int, dict[int, list[int]]]:
    """Decode rank -> prefill rank -> KV heads read from it. A latent cache is one head that every rank holds."""
    p, d = (facts.config.pool(role).layout.tp for role in (Role.PREFILL, Role.DECODE))
    total = 1 if facts.shape.latent else facts.shape.kv_heads
    found: dict[int, dict[int, list[int]]] = {}
    for read in reads(total, p, d):
        found.setdefault(read.decode_rank, {}).setdefault(read.prefill_rank, []).append(read.head)
    return found


def _pool(facts: Preflight, role: Role) -> PoolTopology:
    config, pool = facts.config, facts.config.pool(role)
    total = 1 if facts.shape.latent else facts.shape.kv_heads
    return PoolTopology(
        role=role,
        replicas_min=pool.replicas.min,
        replicas_max=pool.replicas.max,
        replicas_start=pool.replicas.start,
        layout=facts.layouts[role],
        kv_heads_per_rank=len(heads_of(0, total, pool.layout.tp)),
        memory=_memory(facts, role),
        ports_per_replica=ports_needed(config.pool(role).layout),
    )


def _memory(facts: Preflight, role: Role) -> PoolMemory:
    config, shape = facts.config, facts.shape
    pool = config.pool(role)
    if role in facts.specs:
        return _simulated_memory(facts, role)
    tp, pp = pool.layout.tp, pool.layout.pp
    args = {**config.engine.args, **pool.engine_args}
    per_rank = shape.kv_bytes_per_token(tp, pp, facts.kv_dtype)
    weights = _weights_bytes_per_rank(facts, tp * pp)
    known = PoolMemory(per_rank, per_rank * tp * pp, weights)
    device = _device(pool.accelerator)
    if not facts.on_cpu and (device is None or weights is None):
        return known
    on_gpu = not facts.on_cpu and device is not None
    default_seqs = EngineLimits().max_num_seqs if on_gpu else CPU_MAX_NUM_SEQS
    max_num_seqs = whole_number(config, role, "max_num_seqs") or default_seqs
    block_bytes = per_rank * facts.block_size
    if override := whole_number(config, role, "num_gpu_blocks_override"):
        space = override * block_bytes
    elif explicit := whole_number(config, role, "kv_cache_memory_bytes"):
        space = explicit
    elif on_gpu:
        assert device is not None
        space = _gpu_space(facts, role, device, args)
    else:
        space = round(config.engine.cpu.kvcache_gib * GIB)
    blocks = space // block_bytes
    tokens = blocks * facts.block_size
    sequences = tokens // facts.max_model_len
    if sequences < 1:
        field = f"pools.{role}.layout" if on_gpu else "engine.cpu.kvcache_gib"
        raise ConfigError(
            field,
            f"{space / GIB:.2f} GiB of KV per rank holds {tokens} tokens, less than one sequence of "
            f"max_model_len {facts.max_model_len}",
            "lower model.max_model_len or raise tp" if on_gpu else "raise it or lower model.max_model_len",
        )
    cap = _slo_cap(facts, role, device) if on_gpu and role is Role.DECODE else None
    bounds = [(sequences, "KV memory"), (max_num_seqs, "max_num_seqs")]
    bounds += [] if cap is None else [(cap, "TPOT")]
    concurrency, limit = min(bounds)
    return PoolMemory(
        per_rank, per_rank * tp * pp, weights, space, blocks, tokens, sequences, cap, max_num_seqs, concurrency, limit
    )


def _simulated_memory(facts: Preflight, role: Role) -> PoolMemory:
    scheduler = facts.specs[role].scheduler
    tokens = scheduler.kv_blocks * scheduler.block_size_tokens
    sequences = tokens // scheduler.max_model_len
    ranks = facts.layouts[role].accelerators
    return PoolMemory(
        bytes_per_token_per_rank=scheduler.kv_bytes_per_token // ranks,
        bytes_per_token=scheduler.kv_bytes_per_token,
        weights_bytes_per_rank=facts.shape.weight_bytes(facts.specs[role].settings.weight_dtype) // ranks,
        blocks=scheduler.kv_blocks,
        tokens=tokens,
        sequences=sequences,
        max_num_seqs=scheduler.max_num_seqs,
        concurrency=min(sequences, scheduler.max_num_seqs),
        limit="KV memory" if sequences <= scheduler.max_num_seqs else "max_num_seqs",
    )


def _weights_bytes_per_rank(facts: Preflight, ranks: int) -> int | None:
    try:
        return facts.shape.weight_bytes() // ranks
    except UserError:
        return None


def _device(accelerator: str | None) -> Hardware | None:
    if accelerator is None:
        return None
    try:
        return hardware(accelerator)
    except UserError:
        return None


def _gpu_space(facts: Preflight, role: Role, device: Hardware, args: Mapping[str, Any]) -> int:
    config, defaults = facts.config, EngineLimits()
    limits = EngineLimits(
        utilization=memory_utilization(config, role) or defaults.utilization,
        block_tokens=facts.block_size,
        max_batched_tokens=whole_number(config, role, "max_num_batched_tokens") or defaults.max_batched_tokens,
        max_num_seqs=whole_number(config, role, "max_num_seqs") or defaults.max_num_seqs,
        cuda_graphs=not args.get("enforce_eager", False),
    )
    layout = config.pool(role).layout
    quantization = args.get("quantization")
    weight_dtype = quantization if quantization in ("fp8", "int8", "mxfp4") else None
    try:
        return memory_budget(facts.shape, device, layout.tp, layout.pp, weight_dtype, limits).kv_pool_bytes
    except UserError as e:
        raise ConfigError(f"pools.{role}.layout", str(e)) from None


def _slo_cap(facts: Preflight, role: Role, device: Hardware | None) -> int | None:
    assert device is not None
    layout = facts.config.pool(role).layout
    times = RooflineTimes(facts.shape, device, layout.tp, layout.pp, kv_dtype=facts.kv_dtype)
    return slo_batch_cap(times, facts.max_model_len, facts.config.slo.tpot_ms / 1e3)


def _warnings(
    facts: Preflight, pools: Mapping[Role, PoolTopology], accelerators: Mapping[str, tuple[int, int]], machine: Machine
) -> Iterator[str]:
    config = facts.config
    budget = config.autoscaling.accelerators_max
    most = sum(high for _, high in accelerators.values())
    if budget is not None and most > budget:
        yield (
            f"the pools' maxima need {most} accelerators, autoscaling.accelerators_max is {budget}: "
            "both pools cannot be at their maximum at once"
        )
    if machine.accelerators is not None:
        yield from _beyond_cluster(accelerators, machine.accelerators)
    for role, pool in pools.items():
        if config.pool(role).layout.dp > 1 and not facts.shape.experts:
            yield f"pools.{role}.layout.dp: attention-DP ranks pay off in mixture-of-experts models; use replicas"
        if pool.memory.weights_bytes_per_rank is None and not facts.on_cpu:
            yield (
                f"pools.{role}: weights of {facts.shape.name} ({facts.shape.dtype}) are not sized here: "
                "what fits a GPU is known at start"
            )
        if pool.memory.slo_sequences == 0:
            yield f"pools.{role}: one sequence of {facts.max_model_len} tokens already misses slo.tpot_ms"
    kv = config.kv_transfer
    wanted = sum(pool.ports_per_replica * pool.replicas_max for pool in pools.values())
    if wanted > kv.port_max - kv.port_min + 1:
        yield (
            f"all replicas on one node would need {wanted} ports, "
            f"[kv_transfer.port_min, port_max] has {kv.port_max - kv.port_min + 1}"
        )
    if kv.lease_s < 2 * RENEWALS_PER_LEASE and not config.colocated:
        yield f"kv_transfer.lease_s: {kv.lease_s:g} leaves a second or less between renewals; use 12 or more"
    if facts.on_cpu and config.engine.kind == "vllm":
        yield from _beyond_this_machine(config, pools, machine)


def _beyond_cluster(accelerators: Mapping[str, tuple[int, int]], there: Mapping[str, int]) -> Iterator[str]:
    for name, (low, high) in accelerators.items():
        if name == CPU_RANK:
            continue
        count = there.get(name, 0)
        if low > count:
            yield f"the pools' minima need {low} x {name}, the cluster has {count}: replicas will wait for nodes"
        elif high > count:
            yield f"the pools' maxima need {high} x {name}, the cluster has {count}"


def _beyond_this_machine(config: ClusterConfig, pools: Mapping[Role, PoolTopology], machine: Machine) -> Iterator[str]:
    ranks = sum(pool.layout.accelerators * pool.replicas_max for pool in pools.values())
    if machine.memory_bytes is not None:
        space = round(ranks * config.engine.cpu.kvcache_gib * GIB)
        if space > machine.memory_bytes:
            yield (
                f"KV space of all CPU ranks at the maxima is {space / GIB:.1f} GiB, this machine has "
                f"{machine.memory_bytes / GIB:.1f} GiB"
            )
    threads = ranks * config.engine.cpu.threads
    if machine.cores is not None and threads > machine.cores:
        yield f"CPU engines at the maxima have {threads} threads, this machine has {machine.cores} cores"


__all__ = ["PORTS_PER_DP_RANK", "Machine", "PoolMemory", "PoolTopology", "Topology", "head_sources", "topology"]
