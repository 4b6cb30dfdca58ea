"""Charts as SVG text: bars with their names beside them, and lines with their names at their ends.

Colours are CSS classes, so that one style sheet serves light and dark. `picture` makes a standalone file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

WIDTH = 420  # readable on a phone
NAMES = 122  # pixels for names at the left of bars
VALUES = 78  # pixels for values at the right of bars
MARGIN = 16  # of a picture, and half the gap between its columns
BAR, GAP, HEAD, NOTE = 13, 4, 22, 16
LETTERS = 66  # of a note, in the width of a chart
LEAST_APART = 24  # pixels between numbers below an axis
LABEL = 13.0  # pixels from one line's label to the next
LONGEST_NAME = 20  # letters of a name that are shown
SERIES = 7

LIGHT = {
    "text": "#1c2128",
    "muted": "#5d6670",
    "grid": "#dfe3e8",
    "ground": "#ffffff",
    "peer": "#a9b4c0",
    "bad": "#c62828",
    "mark": "#1c2128",
    "series": ("#c2410c", "#1d6fb8", "#2f855a", "#8e44ad", "#b8860b", "#0f8b8d", "#7a7f87"),
}
DARK = {
    "text": "#e6e9ed",
    "muted": "#9aa4af",
    "grid": "#323a44",
    "ground": "#14181d",
    "peer": "#5a6572",
    "bad": "#ff6b6b",
    "mark": "#ffffff",
    "series": ("#ff8a4c", "#5aa9f0", "#5cc98d", "#c792ea", "#e5c04b", "#4fd1d3", "#a0a6ae"),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `kind` is "ours", "peer" or "bad"; `mark` is a place on the axis to be reached."""

    name: str
    value: float
    text: str
    kind: str = "peer"
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing and its height; the width is always the same."""

    body: str
    height: float


def bars(groups: Mapping[str, Sequence[Bar]]) -> Chart:
    """Groups of bars, each with a heading (an empty one takes no room). All bars share one axis from 0."""
    every = [bar for group in groups.values() for bar in group]
    most = max([*(bar.value for bar in every), *(bar.mark or 0 for bar in every)], default=0) or 1.0
    room = WIDTH - NAMES - VALUES
    parts, y = [], 0.0
    for heading, group in groups.items():
        if heading:
            parts.append(_text(0, y + 15, heading, "head"))
            y += HEAD
        for bar in group:
            width = max(1.0, room * bar.value / most)
            parts.append(_text(NAMES - 8, y + BAR - 2.5, _cut(bar.name), "name end", full=bar.name))
            parts.append(
                f'<rect x="{NAMES}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="2" class="{bar.kind}"/>'
            )
            end = NAMES + width
            if bar.mark is not None:
                x = NAMES + room * bar.mark / most
                parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2:.1f}" y2="{y + BAR + 2:.1f}" class="mark"/>')
                end = max(end, x)
            parts.append(_text(end + 6, y + BAR - 2.5, bar.text, f"value {bar.kind}-text"))
            y += BAR + GAP
        y += 6
    return Chart("".join(parts), y)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_name: str,
    y_name: str,
    log_y: bool = False,
    log_x: bool = True,
) -> Chart:
    """Lines; the x axis begins at the least x, the y axis at 0 unless it is logarithmic."""
    height, left, right, top, bottom = 250.0, 42.0, 132.0, 24.0, 38.0
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points if y > 0]
    low, high = _range(ys, log_y)

    def at_x(x: float) -> float:
        along, span = (math.log(x / xs[0]), math.log(xs[-1] / xs[0])) if log_x else (x - xs[0], xs[-1] - xs[0])
        return left + (WIDTH - left - right) * along / (span or 1.0)

    def at_y(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if log_y else (y - low) / (high - low)
        return height - bottom - (height - top - bottom) * max(0.0, min(1.0, share))

    parts = [_text(0, 12, y_name, "axis")]
    for tick in _ticks(low, high, log_y):
        y = at_y(tick)
        parts.append(f'<line x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 6, y + 4, number(tick), "axis end"))
    last = -math.inf
    for x in xs:
        if at_x(x) - last >= LEAST_APART:
            last = at_x(x)
            parts.append(_text(last, height - bottom + 16, number(x), "axis middle"))
    parts.append(_text((left + WIDTH - right) / 2, height - 4, x_name, "axis middle"))
    ends = []
    for index, (name, points) in enumerate(series.items()):
        kind = f"s{index % SERIES}"
        points = [(x, y) for x, y in sorted(points) if y > 0]
        if not points:
            continue
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" class="line {kind}{" first" * (index == 0)}"/>')
        for x, y in points:
            dot = f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3.2" class="dot {kind}">'
            parts.append(f"{dot}<title>{escape(name)}, {number(x)}: {number(y)}</title></circle>")
        ends.append((at_y(points[-1][1]), at_x(points[-1][0]), name, kind))
    for y, x, name, kind in _apart(sorted(ends), height - bottom):
        parts.append(_text(x + 8, y + 4, _cut(name), f"label {kind}-text", full=name))
    return Chart("".join(parts), height)


def picture(charts: Mapping[str, Chart], title: str, notes: Sequence[str], theme: str = "auto") -> str:
    """Charts in two columns as one standalone file. `theme` "light" has fixed colours, for a PNG."""
    count = max(1, min(2, len(charts)))
    rows = [row for note in notes for row in wrap(note, count * LETTERS)]
    columns = [36.0 + NOTE * len(rows)] * count  # the height that is filled of each
    parts = [_text(0, 14, title, "title"), *(_text(0, 34 + NOTE * i, row, "axis") for i, row in enumerate(rows))]
    for heading, chart in charts.items():
        column = columns.index(min(columns))
        body = f'<g transform="translate(0 24)">{chart.body}</g>'
        x = column * (WIDTH + 2 * MARGIN)
        parts.append(f'<g transform="translate({x} {columns[column]:.1f})">{_text(0, 12, heading, "head")}{body}</g>')
        columns[column] += chart.height + 44
    width, height = len(columns) * (WIDTH + 2 * MARGIN), max(columns)
    frame = f'width="{width}" height="{height:.0f}"'
    view = f'viewBox="{-MARGIN} {-MARGIN} {width} {height:.0f}" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} {frame}>'
    ground = f'<rect x="{-MARGIN}" y="{-MARGIN}" {frame} class="ground"/>'
    return f"{head}<title>{escape(title)}</title><style>{style(theme)}</style>{ground}{''.join(parts)}</svg>\n"


def inline(chart: Chart, label: str) -> str:
    """A chart for a page that has the style sheet."""
    return f'<svg viewBox="0 0 {WIDTH} {chart.height:.0f}" role="img" aria-label="{escape(label)}">{chart.body}</svg>'


def style(theme: str = "auto") -> str:
    """The style sheet of charts: light, and dark if the reader prefers it."""
    base = (
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px}"
        ".title{font-size:17px;font-weight:700}.head{font-size:13px;font-weight:600}"
        ".axis,.name,.value,.label{font-size:11.5px}.end{text-anchor:end}.middle{text-anchor:middle}"
        ".value,.label{font-weight:600}.line{fill:none;stroke-width:1.8}.line.first{stroke-width:3}"
        ".mark{stroke-width:2}"
    )
    dark = "" if theme == "light" else f"@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"
    return base + _colours(LIGHT) + dark


def _colours(of: Mapping[str, object]) -> str:
    series: Sequence[str] = of["series"]  # type: ignore[assignment]
    rules = [
        f"text{{fill:{of['text']}}}.axis,.name{{fill:{of['muted']}}}.grid{{stroke:{of['grid']};stroke-width:1}}",
        f".ground{{fill:{of['ground']}}}.ours{{fill:{series[0]}}}.peer{{fill:{of['peer']}}}.bad{{fill:{of['bad']}}}",
        f".ours-text{{fill:{series[0]}}}.peer-text{{fill:{of['muted']}}}.bad-text{{fill:{of['bad']}}}",
        f".mark{{stroke:{of['mark']}}}",
    ]
    for index, colour in enumerate(series):
        rules.append(f".line.s{index}{{stroke:{colour}}}.dot.s{index},.s{index}-text{{fill:{colour}}}")
    return "".join(rules)


def number(value: float) -> str:
    """Three digits, and k for thousands of lengths.

    >>> number(4096), number(1500), number(0.25), number(1e-3)
    ('4k', '1500', '0.25', '0.001')
    """
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _range(ys: Sequence[float], log: bool) -> tuple[float, float]:
    if not ys:
        return (0.1, 1.0) if log else (0.0, 1.0)
    if not log:
        return 0.0, max(ys) * 1.08
    return 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)) + 1e-9)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Four to six round numbers, or powers of ten."""
    if log:
        first, last = round(math.log10(low)), round(math.log10(high))
        return [10.0**n for n in range(first, last + 1, max(1, (last - first) // 6))]
    step = 10 ** math.floor(math.log10(high / 4))
    step *= next(n for n in (1, 2, 5, 10) if high / (n * step) <= 5)
    return [step * n for n in range(int(high / step) + 1)]


def _apart(ends: Sequence[tuple[float, float, str, str]], most: float) -> list[tuple[float, float, str, str]]:
    """Labels moved down so that they do not overlap, then up so that they stay in the chart."""
    placed: list[tuple[float, float, str, str]] = []
    for y, *rest in ends:
        y = max(y, placed[-1][0] + LABEL) if placed else y
        placed.append((y, *rest))  # type: ignore[arg-type]
    for i in range(len(placed) - 1, -1, -1):
        limit = most if i == len(placed) - 1 else placed[i + 1][0] - LABEL
        placed[i] = (min(placed[i][0], limit), *placed[i][1:])
    return placed


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def _text(x: float, y: float, text: str, kind: str, full: str | None = None) -> str:
    title = f"<title>{escape(full)}</title>" if full is not None and full != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}{title}</text>'
