"""Breaking processes of a running cluster: SIGKILL and SIGSTOP, at seeded random moments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass

import psutil


@dataclass
class Fault:
    """What was done. `recovered_s` is filled in by the report."""

    at_s: float
    what: str
    target: str
    pid: int
    recovered_s: float = 0.0


class Processes:
    """The replicas of an application, found by the titles that Ray gives their processes.

    Args:
        root: process whose descendants the cluster is.
    """

    def __init__(self, root: int, application: str) -> None:
        self._root = psutil.Process(root)
        self._prefix = f"ray::ServeReplica:{application}:"

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Living processes of one deployment, oldest first."""
        found = []
        for process in self._root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith(self._prefix + deployment) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda p: p.create_time())

    def all(self) -> list[psutil.Process]:
        return self._root.children(recursive=True)


class Breaker:
    """Injects faults one after the other, each only where a healthy peer of the target exists.

    Args:
        ready: processes of a deployment that are used now.
        weights: how often each (deployment, what) is drawn; what is `kill` or `stop`, or one of them and
            ` child`: a process below the replica.
    """

    def __init__(
        self, processes: Processes, ready, weights: dict[tuple[str, str], float], seed: int, gap_s: float
    ) -> None:
        self._processes, self._ready, self._weights, self._gap_s = processes, ready, weights, gap_s
        self._rng = random.Random(seed)
        self._stopped: dict[int, int] = {}  # stopped process -> its replica
        self.faults: list[Fault] = []

    async def run(self, count: int, deadline_s: float) -> None:
        """Until `count` faults were done, or the time is over."""
        while len(self.faults) < count and time.monotonic() < deadline_s:
            await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._gap_s)
            deployment, what = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
            ready = await self._ready(deployment) - set(self._stopped.values())
            healthy = [p for p in self._processes.replicas(deployment) if p.pid in ready]
            if len(healthy) >= 2:
                await self._break(self._rng.choice(healthy), deployment, what)

    async def _break(self, process: psutil.Process, deployment: str, what: str) -> None:
        target = process
        if what.endswith("child"):
            children = [c for c in process.children(recursive=True) if "resource_tracker" not in " ".join(c.cmdline())]
            if not children:
                return
            target = self._rng.choice(children)
        with contextlib.suppress(psutil.Error):
            if what.startswith("stop"):
                target.send_signal(signal.SIGSTOP)
                self._stopped[target.pid] = process.pid
                asyncio.get_running_loop().call_later(self._rng.uniform(0.5, 8.0), self._go_on, target.pid)
            else:
                target.kill()
            self.faults.append(Fault(time.monotonic(), what, deployment, target.pid))

    def _go_on(self, pid: int) -> None:
        self._stopped.pop(pid, None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def release(self) -> None:
        for pid in list(self._stopped):
            self._go_on(pid)
