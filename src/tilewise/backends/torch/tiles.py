"""What the forward and backward passes share: scores, masks and weighted sums of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from ...core.expression.cells import cells_of, modified, visible_cells
from ...core.mask_rules import key_span
from ...core.mod_tiles import mod_states
from ...core.plan import Plan
from ...core.tensors import Sequence, Tensors
from ...core.tile_map import FULL, MIXED, SKIP, TileMap

FEW = 16  # query rows of a head
FEW_ROWS, PART = 16, 32


def work_dtype(seq: Sequence) -> torch.dtype:
    """The compute dtype of a sequence: float64 if torch is set to run float32 products in fewer bits, or if BLAS would
    round more than the bound allows.
    """
    p = seq.problem
    # BLAS sums products of one to three rows in vector lanes, of more rows term by term, with about twice the error:
    # the rows of a GQA group, multiplied together, would round more than those of each head alone.
    few = p.q_dtype == torch.float32 and seq.q_len <= FEW and p.device.type == "cpu"
    wide = few or p.q_dtype == torch.float64 or torch.get_float32_matmul_precision() != "highest"
    return torch.float64 if wide else torch.float32


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Turns autocast off, which would run float32 products in bfloat16."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q k^T. BLAS sums few rows term by term; summing parts of D and adding them up rounds less."""
    if q.shape[-2] > FEW_ROWS:
        return q @ k.mT
    parts = zip(q.split(PART, -1), k.split(PART, -1), strict=True)
    return torch.stack([a @ b.mT for a, b in parts]).sum(0)


