"""What travels between the parts of pdserve: plain frozen dataclasses, no behaviour, no imports of a runtime.

Times are seconds as float. Inside pure code they are readings of the one clock that is passed in as `now`;
between processes only durations travel, because clocks differ between hosts. Units end every name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Which pool a worker belongs to. With no prefill pool the decode pool does both phases (colocated)."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Path(StrEnum):
    """How a request is served, and why. Every placement has exactly one of these and is counted under it."""

    SPLIT = "split"
    LOCAL_SHORT = "local: short"
    LOCAL_CACHED = "local: cached"
    LOCAL_NO_PREFILL = "local: no prefill worker"
    LOCAL_RETRY = "local: transfer failed"
    COLOCATED = "colocated"


class Outcome(StrEnum):
    """The one terminal state of a request."""

    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class Stage(StrEnum):
    """Where a request spends its time; a missed SLO is charged to exactly one of these."""

    ROUTER_QUEUE = "router_queue"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL_COMPUTE = "prefill_compute"
    KV_TRANSFER = "kv_transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE_STEP = "decode_step"


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits of one request. `itl_p99_s` is optional."""

    ttft_s: float
    tpot_s: float
    itl_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What pure policies know of a request.

    Attributes:
        request_id: minted by the router, unique; never a client's value.
        arrival_s: clock of the router.
        prompt_tokens: length of the tokenized prompt.
        max_output_tokens: upper bound that the client allows.
        block_keys: chained 64-bit key of every full prompt block (see router/prefix_index.py); the namespace
            (tenant, salt, adapter) is part of the first key and so of all.
        tenant: authenticated identity; never a client's own claim.
        priority: lower is served first, like vLLM's.
        n: number of choices decoded from one prefill.
        movable: whether generation can continue on another engine after tokens were sent.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_output_tokens: int
    slo: Slo
    block_keys: tuple[int, ...] = ()
    tenant: str = "default"
    priority: int = 0
    n: int = 1
    movable: bool = True


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What does not change while an engine lives. A restarted engine has a new `incarnation`.

    Attributes:
        worker_id: the Serve replica's unique id (a name in simulation).
        kv_total_blocks: KV blocks of `block_size_tokens` tokens that the engine owns.
        kv_bytes_per_token: over all ranks of the replica.
        kv_events_endpoint: ZMQ address of the engine's KV events, None where they are off.
        accelerators: GPUs (or CPU ranks) of this replica: tp x pp.
        fingerprint: what must agree before two engines exchange KV (see kv_transfer/compatibility.py).
        pid: process of the replica on its node, for people; 0 where there is none.
    """

    worker_id: str
    incarnation: str
    role: Role
    block_size_tokens: int
    kv_total_blocks: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    tp: int = 1
    pp: int = 1
    accelerators: int = 1
    accelerator_type: str | None = None
    node: str = ""
    rack: str = ""
    kv_events_endpoint: str | None = None
    kv_replay_endpoint: str | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Load of one engine, taken after an engine step.

    `steps` grows with every engine step: forward progress is `steps` advancing while `running + waiting > 0`.
    `queued_prefill_tokens` counts prompt tokens that are accepted and not computed yet.
    """

    worker_id: str
    incarnation: str
    state: WorkerState
    steps: int = 0
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    kv_used_blocks: int = 0
    open_leases: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What decode needs to pull a prompt's KV. The lease behind it is the open prefill call.

    `kv_transfer_params` is the connector's own and opaque here. `cached_tokens` counts prompt tokens that the
    prefill engine did not compute; `first_token` is the token it sampled, None where decode samples it again.
    Durations are the prefill engine's own: wait before the first scheduling, then compute.
    """

    lease_id: str
    worker_id: str
    incarnation: str
    kv_transfer_params: Mapping[str, Any]
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    bytes: int
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision of the router. `prefill` is None on every local path."""

    path: Path
    decode: str
    prefill: str | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    predicted_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request is not placed: an HTTP status, a reason for the client, and when to try again."""

    status: int
    reason: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """One finished request, as the router (or the simulator) saw it. Everything goodput needs.

    Attributes:
        stage_s: seconds spent in each stage before the first token; they add up to TTFT. DECODE_STEP holds the
            time from decode's first scheduling to the first token. Stages that did not happen are absent.
        ttft_s: first output token sent minus arrival at the router; None if there was none.
        tpot_s: (last token - first token) / (output_tokens - 1); 0 if output_tokens <= 1.
        itl_s: every gap between consecutive output tokens; a message with k tokens is k samples of gap/k.
        cached_tokens: prompt tokens that the prefilling engine did not compute.
        decode_computed_tokens: prompt tokens that the decode engine computed (one block at most on a split path).
        deadline_passed: the client left, and its tokens had come slower than its TPOT limit.
        status: HTTP status of the error that ended it; None without one.
    """

    request_id: str
    outcome: Outcome
    slo: Slo
    arrival_s: float
    end_s: float
    tenant: str = "default"
    priority: int = 0
    path: Path | None = None
    prefill_worker: str | None = None
    decode_worker: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    decode_computed_tokens: int = 0
    output_tokens: int = 0
    transfer_bytes: int = 0
    transfer_blocks: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    stage_s: dict[Stage, float] = field(default_factory=dict)
    deadline_passed: bool = False
    attempts: int = 1
    migrations: int = 0
    finish_reason: str | None = None
    error: str | None = None
    status: int | None = None
