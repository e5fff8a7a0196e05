"""Decisions travel from Serve's controller to routers and `pdserve status` through Ray's internal key-value store.

Writing happens on a thread of its own: the control loop never waits for it. Only the latest decision and the last
changes are kept.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from typing import Any

log = logging.getLogger("ray.serve")

CHANGES_KEPT = 20


def _key(name: str) -> bytes:
    return f"pdserve/{name}/autoscaling".encode()


class Publisher:
    """Writes the latest decision; older ones that were not written yet are skipped."""

    def __init__(self, name: str) -> None:
        self._key = _key(name)
        self._pending: dict[str, Any] | None = None
        self._changes: deque[dict[str, Any]] = deque(maxlen=CHANGES_KEPT)
        self._counts: dict[str, int] = {}
        self._targets: dict[str, int] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def publish(self, decision: dict[str, Any]) -> None:
        """Hand over a decision; returns at once."""
        for pool, state in decision["pools"].items():
            was, now = self._targets.get(pool), state["target"]
            if was is not None and was != now:
                direction = "up" if now > was else "down"
                self._counts[f"{pool}.{direction}"] = self._counts.get(f"{pool}.{direction}", 0) + 1
                change = {"at_s": decision["at_s"], "pool": pool, "from": was, "to": now}
                self._changes.append(change | {"reason": state["reason"], "why": state["why"]})
            self._targets[pool] = now
        with self._wake:
            self._pending = decision | {"changes": list(self._changes), "change_counts": dict(self._counts)}
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="autoscaling decisions", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _write(self) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        while True:
            with self._wake:
                while self._pending is None:
                    self._wake.wait()
                decision, self._pending = self._pending, None
            try:
                _internal_kv_put(self._key, json.dumps(decision).encode(), overwrite=True)
            except Exception:
                log.exception("autoscaling: a decision could not be published")


def latest(name: str) -> dict[str, Any] | None:
    """The latest published decision of a cluster; None where there is none. Blocks for a round trip to Ray."""
    from ray.experimental.internal_kv import _internal_kv_get

    raw = _internal_kv_get(_key(name))
    if raw is None:
        return None
    decision: dict[str, Any] = json.loads(raw)
    return decision


def forget(name: str) -> None:
    """Remove what was published: a cluster of that name ends or starts anew."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(name))


def gauges(decision: dict[str, Any] | None, now: float) -> dict[str, Any]:
    """A published decision as values for `Metrics.set_gauges`. `now` is wall-clock time, as in Serve's controller."""
    if decision is None:
        return {}
    pools = decision["pools"]
    replicas = {}
    for pool, state in pools.items():
        for name in ("ready", "starting", "draining"):
            replicas[(pool, name)] = float(state[name])
    changes = {tuple(key.split(".")): float(n) for key, n in decision["change_counts"].items()}
    return {
        "pdserve_autoscaling_target_replicas": {pool: float(state["target"]) for pool, state in pools.items()},
        "pdserve_autoscaling_reason": {(pool, state["reason"]): 1.0 for pool, state in pools.items()},
        "pdserve_autoscaling_changes_total": changes,
        "pdserve_autoscaling_unattainable": float(any("unattainable" in w for w in decision["warnings"])),
        # Not the age of the decision: without data one is made every interval too. An older controller tells no other.
        "pdserve_autoscaling_data_age_seconds": max(0.0, now - decision.get("data_at_s", decision["at_s"])),
        "pdserve_pool_replicas": replicas,
    }
