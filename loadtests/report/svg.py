"""Small charts as SVG text: lines, steps and bars, light enough to put a whole report into one file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# Okabe and Ito's palette: told apart with any colour vision.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line; a None in `y` leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Mark:
    """A limit: a dashed line across the chart at a value of `axis`."""

    value: float
    name: str
    axis: str = "y"


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw. `step` holds each value until the next point; `dots` shows measured points."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    log_x: bool = False
    step: bool = False
    dots: bool = False
    y_max: float | None = None
    x_unit: str = ""
    y_unit: str = ""


@dataclass(slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    def at(self, value: float) -> float:
        if self.log:
            share = (math.log10(max(value, self.low)) - math.log10(self.low)) / (
                math.log10(self.high) - math.log10(self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _linear(high: float, start: float, end: float, low: float = 0.0) -> _Axis:
    high = high if high > low else low + 1.0
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * s for s in (1, 2, 2.5, 5, 10) if power * s >= raw)
    last = math.ceil(high / step - 1e-9) * step
    ticks = [low + step * i for i in range(round((last - low) / step) + 1)]
    return _Axis(low, last, start, end, ticks=ticks)


def _log(values: Sequence[float], start: float, end: float) -> _Axis:
    positive = [v for v in values if v > 0] or [1.0]
    low, high = min(positive), max(positive)
    if high / low < 1.5:
        low, high = low / 1.5, high * 1.5
    axis = _Axis(low, high, start, end, log=True)
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for digit in (1, 2, 5):
            tick = digit * 10.0**power
            if low <= tick <= high:
                axis.ticks.append(tick)
    if len(axis.ticks) > 8:
        axis.ticks = [t for t in axis.ticks if abs(math.log10(t) - round(math.log10(t))) < 1e-9] or axis.ticks
    return axis


def number(value: float) -> str:
    """Short form for an axis."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def draw(chart: Chart) -> str:
    """One `<figure>`. Its data is also an attribute, from which the page's script shows values under the pointer."""
    series = [s for s in chart.series if any(y is not None for y in s.y)]
    if not series:
        return f'<figure class="chart empty"><figcaption>{escape(chart.title)}</figcaption><p>no data</p></figure>'
    xs = [x for s in series for x in s.x] + [m.value for m in chart.marks if m.axis == "x"]
    ys = [y for s in series for y in s.y if y is not None and math.isfinite(y)]
    x_axis = _log(xs, LEFT, WIDTH - RIGHT) if chart.log_x else _linear(max(xs), LEFT, WIDTH - RIGHT)
    top = (
        chart.y_max if chart.y_max is not None else max([*ys, *(m.value for m in chart.marks if m.axis == "y")]) * 1.05
    )
    y_axis = _linear(top, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(chart, x_axis, y_axis)]
    for i, s in enumerate(series):
        parts.append(_path(s, COLORS[i % len(COLORS)], x_axis, y_axis, chart.step))
        if chart.dots:
            parts += [
                f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3.2" fill="{COLORS[i % len(COLORS)]}"/>'
                for x, y in zip(s.x, s.y, strict=True)
                if y is not None
            ]
    parts += _legend(series)
    data = json.dumps(
        {
            "x": [LEFT, WIDTH - RIGHT, x_axis.low, x_axis.high, int(chart.log_x)],
            "units": [chart.x_label, chart.x_unit, chart.y_unit],
            "series": [
                [s.name, list(map(_short, s.x)), [None if y is None else _short(y) for y in s.y]] for s in series
            ],
        }
    )
    return (
        f'<figure class="chart" data-chart="{escape(data)}"><figcaption>{escape(chart.title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg><div class="tip"></div></figure>'
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _frame(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    out = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{number(tick)}</text>'
        )
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    out.append(
        f'<text class="label" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    out.append(
        f'<text class="label" transform="translate(14 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>"
    )
    out += [text for mark in chart.marks for text in _mark(mark, x_axis if mark.axis == "x" else y_axis)]
    return out


def _mark(mark: Mark, axis: _Axis) -> list[str]:
    if not axis.low <= mark.value <= axis.high:
        return []
    p, name = axis.at(mark.value), escape(mark.name)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    if mark.axis == "y":
        line = f'<line class="mark" x1="{LEFT}" x2="{right}" y1="{p:.1f}" y2="{p:.1f}"/>'
        return [line, f'<text class="mark" x="{right - 4}" y="{p - 4:.1f}" text-anchor="end">{name}</text>']
    anchor, x = ("end", p - 4) if p > WIDTH / 2 else ("start", p + 4)
    line = f'<line class="mark" x1="{p:.1f}" x2="{p:.1f}" y1="{TOP}" y2="{bottom}"/>'
    return [line, f'<text class="mark" x="{x:.1f}" y="{bottom - 6}" text-anchor="{anchor}">{name}</text>']


def _path(series: Series, color: str, x_axis: _Axis, y_axis: _Axis, step: bool) -> str:
    commands: list[str] = []
    last_y: float | None = None
    for x, y in zip(series.x, series.y, strict=True):
        if y is None or not math.isfinite(y):
            last_y = None
            continue
        px, py = x_axis.at(x), y_axis.at(min(y, y_axis.high))
        if last_y is None:
            commands.append(f"M{px:.1f} {py:.1f}")
            if len(series.x) == 1:
                commands.append("h0.1")
        elif step:
            commands.append(f"H{px:.1f}V{py:.1f}")
        else:
            commands.append(f"L{px:.1f} {py:.1f}")
        last_y = py
    points = sum(y is not None for y in series.y)
    return f'<path class="line" data-points="{points}" d="{"".join(commands)}" stroke="{color}"/>'


def _legend(series: Sequence[Series]) -> list[str]:
    out = []
    x = float(LEFT)
    for i, s in enumerate(series):
        out.append(f'<rect x="{x:.0f}" y="8" width="11" height="11" rx="2" fill="{COLORS[i % len(COLORS)]}"/>')
        out.append(f'<text class="tick" x="{x + 16:.0f}" y="17.5">{escape(s.name)}</text>')
        x += 30 + 6.4 * len(s.name)
    return out


def bars(title: str, rows: Sequence[tuple[str, float]], x_label: str) -> str:
    """Horizontal bars with their values; zero is shown as zero, not left out."""
    if not rows:
        return f'<figure class="chart empty"><figcaption>{escape(title)}</figcaption><p>no data</p></figure>'
    high = max(max(v for _, v in rows), 1.0)
    left, width, row = 150, WIDTH - 150 - 60, 26
    height = row * len(rows) + 30
    parts = []
    for i, (name, value) in enumerate(rows):
        y = 6 + i * row
        w = max(1.0, width * value / high)
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="bar" data-points="1" x="{left}" y="{y}" width="{w:.1f}" height="{row - 8}" rx="2" '
            f'fill="{COLORS[0]}"/><text class="tick" x="{left + w + 6:.1f}" y="{y + 14}">{value:g}</text>'
        )
    parts.append(f'<text class="label" x="{left}" y="{height - 6}">{escape(x_label)}</text>')
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )
