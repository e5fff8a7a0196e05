"""What chaos runs showed, as tables and as one line of JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.clients import Ask
from tests.chaos.faults import Fault

# What only a second connection could have saved: the router that held the client's own connection was killed.
ROUTER_GONE = frozenset({"connection lost", "stream cut"})


@dataclass
class Campaign:
    """One cluster from its start to its end. `ends` holds [end, detail, retries, wrong] of each request."""

    faults: list[Fault]
    ends: list[tuple[str, str, int, bool]]
    leases_open: int
    blocks_leaked: int
    retried: int
    migrated: int
    settled_s: float

    @classmethod
    def of(cls, asks: list[Ask], faults: list[Fault], **figures: Any) -> Campaign:
        """Adds to each fault how long the slowest stream that was open then had to wait for its next token or end.

        Clients that do not stream notice only the end, however well all goes.
        """
        streams = [a for a in asks if a.streaming]
        for fault in faults:
            waits = [_next_notice(a, fault.at_s) for a in streams if a.sent_s <= fault.at_s < a.noticed_s[-1]]
            fault.recovered_s = max(waits, default=0.0)
        return cls(faults, [(a.end, a.detail, a.retried, a.wrong) for a in asks], **figures)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))


def read(file: Path) -> Campaign:
    """A campaign that `write` wrote."""
    raw = json.loads(file.read_text())
    faults = [Fault(**fault) for fault in raw.pop("faults")]
    return Campaign(faults, [tuple(end) for end in raw.pop("ends")], **raw)


def summarize(campaigns: list[Campaign]) -> dict[str, Any]:
    """Key figures. `finished_share` leaves out clients whose own connection was cut with its router."""
    ends = [end for c in campaigns for end in c.ends]
    by_end = Counter(end for end, _, _, _ in ends)
    recovery = sorted(f.recovered_s for c in campaigns for f in c.faults)
    cut = sum(by_end[end] for end in ROUTER_GONE)
    return {
        "faults": len(recovery),
        "offered": len(ends),
        "finished": by_end["finished"],
        "finished_share": round(by_end["finished"] / max(1, len(ends) - cut), 5),
        "failed": {end: count for end, count in by_end.most_common() if end != "finished"},
        "connections_cut": cut,
        "client_retries": sum(retried for _, _, retried, _ in ends),
        "retried": sum(c.retried for c in campaigns),
        "migrated": sum(c.migrated for c in campaigns),
        "wrong_tokens": sum(wrong for _, _, _, wrong in ends),
        "hung": by_end["hung"],
        "leases_open": sum(c.leases_open for c in campaigns),
        "blocks_leaked": sum(c.blocks_leaked for c in campaigns),
        "recovery_p50_s": round(statistics.median(recovery), 2) if recovery else 0.0,
        "recovery_max_s": round(recovery[-1], 2) if recovery else 0.0,
        "settled_s": round(max((c.settled_s for c in campaigns), default=0.0), 2),
    }


def _next_notice(ask: Ask, at_s: float) -> float:
    return next(t for t in ask.noticed_s if t > at_s) - at_s


def show(console: Console, title: str, campaigns: list[Campaign], summary: dict[str, Any]) -> None:
    faults = [f for c in campaigns for f in c.faults]
    table = Table(title=title, title_justify="left")
    for column in ("fault", "target", "times", "recovery p50 s", "recovery max s"):
        table.add_column(column, justify="left" if column in ("fault", "target") else "right")
    for (what, target), count in sorted(Counter((f.what, f.target) for f in faults).items()):
        times = [f.recovered_s for f in faults if (f.what, f.target) == (what, target)]
        table.add_row(what, target, str(count), f"{statistics.median(times):.2f}", f"{max(times):.2f}")
    console.print(table)
    requests = Table(title="requests", title_justify="left")
    requests.add_column("end")
    requests.add_column("why")
    requests.add_column("requests", justify="right")
    ends = Counter((end, _short(detail)) for c in campaigns for end, detail, _, _ in c.ends)
    for (end, detail), count in ends.most_common():
        requests.add_row(end, detail, str(count))
    console.print(requests)
    figures = Table(title="figures", title_justify="left", show_header=False)
    figures.add_column("figure")
    figures.add_column("value", justify="right")
    for name, value in summary.items():
        if name != "failed":
            figures.add_row(name, str(value))
    console.print(figures)


def _short(detail: str) -> str:
    try:
        detail = json.loads(detail)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        pass
    return "after some tokens" if detail.startswith("after ") else detail[:120]
