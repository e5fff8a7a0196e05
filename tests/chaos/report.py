"""What a chaos run showed, as a table and as one line of JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.clients import Ask
from tests.chaos.faults import Fault

# What only a second connection could have saved: the router that held the client's own connection was killed.
ROUTER_GONE = frozenset({"connection lost", "stream cut"})


def summarize(asks: list[Ask], faults: list[Fault], status: dict[str, Any]) -> dict[str, Any]:
    """Key figures. `finished_share` leaves out clients whose own connection was cut with its router."""
    ends = Counter(ask.end for ask in asks)
    for fault in faults:
        after = [_next_notice(ask, fault.at_s) for ask in asks if ask.sent_s <= fault.at_s < ask.noticed_s[-1]]
        fault.recovered_s = max(after, default=0.0)
    recovery = sorted(f.recovered_s for f in faults)
    cut = sum(ends[end] for end in ROUTER_GONE)
    return {
        "faults": len(faults),
        "offered": len(asks),
        "finished": ends["finished"],
        "finished_share": round(ends["finished"] / max(1, len(asks) - cut), 5),
        "connections_cut": cut,
        "client_retries": sum(ask.retried for ask in asks),
        "retried": status["retries"],
        "migrated": status["migrations"],
        "wrong_tokens": sum(ask.wrong for ask in asks),
        "hung": ends["hung"],
        "leases_open": status["leases_open"],
        "blocks_leaked": status["blocks_leaked"],
        "recovery_p50_s": round(statistics.median(recovery), 2) if recovery else 0.0,
        "recovery_max_s": round(recovery[-1], 2) if recovery else 0.0,
    }


def _next_notice(ask: Ask, at_s: float) -> float:
    return next(t for t in ask.noticed_s if t > at_s) - at_s


def show(console: Console, title: str, asks: list[Ask], faults: list[Fault], summary: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("fault", "target", "times", "recovery p50 s", "recovery max s"):
        table.add_column(column, justify="left" if column in ("fault", "target") else "right")
    for (what, target), count in sorted(Counter((f.what, f.target) for f in faults).items()):
        times = [f.recovered_s for f in faults if (f.what, f.target) == (what, target)]
        table.add_row(what, target, str(count), f"{statistics.median(times):.2f}", f"{max(times):.2f}")
    console.print(table)
    requests = Table(title="requests", title_justify="left")
    requests.add_column("end")
    requests.add_column("requests", justify="right")
    requests.add_column("example")
    for end, count in Counter(ask.end for ask in asks).most_common():
        example = next((ask.detail for ask in asks if ask.end == end and ask.detail), "")
        requests.add_row(end, str(count), example[:100])
    console.print(requests)
    figures = Table(title="figures", title_justify="left", show_header=False)
    figures.add_column("figure")
    figures.add_column("value", justify="right")
    for name, value in summary.items():
        figures.add_row(name, str(value))
    console.print(figures)
