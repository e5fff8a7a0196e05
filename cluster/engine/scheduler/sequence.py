"""One request on one engine, as the scheduler sees it: counts of tokens, never the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """
    WAITING  -> LOADING | RUNNING   admitted: blocks for the whole prompt are held
    LOADING  -> READY | WAITING     the ticket's KV arrived, or could not be pulled
    READY    -> RUNNING | WAITING   a batch slot is free; or its reservation was taken back
    RUNNING  -> WAITING             preempted
    RUNNING  -> LEASED | ENDED      all tokens out; a prefill leg's KV waits to be pulled
    LEASED   -> ENDED               pulled or given up
    any      -> ENDED               aborted
    """

    WAITING = 0
    LOADING = 1
    READY = 2
    RUNNING = 3
    LEASED = 4
    ENDED = 5


@dataclass(slots=True, eq=False)
class Sequence:
    """
    Attributes:
        stop_after: output tokens until the sequence ends.
        keys: content keys of full blocks, from the first; a driver that knows the output's content appends to it.
        remote: the prompt's KV comes by a ticket.
        lease: keep the KV at the end until `Scheduler.release`.
        computed: tokens whose KV is in the blocks.
        runs: when tokens came out, as [first step, steps, tokens a step]; the steps of a run are consecutive.
    """

    seq_id: str
    prompt_tokens: int
    stop_after: int
    keys: list[int] | tuple[int, ...] = ()
    priority: int = 0
    remote: bool = False
    lease: bool = False
    state: State = State.WAITING
    order: int = 0
    table: list[int] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    stored_blocks: int = 0
    swapped: bool = False
    cached_tokens: int = 0
    external_tokens: int = 0
    preemptions: int = 0
    arrival_s: float = 0.0
    scheduled_s: float | None = None
    runs: list[list[int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Tokens that exist: the prompt and what was generated."""
        return self.prompt_tokens + self.generated

    @property
    def rank(self) -> tuple[int, int]:
        """Who is served first: lower priority value, then arrival."""
        return self.priority, self.order
