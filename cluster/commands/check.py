"""`pdserve check`: is this configuration one that can run, and what does it resolve to? Starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import complain, err, out, print_json

if TYPE_CHECKING:
    from cluster.layout import ReplicaLayout
    from cluster.preflight import Preflight
    from cluster.topology import Machine, PoolTopology, Topology


def command(
    config: Annotated[Path, typer.Argument(help="a ClusterConfig")],
    gpus: Annotated[
        list[str] | None, typer.Option("--gpus", help="what the cluster has, e.g. H100=16; may be repeated")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--cluster", help="compare with the Ray cluster at this address (`auto`: the local one)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Validate a config and print its topology: replicas, bundles, ranks, ports, memory, NIXL pairs.

    Nothing is started and no weights are loaded. Exit status 2 where the config cannot run.

    Example: [bold]pdserve check cluster.yaml --gpus H100=16[/bold]
    """
    from cluster.config import load
    from cluster.preflight import Incompatible, preflight
    from cluster.topology import topology

    loaded = load(config)
    machine = _machine(gpus or [], address)
    try:
        facts = preflight(loaded)
    except Incompatible as e:
        for refusal in e.refusals:
            complain(f"pools.prefill and pools.decode cannot exchange KV: {refusal}")
        if json:
            print_json({"ok": False, "refusals": [_refusal(r) for r in e.refusals]})
        raise typer.Exit(2) from None
    found = topology(facts, machine)
    if json:
        print_json(_as_json(facts, found))
    else:
        _show(facts, found)
    _warn(found.warnings)


def _warn(warnings: list[str]) -> None:
    from rich.text import Text

    # As text: what stands in brackets is a field's name or a range, no markup.
    for warning in warnings:
        err.print(Text.assemble(("warning:", "yellow"), " ", warning), soft_wrap=True)


def _machine(gpus: list[str], address: str | None) -> Machine:
    import os

    import psutil

    from cluster.errors import UserError
    from cluster.topology import Machine

    counts: dict[str, int] | None = None
    for item in gpus:
        name, _, count = item.partition("=")
        if not name or not count.isdecimal():
            raise UserError(f"--gpus: '{item}' is not TYPE=COUNT; for example --gpus H100=16")
        counts = {**(counts or {}), name: int(count)}
    if address is not None:
        counts = {**_of_ray(address), **(counts or {})}
    return Machine(counts, os.cpu_count(), psutil.virtual_memory().total)


def _of_ray(address: str) -> dict[str, int]:
    """Accelerators of a running Ray cluster: GPUs by type, and custom resources."""
    from cluster.errors import UserError

    err.print(f"asking the Ray cluster at {address}")
    import logging

    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise UserError(
            f"--cluster: no Ray cluster answers at '{address}' ({type(e).__name__}); start one with `ray start --head`"
        ) from None
    finally:
        ray.shutdown()
    counts: dict[str, int] = {}
    for node in nodes:
        resources = node["Resources"]
        gpus = int(resources.get("GPU", 0))
        for name, count in resources.items():
            if name.startswith("accelerator_type:"):
                name, count = name.removeprefix("accelerator_type:"), gpus
            elif name in ("CPU", "memory", "object_store_memory") or name.startswith("node:"):
                continue
            counts[name] = counts.get(name, 0) + int(count)
    return counts


def _refusal(refusal: Any) -> dict[str, Any]:
    return {
        "field": refusal.field,
        "prefill": refusal.prefill,
        "decode": refusal.decode,
        "why": refusal.why,
        "line": str(refusal),
    }


def _as_json(facts: Preflight, found: Topology) -> dict[str, Any]:
    config, shape = facts.config, facts.shape
    return {
        "ok": True,
        "name": config.name,
        "model": {
            "id": config.model.id,
            "revision": config.model.revision,
            "layers": shape.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_model_len": facts.max_model_len,
        },
        "engine": {"kind": config.engine.kind, "device": "cpu" if facts.on_cpu else "gpu"},
        "kv": {
            "block_size_tokens": facts.block_size,
            "dtype": facts.kv_dtype,
            "bytes_per_token": shape.kv_bytes_per_token(kv_dtype=facts.kv_dtype),
        },
        "pools": {role.value: _pool_json(pool) for role, pool in found.pools.items()},
        "accelerators": {name: {"min": low, "max": high} for name, (low, high) in found.accelerators.items()},
        "ports": {"min": config.kv_transfer.port_min, "max": config.kv_transfer.port_max},
        "pairs": {"min": found.pairs[0], "max": found.pairs[1], "ratio": _ratio(found), "heads": found.sources},
        "warnings": found.warnings,
    }


