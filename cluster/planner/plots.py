"""Pictures of a plan: PNG by matplotlib, and one self-contained HTML page that holds them with the tables."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.planner.topology import Rated

SPLIT, COLOCATED, CHUNKED, INK, GRID = "#2563eb", "#dc2626", "#d97706", "#1f2937", "#e5e7eb"
KINDS = {"split": (SPLIT, "o"), "colocated": (COLOCATED, "s"), "chunked": (CHUNKED, "^")}


def figure(width: float = 8.0, height: float = 4.8) -> tuple[Any, Any]:
    """A figure and its axes in the house style, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), dpi=110, layout="constrained")
    ax = fig.subplots()
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#9ca3af")
    ax.tick_params(colors=INK, labelsize=9)
    return fig, ax


def png(fig: Any) -> bytes:
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    return buffer.getvalue()


def pareto_png(rated: Sequence[Rated], front: Sequence[Rated], title: str) -> bytes:
    """Tokens a second a GPU over the speed one user sees, every topology a dot, the front a line."""
    fig, ax = figure()
    for kind, (colour, marker) in KINDS.items():
        points = [e for e in rated if e.topology.kind.split()[0] == kind]
        if points:
            ax.scatter(
                [1 / e.outlook.tpot_s for e in points],
                [e.tokens_per_s_per_gpu for e in points],
                s=26,
                c=colour,
                marker=marker,
                alpha=0.45,
                linewidths=0,
                label=kind,
            )
    ax.plot(
        [1 / e.outlook.tpot_s for e in front],
        [e.tokens_per_s_per_gpu for e in front],
        color=INK,
        linewidth=1.4,
        label="Pareto front",
    )
    for entry in _spaced(front):
        ax.annotate(
            str(entry.topology),
            (1 / entry.outlook.tpot_s, entry.tokens_per_s_per_gpu),
            textcoords="offset points",
            xytext=(7, 5),
            fontsize=7.5,
            color=INK,
        )
    ax.set_xlabel("tokens/s of one user (1 / TPOT)")
    ax.set_ylabel("goodput: output tokens/s per GPU")
    ax.set_ylim(bottom=0)
    ax.margins(x=0.16)
    ax.set_title(title, fontsize=10.5, color=INK, loc="left")
    ax.legend(frameon=False, fontsize=8.5, loc="lower left")
    return png(fig)


def _spaced(front: Sequence[Rated]) -> list[Rated]:
    """Members of the front far enough apart for a label each."""
    top = max((e.tokens_per_s_per_gpu for e in front), default=1.0)
    chosen: list[Rated] = []
    for entry in sorted(front, key=lambda e: -e.tokens_per_s_per_gpu):
        if all(abs(entry.tokens_per_s_per_gpu - c.tokens_per_s_per_gpu) > 0.06 * top for c in chosen):
            chosen.append(entry)
    return chosen


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;max-width:1080px;margin:32px auto;padding:0 20px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px}p.note{color:#4b5563;margin:4px 0 16px}
table{border-collapse:collapse;width:100%;font-size:13.5px;margin:8px 0 16px}
th,td{padding:5px 9px;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}
th{background:#f9fafb;font-weight:600}td:first-child,th:first-child{text-align:left;white-space:normal}
img{max-width:100%;display:block;margin:8px 0}code{background:#f3f4f6;padding:1px 5px;border-radius:4px}
.scroll{overflow-x:auto}
"""


def page(title: str, note: str, parts: Sequence[tuple[str, str]]) -> str:
    """One HTML file without any reference to another: a title, a note, then (heading, HTML) parts."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>{content}" if heading else content for heading, content in parts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p class=note>{note}</p>{body}</html>\n"
    )


def image_tag(data: bytes, alt: str) -> str:
    return f"<img alt='{html.escape(alt)}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"


def table_tag(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as an HTML table; floats to four significant digits."""
    if not rows:
        return "<p class=note>nothing to show</p>"
    columns = columns or list(rows[0])
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(show(row.get(c)))}</td>" for c in columns) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"


def show(value: Any) -> str:
    """A value as people read it: four significant digits, no exponent, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return "-"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
