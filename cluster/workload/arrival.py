"""One request of a workload, before anybody served it.

A prompt is a sequence of segments `(content id, tokens)`. Token j of a segment is a function of its content id
and j alone, so `(7, 100)` is a prefix of `(7, 300)`, and two prompts share exactly their equal leading tokens.
That is all a prefix cache can see, and it lets one workload drive the simulator (which never needs the text) and
a live endpoint (where `text.py` writes the tokens out).
"""

from __future__ import annotations

from dataclasses import dataclass

Prompt = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at `at_s` seconds after the start of the workload, whether or not anyone is ready.

    Attributes:
        prompt: segments `(content id, tokens)`; equal leading segments are equal tokens.
        output_tokens: tokens to generate; at least 1.
        priority: lower is served first.
        session: conversation, document or agent task that the request belongs to; 0 where there is none.
        stream: index of the workload's stream that it comes from.
    """

    at_s: float
    prompt: Prompt
    output_tokens: int
    tenant: str = "default"
    priority: int = 0
    session: int = 0
    stream: int = 0

    @property
    def prompt_tokens(self) -> int:
        return count_tokens(self.prompt)


def count_tokens(prompt: Prompt) -> int:
    return sum(tokens for _, tokens in prompt)


def shared_tokens(a: Prompt, b: Prompt) -> int:
    """Leading tokens that two prompts have in common."""
    shared = 0
    for (id_a, n_a), (id_b, n_b) in zip(a, b, strict=False):
        if id_a != id_b:
            break
        shared += min(n_a, n_b)
        if n_a != n_b:
            break
    return shared


def cut(prompt: Prompt, max_tokens: int) -> Prompt:
    """The first `max_tokens` tokens of a prompt."""
    kept: list[tuple[int, int]] = []
    room = max_tokens
    for content, tokens in prompt:
        if room <= 0:
            break
        kept.append((content, min(tokens, room)))
        room -= tokens
    return tuple(kept)
