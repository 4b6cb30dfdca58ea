"""A record as a picture: SVG, or PNG drawn from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ...core.atomic_write import write_whole
from ...core.extras import install_line
from ...errors import InvalidArgument
from .charts import charts
from .page import device_name, suite_name
from .record import Record
from .svg import picture

ZOOM = 2  # of a PNG, for high-density screens


def check_name(path: Path) -> None:
    """Refuses a picture that cannot be drawn here, before anything is measured."""
    if path.suffix not in (".svg", ".png"):
        raise InvalidArgument("--plot", str(path), "a name that ends in .svg or .png")
    if path.suffix == ".png" and importlib.util.find_spec("resvg_py") is None:
        remedy = f"{install_line('plot')}, or name a file that ends in .svg"
        raise InvalidArgument("--plot", f"{path}, but resvg-py is not installed", "it to be there for PNG", remedy)


def draw(record: Record, path: Path) -> None:
    """Writes the charts of a record to a file."""
    title, notes = title_of(record)
    if path.suffix == ".svg":
        write_whole(path, picture(charts(record), title, notes))
    else:
        write_whole(path, png(picture(charts(record), title, notes, theme="light")))


def title_of(record: Record) -> tuple[str, list[str]]:
    """The heading of the charts: the title, the machine, and notes on the run."""
    about = record.about
    facts = [device_name(about), about.get("dtype"), str(about.get("date", ""))[:10]]
    notes = [f"note: {note}" for note in about.get("notes", [])]
    return f"tilewise bench: {suite_name(about)}", [", ".join(fact for fact in facts if fact), *notes]


def png(svg: str) -> bytes:
    """An SVG as a PNG, with matplotlib's fonts if it is installed: some machines have none."""
    import resvg_py

    options: dict[str, Any] = {}
    if importlib.util.find_spec("matplotlib") is not None:
        import matplotlib

        options = {"font_dirs": [str(Path(matplotlib.get_data_path()) / "fonts" / "ttf")]}
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM, sans_serif_family="DejaVu Sans", **options))