def _pool_json(pool: PoolTopology) -> dict[str, Any]:
    from dataclasses import asdict

    layout = pool.layout
    return {
        "replicas": {"min": pool.replicas_min, "max": pool.replicas_max, "start": pool.replicas_start},
        "accelerator": layout.accelerator_type,
        "accelerators_per_replica": layout.accelerators,
        "gpus": {"min": layout.gpus * pool.replicas_min, "max": layout.gpus * pool.replicas_max},
        "placement": {"strategy": layout.strategy, "bundles": [dict(b) for b in layout.bundles]},
        "executor": layout.executor,
        "ranks": [asdict(rank) for rank in layout.ranks],
        "kv_heads_per_rank": pool.kv_heads_per_rank,
        "memory": asdict(pool.memory),
        "ports_per_replica": pool.ports_per_replica,
    }


def _ratio(found: Topology) -> str | None:
    """Prefill to decode replicas at the start, in lowest terms."""
    from math import gcd

    from cluster.messages import Role

    if Role.PREFILL not in found.pools:
        return None
    prefill, decode = (found.pools[role].replicas_start for role in (Role.PREFILL, Role.DECODE))
    divisor = gcd(prefill, decode) or 1
    return f"{prefill // divisor}:{decode // divisor}"


def _show(facts: Preflight, found: Topology) -> None:
    from rich.table import Table
    from rich.text import Text

    config, shape = facts.config, facts.shape
    device = "simulated" if config.engine.kind == "simulated" else "CPU" if facts.on_cpu else "GPU"
    kv_bytes = shape.kv_bytes_per_token(kv_dtype=facts.kv_dtype)
    # As text: names may hold brackets, which are no markup.
    head = (
        f": {config.model.id} ({shape.layers} layers, {shape.kv_heads} KV heads of "
        f"{shape.head_dim}), {facts.max_model_len:,} tokens, {device}\n"
        f"KV: {facts.kv_dtype}, blocks of {facts.block_size} tokens, {kv_bytes:,} bytes per token"
    )
    out.print(Text.assemble((config.name, "bold"), head), soft_wrap=True)
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("")
    for role in found.pools:
        table.add_column(role.value)
    rows = [_rows(pool) for pool in found.pools.values()]
    for label in rows[0]:
        table.add_row(label, *(Text(row[label]) for row in rows))
    out.print(table)
    ports = config.kv_transfer
    out.print(f"ports on each node: from [{ports.port_min}, {ports.port_max}]")
    totals = ", ".join(f"{name} {_span(low, high)}" for name, (low, high) in found.accelerators.items())
    out.print(f"accelerators: {totals}")
    if not config.colocated:
        out.print(f"NIXL pairs: {_span(*found.pairs)}, prefill:decode {_ratio(found)}")
        for decode_rank, sources in found.sources.items():
            text = "; ".join(f"{_heads(heads)} from prefill rank {rank}" for rank, heads in sources.items())
            out.print(f"  decode rank {decode_rank} reads {text}")


def _started(layout: ReplicaLayout) -> str:
    from cluster.layout import IN_PROCESS

    if layout.executor == IN_PROCESS:
        return "inside the engine"
    return f"started by {layout.executor or 'the engine'}"


def _rows(pool: PoolTopology) -> dict[str, str]:
    layout, memory = pool.layout, pool.memory
    last = layout.ranks[-1]
    return {
        "replicas": f"{_span(pool.replicas_min, pool.replicas_max)}, {pool.replicas_start} at start",
        "layout": f"tp {last.tp + 1} x pp {last.pp + 1} x dp {last.dp + 1}",
        "accelerator": layout.accelerator_type or ("any GPU" if layout.uses_gpu else "none"),
        "bundles": f"{len(layout.bundles)}, {layout.strategy}: {_bundle(layout.bundles[-1])}",
        "ranks": f"{len(layout.ranks)}, {_started(layout)}",
        "KV heads per rank": str(pool.kv_heads_per_rank),
        "KV per token and rank": f"{memory.bytes_per_token_per_rank:,} bytes",
        "KV space per rank": "known at start"
        if memory.space_bytes is None
        else f"{memory.space_bytes / 2**30:.2f} GiB",
        "KV tokens": "known at start" if memory.tokens is None else f"{memory.tokens:,} in {memory.blocks:,} blocks",
        "concurrency (longest)": (
            "known at start" if memory.concurrency is None else f"{memory.concurrency} (limit: {memory.limit})"
        ),
        "  from memory": "-" if memory.sequences is None else str(memory.sequences),
        "  from the SLO": "-" if memory.slo_sequences is None else str(memory.slo_sequences),
        "ports per replica": f"{pool.ports_per_replica} (side channel, KV events, replay)",
    }


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _heads(heads: list[int]) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {heads[0]}-{heads[-1]}"


def _bundle(bundle: Any) -> str:
    return " ".join(f"{name} {amount:g}" for name, amount in bundle.items())
