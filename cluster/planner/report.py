"""An experiment's folder: results.json, runs.csv, PNG plots, timeline.json and one self-contained report.html."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.messages import RequestRecord
from cluster.planner.experiment import Case, Result, averaged, left_out
from cluster.planner.plots import INK, figure, image_tag, page, png, table_tag
from cluster.planner.timeline import chrome_trace, lanes, spans

PALETTE = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563", "#65a30d", "#92400e")
DASHES = ("-", "--", ":", "-.")
STAGE_COLOURS = {
    "router_queue": "#9ca3af",
    "prefill_queue": "#fca5a5",
    "prefill_compute": "#dc2626",
    "kv_transfer": "#d97706",
    "decode_queue": "#93c5fd",
    "decode_step": "#2563eb",
    "decode": "#60a5fa",
}
COLUMNS = (
    "label",
    "runs",
    "rate_rps",
    "attainment",
    "goodput_rps",
    "goodput_per_gpu",
    "requests_per_dollar",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "output_tokens_per_s",
    "cached_share",
    "preemptions",
    "failed",
)


def write(result: Result, folder: Path, command: str) -> list[Path]:
    """Write the folder; returns its files.

    Raises:
        UserError: the folder cannot be written.
    """
    rows = averaged(result.cases)
    pictures = _pictures(result, rows)
    files: dict[str, bytes] = {f"{name}.png": data for name, (_, data) in pictures.items()}
    files["results.json"] = _json(_strict(_results(result, rows, command)))
    files["runs.csv"] = _csv(result).encode()
    if result.timeline is not None:
        files["timeline.json"] = _json(chrome_trace(result.timeline.records))
    files["report.html"] = _html(result, rows, pictures, command).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as e:
        raise UserError(f"out: {folder} cannot be written ({e.strerror})") from None
    return [folder / name for name in files]


def best_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each label at the rate where its goodput is highest, best first."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "impossible" in row:
            continue
        kept = best.get(row["label"])
        if kept is None or row["goodput_rps"] > kept["goodput_rps"]:
            best[row["label"]] = row
    return sorted(best.values(), key=lambda r: -r["goodput_rps"])


def highest_rate_at(rows: Sequence[dict[str, Any]], attainment: float) -> dict[str, float]:
    """label -> highest measured rate with at least this attainment, interpolated to the next rate; 0 for none."""
    result: dict[str, float] = {}
    for label in dict.fromkeys(r["label"] for r in rows if "impossible" not in r):
        points = sorted((r["rate_rps"], r["attainment"]) for r in rows if r["label"] == label and "impossible" not in r)
        reached = 0.0
        for i, (rate, share) in enumerate(points):
            if share >= attainment:
                reached = rate
            elif i and points[i - 1][1] >= attainment:
                low_rate, low = points[i - 1]
                reached = low_rate + (rate - low_rate) * (low - attainment) / max(low - share, 1e-9)
                break
            else:
                break
        result[label] = reached
    return result


def _results(result: Result, rows: list[dict[str, Any]], command: str) -> dict[str, Any]:
    target = attainment_target(result)
    return {
        "title": result.spec.title,
        "command": command,
        "spec": result.spec.model_dump(mode="json"),
        "attainment_target": target,
        "rate_at_attainment": highest_rate_at(rows, target) if result.spec.rates else {},
        "rows": rows,
        "runs": [
            {
                "choice": c.choice,
                "rate": c.rate,
                "seed": c.seed,
                "figures": c.figures,
                "tenants": c.tenants,
                "impossible": c.impossible,
                "name": c.label if c.rate is None else f"{c.label} at {c.rate:g}/s",
                **({"evidence": c.evidence} if c.evidence else {}),
            }
            for c in result.cases
        ],
    }


def attainment_target(result: Result) -> float:
    slo = result.spec.workload.get("slo") or result.spec.cluster.get("slo") or {}
    return float(slo.get("attainment", 0.95))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _csv(result: Result) -> str:
    axes = list(result.spec.axes)
    names = list(dict.fromkeys(name for case in result.cases for name in case.figures))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*axes, "rate", "seed", *names, "impossible"])
    for case in result.cases:
        writer.writerow(
            [
                *(case.choice[a] for a in axes),
                case.rate,
                case.seed,
                *(case.figures.get(n) for n in names),
                case.impossible,
            ]
        )
    return buffer.getvalue()


# -- pictures -----------------------------------------------------------------------------------------------------


def _pictures(result: Result, rows: list[dict[str, Any]]) -> dict[str, tuple[str, bytes]]:
    """File stem -> (heading, PNG)."""
    pictures: dict[str, tuple[str, bytes]] = {}
    if len(result.spec.rates) > 1:
        pictures["goodput"] = (
            "Goodput against rate",
            _over_rate(rows, "goodput_rps", "good requests/s", diagonal=True),
        )
        pictures["attainment"] = ("Attainment against rate", _over_rate(rows, "attainment", "share within the SLO"))
        for metric in result.spec.report.metrics:
            heading = metric.replace("_", " ")
            pictures[metric.replace(" ", "_")] = (f"{heading} against rate", _over_rate(rows, metric, heading))
    elif len(rows) > 1:
        pictures["bars"] = ("Goodput", _bars(rows))
    if result.spec.report.heatmap:
        pictures["heatmap"] = ("Attainment over the axes", _heatmap(result, rows))
    if result.latencies:
        pictures["cdf"] = ("Latencies", _cdfs(result))
    if result.timeline is not None:
        pictures["timeline"] = (f"Timeline of one run: {result.timeline_label}", _gantt(result.timeline.records))
    return pictures


def _style(number: int) -> dict[str, Any]:
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[(number // len(PALETTE)) % len(DASHES)],
        "marker": "os^Dv"[number % 5],
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def _over_rate(rows: list[dict[str, Any]], metric: str, ylabel: str, *, diagonal: bool = False) -> bytes:
    fig, ax = figure(8.6, 4.8)
    labels = list(dict.fromkeys(r["label"] for r in rows if "impossible" not in r))
    for i, label in enumerate(labels):
        points = sorted((r["rate_rps"], r[metric]) for r in rows if r["label"] == label and r.get(metric) is not None)
        ax.plot([p[0] for p in points], [p[1] for p in points], label=label, **_style(i))
    if diagonal:
        top = max((r["rate_rps"] for r in rows if "impossible" not in r), default=1)
        ax.plot([0, top], [0, top], color="#d1d5db", linewidth=1, zorder=0)
        ax.annotate("every request good", (top, top), fontsize=7.5, color="#6b7280", ha="right", va="bottom")
    ax.set_xlabel("offered requests/s")
    ax.set_ylabel(ylabel)
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return png(fig)


def _bars(rows: list[dict[str, Any]]) -> bytes:
    shown = [r for r in rows if "impossible" not in r]
    fig, ax = figure(8.0, 1.2 + 0.36 * len(shown))
    ax.barh([r["label"] for r in shown], [r["goodput_rps"] for r in shown], color=PALETTE[0], height=0.6)
    for i, row in enumerate(shown):
        ax.annotate(
            f" {row['goodput_rps']:.2f}/s, {row['attainment']:.0%}", (row["goodput_rps"], i), va="center", fontsize=8
        )
    ax.invert_yaxis()
    ax.set_xlabel("goodput, requests/s")
    ax.margins(x=0.18)
    return png(fig)


def _heatmap(result: Result, rows: list[dict[str, Any]]) -> bytes:
    assert result.spec.report.heatmap is not None
    x_axis, y_axis = result.spec.report.heatmap
    rates = list(result.spec.rates)
    wanted = result.spec.report.at_rate
    rate = (
        min(rates, key=lambda r: abs(r - wanted)) if rates and wanted else (rates[len(rates) // 2] if rates else None)
    )
    chosen = [r for r in rows if r["rate"] == rate]
    xs = list(dict.fromkeys(r[x_axis] for r in chosen))
    ys = list(dict.fromkeys(r[y_axis] for r in chosen))
    cells = [[math.nan] * len(xs) for _ in ys]
    for row in chosen:
        if "impossible" not in row:
            i, j = ys.index(row[y_axis]), xs.index(row[x_axis])
            cells[i][j] = row["attainment"] if math.isnan(cells[i][j]) else max(cells[i][j], row["attainment"])
    fig, ax = figure(2.6 + 0.95 * len(xs), 1.9 + 0.62 * len(ys))
    ax.grid(False)
    drawn = ax.imshow(cells, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(len(xs)), xs, fontsize=8.5)
    ax.set_yticks(range(len(ys)), ys, fontsize=8.5)
    ax.set_xlabel(x_axis)
    ax.set_ylabel(y_axis)
    for i, line in enumerate(cells):
        for j, value in enumerate(line):
            text = "cannot run" if math.isnan(value) else f"{value:.0%}"
            ax.annotate(text, (j, i), ha="center", va="center", fontsize=8.5, color=INK)
    at = f"at {rate:g} requests/s" if rate is not None else ""
    ax.set_title(f"share of requests within the SLO {at}", fontsize=9.5, loc="left", color=INK)
    fig.colorbar(drawn, ax=ax, shrink=0.8)
    return png(fig)


def _cdfs(result: Result) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    fig = Figure(figsize=(10.4, 3.9), dpi=110, layout="constrained")
    for number, (name, unit) in enumerate((("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "gap between tokens"))):
        ax = fig.add_subplot(1, 3, number + 1)
        ax.grid(color="#e5e7eb", linewidth=0.8)
        for i, (label, values) in enumerate(result.latencies.items()):
            points = _thin(values[name])
            style = {k: v for k, v in _style(i).items() if k not in ("marker", "markersize")}
            ax.plot([1e3 * v for v, _ in points], [q for _, q in points], label=label, **style)
        ax.set_xscale("log")
        seen = [v for values in result.latencies.values() for v in values[name] if v > 0]
        narrow = bool(seen) and max(seen) < 300 * min(seen)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if narrow else (1,)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(f"{unit}, ms", fontsize=9)
        ax.set_ylim(0, 1.02)
        ax.tick_params(labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        if number == 0:
            ax.set_ylabel("share of requests" if name != "itl" else "share of gaps", fontsize=9)
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, frameon=False, fontsize=8, loc="outside lower center", ncols=min(5, len(labels)))
    return png(fig)


def _thin(values: list[float], keep: int = 400) -> list[tuple[float, float]]:
    """A CDF's points, few enough to draw; both ends stay."""
    n = len(values)
    if n <= keep:
        return [(v, (i + 1) / n) for i, v in enumerate(values)]
    picks = sorted({round(i * (n - 1) / (keep - 1)) for i in range(keep)})
    return [(values[i], (i + 1) / n) for i in picks]


