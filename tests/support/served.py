"""Runs `pdserve serve` as a user does, in a process of its own. A tool of the live tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from cluster.runtime.local import free_port

START_S = 600


class Served:
    """A running `pdserve serve`.

    Attributes:
        url: base of the HTTP endpoint.
        process: the command; engines and Ray are below it or in its Ray session.
    """

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.port = free_port("127.0.0.1")
        self._shared_memory = _shared_memory()
        raw = {
            **config,
            "router": {
                **config.get("router", {}),
                "http": {**config.get("router", {}).get("http", {}), "port": self.port},
            },
        }
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(raw))
        self.log = folder / "serve.log"
        self.url = f"http://127.0.0.1:{self.port}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cluster.cli", "serve", str(path), "--json"],
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # one JSON object when ready, nothing if it failed
        assert line, f"pdserve serve ended: {self.log.read_text(errors='replace')[-2000:]}"
        self.ready: dict[str, Any] = json.loads(line)
        self.started = self.processes()

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = httpx.get(f"{self.url}/pdserve/status", timeout=30).json()
        return value

    def records(self) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = httpx.get(f"{self.url}/pdserve/records", timeout=30).json()
        return value

    def replicas(self) -> list[dict[str, Any]]:
        return [replica for pool in self.status()["pools"].values() for replica in pool["replicas"]]

    def idle(self) -> bool:
        """Nothing runs and nothing is held, by the workers' own word."""
        status = self.status()
        replicas = [r for pool in status["pools"].values() for r in pool["replicas"]]
        return status["router"]["running_requests"] == 0 and not any(
            r["running"] or r["waiting"] or r["open_leases"] for r in replicas
        )

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to it: its children and theirs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 180) -> int:
        """Ask it to end; returns its exit status."""
        self.started = list({p.pid: p for p in [*self.started, *self.processes()]}.values())
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(timeout_s)
            self.close()
            return status
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        for process in [*self.started, *self.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def left(self) -> list[str]:
        """Processes and shared memory of it that are still there."""
        names = sorted(_shared_memory() - self._shared_memory)
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    names.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        return names


def _shared_memory() -> set[str]:
    return {str(p) for p in Path("/dev/shm").glob("*vllm*")}


def wait_for(done: Any, timeout_s: float, what: str) -> float:
    """Seconds until `done()` is true; fails the test after `timeout_s`."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < timeout_s, f"still waiting after {timeout_s} s for {what}"
        time.sleep(0.05)
    return time.monotonic() - began
