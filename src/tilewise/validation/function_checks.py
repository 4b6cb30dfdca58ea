"""Whether functions of the user read inside the tensors that they capture: asked for by `validate=True`."""

from __future__ import annotations

import torch

from ..core.expression.bounds import Range, point
from ..core.expression.cells import Cells, cells_of, visible_cells
from ..core.expression.evaluate import evaluate
from ..core.expression.intervals import proven_inside, ranges
from ..core.expression.node import Node, in_order
from ..core.problem import Problem
from ..core.tensors import Sequence, Tensors, sequences
from ..errors import InvalidArgument

ROWS, KEYS = 64, 512


def check_loads(problem: Problem, tensors: Tensors) -> None:
    """Refuses an index outside a captured tensor, in a cell that position rules and mask_mod leave, and names it."""
    mods = problem.mods
    if mods is None:
        return
    roots = [root for root in (mods.mask, mods.score) if root is not None]
    loads = [x for x in in_order(*roots) if x.op == "load"]
    for seq in sequences(problem, tensors):
        for top in range(0, seq.q_len, ROWS):
            rows = slice(top, min(top + ROWS, seq.q_len))
            for first in range(0, seq.kv_len, KEYS):
                _check_tile(seq, loads, rows, slice(first, min(first + KEYS, seq.kv_len)))


def _check_tile(seq: Sequence, loads: list[Node], rows: slice, cols: slice) -> None:
    mods, captured = seq.problem.mods, seq.tensors.captured
    assert mods is not None
    qpos, kpos = seq.positions(rows, cols)
    unproven = _unproven(seq, loads, qpos, kpos)
    if not unproven:
        return
    cells = cells_of(seq.b, seq.problem.heads, qpos, kpos)
    lo, hi = seq.spans(rows)
    j = torch.arange(cols.start, cols.stop, device=kpos.device)
    visible = (lo <= j) & (j < hi)
    if (kept := visible_cells(mods, cells, captured)) is not None:
        visible = visible & kept
    for load, dim in unproven:
        node = list(load.children)[dim]
        x = captured[int(load.args[0])]  # type: ignore[arg-type]
        index = evaluate([node], cells, captured, torch.float32)[0]
        wrong = ((index < -x.shape[dim]) | (index >= x.shape[dim])) & visible
        if bool(wrong.any()):
            _refuse(load, dim, x, index, wrong, cells)


def _unproven(seq: Sequence, loads: list[Node], qpos: torch.Tensor, kpos: torch.Tensor) -> list[tuple[Node, int]]:
    """The loads, and their dims, whose indices may be outside in this tile. Those that a score decides are clamped."""
    device, captured = qpos.device, seq.tensors.captured
    given = {
        "b": point(torch.tensor(seq.b, device=device)),
        "h": Range(*torch.tensor([0, seq.problem.heads - 1], device=device)),
        "q": Range(qpos.min(), qpos.max()),
        "k": Range(kpos.min(), kpos.max()),
    }
    found = []
    for load in loads:
        x = captured[int(load.args[0])]  # type: ignore[arg-type]
        for dim, index in enumerate(load.children):
            if "s" not in index.inputs and not bool(proven_inside(ranges([index], given, captured)[0], x.shape[dim])):
                found.append((load, dim))
    return found


def _refuse(load: Node, dim: int, x: torch.Tensor, index: torch.Tensor, wrong: torch.Tensor, cells: Cells) -> None:
    h, i, j = (int(n) for n in wrong.expand(cells["h"].shape[0], *wrong.shape[-2:]).nonzero()[0])
    value = int(index.expand(cells["h"].shape[0], *wrong.shape[-2:])[h, i, j])
    raise InvalidArgument(
        f"score_mod or mask_mod, captured tensor {load.args[0]} {tuple(x.shape)}",
        f"index {value} of dim {dim} at b={int(cells['b'])}, h={h}, q_idx={int(cells['q'][i])}, "
        f"kv_idx={int(cells['k'][0, j])}",
        f"{-x.shape[dim]} to {x.shape[dim] - 1}",
        "hide the cell, clamp the index, or call without validate=True, which clamps it",
    )
