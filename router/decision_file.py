"""Writes decision-log entries to a JSON-lines file of bounded size."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cluster.config import PlacementConfig
from router.decision_log import Watch

logger = logging.getLogger(__name__)
MAX_BYTES = 256 * 1024 * 1024


def watch(config: PlacementConfig, router_id: str) -> Watch:
    """What a router keeps of its decisions, by `router.placement.shadow` and `router.placement.decision_log`."""
    sink = None if config.decision_log is None else DecisionFile(config.decision_log, router_id)
    return Watch(shadow=config.shadow, sink=sink)


class DecisionFile:
    """Appends lines; a full file becomes `NAME.1`. A disk that cannot be written to ends the log, never a request.

    Args:
        path: each router replica needs its own, so `{router}` in it is replaced by `router_id`.
    """

    def __init__(self, path: str, router_id: str = "", max_bytes: int = MAX_BYTES) -> None:
        self.path = Path(path.replace("{router}", router_id))
        self._max_bytes = max_bytes
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = None
        self._size = 0
        self._open()

    def __call__(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = self._encoder.encode(entry) + b"\n"
        try:
            if self._size + len(line) > self._max_bytes:
                self._file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._open()
            if self._file is not None:
                self._file.write(line)
                self._file.flush()
                self._size += len(line)
        except OSError as e:
            logger.error("the decision log %s cannot be written (%s); it ends here", self.path, e.strerror)
            self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                pass

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._size = self.path.stat().st_size
        except OSError as e:
            logger.error("the decision log %s cannot be opened (%s); there is none", self.path, e.strerror)
            self._file = None
