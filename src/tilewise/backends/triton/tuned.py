"""Tiles that `tilewise tune` found to be the fastest on a device, kept in a JSON file, by problem shape.

The file is read once, when a GPU call is first planned. Without it, or for shapes that it does not hold,
`config.py` decides alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from ...core.atomic_write import write_whole
from ...core.cache_home import cache_home
from ...core.problem import Problem
from ...core.storage import PLAIN, StorageFormat
from ..gpu.flags import ceil_pow2
from ..gpu.target import Target
from . import config
from .flipped_products import pack_of
from .spec import Config

FORMAT = 1
CHOICES = {"BM": (8, 16, 32, 64, 128), "BK": (16, 32, 64, 128, 256), "warps": (1, 2, 4, 8), "stages": range(1, 9),
           "slices": (1, 2)}  # fmt: skip
Table = Mapping[str, Config]


def path() -> Path:
    return cache_home() / "tuned.json"


def key_of(problem: Problem, target: Target) -> str:
    """The key of a tuned tile: the device, and all that a tile's time depends on, but not the number of tiles."""
    p = problem
    what = "decode" if config.is_decode(p) else "prefill"
    words = [target.name, what, f"D{p.head_dim}", f"Dv{p.value_dim}"]
    words += [
        _type(PLAIN[p.q_dtype]),
        _type(p.k_format),
        _type(p.v_format),
    ]
    if what == "decode":
        words.append(f"rows{ceil_pow2(pack_of(p.group) * p.sharing_queries)}")
    if p.page_size:
        words.append(f"page{p.page_size}")
    if p.mask is not None:
        words.append("mask")
    if p.selection is not None:
        words.append("indices")
    curved = p.softcap > 0 or p.alibi or p.biased
    words += ["rules"] * p.rules.by_position + ["curved"] * curved + ["tf32"] * p.allow_tf32
    return " ".join(words)


def _type(fmt: StorageFormat) -> str:
    return str(fmt) if fmt.is_quantised else f"{fmt.bits}bit"


def candidates(problem: Problem, target: Target) -> list[Config]:
    """Tiles worth trying, the heuristics' own first."""
    own = config.tile(problem, target)
    if config.is_decode(problem):
        shapes = [
            (own.BM, BK, w, s, 1)
            for BK in (32, 64, 128, 256)
            for w in sorted({own.warps, 2, 4, 8})
            for s in (2, 3, 4, 5)
        ]
    else:
        slices = own.slices
        shapes = [(BM, BK, w, s, slices) for BM, w in ((64, 4), (128, 8)) for BK in (32, 64, 128) for s in (1, 2, 3, 4)]
    found = [config.fitted(problem, own, target)]
    for BM, BK, w, s, slices in shapes:
        c = Config(BM, BK, w, s, own.pack, slices=slices)
        if c not in found and config.fitted(problem, c, target) == c:
            found.append(c)
    return found


def read(file: Path) -> dict[str, Config]:
    """The tiles in a file; invalid entries are skipped, with a warning."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}")
        entries = content["tiles"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        warnings.warn(f"ignoring {file}: not a file that `tilewise tune` wrote ({error!r})", stacklevel=2)
        return {}
    table = {}
    for key, tile in entries:
        if isinstance(tile, dict) and set(tile) == set(CHOICES) and all(tile[n] in CHOICES[n] for n in CHOICES):
            table[key] = Config(**tile)
        else:
            warnings.warn(f"{file}: ignoring the tile of {key!r}, which is not a valid one: {tile}", stacklevel=2)
    return table


def write(file: Path, table: Table) -> None:
    tiles = {key: {n: x for n, x in asdict(c).items() if n in CHOICES} for key, c in sorted(table.items())}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"format": FORMAT, "tiles": tiles}, indent=1) + "\n")


@cache
def kept() -> dict[str, Config]:
    """The tiles kept on this machine."""
    return read(path())


def config_of(problem: Problem, target: Target, table: Table | None = None) -> Config:
    """The launch shape of a problem: from a tuned tile if there is one, else from `config.py`."""
    tile = (kept() if table is None else table).get(key_of(problem, target))
    if tile is not None and config.is_decode(problem):
        tile = replace(tile, pack=pack_of(problem.group, tile.BM))
    return config.config_of(problem, target, tile)
