"""What routers and workers push to the autoscaling policy through Serve: flat numbers by name."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.messages import Role

# A worker: monotone totals (see meter.py), and its load now.
WORKER_TOTALS = ("busy_s", "steps", "sequence_steps", "prompt_tokens")
WORKER_LOADS = ("running", "waiting", "queued_prefill_tokens", "kv_used_blocks", "kv_total_blocks")
# A router: request counters under this prefix, and its queue.
REQUESTS = "requests."
ROUTER_LOADS = ("queue_depth", "oldest_wait_s", "draining_prefill", "draining_decode")

_NEEDED = (
    "started",
    "outcome{",
    "good",
    "missed",
    "refused",
    "served",
    "computed_tokens{",
    "prefill_computed_tokens_squared",
    "prefill_legs",
    "output_tokens",
    "used{",
)


def needed_values(values: Mapping[str, float]) -> dict[str, float]:
    """The counters that the policy reads: what a router pushes to it."""
    return {key: value for key, value in values.items() if key.startswith(_NEEDED)}


def router_stats(
    counters: Mapping[str, float], *, queue_depth: float, oldest_wait_s: float, draining: Mapping[Role, int]
) -> dict[str, float]:
    """What a router's `record_autoscaling_stats` returns.

    Args:
        counters: its request counters; those the policy does not read stay behind.
        draining: replicas that left their pool and still run legs of this router.
    """
    stats = {REQUESTS + key: float(value) for key, value in needed_values(counters).items()}
    stats |= {f"draining_{role.value}": float(n) for role, n in draining.items()}
    return stats | {"queue_depth": float(queue_depth), "oldest_wait_s": float(oldest_wait_s)}
