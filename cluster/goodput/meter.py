"""What an engine's worker counts so that its capacity can be measured: busy time, steps and tokens, all monotone.

Busy time runs from the moment the engine is given work until a step ends with nothing running. That is what a
replica can be credited for: tokens over busy seconds is its speed at any load, also far below saturation.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import WorkerSnapshot


@dataclass(slots=True)
class LoadMeter:
    """One engine's totals since it started. `now` is a monotone clock of the worker, in seconds."""

    busy_s: float = 0.0
    steps: int = 0
    sequence_steps: int = 0
    prompt_tokens: int = 0
    _busy_since_s: float | None = None
    _engine_steps: int = 0

    def on_start(self, now: float) -> None:
        """The engine was given a request."""
        if self._busy_since_s is None:
            self._busy_since_s = now

    def on_output(self, *, output_tokens: int, computed_prompt_tokens: int = 0) -> None:
        """One request's share of a step. `computed_prompt_tokens` once, with its first output."""
        self.sequence_steps += max(0, output_tokens)
        self.prompt_tokens += max(0, computed_prompt_tokens)

    def on_step(self, snapshot: WorkerSnapshot, now: float) -> None:
        """An engine step has ended; `snapshot` is the load after it."""
        self.steps += max(0, snapshot.steps - self._engine_steps)
        self._engine_steps = snapshot.steps
        if self._busy_since_s is not None:
            self.busy_s += max(0.0, now - self._busy_since_s)
        self._busy_since_s = now if snapshot.running > 0 else None

    def values(self) -> dict[str, float]:
        """The totals by the names that the autoscaling policy reads."""
        return {
            "busy_s": self.busy_s,
            "steps": float(self.steps),
            "sequence_steps": float(self.sequence_steps),
            "prompt_tokens": float(self.prompt_tokens),
        }
