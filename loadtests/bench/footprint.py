"""Resident memory and start time of every process of 1P1D with the embedded model: `make footprint`."""

from __future__ import annotations

import json
import time
from typing import Any

import psutil
from rich.console import Console

from cluster.config import parse
from cluster.runtime.local import free_port, start

NAMES = {
    "ServeReplica:pdserve:router": "router replica (vLLM's OpenAI layer, tokenizer)",
    "ServeReplica:pdserve:prefill": "prefill replica (engine client)",
    "ServeReplica:pdserve:decode": "decode replica (engine client)",
    "VLLM::EngineCore": "engine core (scheduler; the model and KV of a single rank)",
    "VLLM::Worker": "engine rank (model, KV) of several",
    "ServeController": "Serve controller",
    "ProxyActor": "Serve proxy (idle with direct ingress)",
    "gcs_server": "Ray GCS",
    "raylet": "raylet",
}


def main() -> None:
    began = time.time()
    router = {"http": {"port": free_port("127.0.0.1")}, "placement": {"conditional": False}}
    cluster = start(parse({"model": {"dtype": "float32"}, "router": router}))
    try:
        ready_s = time.time() - began
        rows = _rows(began)
    finally:
        cluster.stop()
    out = Console(width=120)
    out.print("| process | resident MiB | started after s |\n|---|---|---|", markup=False)
    for row in rows:
        out.print(f"| {row['process']} | {row['rss_mib']} | {row['started_after_s']} |", markup=False)
    total = sum(row["rss_mib"] for row in rows)
    print(json.dumps({"ready_s": round(ready_s, 1), "rss_total_mib": total, "processes": rows}))


def _rows(began: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            name = next((text for key, text in NAMES.items() if key in title), None)
            if name is not None:
                memory = process.memory_info().rss >> 20
                rows.append(
                    {"process": name, "rss_mib": memory, "started_after_s": round(process.create_time() - began, 1)}
                )
        except psutil.NoSuchProcess:
            continue
    return sorted(rows, key=lambda row: float(row["started_after_s"]))


if __name__ == "__main__":
    main()
