"""CPU seconds by process of a front: where a token's cost is spent."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable

import psutil

# First match wins; read from the process title, which Ray and vLLM set.
_KINDS = (
    ("router", re.compile(r"ServeReplica:[^ ]*router", re.I)),
    ("prefill worker", re.compile(r"ServeReplica:[^ ]*prefill", re.I)),
    ("decode worker", re.compile(r"ServeReplica:[^ ]*decode", re.I)),
    ("http proxy", re.compile(r"ProxyActor|haproxy", re.I)),
    ("serve controller", re.compile(r"ServeController", re.I)),
    ("engine core", re.compile(r"EngineCore|VLLM::", re.I)),
    ("engine rank", re.compile(r"VLLM.*Worker", re.I)),
    ("ray", re.compile(r"raylet|gcs_server|ray::|/ray/|log_monitor|ray-dashboard|runtime_env", re.I)),
    ("vllm server", re.compile(r"vllm\.entrypoints", re.I)),
    ("pdserve", re.compile(r"cluster\.cli|pdserve", re.I)),
)


def kind_of(title: str) -> str:
    """A short name for a process."""
    return next((name for name, pattern in _KINDS if pattern.search(title)), "other")


def cpu_by_process(roots: Iterable[int]) -> dict[tuple[int, str], float]:
    """CPU seconds so far of the roots, everything below them, and this process (`client`)."""
    used: dict[tuple[int, str], float] = {}
    for root in roots:
        try:
            top = psutil.Process(root)
            family = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                times = process.cpu_times()
                title = " ".join(process.cmdline()) or process.name()
            except psutil.Error:
                continue
            used[process.pid, kind_of(title)] = times.user + times.system
    mine = psutil.Process(os.getpid()).cpu_times()
    used[os.getpid(), "client"] = mine.user + mine.system
    return used


def spent(before: dict[tuple[int, str], float], after: dict[tuple[int, str], float]) -> dict[str, float]:
    """CPU seconds between two readings, by kind of process. A process that is new counts from its start."""
    out: dict[str, float] = defaultdict(float)
    earlier = {pid: seconds for (pid, _), seconds in before.items()}
    for (pid, kind), seconds in after.items():
        out[kind] += max(0.0, seconds - earlier.get(pid, 0.0))
    return dict(out)
