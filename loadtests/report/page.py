"""The HTML report: one file, no network, readable in light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from loadtests.report.svg import Chart, Mark, Series, bars, draw

_FILES = files("loadtests.report")


def ms(value: float | None) -> str:
    """Seconds as text with a unit that fits."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    if value >= 10:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def plain(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}" if value < 1000 else f"{value:,.0f}"


def render(result: Mapping[str, Any]) -> str:
    """The page for one result (see `loadtests/report/build.py`)."""
    s, v, slo = result["summary"], result["validity"], result["slo"]
    name = escape(result["scenario"]["name"])
    body = [
        f"<h1>{name}</h1><p class='muted'>{escape(result['scenario'].get('description') or '')} "
        f"{escape(result['model'])} at {escape(result['url'])} · {v['loop']} loop · "
        f"{s['offered']} requests in {result['length_s']:.1f} s · {escape(result['started_at'])}</p>",
        _banners(result),
        _tiles(s, v, slo),
        "<h2>Over time</h2><div class='grid2'>",
        *_time_charts(result),
        "</div><h2>Latency</h2><div class='grid2'>",
        *_cdf_charts(result),
        "</div>",
        _latency_table(s),
        "<h2>Misses</h2><div class='grid2'>",
        *_miss_charts(result),
        "</div>",
        _errors(s),
    ]
    if result.get("sweep"):
        body += ["<h2>Rate sweep</h2>", *_sweep(result)]
    if result.get("by_tenant"):
        body += ["<h2>Tenants</h2>", _groups(result["by_tenant"])]
    if result.get("by_stream"):
        body += ["<h2>Streams</h2>", _groups(result["by_stream"])]
    body += ["<h2>How it was run</h2>", _conditions(result)]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><link rel='icon' href='data:,'>"
        f"<title>pdserve loadtest {name}</title><style>{_file('style.css')}</style></head><body>"
        f"{''.join(body)}<script>{_file('page.js')}</script></body></html>"
    )


