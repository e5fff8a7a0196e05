"""One streamed HTTP exchange without any I/O: bytes and their time go in, a finished `Sample` comes out.

The asyncio and the gevent client both drive this class, so a number measured under Locust and one measured by
`pdserve loadtest` cannot differ in meaning.

    ====================================================  ===========================================
    what arrived                                          outcome
    ====================================================  ===========================================
    200, a finish reason for every choice, `[DONE]`       done
    429 or 503 before the stream                          rejected (Retry-After kept)
    any other status                                      failed
    200, then an error event                              failed
    200, then the end without finish reason or `[DONE]`   failed: cut
    nothing readable, or time ran out                     failed
    ====================================================  ===========================================
"""

from __future__ import annotations

import httptools
import msgspec

from cluster.goodput.timing import TokenTimes, token_times
from cluster.messages import Outcome
from loadtests.chunks import Chunk, Usage, decode_chunk
from loadtests.sample import Sample
from loadtests.sse import Event, SseParser

REJECTIONS = (429, 503)
ERROR_BODY_BYTES = 2000


class Exchange:
    """Reads one response. `finished` turns true exactly once; then `sample.outcome` is set.

    Args:
        choices: the `n` of the request; each needs its own finish reason.
    """

    def __init__(self, sample: Sample, *, choices: int = 1) -> None:
        self.sample = sample
        self.finished = False
        self.touched_s = sample.sent_s or sample.scheduled_s
        self.keep_alive = False
        self._choices = choices
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._sse: SseParser | None = None
        self._events: list[tuple[float, int]] = []
        self._seen_tokens = 0
        self._uncounted = False
        self._reasons: dict[int, str] = {}
        self._body = b""
        self._complete = False
        self._failure = ""
        self._any = False
        self._torn = False

    @property
    def answered(self) -> bool:
        """Whether any byte of the response has arrived."""
        return self._any

    def feed(self, now: float, data: bytes) -> None:
        """Bytes from the socket, read at `now`."""
        if self.finished or not data:
            return
        self._any = True
        self._now = self.touched_s = now
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as e:
            cause = e.__context__ or e
            self._end(now, Outcome.FAILED, f"malformed response: {cause}")
            return
        if self._complete:
            self._conclude(now)

    def eof(self, now: float) -> None:
        """The peer closed the connection."""
        if self.finished:
            return
        self._now = now
        if self.sample.status is None:
            self._end(now, Outcome.FAILED, "connection closed before the headers")
            return
        # A body without length or chunks ends here by right; any other is cut. Both are judged by what arrived, and
        # an event that stops in the middle is no event.
        self._torn = True
        self._drain_sse()
        self._conclude(now)

    def fail(self, now: float, why: str, outcome: Outcome = Outcome.FAILED) -> None:
        """Give up: connect error, time-out, end of the run."""
        if not self.finished:
            self._end(now, outcome, why)

    # Callbacks of httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"retry-after":
            try:
                self.sample.retry_after_s = float(value)
            except ValueError:
                pass  # an HTTP date: the rejection still counts, only its hint is not a number
        elif lower == b"x-request-id":
            self.sample.server_id = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.sample.status = self._parser.get_status_code()
        self.sample.headers_s = self._now
        if self.sample.status == 200:
            self._sse = SseParser()

    def on_body(self, body: bytes) -> None:
        if self._sse is None:
            self._body = (self._body + body)[:ERROR_BODY_BYTES]
            return
        for event in self._sse.feed(body):
            self._on_event(event)

    def on_message_complete(self) -> None:
        if self.sample.status is not None and 100 <= self.sample.status < 200:
            self.sample.status = None  # an interim response; the real one follows
            return
        self._drain_sse()
        self.keep_alive = self._parser.should_keep_alive()
        self._complete = True

    # What events mean.

    def _drain_sse(self) -> None:
        if self._sse is not None:
            for event in self._sse.close():
                self._on_event(event)

    def _on_event(self, event: Event) -> None:
        if self.sample.done or self._failure:
            return
        data = event.data
        if data == b"[DONE]":
            self.sample.done = True
            return
        try:
            chunk = decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            if self._torn:
                return
            self._failure = f"malformed event: {e}" if event.name != "error" else data.decode(errors="replace")[:200]
            return
        failure = chunk.failure or ("error event" if event.name == "error" else None)
        if failure is not None:
            self._failure = failure
            return
        if chunk.id and not self.sample.server_id:
            self.sample.server_id = chunk.id
        if chunk.usage is not None:
            self._on_usage(chunk.usage)
        self._on_output(chunk)

    def _on_usage(self, usage: Usage) -> None:
        s = self.sample
        if usage.prompt_tokens is not None:
            s.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            s.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
            s.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _on_output(self, chunk: Chunk) -> None:
        output = False
        for choice in chunk.choices:
            output = output or choice.has_output
            if choice.finish_reason is not None:
                self._reasons[choice.index] = choice.finish_reason
        if not chunk.choices:
            return
        if chunk.usage is not None and chunk.usage.completion_tokens is not None and not self._uncounted:
            # Counts are cumulative; the difference is what this chunk brought, whatever its text looks like. A count
            # that comes only after output without one is the total of the answer, which no single chunk brought.
            self.sample.counted = "usage"
            new = chunk.usage.completion_tokens - self._seen_tokens
            if new > 0:
                self._events.append((self._now, new))
                self._seen_tokens += new
        elif output:
            self._uncounted = self.sample.counted == "chunks"
            self._events.append((self._now, 1))
            self._seen_tokens += 1

    def _conclude(self, now: float) -> None:
        s = self.sample
        if s.status in REJECTIONS:
            self._end(now, Outcome.REJECTED, f"HTTP {s.status}")
        elif s.status != 200:
            text = self._body.decode("utf-8", errors="replace").strip().replace("\n", " ")
            self._end(now, Outcome.FAILED, f"HTTP {s.status}: {text[:200]}")
        elif self._failure:
            self._end(now, Outcome.FAILED, f"error in the stream: {self._failure[:200]}")
        elif len(self._reasons) < self._choices:
            self._end(now, Outcome.FAILED, "cut: no finish reason")
        elif bad := [r for r in self._reasons.values() if r in ("error", "abort")]:
            self._end(now, Outcome.FAILED, f"finish reason {bad[0]}")
        elif not s.done:
            self._end(now, Outcome.FAILED, "cut: no [DONE]")
        else:
            self._end(now, Outcome.DONE, "")

    def _end(self, now: float, outcome: Outcome, error: str) -> None:
        s = self.sample
        self.finished = True
        self.keep_alive = self.keep_alive and self._complete
        s.end_s, s.outcome, s.error = now, outcome, error
        s.finish_reason = self._reasons.get(0)
        s.times = self._times()
        if s.output_tokens is None:
            s.output_tokens = s.times.tokens

    def _times(self) -> TokenTimes:
        s = self.sample
        events = self._events
        if s.counted == "chunks" and events and s.output_tokens and s.output_tokens != len(events):
            # Only the total is known: spread it evenly, so that TPOT is exact and the first chunk has a token.
            total, n = s.output_tokens, len(events)
            upto = [max(1, (i + 1) * total // n) for i in range(n)]
            before = [0, *upto[:-1]]
            events = [(at, b - a) for (at, _), a, b in zip(events, before, upto, strict=True)]
        return token_times(s.scheduled_s, events)
