"""A pool's layout, as Ray has to see it: bundles, strategy and ranks of one replica. Pure.

    ranks            tp x pp x dp, one accelerator each; dp here are attention-DP ranks inside one replica (MoE
                     models), while more replicas are more engines
    one node         every layout without pipeline stages is one bundle on one node: tensor parallelism needs the
                     node's own links, and the engine starts its ranks as processes (executor "mp"), a single rank
                     inside its own. A rank that dies ends the engine and so the replica
    pipeline stages  one bundle per rank, so that stages may lie on several nodes (executor "ray"). As many as fit a
                     node stay on one; the engine sorts bundles by node, so that ranks of one stage are neighbours

A pool's `accelerator` is a type that Ray knows (`H100`: the bundle asks for GPUs of that type) or the name of a
custom resource (`prefill-card`: the bundle asks for one unit per rank; with `engine.device: gpu`, GPUs too).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import ClusterConfig, PoolConfig
from cluster.errors import ConfigError, UserError
from cluster.messages import Role
from cluster.perf.hardware import hardware

# `ray.util.accelerators` of Ray 2.60; a test compares the two.
_TYPES = """
    V100 P100 T4 P4 K80 A10G L4 L40S A100 A100-40G A100-80G H100 H200 H20 B200 B300 GB200 GB300 RTX-PRO-6000
    AMD-Instinct-MI100 AMD-Instinct-MI210 AMD-Instinct-MI250X-MI250 AMD-Instinct-MI300A AMD-Radeon-HD-7900
    AMD-Radeon-R9-200-HD-7900 Intel-GPU-Max-1100 Intel-GPU-Max-1550 Intel-GAUDI aws-neuron-core Ascend910B Ascend910B4
    TPU-V2 TPU-V3 TPU-V4 TPU-V5P TPU-V5LITEPOD TPU-V6E TPU-V7X MXC500 MXC550 FURIOSA_RNGD MOBILINT_ARIES
    MOBILINT_REGULUS M1 M1-Pro M1-Max M1-Ultra M2 M2-Pro M2-Max M2-Ultra M3 M3-Pro M3-Max Apple-Silicon
    """
RAY_ACCELERATOR_TYPES = frozenset(_TYPES.split())
# vLLM's executor of a single rank on GPUs. Named by its path: by its short name `uni` it is two processes on CPU. The
# second one polls for what the first computes: beside another engine on two cores, decode steps took 70% longer
# (docs/architecture.md).
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Ray's own amount: it marks the type of a node and is never used up.
TYPE_MARK = 0.001


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine rank and the bundle its accelerator comes from."""

    dp: int
    pp: int
    tp: int
    bundle: int


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """What one replica of a pool asks of Ray.

    Attributes:
        bundles: of its placement group; the replica's own process lives in the first.
        strategy: Ray's placement strategy.
        actor_resources: what the replica's own process takes of the first bundle.
        executor: vLLM's `distributed_executor_backend`; None for one rank on a GPU, where its own choice is good.
        accelerators: GPUs of one replica (CPU ranks without a GPU).
    """

    bundles: tuple[Mapping[str, float], ...]
    strategy: str
    actor_resources: Mapping[str, float]
    executor: str | None
    ranks: tuple[Rank, ...]
    accelerators: int
    accelerator_type: str | None
    uses_gpu: bool

    @property
    def gpus(self) -> int:
        return self.accelerators if self.uses_gpu else 0


def replica_layout(config: ClusterConfig, role: Role, *, on_cpu: bool) -> ReplicaLayout:
    """Bundles, strategy and ranks of one replica of a pool.

    Args:
        on_cpu: engines compute on CPU (or are simulated): GPUs are asked for only where `accelerator` names a type.

    Raises:
        ConfigError: a layout that no node can hold.
    """
    pool, layout = config.pool(role), config.pool(role).layout
    world = layout.ranks
    ray_type = pool.accelerator in RAY_ACCELERATOR_TYPES
    uses_gpu = not on_cpu or ray_type
    per_node = _per_node(pool)
    path = f"pools.{role}.layout"
    if layout.pp > 1 and layout.dp > 1:
        raise ConfigError(path, f"pp {layout.pp} with dp {layout.dp}", "use one of them; more replicas are dp too")
    if uses_gpu and per_node is not None and layout.tp * layout.dp > per_node:
        raise ConfigError(
            path,
            f"tp {layout.tp} x dp {layout.dp} is above the {per_node} GPUs of a {pool.accelerator} node",
            "use pp across nodes",
        )
    if layout.pp == 1:
        bundle = {"CPU": pool.num_cpus, **_accelerators(pool, world, uses_gpu, ray_type)}
        ranks = tuple(Rank(dp, 0, tp, 0) for dp in range(layout.dp) for tp in range(layout.tp))
        executor = "mp" if world > 1 else IN_PROCESS if on_cpu else None
        return ReplicaLayout((bundle,), "STRICT_PACK", bundle, executor, ranks, world, pool.accelerator, uses_gpu)
    spans = uses_gpu and (per_node is None or world > per_node)
    one = _accelerators(pool, 1, uses_gpu, ray_type)
    bundles = ({"CPU": pool.num_cpus, **one}, *(dict(one) or {"CPU": pool.num_cpus} for _ in range(world - 1)))
    ranks = tuple(Rank(0, pp, tp, pp * layout.tp + tp) for pp in range(layout.pp) for tp in range(layout.tp))
    return ReplicaLayout(
        bundles,
        "PACK" if spans else "STRICT_PACK",
        {"CPU": pool.num_cpus},
        "ray" if uses_gpu else "mp",
        ranks,
        world,
        pool.accelerator,
        uses_gpu,
    )


def _accelerators(pool: PoolConfig, count: int, uses_gpu: bool, ray_type: bool) -> dict[str, float]:
    asked: dict[str, float] = {"GPU": float(count)} if uses_gpu else {}
    if pool.accelerator is None:
        return asked
    if ray_type:
        return {**asked, f"accelerator_type:{pool.accelerator}": TYPE_MARK}
    return {**asked, pool.accelerator: float(count)}


def _per_node(pool: PoolConfig) -> int | None:
    """GPUs of a node of this type; None where the hardware table does not know it."""
    if pool.accelerator is None:
        return None
    try:
        return hardware(pool.accelerator).gpus_per_node
    except UserError:
        return None