def _gantt(records: list[RequestRecord], requests: int = 60) -> bytes:
    """The first requests after a warm-up, one band a worker."""
    ordered = sorted(records, key=lambda r: r.arrival_s)
    begin = min(len(ordered) // 4, max(0, len(ordered) - requests))
    shown = ordered[begin : begin + requests]
    placed = lanes([s for r in shown for s in spans(r)])
    workers = sorted({s.worker for s, _ in placed}, key=lambda w: (w != "router", not w.startswith("prefill"), w))
    height = {w: 1 + max(lane for s, lane in placed if s.worker == w) for w in workers}
    offset, at = {}, 0
    for worker in workers:
        offset[worker] = at
        at += height[worker] + 1
    fig, ax = figure(10.4, min(11.0, 1.6 + 0.13 * at))
    ax.grid(False)
    for span, lane in placed:
        ax.broken_barh(
            [(span.begin_s, max(span.end_s - span.begin_s, 1e-4))],
            (offset[span.worker] + lane, 0.82),
            facecolors=STAGE_COLOURS.get(span.name, "#9ca3af"),
        )
    ax.set_yticks([offset[w] + height[w] / 2 for w in workers], workers, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("seconds of the run")
    from matplotlib.patches import Patch

    drawn = {s.name for s, _ in placed}
    patches = [Patch(color=c, label=n.replace("_", " ")) for n, c in STAGE_COLOURS.items() if n in drawn]
    fig.legend(handles=patches, frameon=False, fontsize=8, ncols=7, loc="outside upper left")
    return png(fig)


# -- page ---------------------------------------------------------------------------------------------------------


def _html(result: Result, rows: list[dict[str, Any]], pictures: dict[str, tuple[str, bytes]], command: str) -> str:
    spec = result.spec
    parts: list[tuple[str, str]] = []
    target = attainment_target(result)
    if spec.rates:
        reached = highest_rate_at(rows, target)
        best = {r["label"]: r for r in best_rows(rows)}
        lines = [
            {
                "variant": label,
                f"rate at {target:.0%}": rate,
                "best goodput/s": best[label]["goodput_rps"],
                "per GPU": best[label]["goodput_per_gpu"],
                "requests/$": best[label]["requests_per_dollar"],
                "spread over seeds": best[label]["goodput_spread"],
            }
            for label, rate in sorted(reached.items(), key=lambda kv: -kv[1])
        ]
        parts.append((f"Highest rate with {target:.0%} of the requests within the SLO", table_tag(lines)))
    for heading, data in pictures.values():
        parts.append((heading, image_tag(data, heading)))
    shown = [r for r in rows if "impossible" not in r]
    partial = any(r["runs"] < len(spec.seeds) for r in shown)
    used = [c for c in COLUMNS if any(r.get(c) not in (None, 0, 0.0) for r in shown) and (partial or c != "runs")]
    parts.append(("All runs (means over seeds)", table_tag(shown, used)))
    tenants = [
        {"variant": c.label, "rate": c.rate, "tenant": name, **figures}
        for c in _first_runs(result)
        if len(c.tenants) > 1
        for name, figures in c.tenants.items()
    ]
    if tenants:
        parts.append(("By tenant", table_tag(tenants)))
    misses = _counts(shown, "miss ")
    if misses:
        parts.append(("Misses by the stage charged", table_tag(misses)))
    if missing := left_out(result.cases):
        parts.append(("Cannot run", table_tag(missing)))
    note = html.escape(spec.question)
    if spec.conditions:
        note += f"<br><b>Conditions.</b> {html.escape(spec.conditions)}"
    seeds = ", ".join(map(str, spec.seeds))
    note += f"<br><code>{html.escape(command)}</code>, seeds {seeds}; the timeline opens in Perfetto (timeline.json)."
    return page(spec.title, note, parts)


def _first_runs(result: Result) -> list[Case]:
    """Of each variant and rate, the first seed that has figures."""
    first: dict[tuple[str, float | None], Case] = {}
    for case in result.cases:
        if case.impossible is None:
            first.setdefault((case.label, case.rate), case)
    return list(first.values())


def _counts(rows: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(n for r in rows for n in r if n.startswith(prefix)))
    if not names:
        return []
    return [
        {
            "variant": r["label"],
            "rate": r["rate_rps"],
            **{n.removeprefix(prefix).replace("_", " "): r.get(n, 0) for n in names},
        }
        for r in rows
        if any(r.get(n) for n in names)
    ]
