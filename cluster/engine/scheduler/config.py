"""What shapes one engine's scheduling: batching policy, KV memory, preemption, speculation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Policy(StrEnum):
    """STATIC waits until the whole batch has ended. CONTINUOUS admits whole prompts at every iteration. CHUNKED also
    cuts prompts to the token budget that the decodes of the iteration leave."""

    STATIC = "static"
    CONTINUOUS = "continuous"
    CHUNKED = "chunked"


class Preemption(StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


class Reservation(StrEnum):
    """PAGED allocates KV as tokens come; CONTIGUOUS reserves `max_model_len` for every admitted sequence."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft `k` tokens a step; each is accepted with `acceptance`, up to the first rejection.

    `draft_cost_ratio` is one draft step's cost over one target decode step's. The cost of verifying is the
    `draft_tokens` of StepTimes: nothing while the step is bound by memory, compute once it is not.
    """

    k: int
    acceptance: float
    draft_cost_ratio: float = 0.05


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """
    Attributes:
        max_num_batched_tokens: tokens one iteration computes. CONTINUOUS lets one longer prompt through alone;
            STATIC ignores it.
        watermark: share of the KV blocks that admission leaves free while others run.
        swap_bytes_per_s: host link that PREEMPTION.SWAP moves KV over, each way, while the step waits.
    """

    kv_blocks: int
    policy: Policy = Policy.CHUNKED
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    block_size_tokens: int = 16
    prefix_caching: bool = True
    preemption: Preemption = Preemption.RECOMPUTE
    reservation: Reservation = Reservation.PAGED
    watermark: float = 0.0
    kv_bytes_per_token: int = 131_072
    swap_bytes_per_s: float = 25e9
    speculation: Speculation | None = None
