"""What the scheduler hands to its driver: iterations, outputs, KV to pull; and its running totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.engine.scheduler.sequence import Sequence


@dataclass(slots=True)
class Load:
    """KV to pull for a sequence: `tokens` of its prompt in the last `blocks` of its prompt's table; may be 0."""

    sequence: Sequence
    tokens: int
    blocks: int


@dataclass(slots=True)
class Step:
    """One iteration. `durations_s` has one entry a repeat; a preempted sequence's KV moves in `swap_s` before it.

    `chunks` and `decodes` are disjoint; a single token on top of a context is priced as a decode.
    """

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    decode_context_tokens: int = 0
    draft_tokens: int = 0
    swapped_blocks: int = 0
    durations_s: list[float] = field(default_factory=list)

    @property
    def repeats(self) -> int:
        return len(self.durations_s)


@dataclass(slots=True)
class Output:
    """`tokens` new tokens of a sequence, in each repeat together; `finished` at its end."""

    sequence: Sequence
    tokens: int
    finished: bool


@dataclass(slots=True)
class Counters:
    """Monotone totals. A padded slot is a place in a static batch whose sequence has ended."""

    steps: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    external_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    slot_steps: int = 0
    padded_slot_steps: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
