"""From what a driver measured of a request to its record. Pure: the live router and the simulator make theirs here."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.errors import PdserveError
from cluster.goodput.accounting import is_behind
from cluster.messages import Outcome, Placement, Request, RequestRecord, Stage, Ticket
from router.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the engine that gave the first token says of it: compute since its scheduling, and the pull before that."""

    compute_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(slots=True)
class Measured:
    """Tokens and times of one request; see `RequestRecord` for each."""

    output_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    stage_s: dict[Stage, float] = field(default_factory=dict)
    cached_tokens: int = 0
    decode_computed_tokens: int = 0
    transfer_bytes: int = 0
    transfer_blocks: int = 0
    finish_reason: str | None = None


def make_record(
    request: Request,
    placement: Placement | None,
    lifecycle: Lifecycle,
    measured: Measured,
    outcome: Outcome,
    error: PdserveError | None,
    now: float,
) -> RequestRecord:
    """The record of a request that ends now."""
    m = measured
    record = RequestRecord(
        request_id=request.request_id,
        outcome=outcome,
        slo=request.slo,
        arrival_s=request.arrival_s,
        end_s=now,
        tenant=request.tenant,
        priority=request.priority,
        path=placement.path if placement else None,
        prefill_worker=placement.prefill if placement else None,
        decode_worker=placement.decode if placement else None,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=m.cached_tokens,
        predicted_cached_tokens=placement.predicted_cached_tokens if placement else 0,
        predicted_ttft_s=placement.predicted_ttft_s if placement else None,
        decode_computed_tokens=m.decode_computed_tokens,
        output_tokens=m.output_tokens,
        transfer_bytes=m.transfer_bytes,
        transfer_blocks=m.transfer_blocks,
        ttft_s=m.ttft_s,
        tpot_s=m.tpot_s,
        itl_s=m.itl_s,
        stage_s=m.stage_s,
        attempts=max(1, lifecycle.attempt),
        migrations=lifecycle.migrations,
        finish_reason=m.finish_reason,
        error=None if error is None else str(error),
        status=None if error is None else error.status,
    )
    record.deadline_passed = outcome is Outcome.CANCELLED and is_behind(record)
    return record


def stages(
    arrival_s: float,
    placed_s: float | None,
    until_s: float,
    *,
    split: bool,
    ticket: Ticket | None = None,
    ticket_s: float = 0.0,
    first: FirstToken | None = None,
) -> dict[Stage, float]:
    """Seconds per stage; they add up to `until_s - arrival_s`.

    What the engines measured themselves goes to the stage they measured; the rest of a leg (the call, the way back)
    goes to the wait before it.

    Args:
        placed_s: when the attempt that gave the first token was placed; None if none was.
        until_s: the first token, or the end of a request without one.
        split: the prompt was computed (or waited for) on another engine than the first token.
        ticket, ticket_s: that attempt's ticket, and when it came.
        first: None without a first token.
    """
    if placed_s is None:
        return {Stage.ROUTER_QUEUE: max(0.0, until_s - arrival_s)}
    found = {Stage.ROUTER_QUEUE: max(0.0, placed_s - arrival_s)}
    if split and ticket is None:
        found[Stage.PREFILL_QUEUE] = max(0.0, until_s - placed_s)
        return found
    if split and ticket is not None:
        leg_s = max(0.0, ticket_s - placed_s)
        compute_s = min(ticket.compute_s, leg_s)
        found[Stage.PREFILL_QUEUE], found[Stage.PREFILL_COMPUTE] = leg_s - compute_s, compute_s
        rest_s = max(0.0, until_s - ticket_s)
        if first is None:
            found[Stage.DECODE_QUEUE] = rest_s
            return found
        step_s = min(first.compute_s, rest_s)
        transfer_s = min(first.transfer_s, rest_s - step_s)
        found[Stage.KV_TRANSFER], found[Stage.DECODE_STEP] = transfer_s, step_s
        found[Stage.DECODE_QUEUE] = rest_s - step_s - transfer_s
        return found
    leg_s = max(0.0, until_s - placed_s)
    compute_s = min(first.compute_s, leg_s) if first is not None else 0.0
    found[Stage.PREFILL_COMPUTE], found[Stage.PREFILL_QUEUE] = compute_s, leg_s - compute_s
    return found