def _file(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _banners(result: Mapping[str, Any]) -> str:
    out = []
    v = result["validity"]
    if not v["valid"]:
        reasons = "; ".join(map(escape, v["reasons"]))
        out.append(
            f"<div class='banner bad'><b>Invalid run:</b> the load generator was the bottleneck. {reasons}</div>"
        )
    out += [f"<div class='banner muted'>{escape(note)}</div>" for note in result.get("notes", ())]
    return "".join(out)


def _tiles(s: Mapping[str, Any], v: Mapping[str, Any], slo: Mapping[str, Any]) -> str:
    goal = slo.get("attainment")
    met = s["attainment"] is not None and goal is not None and s["attainment"] >= goal
    tiles = [
        (percent(s["attainment"]), f"attainment (goal {percent(goal)})", "good" if met else "bad"),
        (f"{plain(s['goodput_per_s'])}/s", f"goodput of {plain(v['planned_rate_per_s'])}/s offered", ""),
        (ms(s["ttft_s"]["p99"]), f"TTFT p99 (limit {slo['ttft_ms']:g} ms)", ""),
        (ms(s["tpot_s"]["p99"]), f"TPOT p99 (limit {slo['tpot_ms']:g} ms)", ""),
        (ms(s["itl_s"]["p99"]), "ITL p99", ""),
        (plain(s["output_tokens_per_s"]), "output tokens/s", ""),
        (percent(s["error_rate"]), "not served", "bad" if s["error_rate"] else ""),
        (percent(s["cached_share"]), "prompt tokens from cache", ""),
    ]
    cells = "".join(
        f"<div class='tile'><b class='{c}'>{escape(b)}</b><span>{escape(t)}</span></div>" for b, t, c in tiles
    )
    return f"<div class='tiles'>{cells}</div>"


def _time_charts(result: Mapping[str, Any]) -> list[str]:
    rows = result["over_time"]
    x = [r["start_s"] for r in rows]

    def series(name: str, key: str, scale: float = 1.0) -> Series:
        return Series(name, x, [None if r[key] is None else r[key] * scale for r in rows])

    slo = result["slo"]
    return [
        draw(
            Chart(
                "Offered and good requests",
                "seconds",
                "requests/s",
                [series("offered", "offered_per_s"), series("good", "goodput_per_s")],
                step=True,
                x_unit=" s",
            )
        ),
        draw(
            Chart(
                "SLO attainment",
                "seconds",
                "% of ended",
                [series("attainment", "attainment", 100)],
                marks=[Mark(100 * slo["attainment"], f"goal {100 * slo['attainment']:g}%")],
                y_max=100,
                x_unit=" s",
                y_unit="%",
            )
        ),
        draw(
            Chart(
                "TTFT by scheduled time",
                "seconds",
                "ms",
                [series("p50", "ttft_p50_s", 1e3), series("p99", "ttft_p99_s", 1e3)],
                marks=[Mark(slo["ttft_ms"], "limit")],
                x_unit=" s",
                y_unit=" ms",
            )
        ),
        draw(
            Chart(
                "Work in the system",
                "seconds",
                "requests in flight",
                [series("in flight", "in_flight")],
                step=True,
                x_unit=" s",
            )
        ),
        draw(
            Chart(
                "Output",
                "seconds",
                "tokens/s",
                [series("output tokens", "output_tokens_per_s")],
                step=True,
                x_unit=" s",
            )
        ),
    ]


def _cdf_charts(result: Mapping[str, Any]) -> list[str]:
    slo, curves = result["slo"], result["cdf"]

    def one(title: str, key: str, limit_ms: float | None) -> str:
        points = curves[key]
        series = Series(
            "requests" if key != "itl_s" else "gaps", [1e3 * v for v, _ in points], [100 * q for _, q in points]
        )
        marks = [] if limit_ms is None else [Mark(limit_ms, "limit", "x")]
        return draw(
            Chart(title, "ms", "% at or below", [series], marks, log_x=True, y_max=100, x_unit=" ms", y_unit="%")
        )

    return [
        one("TTFT, from the scheduled time", "ttft_s", slo["ttft_ms"]),
        one("TPOT", "tpot_s", slo["tpot_ms"]),
        one("ITL, every gap between tokens", "itl_s", slo.get("itl_p99_ms")),
        one("End to end", "e2e_s", None),
    ]


def _miss_charts(result: Mapping[str, Any]) -> list[str]:
    misses = result["summary"]["misses"]
    out = [
        bars(
            "Seen by the client",
            [(k, misses.get(k, 0)) for k in ("ttft", "tpot", "itl", "rejected", "failed", "unfinished")],
            "requests",
        )
    ]
    stages = result.get("misses_by_stage")
    if stages is not None:
        rows = [(name.replace("_", " "), count) for name, count in stages["stages"].items()]
        out.append(bars(f"Charged to a stage by the server ({stages['joined']} records joined)", rows, "requests"))
    return out


def _latency_table(s: Mapping[str, Any]) -> str:
    rows = [
        ("TTFT from schedule", "ttft_s"),
        ("TTFT from sending", "ttft_from_sent_s"),
        ("TPOT", "tpot_s"),
        ("ITL", "itl_s"),
        ("end to end", "e2e_s"),
    ]
    columns = ("p50", "p90", "p95", "p99", "mean", "max")
    head = "".join(f"<th>{c}</th>" for c in columns)
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{ms(s[key][c])}</td>' for c in columns)}</tr>" for name, key in rows
    )
    a = s["ttft_adjusted_s"]
    body += (
        f"<tr><td>TTFT, unserved = ∞</td>{''.join(f'<td>{ms(a[c])}</td>' for c in columns[:4])}<td></td><td></td></tr>"
    )
    return f"<div class='scroll'><table><tr><th></th>{head}</tr>{body}</table></div>"


def _errors(s: Mapping[str, Any]) -> str:
    if not s["errors"]:
        return ""
    rows = "".join(f"<tr><td>{escape(e)}</td><td>{n}</td></tr>" for e, n in s["errors"].items())
    return f"<div class='scroll'><table><tr><th>what went wrong</th><th>requests</th></tr>{rows}</table></div>"


