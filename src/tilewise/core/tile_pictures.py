"""Pictures of tile maps: as text, and by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .extras import need
from .tile_map import TileMap, regroup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = ".▒█"  # skip, mixed, full
SIZE = 64  # marks in a line at most


def as_text(tiles: TileMap) -> str:
    Lq, Lk = tiles.shape
    counts = tiles.counts()
    lines = [
        f"TileMap {Lq} x {Lk} in tiles of {tiles.tile[0]} x {tiles.tile[1]}: "
        f"{counts.skip} skip, {counts.mixed} mixed, {counts.full} full"
    ]
    if planes := tiles.states.shape[0] * tiles.states.shape[1] - 1:
        lines[0] += f" ({planes} more planes)"
    plane = tiles.states[:1, :1]
    merged = [max(1, -(-size // SIZE)) for size in plane.shape[2:]]
    for dim, several in enumerate(merged, start=2):
        plane = regroup(plane, dim, plane.shape[dim], 1, several)
    if max(merged) > 1:
        lines[0] += f"; each mark is {merged[0]} x {merged[1]} of them"
    lines += ["".join(MARKS[state] for state in row) for row in plane[0, 0].tolist()]
    return "\n".join(lines)


def draw(tiles: TileMap, ax: Axes | None, plane: tuple[int, int]) -> Axes:
    need("plot", "matplotlib", by="TileMap.plot")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    if ax is None:
        _, ax = plt.subplots(layout="constrained")  # with room for the legend
    colours = ["#f2f2f2", "#f4a259", "#2e6f95"]
    extent: Any = (0, tiles.shape[1], tiles.shape[0], 0)
    cells = tiles.states[plane].cpu().numpy()
    ax.imshow(
        cells, cmap=ListedColormap(colours), vmin=0, vmax=2, extent=extent, aspect="auto", interpolation="nearest"
    )
    ax.set(xlabel="key", ylabel="query", title=f"{tiles.density:.1%} of tiles visited")
    ax.legend(
        handles=[Patch(color=c, label=name) for c, name in zip(colours, ("skip", "mixed", "full"), strict=True)],
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    return ax
