"""Reading a user's YAML file; every mistake is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ConfigError


def read_yaml(path: str | Path, remedy: str = "give the path of a YAML file", *, key: str | None = None) -> Any:
    """The file's content, as YAML has it.

    Args:
        remedy: what to do where the file cannot be read.
        key: of the configuration that names the file; default: the path itself.

    Raises:
        ConfigError: the file is missing, is not UTF-8 text, or is not YAML (with the line).
    """
    path = Path(path)
    where = key or str(path)
    of = f"{path} " if key else ""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(where, f"{of}cannot be read ({e.strerror})", remedy) from e
    except UnicodeDecodeError as e:
        raise ConfigError(where, f"{of}is not UTF-8 text", remedy) from e
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        line = f" at line {e.problem_mark.line + 1}" if isinstance(e, yaml.MarkedYAMLError) and e.problem_mark else ""
        raise ConfigError(where, f"{of}is not valid YAML{line}", "check indentation and quoting") from e
