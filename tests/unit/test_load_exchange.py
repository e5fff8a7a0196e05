"""Every way a streamed answer can arrive or break, without a socket: outcome and numbers."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.goodput.accounting import is_good
from cluster.messages import Outcome, Slo
from loadtests.exchange import Exchange
from loadtests.sample import Sample

HEADERS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
SLO = Slo(ttft_s=1.0, tpot_s=0.2)


def chunk(text: str = "x", *, total: int | None = None, reason: str | None = None, role: bool = False) -> bytes:
    delta = {"role": "assistant", "content": ""} if role else {"content": text}
    body: dict = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if total is not None:
        body["usage"] = {"prompt_tokens": 9, "completion_tokens": total}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def usage(total: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    body = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": total, "prompt_tokens_details": details}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunked(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def run(
    *reads: tuple[float, bytes], headers: bytes = HEADERS, eof_s: float | None = None, framed: bool = True
) -> Sample:
    """Feed a response: headers at 0.1 s, then each read; framed = HTTP chunks with a proper end."""
    exchange = Exchange(Sample(0, scheduled_s=0.0, sent_s=0.05))
    head = headers + (b"transfer-encoding: chunked\r\n\r\n" if framed else b"\r\n")
    exchange.feed(0.1, head)
    for at_s, body in reads:
        exchange.feed(at_s, chunked(body) if framed else body)
    if framed and eof_s is None:
        exchange.feed(reads[-1][0] if reads else 0.1, b"0\r\n\r\n")
    else:
        exchange.eof(eof_s if eof_s is not None else reads[-1][0])
    assert exchange.finished
    return exchange.sample


def test_token_arithmetic_of_the_published_fault() -> None:
    # (time, tokens): (1.0, 1) (1.3, 3) (1.3, 0) (1.5, 2)
    s = run(
        (0.2, chunk(role=True, total=0)),
        (1.0, chunk(total=1)),
        (1.3, chunk("abc", total=4)),
        (1.3, chunk("", total=4)),
        (1.5, chunk("de", total=6, reason="stop")),
        (1.5, usage(6, cached=4)),
        (1.5, DONE),
    )
    assert s.outcome is Outcome.DONE
    assert s.counted == "usage"
    assert (s.times.tokens, s.ttft_s) == (6, 1.0)
    assert s.tpot_s == pytest.approx(0.1)
    assert s.times.itl_s == pytest.approx([0.1] * 5)
    assert (s.prompt_tokens, s.output_tokens, s.cached_tokens) == (9, 6, 4)
    assert s.server_id == "chatcmpl-1"


def test_without_counts_per_chunk_the_total_still_makes_tpot_exact() -> None:
    s = run((1.0, chunk()), (1.3, chunk()), (1.5, chunk(reason="length")), (1.5, usage(6)), (1.5, DONE))
    assert s.counted == "chunks"
    assert s.times.tokens == 6
    assert s.tpot_s == pytest.approx(0.1)
    assert sum(s.times.itl_s) == pytest.approx(0.5)
    fewer = run((1.0, chunk()), (1.3, chunk()), (1.5, chunk(reason="length")), (1.5, usage(2)), (1.5, DONE))
    assert fewer.times.tokens == 2
    assert fewer.ttft_s == 1.0


def test_a_total_on_the_last_chunk_is_no_count_of_that_chunk() -> None:
    """Ten chunks of four tokens, 0.1 s apart; their total comes with the finish reason."""
    reads = [(1 + 0.1 * i, chunk("abcd")) for i in range(9)]
    with_text = run(*reads, (1.9, chunk("abcd", total=40, reason="stop")), (1.9, DONE))
    without = run(*reads, (1.9, chunk("abcd")), (1.9, chunk("", total=40, reason="stop")), (1.9, DONE))
    for s in (with_text, without):
        assert s.counted == "chunks"
        assert (s.times.tokens, s.output_tokens, s.ttft_s) == (40, 40, 1.0)
        assert s.tpot_s == pytest.approx(0.9 / 39)
        assert max(s.times.itl_s) == pytest.approx(0.025)
    # A count with every chunk, and one more chunk without: the counts stay what they are.
    mixed = run((1.0, chunk(total=2)), (1.2, chunk(total=4)), (1.3, chunk()), (1.4, chunk(total=7, reason="stop")))
    assert (mixed.counted, mixed.times.tokens) == ("usage", 7)


def test_one_token_has_no_tpot_and_no_token_has_no_ttft() -> None:
    one = run((1.0, chunk(total=1, reason="length")), (1.0, DONE))
    assert (one.ttft_s, one.tpot_s, one.times.itl_s) == (1.0, None, [])
    none = run((1.0, chunk("", total=0, reason="stop")), (1.0, DONE))
    assert none.outcome is Outcome.DONE
    assert (none.ttft_s, none.tpot_s) == (None, None)


def test_the_final_usage_chunk_does_not_move_ttft_and_a_one_chunk_answer_has_one() -> None:
    s = run((0.4, chunk(reason="stop") + usage(1) + DONE))
    assert (s.outcome, s.ttft_s, s.times.tokens) == (Outcome.DONE, 0.4, 1)


def test_spaces_are_tokens() -> None:
    s = run((1.0, chunk(" " * 20, total=20, reason="length")), (1.0, DONE))
    assert s.times.tokens == 20


def test_headers_at_once_first_token_late_then_cut() -> None:
    s = run((2.0, chunk(total=1)), (2.5, chunk(total=2)), eof_s=3.0)
    assert s.headers_s == 0.1
    assert s.ttft_s == 2.0
    assert s.outcome is Outcome.FAILED
    assert "cut" in s.error
    assert s.end_s == 3.0
    assert s.e2e_s is None


@pytest.mark.parametrize(
    ("reads", "error"),
    [
        ([(1.0, chunk(total=1)), (1.2, DONE)], "no finish reason"),
        ([(1.0, chunk(total=1, reason="stop"))], r"no \[DONE\]"),
        (
            [(1.0, chunk(total=1)), (1.2, b'data: {"error": {"message": "worker lost"}}\n\n'), (1.2, DONE)],
            "worker lost",
        ),
        ([(1.0, b'data: {"object": "error", "message": "old shape"}\n\n'), (1.2, DONE)], "old shape"),
        ([(1.0, b"event: error\ndata: boom\n\n")], "boom"),
        ([(1.0, b"data: {not json\n\n")], "malformed event"),
        ([(1.0, chunk(total=1, reason="abort")), (1.0, DONE)], "finish reason abort"),
        ([], "no finish reason"),
    ],
)
def test_failures_inside_a_200(reads: list[tuple[float, bytes]], error: str) -> None:
    s = run(*reads)
    assert s.status == 200
    assert s.outcome is Outcome.FAILED
    assert __import__("re").search(error, s.error), s.error
    assert not is_good(s.record(SLO))


def test_a_stream_torn_inside_an_event_is_cut_not_malformed() -> None:
    s = run((1.0, chunk(total=1)), (1.1, chunk(total=2)[:20]), eof_s=1.2)
    assert "cut" in s.error


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(503, Outcome.REJECTED), (429, Outcome.REJECTED), (500, Outcome.FAILED), (400, Outcome.FAILED)],
)
def test_statuses(status: int, outcome: Outcome) -> None:
    headers = f"HTTP/1.1 {status} X\r\nretry-after: 7\r\n".encode()
    s = run((0.2, b'{"error": {"message": "no room"}}'), headers=headers)
    assert s.outcome is outcome
    assert s.status == status
    assert s.retry_after_s == 7
    assert s.ttft_s is None


def test_connection_closed_before_headers_and_garbage() -> None:
    exchange = Exchange(Sample(0, scheduled_s=0.0))
    exchange.eof(0.3)
    assert exchange.sample.error == "connection closed before the headers"
    assert not exchange.answered
    exchange = Exchange(Sample(0, scheduled_s=0.0))
    exchange.feed(0.1, b"SSH-2.0-OpenSSH\r\n")
    assert exchange.sample.outcome is Outcome.FAILED
    assert "malformed response" in exchange.sample.error


def test_body_without_length_ends_with_the_connection() -> None:
    s = run((0.4, chunk(reason="stop", total=1)), (0.5, b"data: [DONE]"), framed=False, eof_s=0.6)
    assert s.outcome is Outcome.DONE
    kept = Exchange(Sample(0, scheduled_s=0.0))
    body = chunk(reason="stop", total=1) + DONE
    kept.feed(0.1, HEADERS + f"content-length: {len(body)}\r\n\r\n".encode() + body)
    assert kept.finished
    assert kept.keep_alive


def test_interim_responses_are_not_the_answer() -> None:
    exchange = Exchange(Sample(0, scheduled_s=0.0))
    exchange.feed(0.1, b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not exchange.finished
    exchange.feed(0.2, HEADERS + b"transfer-encoding: chunked\r\n\r\n")
    exchange.feed(0.3, chunked(chunk(reason="stop", total=1) + DONE) + b"0\r\n\r\n")
    assert exchange.sample.outcome is Outcome.DONE


def test_every_choice_needs_its_finish_reason() -> None:
    def two(*reasons: tuple[int, str | None]) -> Outcome | None:
        exchange = Exchange(Sample(0, scheduled_s=0.0), choices=2)
        body = b"".join(
            b"data: " + json.dumps({"choices": [{"index": i, "text": "x", "finish_reason": r}]}).encode() + b"\n\n"
            for i, r in reasons
        )
        exchange.feed(0.1, HEADERS + b"\r\n" + body + DONE)
        exchange.eof(0.2)
        return exchange.sample.outcome

    assert two((0, "stop"), (1, "length")) is Outcome.DONE
    assert two((0, "stop"), (1, None)) is Outcome.FAILED


STREAM = (
    b": hello\n\n"
    + chunk(role=True, total=0)
    + chunk("é🫠", total=3)
    + chunk(total=5)
    + chunk(total=6, reason="stop")
    + usage(6)
    + DONE
)


@given(st.integers(), st.sampled_from(["lf", "crlf"]), st.booleans())
def test_the_same_numbers_however_the_bytes_are_cut(seed: int, ends: str, framed: bool) -> None:
    body = STREAM.replace(b"\n", b"\r\n") if ends == "crlf" else STREAM
    wire = HEADERS + (
        b"transfer-encoding: chunked\r\n\r\n" + chunked(body) + b"0\r\n\r\n" if framed else b"\r\n" + body
    )
    rng = Random(seed)
    cuts = sorted(rng.randrange(len(wire)) for _ in range(rng.randrange(40)))
    exchange = Exchange(Sample(0, scheduled_s=0.0))
    for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        exchange.feed(1.0, wire[a:b])
    exchange.eof(1.0)
    s = exchange.sample
    assert (s.outcome, s.times.tokens, s.ttft_s, s.finish_reason, s.done) == (Outcome.DONE, 6, 1.0, "stop", True)


def test_samples_travel_between_processes() -> None:
    s = run((1.0, chunk(total=1)), (1.3, chunk(total=4, reason="stop")), (1.5, DONE))
    s.tenant = "a"
    again = Sample.from_wire(json.loads(json.dumps(s.to_wire())))
    assert again == s
    assert again.record(SLO) == s.record(SLO)
