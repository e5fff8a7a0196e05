"""Server-sent events, parsed as bytes arrive, however the network cuts them.

Lines end with LF, CRLF or CR; `data` lines of one event are joined with a newline; comments and unknown fields are
skipped; an event is decoded only when it is whole, so a character split over two reads is never seen in halves.
"""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One dispatched event. `name` is the `event` field, empty for plain messages."""

    data: bytes
    name: str = ""


class SseParser:
    """`feed` bytes, get the events that they complete; `close` at the end of the stream."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._name = ""
        self._after_cr = False
        self._started = False

    def feed(self, chunk: bytes) -> list[Event]:
        if not self._started:
            chunk = self._without_bom(chunk)
        if self._after_cr and chunk:
            # The CR ended a line already; an LF right behind it belongs to the same line end.
            self._after_cr = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        if not chunk:
            return []
        text = self._tail + chunk
        if b"\r" in text:
            if text.endswith(b"\r"):
                self._after_cr = True
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._tail = text.split(b"\n")
        events: list[Event] = []
        for line in lines:
            if line:
                self._field(line)
            elif self._data:
                events.append(self._dispatch())
            else:
                self._name = ""
        return events

    def close(self) -> list[Event]:
        """The stream has ended. An event that lacks only its blank line is still given: servers forget it after
        `[DONE]`. Whether its data is whole is for the reader to find out."""
        if self._tail:
            self._field(self._tail)
            self._tail = b""
        return [self._dispatch()] if self._data else []

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value.decode("utf-8", errors="replace")

    def _dispatch(self) -> Event:
        event = Event(self._data[0] if len(self._data) == 1 else b"\n".join(self._data), self._name)
        self._data, self._name = [], ""
        return event

    def _without_bom(self, chunk: bytes) -> bytes:
        self._tail += chunk
        bom = b"\xef\xbb\xbf"
        if len(self._tail) < 3 and bom.startswith(self._tail):
            return b""
        self._started = True
        whole, self._tail = self._tail, b""
        return whole.removeprefix(bom)
