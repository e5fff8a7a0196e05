"""`pdserve status`: what a running cluster is doing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cluster.commands.output import out, print_json, styled
from cluster.errors import UserError

CHANGES_SHOWN = 5


def command(
    url: Annotated[str, typer.Option(help="where the cluster is served")] = "http://127.0.0.1:8000",
    watch: Annotated[bool, typer.Option("--watch", help="refresh until Ctrl-C")] = False,
    interval_s: Annotated[float, typer.Option(min=0.2, help="seconds between refreshes")] = 1.0,
    api_key: Annotated[str | None, typer.Option(help="an operator's key", envvar="PDSERVE_API_KEY")] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Pools, replicas, load, open leases, goodput, misses by stage and the autoscaler's last decisions.

    It is what one router knows; with several, counts are of the one that answers, whose name is shown.

    Example: pdserve status --url http://127.0.0.1:8000 --watch
    """
    from cluster.runtime.local import fetch_status
    from loadtests.endpoint import base_url

    if json_ and watch:
        raise UserError("--watch: is for people; ask with --json as often as needed")
    url = base_url(url, "--url")
    first = fetch_status(url, api_key)
    if json_:
        print_json(first)
        return
    if not watch:
        out.print(render(first))
        return
    from rich.live import Live

    # Ctrl-C is how it ends.
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(render(first), console=out, screen=out.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(interval_s)
            live.update(_now(lambda: fetch_status(url, api_key)), refresh=True)


def _now(ask: Callable[[], dict[str, Any]]) -> Any:
    """What there is to show; a router that is being replaced is no reason to stop looking."""
    try:
        return render(ask())
    except UserError as e:
        return styled((str(e), "yellow"))


def render(status: dict[str, Any]) -> Any:
    """Tables for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    router = status["router"]
    head = Text.assemble(
        (status["name"], "bold"),
        f"  model {status['model']}  engine {status['engine']}  policy {router['policy']}  router {router['id']}"
        f"  running {router['running_requests']}  retries {router['retries']}  migrations {router['migrations']}",
    )
    replicas = Table(title="replicas", title_justify="left", box=None, pad_edge=False)
    for column in ("pool", "layout", "replica", "state", "run", "wait", "KV blocks", "leases", "last failure"):
        replicas.add_column(column, no_wrap=column != "last failure")
    for name, pool in status["pools"].items():
        layout = "x".join(f"{k}{v}" for k, v in pool["layout"].items() if v > 1 or k == "tp")
        for r in pool["replicas"]:
            replicas.add_row(
                name,
                layout,
                r["id"],
                r["state"],
                str(r["running"]),
                str(r["waiting"]),
                f"{r['kv_used_blocks']}/{r['kv_total_blocks']}",
                str(r["open_leases"]),
                r["last_failure"] or "",
            )
        if not pool["replicas"]:
            replicas.add_row(name, layout, "-", "no replica", "", "", "", "", "")
    parts = [head, Text(""), replicas, Text(""), _goodput(status["goodput"]), _pairs(status.get("pairs", []))]
    if status.get("autoscaling"):
        parts += [Text(""), _autoscaling(status["autoscaling"], time.time())]
    return Group(*parts)


def _goodput(goodput: dict[str, Any]) -> Any:
    from rich.text import Text

    missed = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in goodput["missed_by_stage"].items() if v) or "none"
    attainment = "-" if goodput["attainment"] is None else f"{100 * goodput['attainment']:.1f}%"
    return Text(
        f"goodput  {goodput['good']} good of {goodput['offered']} offered, attainment {attainment}"
        f", failed {goodput['failed']}, rejected {goodput['rejected']}\n"
        f"latency  TTFT p50/p99 {_ms(goodput['ttft_s'])} ms, TPOT p50/p99 {_ms(goodput['tpot_s'])} ms\n"
        f"missed   {missed}"
    )


def _autoscaling(decision: dict[str, Any], now: float) -> Any:
    """Targets with their reasons, the last changes, and what a person should see."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    age_s = max(0.0, now - decision["at_s"])
    pools = Table(title=f"autoscaling, decided {age_s:.0f} s ago", title_justify="left", box=None, pad_edge=False)
    for column in ("pool", "target", "ready", "starting", "draining", "need", "reason"):
        pools.add_column(column, no_wrap=column != "reason")
    for name, pool in decision["pools"].items():
        need = "-" if pool["need"] is None else f"{pool['need']:.2f}"
        counts = (str(pool[key]) for key in ("target", "ready", "starting", "draining"))
        pools.add_row(name, *counts, need, f"{pool['reason']}: {pool['why']}")
    lines = [
        f"{max(0.0, now - c['at_s']):5.0f} s ago  {c['pool']} {c['from']} -> {c['to']}: {c['reason']} ({c['why']})"
        for c in reversed(decision["changes"][-CHANGES_SHOWN:])
    ]
    warnings = [Text(f"warning: {w}", style="yellow") for w in decision["warnings"]]
    return Group(pools, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines), *warnings)


def _ms(quantiles: dict[str, float | None]) -> str:
    return " / ".join("-" if quantiles[q] is None else f"{1e3 * float(quantiles[q] or 0):.1f}" for q in ("p50", "p99"))


def _pairs(pairs: list[dict[str, Any]]) -> Any:
    from rich.text import Text

    waiting = [f"{p['prefill']} -> {p['decode']}: {p['state']}" for p in pairs if p["state"] != "ready"]
    ready = sum(p["state"] == "ready" for p in pairs)
    return Text(f"pairs ready to transfer: {ready} of {len(pairs)}" + ("; " + "; ".join(waiting) if waiting else ""))
