"""The SSE parser gives the same events however the bytes are cut."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.sse import Event, SseParser


def events(*chunks: bytes, close: bool = True) -> list[Event]:
    parser = SseParser()
    out = [event for chunk in chunks for event in parser.feed(chunk)]
    return out + (parser.close() if close else [])


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
        (b"data:tight\n\n", [b"tight"]),
        (b"data:  one space is kept\n\n", [b" one space is kept"]),
        (b": ping\n\ndata: a\n: in between\n\n", [b"a"]),
        (b"id: 7\nretry: 5\ndata: a\n\n", [b"a"]),
        (b"\n\n\ndata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: [DONE]", [b"[DONE]"]),
        (b"data: [DONE]\n", [b"[DONE]"]),
        (b"data\n\n", [b""]),
        ("data: é🫠\n\n".encode(), ["é🫠".encode()]),
        (b"", []),
    ],
)
def test_whole_and_byte_by_byte(stream: bytes, data: list[bytes]) -> None:
    assert [e.data for e in events(stream)] == data
    assert [e.data for e in events(*(stream[i : i + 1] for i in range(len(stream))))] == data


def test_event_names_do_not_leak_into_the_next_event() -> None:
    assert events(b"event: error\ndata: x\n\ndata: y\n\n") == [Event(b"x", "error"), Event(b"y", "")]
    assert events(b"event: error\n\ndata: y\n\n") == [Event(b"y", "")]


def test_an_event_is_given_when_its_blank_line_arrives_and_not_later() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r") == [Event(b"a")]
    assert parser.feed(b"\ndata: b\n") == []
    assert parser.feed(b"\n") == [Event(b"b")]


@given(
    st.lists(st.text(alphabet="ab:é🫠 ", max_size=6), max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.integers()
)
def test_any_cut_gives_the_same_events(payloads: list[str], newline: str, seed: int) -> None:
    rng = Random(seed)
    stream = "".join(f": c{newline}data: {p}{newline}{newline}" for p in payloads).encode()
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [e.data.decode() for e in events(*pieces)] == payloads
