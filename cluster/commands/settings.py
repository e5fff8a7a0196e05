"""A ClusterConfig from a file and the options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig, load, parse
from cluster.errors import ConfigError
from cluster.yaml_file import read_yaml


def load_config(
    path: Path | None, *, port: int | None = None, model: str | None = None, defaults: dict[str, Any] | None = None
) -> ClusterConfig:
    """Read `path` (or take the defaults) and put the options over it.

    Raises:
        ConfigError: the file or the result cannot be used.
    """
    raw: dict[str, Any] = dict(defaults or {})
    if path is not None:
        load(path)  # for its messages
        raw = read_yaml(path) or {}
    if port is not None:
        raw = _with(raw, ("router", "http", "port"), port)
    if model is not None:
        raw = _with(raw, ("model", "id"), model)
    return parse(raw)


def _with(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    below = raw.get(head) or {}
    if rest and not isinstance(below, dict):
        raise ConfigError(head, "is not a mapping")
    return {**raw, head: _with(below, tuple(rest), value) if rest else value}
