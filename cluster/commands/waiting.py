"""Shows what is being waited for and for how long, on stderr; a line now and then where there is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.status import Status
from rich.text import Text

from cluster.commands.output import err

QUIET_INTERVAL_S = 10.0


class Waiting:
    """A progress callback (`what`, seconds) that is also a context manager."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._status: Status | None = None
        self._said_s = -QUIET_INTERVAL_S
        self._said = ""

    def __enter__(self) -> Waiting:
        if err.is_terminal:
            self._status = err.status(Text(self._title))
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, what: str, elapsed_s: float) -> None:
        line = f"{self._title}: waiting for {what} ({elapsed_s:.0f} s)"
        if self._status is not None:
            self._status.update(Text(line))
        elif elapsed_s - self._said_s >= QUIET_INTERVAL_S or (what.split(":")[0] != self._said):
            self._said_s, self._said = elapsed_s, what.split(":")[0]
            err.print(line)
