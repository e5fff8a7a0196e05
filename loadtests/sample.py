"""What a load generator knows of one request, and how it becomes a record of `cluster.goodput`.

Latencies count from the scheduled time: what a request waits inside the client is waiting all the same, and leaving
it out (coordinated omission) is how slow servers get good numbers. The sent time is kept beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.goodput.timing import TokenTimes
from cluster.messages import Outcome, RequestRecord, Slo

# The run is over and this request is not. It was offered and not served: a miss.
UNFINISHED = "unfinished"


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds from the start of the run.

    Attributes:
        scheduled_s: when the workload said it arrives; equal to sent_s in a closed loop.
        sent_s: when the client began to connect or write.
        headers_s: status line and headers complete. Never used as a latency.
        times: token times, counted from scheduled_s.
        counted: `usage` where the server gave a token count with each chunk, `chunks` where chunks had to stand for
            tokens (then TPOT is exact and ITL is per chunk).
        done: `[DONE]` was received.
        error: why it is not a success; empty for a success.
        reconnects: a kept-alive connection was found closed and the request sent again on a new one.
    """

    index: int
    scheduled_s: float
    stream: str = ""
    tenant: str = "default"
    priority: int = 0
    session: int = 0
    asked_prompt_tokens: int = 0
    asked_output_tokens: int = 0
    sent_s: float | None = None
    headers_s: float | None = None
    end_s: float | None = None
    status: int | None = None
    retry_after_s: float | None = None
    request_id: str = ""
    server_id: str = ""
    finish_reason: str | None = None
    done: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    counted: str = "chunks"
    outcome: Outcome | None = None
    error: str = ""
    reconnects: int = 0
    times: TokenTimes = field(default_factory=lambda: TokenTimes(0.0))

    @property
    def ttft_s(self) -> float | None:
        return self.times.ttft_s

    @property
    def tpot_s(self) -> float | None:
        return self.times.tpot_s

    @property
    def e2e_s(self) -> float | None:
        """Scheduled time to the end of the answer, for successes."""
        return None if self.outcome is not Outcome.DONE or self.end_s is None else self.end_s - self.scheduled_s

    @property
    def lag_s(self) -> float | None:
        """How much later than scheduled the client began to send."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s

    def record(self, slo: Slo) -> RequestRecord:
        """This request for `cluster.goodput`. A request without an outcome counts as failed."""
        return RequestRecord(
            request_id=self.request_id or str(self.index),
            outcome=self.outcome or Outcome.FAILED,
            slo=slo,
            arrival_s=self.scheduled_s,
            end_s=self.end_s if self.end_s is not None else self.scheduled_s,
            tenant=self.tenant,
            priority=self.priority,
            prompt_tokens=self.prompt_tokens or 0,
            cached_tokens=self.cached_tokens or 0,
            output_tokens=self.times.tokens,
            ttft_s=self.times.ttft_s,
            tpot_s=self.times.tpot_s,
            itl_s=self.times.itl_s,
            finish_reason=self.finish_reason,
            error=self.error or None,
        )

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for another process and for JSON."""
        out = {name: getattr(self, name) for name in _PLAIN}
        out["outcome"] = None if self.outcome is None else self.outcome.value
        t = self.times
        return out | {"tokens": t.tokens, "first_s": t.first_s, "last_s": t.last_s, "itl_s": t.itl_s}

    @classmethod
    def from_wire(cls, raw: dict[str, Any]) -> Sample:
        sample = cls(**{name: raw[name] for name in _PLAIN})
        sample.outcome = None if raw["outcome"] is None else Outcome(raw["outcome"])
        sample.times = TokenTimes(raw["scheduled_s"], raw["tokens"], raw["first_s"], raw["last_s"], raw["itl_s"])
        return sample


_PLAIN = tuple(name for name in Sample.__dataclass_fields__ if name not in ("outcome", "times"))