def tile_states(plan: Plan, tensors: Tensors) -> list[list[list[int]]] | None:
    """The state of each of the plan's tiles, `[B][nq][nk]`, merged over heads, which are computed together.

    A tile that functions of the user hide is skipped too; full is what the mask leaves whole.
    """
    p, tile_map = plan.problem, tensors.tile_map
    if tile_map is None and p.mask is not None and tensors.mask is not None:
        kept = tuple(slice(0, 1) if broadcast else slice(None) for broadcast in p.mask.broadcast)
        tile_map = TileMap.from_mask(tensors.mask[kept], plan.tile)
    nq, nk = (-(-n // t) for n, t in zip((p.q_len, p.kv_len), plan.tile, strict=True))
    merged = None
    if tile_map is not None:
        states = tile_map.retile(plan.tile).states
        low, high = states.amin(1), states.amax(1)
        merged = torch.where(low == high, low, MIXED).expand(p.batch, nq, nk)
    if (states_of_mods := mod_states(p, tensors, plan.tile)) is not None:
        hidden = (states_of_mods == SKIP).all(1).expand(p.batch, nq, nk)
        merged = torch.where(hidden, SKIP, MIXED if merged is None else merged)
    return None if merged is None else merged.tolist()


def span_ends(seq: Sequence, rows: slice) -> tuple[tuple[int, int], tuple[int, int]]:
    """The key spans of the first and the last of these queries. With positions of a tree spans need not move right, so
    they begin at the leftmost start, and no key counts as seen by all rows.
    """
    if seq.tensors.positions is not None:
        lo, hi = seq.spans(rows)
        return (int(lo.min()), 0), (seq.kv_len, int(hi.max()))
    return tuple(key_span(seq.rules, seq.position(row), seq.kv_len) for row in (rows.start, rows.stop - 1))  # type: ignore[return-value]


def tiles_of_keys(
    seq: Sequence, rows: slice, BK: int, states: list[int] | None
) -> Iterator[tuple[slice, bool, bool, torch.Tensor | None]]:
    """The tiles of keys that these rows may see: their keys, whether the mask is read, whether position rules may hide
    a cell, and the cells selected by indices.
    """
    # Spans move right as rows go down, so the first row has the leftmost start and the last row the rightmost end.
    first, last = span_ends(seq, rows)
    for tile in range(first[0] // BK, -(-last[1] // BK)):
        cols = slice(tile * BK, min((tile + 1) * BK, seq.kv_len))
        state = MIXED if states is None else states[tile]
        if state == SKIP:
            continue
        chosen = seq.chosen(rows, cols)
        if chosen is not None and not bool(chosen.any()):
            continue
        inside = last[0] <= cols.start and first[1] >= cols.stop
        yield cols, seq.tensors.mask is not None and state != FULL, not inside, chosen


def adjust(
    seq: Sequence, s: torch.Tensor, rows: slice, cols: slice, masked: bool, edge: bool, chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Applies softcap, biases and the functions of the user to scores, and -inf to hidden cells. Also returns the
    visible cells; None if all are.

    `chosen` are the cells selected by key or block indices.
    """
    s, visible = with_biases(seq, s, rows, cols, masked, edge, chosen)
    s, visible = with_mods(seq, s, visible, rows, cols)
    return (s, None) if visible is None else (torch.where(visible, s, -torch.inf), visible)


def with_mods(
    seq: Sequence, s: torch.Tensor, visible: torch.Tensor | None, rows: slice, cols: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What score_mod makes of scores, and the cells that it and mask_mod leave visible."""
    mods, captured = seq.problem.mods, seq.tensors.captured
    if mods is None:
        return s, visible
    own = cells_of(seq.b, seq.problem.heads, *seq.positions(rows, cols))
    kept = visible_cells(mods, own, captured)
    if mods.score is not None:
        s = modified(mods, s, own, captured)
        kept = s != -torch.inf if kept is None else kept & (s != -torch.inf)
    kept = torch.ones_like(s, dtype=torch.bool) if kept is None else kept.expand_as(s)
    return s, kept if visible is None else visible & kept


def with_biases(
    seq: Sequence, s: torch.Tensor, rows: slice, cols: slice, masked: bool, edge: bool, chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores with softcap and all biases, and the cells that rules and masks leave visible; None if all are."""
    p = seq.problem
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    qpos, kpos = seq.positions(rows, cols)
    if seq.slopes is not None:
        s = s - seq.slopes.to(s.dtype)[:, None, None] * (qpos - kpos).abs()
    visible: torch.Tensor | None = None
    if edge:
        lo, hi = seq.spans(rows)  # [BQ, 1]
        j = torch.arange(cols.start, cols.stop, device=s.device)
        visible = ((lo <= j) & (j < hi)).expand_as(s)
    tree = seq.tree(rows, cols)
    if tree is not None:
        visible = tree.expand_as(s) if visible is None else visible & tree
    bias = seq.bias(rows, cols, s.dtype)
    if bias is not None:
        s = s + bias
        seen = (bias != -torch.inf).expand_as(s)
        visible = seen if visible is None else visible & seen
    mask = seq.mask(rows, cols) if masked else None
    if mask is not None:
        if mask.dtype == torch.bool:
            visible = mask if visible is None else visible & mask
        else:
            s = s + mask.to(s.dtype)
            seen = mask != -torch.inf
            visible = seen if visible is None else visible & seen
    if chosen is not None:
        visible = chosen if visible is None else visible & chosen
    return s, visible


def weighted_sum(prob: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """`prob [H, BQ, BK] @ v [Hkv, BK, Dv]`, in which hidden values have no effect, not even as 0 * inf."""
    H, n, cols = prob.shape
    grouped = prob.reshape(v.shape[0], -1, cols)  # [Hkv, G * BQ, BK]; prob may have a mask's strides
    v = v.contiguous()  # rounding depends on strides: they must not differ between clean and cleaned values
    finite = v.isfinite()
    if visible is None or bool(finite.all()):
        return (grouped @ v).view(H, n, -1)
    out = (grouped @ torch.where(finite, v, 0.0)).view(H, n, -1)
    nonfinite = torch.where(finite, 0.0, v).repeat_interleave(H // v.shape[0], 0)  # [H, BK, Dv]
    return out + torch.where(visible[..., None], prob[..., None] * nonfinite[:, None], 0.0).sum(-2)
