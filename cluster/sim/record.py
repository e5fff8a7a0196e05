"""From the iterations that gave a sequence its tokens to the times of a record."""

from __future__ import annotations

from operator import sub

from cluster.engine.scheduler.sequence import Sequence
from cluster.goodput.timing import TokenTimes
from cluster.sim.engine import SimEngine


def token_times(engine: SimEngine, sequence: Sequence) -> tuple[float, float, list[float]]:
    """First and last token's time, and every gap between tokens, in seconds."""
    if all(tokens == 1 for _, _, tokens in sequence.runs):
        ends = engine.step_ends_s
        at_s: list[float] = []
        for first, steps, _ in sequence.runs:
            at_s += ends[first : first + steps]
        return at_s[0], at_s[-1], list(map(sub, at_s[1:], at_s))
    times = TokenTimes(sequence.arrival_s)
    for now, tokens in engine.token_times(sequence):
        times.on_tokens(now, tokens)
    assert times.first_s is not None and times.last_s is not None
    return times.first_s, times.last_s, times.itl_s
