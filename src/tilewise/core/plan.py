"""The plan of a call: what will run, why, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from .problem import Problem
from .tile_map import TileCounts, TileMap

Made = TypeVar("Made")


class OtherDevice(str):
    """A backend's reason to refuse any call: the backend is for another kind of device."""

    __slots__ = ()


class Lacking(str):
    """Why kernels do not serve a device that they are made for: another version would do. The planner warns of it."""

    __slots__ = ()


class Unproven(NamedTuple):
    """What no record says of a backend's kernels on a device with a compiler: `tilewise prove` asks the machine."""

    what: str  # "compiled with Triton 3.7, not yet run on a GPU"
    taken: bool  # on trust, with a note in the plan; if not, only where it is named or proven


class Deferred(Generic[Made]):
    """What `make(problem)` returns, for `Plan.detail`: made when it is first asked for."""

    def __init__(self, make: Callable[[Problem], Made], problem: Problem) -> None:
        self.make, self.problem = make, problem
        self.made: Made | None = None

    def __call__(self) -> Made:
        if self.made is None:
            self.made = self.make(self.problem)
        return self.made


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a call: only visible cells count, and each byte is counted once."""

    cells: int  # visible (query, key) pairs, over all heads
    flops: int  # 2 * D + 2 * Dv for each of them
    bytes_moved: int  # q, visible k and v (once if V lies in K), their scales, the mask's mixed tiles, out and lse
    tiles: TileCounts  # of the plan's tile, over batch rows and heads
    function_map: TileMap | None = None  # of the first sequence, if functions of the user hide tiles


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs for a `Problem`: backend, kernel, tile, splits and workspace. `str(plan)` is readable text.

    `cost` is filled in by `tilewise.plan`, which may have to read lengths and masks for it; a call does not.
    """

    problem: Problem
    backend: str
    kernel: str
    tile: tuple[int, int]  # (BQ, BK)
    splits: int = 1
    workspace_bytes: int = 0
    notes: tuple[str, ...] = ()
    passed_over: tuple[tuple[str, str], ...] = ()  # (backend, reason), best first
    cost: Cost | None = None
    backward: Plan | None = None  # of a call whose inputs require grad
    statistics: Plan | None = None  # of what `return_aux` requests
    detail: Any = field(default=None, compare=False, repr=False)  # the backend's own data for its launches

    def summary(self) -> str:
        """The plan as one line."""
        words = [f"{self.backend}: {self.kernel}", f"tile {self.tile[0]} x {self.tile[1]}"]
        if self.splits > 1:
            words.append(f"{self.splits} splits")
        return ", ".join([*words, *self.problem.options()])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Plan {self.summary()}>"

    def _repr_html_(self) -> str:
        """The text, and the share of tiles that are skipped, for notebooks."""
        from html import escape

        from .tile_pictures import bar

        return f"<pre>{escape(self.text())}</pre>" + (bar(self.cost.tiles) if self.cost is not None else "")

    def text(self, every_backend: bool = False) -> str:
        """The plan as text. Backends for another kind of device are left out unless `every_backend`."""
        from .tile_pictures import marks

        p = self.problem
        kv = p.kv_heads if p.kv_heads != p.heads else p.heads
        width = f"{p.head_dim}" if p.head_dim == p.value_dim else f"{p.head_dim}/{p.value_dim}"
        rows = f"{p.total_q} packed rows" if p.packed_q else f"Lq {p.q_len}"
        pages = f", pages of {p.page_size}" if p.page_size else ""
        stored = [_dtype(p.q_dtype)]
        for name, fmt in (("k", p.k_format), ("v", p.v_format)):
            word = str(fmt) if fmt.is_quantised else _dtype(fmt.dtype)
            if word != stored[0]:
                stored.append(f"{name} {word}")
        lines = [
            f"{p.form} attention on {p.device}: batch {p.batch}, heads {p.heads}/{kv}, {rows}, Lk {p.kv_len}{pages}, "
            f"D {width}, {', '.join(stored)}",
            f"  options    {', '.join(p.options()) or 'none'}",
            f"  backend    {self.backend}, {self.kernel}",
            f"  tile       {self.tile[0]} x {self.tile[1]}, {self.splits} split{'s' * (self.splits != 1)}",
            f"  workspace  {_size(self.workspace_bytes)}",
        ]
        if self.cost is not None:
            c = self.cost
            lines += [
                f"  work       {_flops(c.flops)} over {c.cells:,} visible cells, {_size(c.bytes_moved)} moved",
                f"  tiles      {c.tiles.skip:,} skipped, {c.tiles.full:,} full, {c.tiles.mixed:,} mixed",
            ]
            lines += [] if c.function_map is None else [f"             {row}" for row in marks(c.function_map)]
        lines += [f"  copied     {copy}" for copy in p.copies]
        lines += [f"  note       {note}" for note in self.notes]
        lines += self._not_taken("not", every_backend)
        if (s := self.statistics) is not None:
            lines.append(f"  statistics {s.backend}, {s.kernel}, tile {s.tile[0]} x {s.tile[1]}")
        if (b := self.backward) is not None:
            lines += [
                f"  backward   {b.backend}, {b.kernel}, tile {b.tile[0]} x {b.tile[1]}, "
                f"workspace {_size(b.workspace_bytes)}",
                f"             {', '.join(word for word in b.problem.options() if word not in p.options())}",
            ]
            lines += [f"  note       {note}" for note in b.notes]
            lines += b._not_taken("backward not", every_backend)
        return "\n".join(lines)

    def _not_taken(self, how: str, every_backend: bool) -> list[str]:
        shown = (x for x in self.passed_over if every_backend or not isinstance(x[1], OtherDevice))
        return [f"  {how} {name}: {reason}" for name, reason in shown]


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _flops(count: int) -> str:
    """Operations in units that leave few digits.

    >>> [_flops(n) for n in (52, 3328, 457_000_000, 10**12)]
    ['52 FLOP', '3.33 KFLOP', '457 MFLOP', '1 TFLOP']
    """
    number = float(count)
    for unit in ("", "K", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {unit}FLOP"
        number /= 1000
    return f"{number:.4g} TFLOP"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
