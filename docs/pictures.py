"""Draws the pictures of masks in these documents: `python docs/pictures.py` writes docs/pictures/*.svg.

A square is a cell (query, key); filled ones are visible. Rules are asked of tilewise itself, so that a picture shows
what it does; `tests/test_docs.py` compares the files with what this makes.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tilewise import TileMap
from tilewise.bench.svg import DARK, LIGHT
from tilewise.patterns import tree

SIZE, STEP = 10, 11  # pixels of a square, and from one to the next
HERE = Path(__file__).parent / "pictures"


def rule(Lq: int, Lk: int, **rules: object) -> torch.Tensor:
    """The visible cells of a rule: bool `[Lq, Lk]`."""
    return TileMap.from_spec(Lq, Lk, (1, 1), **rules).states[0, 0] > 0  # type: ignore[arg-type]


def documents(length: int) -> torch.Tensor:
    of = torch.bucketize(torch.arange(length), torch.tensor([5, 11]), right=True)
    return (of[:, None] == of) & rule(length, length, causal=True)


def prefix(length: int, first: int) -> torch.Tensor:
    return rule(length, length, causal=True) | (torch.arange(length) < first)


PICTURES: dict[str, list[tuple[str, torch.Tensor]]] = {
    "rules": [
        ("causal", rule(16, 16, causal=True)),
        ("causal, window=4", rule(16, 16, causal=True, window=4)),
        ("window=(3, 3)", rule(16, 16, window=(3, 3))),
        ("causal, chunk=5", rule(16, 16, causal=True, chunk=5)),
    ],
    "alignment": [
        ("6 queries, 16 keys", rule(6, 16, causal=True)),
        ("q_offset=0", rule(6, 16, causal=True, q_offset=0)),
        ("1 query, 16 keys", rule(1, 16, causal=True)),
        ("16 queries, 6 keys", rule(16, 6, causal=True)),
    ],
    "masks": [
        ("packed documents", documents(16)),
        ("prefix", prefix(16, 5)),
        ("tree of 8 drafts", tree(8, 16)),
        ("padding", torch.arange(16).expand(16, 16) < 11),
    ],
}


def picture(name: str) -> str:
    """One row of masks as an SVG that stands alone, light and dark."""
    parts, x, most = [], 0, 0
    for title, cells in PICTURES[name]:
        rows, columns = cells.shape
        for kind, shown in (("on", cells), ("off", ~cells)):
            squares = (f"M{x + STEP * j} {22 + STEP * i}h{SIZE}v{SIZE}h-{SIZE}z" for i, j in shown.nonzero().tolist())
            parts.append(f'<path class="{kind}" d="{"".join(squares)}"/>')
        parts.append(f'<text x="{x}" y="12">{title}</text>')
        x += max(STEP * columns, 8 * len(title)) + 24
        most = max(most, STEP * rows)
    frame = f'viewBox="-4 -2 {x - 16} {most + 28}" width="{x - 16}" height="{most + 28}"'
    style = "text{font:600 12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}" + _colours(LIGHT)
    style += f"@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img"><title>{name}</title>'
    return f"{head}<style>{style}</style>{''.join(parts)}</svg>\n"


def _colours(of: dict[str, object]) -> str:
    series = of["series"]
    assert isinstance(series, tuple)
    return f"text{{fill:{of['text']}}}.on{{fill:{series[0]}}}.off{{fill:{of['grid']}}}"


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in PICTURES:
        (HERE / f"{name}.svg").write_text(picture(name), encoding="utf-8")
