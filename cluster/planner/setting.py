"""A value set by its dotted path, as the axes of an experiment name it: `cluster.pools.decode.layout.tp`."""

from __future__ import annotations

from typing import Any

from cluster.errors import ConfigError


def set_path(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in the `cluster` or `workload` of `raw`; a whole number at `replicas` sets minimum and maximum.

    Raises:
        ConfigError: the path leads nowhere.
    """
    parts = path.split(".")
    if parts[0] not in raw or len(parts) < 2:
        raise ConfigError(f"axes: {path}", "does not start with `cluster.` or `workload.`", "give the whole path")
    if parts[-1] == "replicas" and isinstance(value, int) and len(parts) > 2:
        value = {"min": value, "max": value}
    node: Any = raw
    for part in parts[:-1]:
        if isinstance(node, list):
            node = node[_index(path, node, part)]
            if not isinstance(node, (dict, list)):
                raise ConfigError(f"axes: {path}", f"{part} holds no mapping", "end the path there")
            continue
        if not isinstance(node.get(part), (dict, list)):
            node[part] = {}
        node = node[part]
    if isinstance(node, list):
        node[_index(path, node, parts[-1])] = value
    else:
        node[parts[-1]] = value


def _index(path: str, node: list[Any], part: str) -> int:
    if not part.isdecimal() or int(part) >= len(node):
        raise ConfigError(f"axes: {path}", f"{part!r} is no index of a list of {len(node)}", "count from 0")
    return int(part)
