"""The three fronts that are compared, each started alone on this machine with the same engines and settings.

| mode | processes |
|---|---|
| `colocated` | one vLLM engine behind vLLM's own OpenAI server |
| `direct` | a prefill and a decode engine, each behind vLLM's own server; the client makes the two calls itself |
| `pdserve` | `pdserve serve` with one prefill and one decode engine |

Engines get what `cluster/engine/vllm` gives its own: threads, executor, KV size, the CPU plugin's switches, the
connector, and they are compiled or not alike.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.config import ClusterConfig, parse
from cluster.engine.vllm.environment import prepare
from cluster.errors import UserError
from cluster.messages import Role
from cluster.models.resolve import resolve
from cluster.runtime.local import free_port

MODES = ("colocated", "direct", "pdserve")
HOST = "127.0.0.1"
START_S = 900.0  # two cores compile for minutes, once


@dataclass(slots=True)
class Front:
    """A running front. `url` takes the streamed request; `prefill_url` the first call of the direct split."""

    mode: str
    url: str
    prefill_url: str | None = None
    roots: list[int] = field(default_factory=list)


def bench_config(mode: str, port: int, changes: dict[str, Any] | None = None) -> ClusterConfig:
    """The configuration that all fronts share; `changes` is laid over it.

    Engines are compiled, which pdserve leaves out for a fast start: the faster a step, the more a front counts.
    """
    raw: dict[str, Any] = {"network": {"host": HOST}, "router": {"http": {"host": HOST, "port": port}}}
    raw["engine"] = {"cpu": {"compile": True}}
    # Limits that the direct split keeps at every concurrency: beyond them a router rightly puts late requests last.
    raw["slo"] = {"ttft_ms": 2000, "tpot_ms": 100}
    if mode == "colocated":
        raw["pools"] = {"prefill": None}
    for section, values in (changes or {}).items():
        raw[section] = {**raw.get(section, {}), **values}
    return parse(raw)


@contextmanager
def start(mode: str, folder: Path, changes: dict[str, Any] | None = None) -> Iterator[Front]:
    """Start a front and wait until it answers; end it and everything it started.

    Raises:
        UserError: it did not start; the log's last line is part of the message.
    """
    with ExitStack() as stack:
        if mode == "pdserve":
            front = _pdserve(stack, folder, changes)
        elif mode == "colocated":
            url, pid = _vllm(stack, folder, "colocated", Role.DECODE, bench_config(mode, 8000, changes))
            front = Front(mode, url, roots=[pid])
        else:
            config = bench_config(mode, 8000, changes)
            prefill_url, prefill = _vllm(stack, folder, "prefill", Role.PREFILL, config)
            url, decode = _vllm(stack, folder, "decode", Role.DECODE, config)
            front = Front(mode, url, prefill_url, [prefill, decode])
        yield front


def _pdserve(stack: ExitStack, folder: Path, changes: dict[str, Any] | None) -> Front:
    port = free_port(HOST)
    file = folder / "pdserve.yaml"
    config = bench_config("pdserve", port, changes).model_dump(mode="json", exclude_defaults=True)
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "cluster.cli", "serve", str(file), "--json"]
    process = _spawn(stack, command, {}, folder / "pdserve.log", grace_s=60)
    url = f"http://{HOST}:{port}"
    _wait(process, url + "/health", folder / "pdserve.log")
    _wait_for_pairs(process, url, folder / "pdserve.log")
    return Front("pdserve", url, roots=[process.pid])


def _vllm(stack: ExitStack, folder: Path, name: str, role: Role, config: ClusterConfig) -> tuple[str, int]:
    settings = prepare(config, role, host=HOST)
    stack.callback(settings.ports.close)
    port = free_port(HOST)
    arguments = ["--model", settings.model_path, "--served-model-name", resolve(config.model).name]
    arguments += ["--host", HOST, "--port", str(port), "--dtype", config.model.dtype, "--enable-prefix-caching"]
    arguments += ["--no-enable-log-requests", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    if settings.eager:
        arguments.append("--enforce-eager")
    if settings.executor is not None:
        arguments += ["--distributed-executor-backend", settings.executor]
    if settings.kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    if settings.kv_transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(settings.kv_transfer)]
    for key, value in {**config.engine.args, **config.pool(role).engine_args}.items():
        arguments += [f"--{key.replace('_', '-')}", str(value)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    log = folder / f"{name}.log"
    process = _spawn(stack, command, settings.environment, log, grace_s=20)
    url = f"http://{HOST}:{port}"
    _wait(process, url + "/health", log)
    return url, process.pid


def _spawn(
    stack: ExitStack, command: list[str], environment: dict[str, str], log: Path, grace_s: float
) -> subprocess.Popen[bytes]:
    file = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=file, stderr=file, start_new_session=True
    )

    def end() -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    stack.callback(end)
    return process


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise UserError(f"{log.stem} did not start: {lines[-1] if lines else 'no output'}")


def _wait_for_pairs(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Every pair has met before the first request that counts."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        pairs = httpx.get(url + "/pdserve/status", timeout=20).json().get("pairs", [])
        if pairs and all(pair["state"] in ("ready", "warm") for pair in pairs):
            return
        time.sleep(0.3)
    raise UserError(f"the pairs of pdserve did not become ready; see {log}")
