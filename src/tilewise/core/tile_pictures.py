"""Pictures of tile maps: as text, as SVG in notebooks, and by matplotlib."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from .extras import need
from .tile_blocks import regroup
from .tile_map import SKIP, TileCounts, TileMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = ".▒█"  # skip, mixed, full
STATES = ("skip", "mixed", "full")
COLOURS = ("#f2f2f2", "#f4a259", "#2e6f95")
SIZE = 64  # marks in a line at most
SMALL = 32
PIXELS = 320  # a side of the picture in a notebook


def _picture(tiles: TileMap, most: int = SIZE) -> tuple[str, list[list[int]]]:
    """A line that describes the map, and the marks of its first plane."""
    Lq, Lk = tiles.shape
    counts = tiles.counts()
    title = (
        f"TileMap {Lq} x {Lk} in tiles of {tiles.tile[0]} x {tiles.tile[1]}: "
        f"{counts.skip} skip, {counts.mixed} mixed, {counts.full} full"
    )
    if planes := tiles.states.shape[0] * tiles.states.shape[1] - 1:
        title += f" ({planes} more planes)"
    plane = tiles.states[:1, :1]
    merged = [max(1, -(-size // most)) for size in plane.shape[2:]]
    for dim, several in enumerate(merged, start=2):
        plane = regroup(plane, dim, plane.shape[dim], 1, several)
    if max(merged) > 1:
        title += f"; each mark is {merged[0]} x {merged[1]} of them"
    return title, plane[0, 0].tolist()


def marks(tiles: TileMap) -> list[str]:
    """The marks of a small picture."""
    return ["".join(MARKS[state] for state in row) for row in _picture(tiles, SMALL)[1]]


def as_text(tiles: TileMap) -> str:
    title, marks = _picture(tiles)
    return "\n".join([title, *("".join(MARKS[state] for state in row) for row in marks)])


def as_html(tiles: TileMap) -> str:
    """The same as SVG, for notebooks: a rectangle for each run of equal marks."""
    title, marks = _picture(tiles)
    shapes = []
    for y, row in enumerate(marks):
        left = 0
        for state, run in groupby(row):
            width = len(list(run))
            if state != SKIP:
                shapes.append(f'<rect x="{left}" y="{y}" width="{width}" height="1" fill="{COLOURS[state]}"/>')
            left += width
    return f"<div>{title}</div>{_svg(len(marks[0]) if marks else 0, len(marks), PIXELS, shapes)}{_legend()}"


def bar(counts: TileCounts) -> str:
    """SVG: the share of tiles in each state, as parts of a bar."""
    left, shapes, total = 0.0, [], max(1, sum(counts))
    for state, count in enumerate(counts):
        width = 100 * count / total
        shapes.append(f'<rect x="{left:.3f}" width="{width:.3f}" height="1" fill="{COLOURS[state]}"/>')
        left += width
    return _svg(100, 1, 12, shapes) + _legend()


def _svg(width: int, height: int, pixels: int, shapes: list[str]) -> str:
    frame = f'viewBox="0 0 {width} {height}" width="{PIXELS}" height="{pixels}" preserveAspectRatio="none"'
    ground = f'<rect width="{width}" height="{height}" fill="{COLOURS[SKIP]}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>{ground}{"".join(shapes)}</svg>'


def _legend() -> str:
    names = (f'<span style="color:{c}">&#9632;</span> {name}' for c, name in zip(COLOURS, STATES, strict=True))
    return f"<div>{' '.join(names)}</div>"


def draw(tiles: TileMap, ax: Axes | None, plane: tuple[int, int]) -> Axes:
    need("plot", "matplotlib", by="TileMap.plot")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    if ax is None:
        _, ax = plt.subplots(layout="constrained")  # with room for the legend
    extent: Any = (0, tiles.shape[1], tiles.shape[0], 0)
    cells = tiles.states[plane].cpu().numpy()
    ax.imshow(
        cells, cmap=ListedColormap(COLOURS), vmin=0, vmax=2, extent=extent, aspect="auto", interpolation="nearest"
    )
    ax.set(xlabel="key", ylabel="query", title=f"{tiles.density:.1%} of tiles visited")
    ax.legend(
        handles=[Patch(color=c, label=name) for c, name in zip(COLOURS, STATES, strict=True)],
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    return ax
