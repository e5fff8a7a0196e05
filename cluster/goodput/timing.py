"""Token times of one request: from (time, tokens) events to TTFT, TPOT and one ITL sample per token.

The unit of account is the token, never the message: engines, routers and clients see several tokens in one
message. A message of k tokens that comes `gap` after the one before it stands for k samples of gap/k, so that

    sum of ITL samples == last token - first token == TPOT * (tokens - 1)

holds for every way of cutting the same output into messages. Tokens that arrive together with the first one
follow it by 0 s. Messages without a token count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenTimes:
    """Accounting of one request, or of one choice of it. Times are readings of the caller's clock, in seconds."""

    arrival_s: float
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    itl_s: list[float] = field(default_factory=list)

    def on_tokens(self, now: float, tokens: int) -> None:
        """Account for a message with `tokens` new tokens. A clock that steps back counts as standing still."""
        if tokens <= 0:
            return
        if self.first_s is None or self.last_s is None:
            self.first_s = self.last_s = max(now, self.arrival_s)
            self.itl_s.extend([0.0] * (tokens - 1))
        else:
            now = max(now, self.last_s)
            self.itl_s.extend([(now - self.last_s) / tokens] * tokens)
            self.last_s = now
        self.tokens += tokens

    @property
    def ttft_s(self) -> float | None:
        """First token minus arrival; None while there is no token."""
        return None if self.first_s is None else self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1); None below two tokens: one token has no gap to average."""
        if self.tokens < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


def token_times(arrival_s: float, events: Iterable[tuple[float, int]]) -> TokenTimes:
    """Account for a whole trace of (time, tokens) events."""
    times = TokenTimes(arrival_s)
    for at_s, tokens in events:
        times.on_tokens(at_s, tokens)
    return times


def itl_p99_s(itl_s: list[float]) -> float | None:
    """Nearest-rank 99th percentile of one request's own gaps; None without a gap."""
    if not itl_s:
        return None
    rank = -(-99 * len(itl_s) // 100)  # ceil(0.99 n) in integers: floats would round 100 up to rank 100
    return sorted(itl_s)[rank - 1]
