"""Interval arithmetic on expressions: what the functions of a call can be on whole tiles, without evaluating a cell.

A `Range` bounds a node over each tile of a grid. Bounds hold for every backend: floats are bounded in float64, wider
by more than float32 operations round, and ints that may wrap may be anything. What is not known is left open: a tile is
called hidden, or seen, only if it provably is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from .bounds import BITS, BOOLS, NUMBERS, Range, point, rounded, wrapped
from .build import LEAST, MOST
from .evaluate import clamped
from .mods import Mods
from .node import Node, in_order
from .reductions import extremes

Tensor = torch.Tensor
HIDDEN, MIXED, SEEN = 0, 1, 2


def ranges(roots: Sequence[Node], inputs: Mapping[str, Range], captured: Sequence[Tensor]) -> list[Range]:
    """Bounds of nodes on tiles, by those of the inputs. Elements of captured tensors are bounded by their values."""
    device = next(iter(inputs.values())).lo.device
    known: dict[Node, Range] = {}
    for node in in_order(*roots):
        args = [known[x] for x in node.children]
        if node.op == "in":
            known[node] = inputs[str(node.args[0])]
        elif node.op == "const":
            known[node] = _const(node, device)
        elif node.op == "load":
            known[node] = _load(captured[int(node.args[0])], args)  # type: ignore[arg-type]
        else:
            rules = BITS if node.kind == "int" and node.op in BITS else BOOLS if node.kind == "bool" else NUMBERS
            found = rules[node.op](*args)
            known[node] = wrapped(found) if node.kind == "int" else found
    return [known[root] for root in roots]


def classes(mods: Mods, inputs: Mapping[str, Range], captured: Sequence[Tensor]) -> Tensor:
    """What mask_mod and score_mod leave of each tile: uint8, HIDDEN, MIXED or SEEN: every cell is visible to mask_mod.

    A score_mod hides a tile if its result is `-inf` whatever score it is given.
    """
    device = inputs["q"].lo.device
    anything = torch.tensor([-math.inf, math.inf], dtype=torch.float64, device=device)
    given = {**inputs, "s": Range(anything[0], anything[1], torch.ones((), dtype=torch.bool, device=device))}
    roots = [root for root in (mods.mask, mods.score) if root is not None]
    found = ranges(roots, given, captured)
    states = torch.full((), SEEN, dtype=torch.uint8, device=device)
    if mods.mask is not None:
        states = found[0].hi.to(torch.uint8) + found[0].lo.to(torch.uint8)
    if mods.score is not None:
        score = found[-1]
        states = torch.where((score.hi == -math.inf) & ~score.maybe_nan, HIDDEN, states)
    return states.to(torch.uint8)


def _const(node: Node, device: torch.device) -> Range:
    kind = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}[node.kind]
    x = torch.tensor(node.value, dtype=kind, device=device)
    if node.value != node.value:
        return Range(torch.full_like(x, -math.inf), torch.full_like(x, math.inf), torch.ones_like(x, dtype=torch.bool))
    if node.kind != "float" or float(x.float()) == node.value:
        return point(x)
    return rounded(x, x)  # a kernel has the nearest float32


# Loads


def _load(x: Tensor, at: Sequence[Range]) -> Range:
    """Bounds of the elements at these ranges of indices. If two dims have wide ranges, one of them is taken whole."""
    if x.numel() == 0:
        x = x.new_zeros([1] * x.ndim)
    ends = [_inside(i, n) for i, n in zip(at, x.shape, strict=True)]
    wide = [dim for dim, (lo, hi) in enumerate(ends) if lo is not hi and bool((lo != hi).any())]
    nan = None
    if x.dtype == torch.bool:
        values = [x.to(torch.uint8)] * 2
    elif x.is_floating_point():
        x = x.detach().to(torch.float32) if x.dtype.itemsize < 4 else x.detach()
        unknown = x.isnan()
        nan = unknown if bool(unknown.any()) else None
        values = [x] * 2 if nan is None else [x.masked_fill(unknown, -math.inf), x.masked_fill(unknown, math.inf)]
    else:
        values = [x if x.dtype.itemsize < 8 else x.clamp(LEAST, MOST).to(torch.int32)] * 2
    tables = [(values[0], False), (values[1], True)] + ([] if nan is None else [(nan.to(torch.uint8), True)])
    results = [extremes(table, ends, wide, largest) for table, largest in tables]
    if x.dtype == torch.bool:
        return Range(results[0].bool(), results[1].bool())
    if not x.is_floating_point():
        return Range(results[0].long(), results[1].long())
    found = Range(results[0].double(), results[1].double(), None if nan is None else results[2].bool())
    return rounded(*found) if x.dtype == torch.float64 else found


def _inside(at: Range, size: int) -> tuple[Tensor, Tensor]:
    """The indices that `evaluate.clamped` makes of a range of indices; all of them if it reaches around 0."""
    if at.lo is at.hi:
        x = clamped(at.lo, size)
        return x, x
    around = (at.lo < 0) & (at.hi >= 0)
    return torch.where(around, 0, clamped(at.lo, size)), torch.where(around, size - 1, clamped(at.hi, size))


def proven_inside(index: Range, size: int) -> Tensor:
    """Where all indices of a range are inside a dim of `size`; negative ones count from its end."""
    return (index.lo >= -size) & (index.hi < size)