def _sweep(result: Mapping[str, Any]) -> list[str]:
    steps = sorted(result["sweep"]["steps"], key=lambda r: r["rate_per_s"])
    x = [r["rate_per_s"] for r in steps]
    found = result["sweep"]["highest_rate_per_s"]
    marks = [Mark(rate, f"{100 * float(goal):g}% up to {rate:.3g}/s", "x") for goal, rate in found.items() if rate]
    attainment = Series("attainment", x, [None if r["attainment"] is None else 100 * r["attainment"] for r in steps])
    goodput = Series("goodput", x, [r["goodput_per_s"] for r in steps])
    charts = [
        draw(
            Chart(
                "Attainment against offered rate",
                "requests/s",
                "%",
                [attainment],
                marks,
                dots=True,
                y_max=100,
                y_unit="%",
            )
        ),
        draw(
            Chart(
                "Goodput against offered rate",
                "requests/s",
                "good requests/s",
                [goodput, Series("offered", x, x)],
                dots=True,
            )
        ),
    ]
    slo = result["slo"]
    for title, key, limit in (("TTFT", "ttft_p99_s", slo["ttft_ms"]), ("TPOT", "tpot_p99_s", slo["tpot_ms"])):
        latency = Series("p99", x, [None if r[key] is None else 1e3 * r[key] for r in steps])
        marks = [Mark(limit, "limit")]
        charts.append(draw(Chart(f"{title} p99 against offered rate", "requests/s", "ms", [latency], marks, dots=True)))
    columns = ("offered/s", "attainment", "goodput/s", "TTFT p99", "TPOT p99", "valid")
    body = "".join(
        f"<tr><td>{r['rate_per_s']:.3g}</td><td>{percent(r['attainment'])}</td><td>{plain(r['goodput_per_s'])}</td>"
        f"<td>{ms(r['ttft_p99_s'])}</td><td>{ms(r['tpot_p99_s'])}</td><td>{'yes' if r['valid'] else 'no'}</td></tr>"
        for r in steps
    )
    head = "".join(f"<th>{c}</th>" for c in columns)
    return [f"<div class='grid2'>{''.join(charts)}</div><div class='scroll'><table><tr>{head}</tr>{body}</table></div>"]


def _groups(groups: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("", "offered", "attainment", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p99", "not served")
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{g['offered']}</td><td>{percent(g['attainment'])}</td><td>{plain(g['goodput_per_s'])}</td>"
        f"<td>{ms(g['ttft_s']['p50'])}</td><td>{ms(g['ttft_s']['p99'])}</td><td>{ms(g['tpot_s']['p99'])}</td>"
        f"<td>{percent(g['error_rate'])}</td></tr>"
        for name, g in groups.items()
    )
    return f"<div class='scroll'><table><tr>{''.join(f'<th>{c}</th>' for c in columns)}</tr>{rows}</table></div>"


def _conditions(result: Mapping[str, Any]) -> str:
    v = result["validity"]
    counts: Sequence[str] = result["summary"]["token_counts"]
    facts = [
        ("run", "valid" if v["valid"] else "INVALID"),
        ("seed", result["seed"]),
        ("planned rate", f"{plain(v['planned_rate_per_s'])}/s, achieved {plain(v['achieved_rate_per_s'])}/s"),
        ("schedule lag", f"p50 {ms(v['schedule_lag_s']['p50'])}, p99 {ms(v['schedule_lag_s']['p99'])}"),
        ("client loop lag", f"p50 {ms(v['loop_lag_s']['p50'])}, p99 {ms(v['loop_lag_s']['p99'])}"),
        ("client processes", result["processes"]),
        ("tokenizer", result["tokenizer"]),
        (
            "token counts",
            "server, per chunk" if counts == ["usage"] else "chunks (ITL is per chunk)" if counts else "none",
        ),
        ("versions", ", ".join(f"{k} {val}" for k, val in result["versions"].items())),
        ("command", result["command"]),
    ]
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(val))}</td></tr>" for k, val in facts)
    scenario = escape(json.dumps(result["scenario"], indent=1, ensure_ascii=False))
    return f"<table>{rows}</table><h2>Scenario</h2><pre>{scenario}</pre>"
