"""The functions of a call on tiles of cells, in torch: for the oracle, the torch backend and the checks."""

from __future__ import annotations

import torch

from .evaluate import clamped, evaluate, gather
from .mods import Mods
from .node import Node

Tensor = torch.Tensor
Cells = dict[str, Tensor]  # the inputs of the functions, of shapes that broadcast: `node.INPUTS` by name


def cells_of(b: int, heads: int, qpos: Tensor, kpos: Tensor) -> Cells:
    """The indices of cells `[H, n, m]`: all heads, positions `[n, 1]` and `[1, m]`."""
    device = qpos.device
    return {
        "b": torch.tensor(b, device=device),
        "h": torch.arange(heads, device=device)[:, None, None],
        "q": qpos,
        "k": kpos,
    }


def visible_cells(mods: Mods, cells: Cells, captured: tuple[Tensor, ...]) -> Tensor | None:
    """What mask_mod leaves visible; None if there is none."""
    return None if mods.mask is None else evaluate([mods.mask], cells, captured, torch.float32)[0]


def modified(mods: Mods, s: Tensor, cells: Cells, captured: tuple[Tensor, ...]) -> Tensor:
    """What score_mod makes of scores, in their shape and dtype."""
    if mods.score is None:
        return s
    return evaluate([mods.score], cells | {"s": s}, captured, s.dtype)[0].expand_as(s)


def slopes(mods: Mods, nodes: list[Node], s: Tensor, cells: Cells, captured: tuple[Tensor, ...]) -> list[Tensor]:
    """Derivatives of score_mod, as `Mods.by_score` and `Mods.by_loads` have them, in the dtype of `s`."""
    return evaluate(nodes, cells | {"s": s}, captured, s.dtype)


def moved(
    mods: Mods, s: Tensor, ds: Tensor, cells: Cells, captured: tuple[Tensor, ...], dcaptured: tuple[Tensor | None, ...]
) -> Tensor:
    """The tangents of what score_mod makes of scores `s`, whose tangents are `ds`; those of captured tensors are
    `dcaptured`, None where they do not move.
    """
    loads = {x: d for x, d in mods.by_loads.items() if dcaptured and dcaptured[int(x.args[0])] is not None}  # type: ignore[arg-type]
    if mods.by_score is None and not loads:
        return ds
    own = cells | {"s": s}
    total = ds if mods.by_score is None else ds * evaluate([mods.by_score], own, captured, s.dtype)[0]
    for load, derivative in loads.items():
        slope, *places = evaluate([derivative, *load.children], own, captured, s.dtype)
        total = total + slope * gather(dcaptured[int(load.args[0])], places, s.dtype)  # type: ignore[arg-type]
    return total


def add_captured(
    mods: Mods, totals: dict[int, Tensor], ds: Tensor, visible: Tensor, s: Tensor, cells: Cells,
    captured: tuple[Tensor, ...], *, absolute: bool = False,
) -> None:  # fmt: skip
    """Adds to the gradients of captured tensors, by number, what visible cells of a tile give: `ds` times a derivative.

    The sums over what an index does not depend on are taken first. The order of all sums is fixed on a CPU.
    """
    for load, derivative in mods.by_loads.items():
        number = int(load.args[0])  # type: ignore[arg-type]
        if number not in totals:
            continue
        total, indices = totals[number], list(load.children)
        slope, *places = evaluate([derivative, *indices], cells | {"s": s}, captured, s.dtype)
        terms = torch.where(visible, ds * (slope.abs() if absolute else slope), 0.0).to(total.dtype)  # [H, n, m]
        if not total.numel():
            continue
        at = element_number(places, total)
        at = at.expand((1,) * (terms.ndim - at.ndim) + tuple(at.shape))
        shared = [dim for dim, n in enumerate(at.shape) if n == 1 and terms.shape[dim] != 1]
        terms = terms.sum(shared, keepdim=True) if shared else terms
        add_at(total.view(-1), at.expand_as(terms).reshape(-1), terms.reshape(-1))


def element_number(places: list[Tensor], x: Tensor) -> Tensor:
    """The number of the element of x that a load reads at these indices, in row-major order."""
    at = torch.zeros((), dtype=torch.int64, device=x.device)
    for place, size in zip(places, x.shape, strict=True):
        at = at * size + clamped(place, size)
    return at


def add_at(total: Tensor, at: Tensor, terms: Tensor) -> None:
    """total[at] += terms, all of one dim, in the same order each time."""
    if total.is_cuda:  # it sorts, where `index_add_` has atomics
        total.index_put_((at,), terms, accumulate=True)
    else:
        total.index_add_(0, at, terms)
