"""A record as one HTML file: charts inline, no script, nothing from elsewhere, light and dark, narrow screens too."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from .charts import charts
from .peers.candidate import OURS
from .record import Cell, Record
from .report import ratio_text, time_text
from .scaling import growths
from .svg import inline, style
from .tables import error_text, rate_text, rate_unit

PAGE_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def page(record: Record) -> str:
    """The whole file."""
    about = record.about
    title = f"tilewise bench: {suite_name(about)} on {device_name(about)}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<link rel="icon" href="data:,">',  # or a browser asks for one
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{style()}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(str(about.get("date", "")))} · ',
        f"<code>{escape(str(about.get('command', '')))}</code></p>",
        *(f"<p>Note: {escape(str(note))}</p>" for note in about.get("notes", [])),
        '<div class="cards">' + "".join(_cards(record)) + "</div>",
        *_charts(record),
        "<h2>Every number</h2>",
        *_tables(record),
        *_missing(record),
        *_method(record),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def suite_name(about: Any) -> str:
    return str(about.get("suite", "")).replace(",", ", ")


def device_name(about: Any) -> str:
    device = about.get("device", {})
    return str(device.get("gpu") or f"{device.get('cpu', 'CPU')}, {device.get('cores', '?')} cores")


def _cards(record: Record) -> Iterator[str]:
    wrong = len(record.wrong)
    word = '<b class="good">all right</b>' if not wrong else f'<b class="bad-word">{wrong} WRONG</b>'
    yield f'<div class="card">{word}<span>{len(record.cells)} cases against a float64 oracle</span></div>'
    if record.rows:
        met = sum(row["verdict"] == "reached" for row in record.rows)
        yield f'<div class="card"><b>{met} of {len(record.rows)}</b><span>bars reached</span></div>'
    elif record.mean_ratio is not None:
        ratios = [cell.ratio for cell in record.cells if cell.ratio is not None]
        low, high = (ratio_text(ratio, False) for ratio in (min(ratios), max(ratios)))
        text = f"the fastest peer's speed, on average over {len(ratios)} cases ({low} to {high})"
        yield f'<div class="card"><b>{ratio_text(record.mean_ratio, False)}</b><span>{text}</span></div>'
    if record.alone:
        yield f'<div class="card"><b>{len(record.alone)}</b><span>cases that no peer here can do</span></div>'
    limits = record.about.get("ceilings") or {}
    products = limits.get("matmul_gflop_per_s") or limits.get("sgemm_gflop_per_s")
    if products:
        rate = f"{products / 1e3:.0f} TFLOP/s" if products >= 1e4 else f"{products:.0f} GFLOP/s"
        reading = limits["read_gb_per_s"]
        read = f"{reading / 1e3:.2f} TB/s" if reading >= 1e3 else f"{reading:.1f} GB/s"
        yield f'<div class="card"><b>{rate}</b><span>large matrix products, in this run</span></div>'
        yield f'<div class="card"><b>{read}</b><span>reading memory, in this run</span></div>'


def _charts(record: Record) -> Iterator[str]:
    yield '<h2>Charts</h2><p class="muted">Higher is better, unless the unit is ms or MiB. Orange is tilewise.</p>'
    yield '<div class="charts">'
    for title, chart in charts(record).items():
        yield f'<div class="chart"><h3>{escape(title)}</h3>{inline(chart, title)}</div>'
    yield "</div>"
    if record.about.get("suite") == "scale":
        yield "<h2>How it grows</h2>" + _growth_table(record)


def _growth_table(record: Record) -> str:
    heads = "<tr><th>mask</th><th></th><th>time ~ L^</th><th>time ~ cells^</th><th>tiles ~ L^</th><th>memory</th></tr>"
    rows = []
    for g in growths(record):
        numbers = ["-" if n is None else f"{n:.2f}" for n in (g.time, g.cells, g.tiles)]
        memory = "-" if g.memory_bytes is None else f"{g.memory_bytes / 2**20:.1f} MiB{' (flat)' * bool(g.is_flat)}"
        verdict = "linear in visible cells" if g.is_linear else ""
        rows.append("<tr>" + "".join(f"<td>{escape(t)}</td>" for t in (g.kind, verdict, *numbers, memory)) + "</tr>")
    return f'<div class="card"><div class="scroll"><table>{heads}{"".join(rows)}</table></div></div>'


def _tables(record: Record) -> Iterator[str]:
    """A table for each group, folded away by suite."""
    suites: dict[str, list[str]] = {}
    for group in record.groups:
        suites.setdefault(group.partition(": ")[0] if ": " in group else suite_name(record.about), []).append(group)
    for suite, groups in suites.items():
        yield f"<details><summary>{escape(suite)}: {sum(len(record.groups[g]) for g in groups)} cases</summary>"
        yield from (_table(record, group) for group in groups)
        yield "</details>"


def _table(record: Record, group: str) -> str:
    cells = record.groups[group]
    unit = rate_unit(cells)
    heads = "".join(f"<th>{h}</th>" for h in ("case", "way", "time", "spread", unit, "of limit", "error"))
    rows = "".join(row for cell in cells for row in _rows(record, cell, unit))
    return f'<h3>{escape(group)}</h3><div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>'


def _rows(record: Record, cell: Cell, unit: str) -> Iterator[str]:
    for number, result in enumerate(cell.ways):
        share = record.share(cell, result)
        kind = ' class="ours"' if result.name == OURS else ""
        error = escape(error_text(cell, result))
        texts = (
            f"<td>{'' if number else escape(cell.name)}</td><td{kind}>{escape(result.name)}{_note(result.note)}</td>",
            f"<td>{time_text(result.timing.seconds)}</td><td>{result.timing.spread:.0%}</td>",
            f"<td>{rate_text(cell, result, unit)}</td><td>{'' if share is None else f'{share:.0%}'}</td>",
            f"<td>{error if cell.is_right(result) else f'<span class=bad-word>{error}</span>'}</td>",
        )
        yield f"<tr{'' if number else ' class=first'}>{''.join(texts)}</tr>"


def _note(note: str) -> str:
    return f' <span class="muted">{escape(note)}</span>' if note else ""


def _missing(record: Record) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in record.cells:
        for name, why in cell.refused.items():
            reasons.setdefault((name, why), []).append(f"{cell.group}, {cell.name}")
    peers = {name: why for name, why in (record.about.get("peers") or {}).items() if why}
    if not reasons and not peers:
        return
    yield "<h2>What has no time</h2><dl>"
    for (name, why), cases in reasons.items():
        more = f" and {len(cases) - 2} more" if len(cases) > 2 else ""
        yield f"<dt>{escape(name)}</dt><dd>{escape(why)}: {escape('; '.join(cases[:2]))}{more}</dd>"
    for name, why in peers.items():
        yield f"<dt>{escape(name)}</dt><dd>{escape(why)}</dd>"
    yield "</dl>"


def _method(record: Record) -> Iterator[str]:
    about = record.about
    yield "<h2>How it was measured</h2>"
    yield (
        "<p>All ways of a case are interleaved in one process, so that a slow machine slows them all. A time "
        "is the best of the medians of up to five blocks of rounds; spread is between the quartiles of all rounds. The "
        "limit of a case is the time that large matrix products or reading its bytes would take at the speeds measured "
        "in this run, whichever is longer. Errors are the largest ones against float64, on inputs with peaked scores."
        "</p><dl>"
    )
    facts = {**about.get("device", {}), **about.get("versions", {}), **about.get("environment", {})}
    for name in ("dtype", "quick", "complete", "seconds"):
        if name in about:
            facts[name] = f"{about[name]:.0f}" if isinstance(about[name], float) else about[name]
    for name, value in facts.items():
        if value not in (None, ""):
            yield f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
    yield "</dl>"
