"""One request while it runs: its lifecycle, its legs, and the times from which its record is made."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.engine.base import EngineDelta
from cluster.errors import PdserveError
from cluster.goodput.timing import TokenTimes
from cluster.messages import Outcome, Path, Placement, Request, RequestRecord, Stage, Ticket
from router.lifecycle import Lifecycle, State
from router.lifecycle_messages import StartDecode
from router.record import FirstToken, Measured, make_record, stages


class Run:
    __slots__ = (
        "_first_output",
        "_leg_start",
        "_placed_s",
        "_ticket",
        "_ticket_s",
        "_timer",
        "_times",
        "final_error",
        "finish_reason",
        "first_seen",
        "job",
        "legs",
        "lifecycle",
        "placement",
        "request",
        "waiting_choices",
    )

    def __init__(self, job: Any, lifecycle: Lifecycle, arrival_s: float) -> None:
        self.job = job
        self.request: Request = job.request
        self.lifecycle = lifecycle
        self.legs: list[str] = []
        self.placement: Placement | None = None
        self.first_seen = False
        self.waiting_choices: list[StartDecode] = []
        self.finish_reason: str | None = None
        self.final_error: PdserveError | None = None
        self._times = [TokenTimes(arrival_s) for _ in range(self.request.n)]
        self._leg_start = [0] * self.request.n
        self._placed_s: float | None = None
        self._ticket: Ticket | None = None
        self._ticket_s: float | None = None
        self._first_output: tuple[EngineDelta, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set_timer(self, timer: asyncio.TimerHandle) -> None:
        self.clear_timer()
        self._timer = timer

    def clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def tokens(self, choice: int) -> int:
        """Output tokens of a choice over all its legs."""
        return self._times[choice].tokens

    def leg_tokens(self, choice: int) -> int:
        """Output tokens of a choice on its current leg."""
        return self._times[choice].tokens - self._leg_start[choice]

    def start_leg(self, choice: int) -> None:
        self._leg_start[choice] = self._times[choice].tokens

    def restart(self, choice: int) -> None:
        self._times[choice] = TokenTimes(self.request.arrival_s)
        if self.request.n == 1:
            self._first_output = None

    def on_placed(self, placement: Placement, now: float) -> None:
        self.placement = placement
        if self._first_output is None:
            self._placed_s = now
            self._ticket = self._ticket_s = None

    @property
    def owes_ticket(self) -> bool:
        """Whether a prefill leg runs that has not given its ticket."""
        return self.lifecycle.state is State.PREFILL

    def on_ticket(self, ticket: Ticket, now: float) -> None:
        if self._first_output is None:
            self._ticket, self._ticket_s = ticket, now

    def on_output(self, choice: int, delta: EngineDelta, now: float) -> int | None:
        """Account for a delta; returns the request's cached prompt tokens with the first one of a choice."""
        times = self._times[choice]
        first = times.tokens == 0
        times.on_tokens(now, len(delta.token_ids))
        if not (first and delta.cached_tokens is not None):
            return None
        if self._first_output is None:
            self._first_output = (delta, now)
        return self.cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine which prefilled did not compute: arrived is not reused."""
        if self._ticket is not None:
            return self._ticket.cached_tokens
        return (self._first_output[0].cached_tokens or 0) if self._first_output is not None else 0

    def record(self, outcome: Outcome, error: PdserveError | None, now: float) -> RequestRecord:
        request = self.request
        if self.final_error is not None:
            outcome = Outcome.FAILED  # the router ended it; its client has not left
        delta = self._first_output[0] if self._first_output is not None else None
        firsts = [t.ttft_s for t in self._times if t.ttft_s is not None]
        tpots = [t.tpot_s for t in self._times if t.tpot_s is not None]
        decode_computed = 0
        if delta is not None and self._ticket is not None:
            decode_computed = max(0, request.prompt_tokens - (delta.cached_tokens or 0))
        measured = Measured(
            output_tokens=sum(t.tokens for t in self._times),
            ttft_s=min(firsts, default=None),
            tpot_s=max(tpots, default=None if not firsts else 0.0),
            itl_s=[gap for t in self._times for gap in t.itl_s],
            stage_s=self._stages(now),
            cached_tokens=self.cached_tokens,
            decode_computed_tokens=decode_computed,
            transfer_bytes=(delta.transfer_bytes or 0) if delta is not None else 0,
            transfer_blocks=self._pulled_blocks(delta),
            finish_reason=self.finish_reason,
        )
        return make_record(request, self.placement, self.lifecycle, measured, outcome, error, now)

    def _pulled_blocks(self, delta: EngineDelta | None) -> int:
        """Blocks that the decode engine pulled: those of the prompt that it did not hold."""
        if delta is None or self._ticket is None or not delta.external_tokens:
            return 0
        held_tokens = (delta.cached_tokens or 0) - delta.external_tokens
        return self._ticket.blocks - held_tokens * self._ticket.blocks // max(1, self._ticket.prompt_tokens)

    def _stages(self, now: float) -> dict[Stage, float]:
        """Up to the first token, or to now without one."""
        delta, until_s = self._first_output if self._first_output is not None else (None, now)
        placement = self.placement
        split = placement is not None and placement.path is Path.SPLIT and placement.prefill is not None
        first = None
        if delta is not None:
            pulled_s = delta.transfer_s if delta.transfer_s is not None else (delta.queue_s or 0.0)
            first = FirstToken(delta.compute_s or 0.0, pulled_s if delta.external_tokens else 0.0)
        return stages(
            self.request.arrival_s,
            self._placed_s,
            until_s,
            # A first token without a ticket was computed where it came from.
            split=split and (self._ticket is not None or delta is None),
            ticket=self._ticket,
            ticket_s=self._ticket_s or 0.0,
            first=first,
        )
