"""Starts `bare_engine.py`: one vLLM engine in a process of its own, without Ray. A tool of the live tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.messages import Role
from cluster.models.resolve import resolve
from kv_transfer import ports
from kv_transfer.settings import PortPlan, engine_transfer, ports_needed


class Bare:
    """An engine process in its own process group.

    Args:
        config: what the engine is given for KV transfer; nothing where it is colocated.
        cores: OpenMP threads of the ranks, in vLLM's notation.
        log: where its stderr goes.
    """

    def __init__(self, config: ClusterConfig, role: Role, cores: str, log: Path, **engine_args: Any) -> None:
        self._ports = ports.reserve(
            ports_needed(config.pool(role).layout),
            lowest=config.kv_transfer.port_min,
            highest=config.kv_transfer.port_max,
        )
        transfer = engine_transfer(config, role, host="127.0.0.1", ports=PortPlan(self._ports.first), on_cpu=True)
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **transfer.environment,
        }
        options = {
            "environment": environment,
            "kv_transfer_config": transfer.kv_transfer_config,
            "engine_args": {"model": resolve(config.model).path, **engine_args},
        }
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("bare_engine.py")), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended; see {self._log.name}"
        return json.loads(line)

    def ask(self, prompt: list[int], max_tokens: int, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "max_tokens": max_tokens, **order}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        group = self.process.pid
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.communicate("\n", timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        self._ports.close()
