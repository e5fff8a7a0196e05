"""Is there room for what a long run will write? Asked before it starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cluster.errors import ConfigError


def make_folder(folder: Path, option: str = "--out") -> None:
    """Create the folder of a report.

    Raises:
        ConfigError: no file can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        problem = f"no file can be written in {str(folder)!r} ({e.strerror or e})"
        raise ConfigError(option, problem, "give a folder of your own") from None


def make_room(file: Path, option: str) -> None:
    """Create the folder of a file.

    Raises:
        ConfigError: the file cannot be written.
    """
    if file.is_dir():
        raise ConfigError(option, f"{str(file)!r} is a folder", "name a file")
    if not file.exists():
        make_folder(file.parent, option)
    elif not os.access(file, os.W_OK):
        raise ConfigError(option, f"{str(file)!r} is there and cannot be written", "name another file")
