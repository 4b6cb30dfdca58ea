"""The cost of a call: visible cells, FLOPs, bytes, tiles. It reads lengths and masks, so the counts are exact."""

from __future__ import annotations

import torch

from .expression.cells import cells_of
from .expression.cells import visible_cells as visible_to
from .mod_tiles import mod_states
from .plan import Cost
from .problem import Problem
from .tensors import Sequence, Tensors, sequences
from .tile_map import TileCounts, TileMap
from .tile_spans import span_counts, span_tiles

ROWS = 256  # query rows at a time where visible cells are counted one by one


def estimate(problem: Problem, tensors: Tensors, tile: tuple[int, int]) -> Cost:
    """The cost of a call cut into tiles of `tile`."""
    p = problem
    mask_map = _mask_map(p, tensors, tile)
    found_map = None if p.device.type == "meta" else mod_states(p, tensors, tile)
    mod_map = None if found_map is None else found_map.cpu()
    shown: TileMap | None = None
    cells = keys = mask_cells = 0
    tiles = [0, 0, 0]
    for seq in sequences(p, tensors):
        lo, hi = (x[:, 0] for x in seq.spans(slice(0, seq.q_len), "cpu"))  # [Lq]; on the CPU, since q may be on meta
        if p.selection is not None:
            found = _chosen_cells(seq, lo, hi, tile)
            cells, keys, mask_cells = cells + found[0], keys + found[1], mask_cells + found[0] * (p.mask is not None)
            tiles = [a + b for a, b in zip(tiles, found[2], strict=True)]
            continue
        widths = (hi - lo).clamp_min(0)
        by_function = None if mod_map is None else mod_map[seq.b % len(mod_map)]
        if p.mask is not None or p.tree:
            cells += _masked_cells(seq, lo, hi)
        elif by_function is not None:
            cells += _function_cells(seq, lo, hi, by_function, tile)
        else:
            cells += int(widths.sum()) * p.heads
        seen = widths > 0
        if bool(seen.any()):
            keys += int(hi[seen].max() - lo[seen].min())
        if mask_map is None and by_function is None and not p.rules.affine and not p.tree:
            for kind, count in enumerate(span_counts(lo, hi, seq.kv_len, tile)):
                tiles[kind] += count * p.heads
            continue
        if p.positions:  # spans need not move right from row to row
            kpos = torch.arange(seq.kv_len, device="cpu")
            states = TileMap.from_mask((lo[:, None] <= kpos) & (kpos < hi[:, None]), tile).states[0]  # [1, nq, nk]
        else:
            states = span_tiles(lo[None], hi[None], seq.kv_len, tile)
        if p.tree:  # a tree mask hides cells in the tiles of the queries' own keys
            states[..., max(0, seq.kv_len - seq.q_len) // tile[1] :].clamp_(max=1)
        if by_function is not None:
            states = torch.minimum(states, by_function[:, : states.shape[-2], : states.shape[-1]])
            shown = shown or TileMap(states[None], tile, (seq.q_len, seq.kv_len))
        if mask_map is not None:
            plane = mask_map[seq.b % len(mask_map)]  # [1 or H, 1 or nq, 1 or nk]
            nq, nk = states.shape[1:]
            states = torch.minimum(states, plane[:, :nq, :nk])  # [1 or H, nq, nk]
            read = ((states > 0) & (plane[:, :nq, :nk] == 1)).long()
            mask_cells += int(_sizes(seq.q_len, tile[0]) @ read.sum(0) @ _sizes(seq.kv_len, tile[1]))
        for kind in range(3):
            tiles[kind] += int((states == kind).sum()) * (p.heads // len(states))

    rows = tensors.q[..., 0].numel()  # B * Lq * H
    moved = rows * (p.head_dim + p.value_dim) * p.q_dtype.itemsize + (4 * rows if p.return_lse else 0)
    stored = [(tensors.k, tensors.k_scales)] + [(tensors.v, tensors.v_scales)] * (not p.v_in_k)
    for data, scales in stored:
        width = data.shape[-1] * data.element_size()
        if scales is not None:
            width += scales.shape[-1] * scales.element_size()
        moved += keys * p.kv_heads * width
    moved += keys * p.k_shared_dim * p.k_dtype.itemsize
    if p.mask is not None:
        moved += mask_cells * p.mask.dtype.itemsize
    return Cost(cells, 2 * cells * (p.head_dim + p.value_dim), moved, TileCounts(*tiles), shown)


def _chosen_cells(
    seq: Sequence, lo: torch.Tensor, hi: torch.Tensor, tile: tuple[int, int]
) -> tuple[int, int, TileCounts]:
    """With key or block indices: visible cells, keys that some query sees (average over KV heads), tiles."""
    p, kpos = seq.problem, torch.arange(seq.kv_len, device="cpu")
    cells, tiles = 0, TileCounts(0, 0, 0)
    used = torch.zeros(p.kv_heads, seq.kv_len, dtype=torch.bool, device="cpu")
    step = tile[0] * -(-ROWS // tile[0])
    for top in range(0, seq.q_len, step):
        part = slice(top, min(top + step, seq.q_len))
        seen, mask = seq.chosen(part, slice(0, seq.kv_len)), seq.mask(part, slice(0, seq.kv_len))
        assert seen is not None
        seen = seen.cpu() & (lo[part, None] <= kpos) & (kpos < hi[part, None])
        if mask is not None:
            seen &= (mask if mask.dtype == torch.bool else mask != -torch.inf).cpu()
        cells += int(seen.sum())
        used |= seen.unflatten(0, (p.kv_heads, p.group)).any(1).any(1)
        tiles = TileCounts(*(a + b for a, b in zip(tiles, TileMap.from_mask(seen, tile).counts(), strict=True)))
    return cells, int(used.sum()) // p.kv_heads, tiles


def _sizes(length: int, tile: int) -> torch.Tensor:
    """The sizes of the tiles that cover `length`."""
    starts = torch.arange(0, length, tile, device="cpu")
    return (length - starts).clamp_max(tile)


def _mask_map(p: Problem, tensors: Tensors, tile: tuple[int, int]) -> torch.Tensor | None:
    """The states of the mask's tiles, on the CPU: `[1 or B, 1 or H, 1 or nq, 1 or nk]`."""
    if p.mask is None or tensors.mask is None:
        return None
    kept = tuple(slice(0, 1) if broadcast else slice(None) for broadcast in p.mask.broadcast)
    return TileMap.from_mask(tensors.mask[kept], tile).states.cpu()


def _function_cells(
    seq: Sequence, lo: torch.Tensor, hi: torch.Tensor, states: torch.Tensor, tile: tuple[int, int]
) -> int:
    """Cells that spans and mask_mod leave visible, counted one by one in mixed tiles `[1 or H, nq, nk]` alone.

    What score_mod hides counts, except whole tiles.
    """
    p, (BQ, BK) = seq.problem, tile
    sizes, count = _sizes(seq.kv_len, BK), 0
    for i, top in enumerate(range(0, seq.q_len, BQ)):
        rows, plane = slice(top, min(top + BQ, seq.q_len)), states[:, i, : len(sizes)]
        used = plane.amax(0) > 0  # by any head
        j = torch.arange(seq.kv_len, device="cpu")[used.repeat_interleave(sizes)]
        inside = (lo[rows, None] <= j) & (j < hi[rows, None])  # [n, m]
        shown = plane.repeat_interleave(sizes, 1)[:, None, used.repeat_interleave(sizes)] > 0  # [1 or H, 1, m]
        seen = torch.ones((), dtype=torch.bool, device="cpu")
        if bool((plane == 1).any()) and p.mods is not None and p.mods.mask is not None:
            device = seq.tensors.q.device
            qpos, kpos = seq.positions(rows, slice(0, seq.kv_len), "cpu")
            cells = cells_of(seq.b, p.heads, qpos.to(device), kpos[:, j].to(device))
            kept = visible_to(p.mods, cells, seq.tensors.captured)
            seen = seen if kept is None else kept.cpu()
        visible = inside & shown & seen
        count += int(visible.sum()) * (p.heads // visible.shape[0])
    return count


def _masked_cells(seq: Sequence, lo: torch.Tensor, hi: torch.Tensor) -> int:
    """Cells that spans, masks and functions leave visible, counted ROWS rows at a time."""
    p = seq.problem
    heads = 1 if p.mask is None or p.mask.broadcast[1] else p.heads
    count = 0
    kpos = torch.arange(seq.kv_len, device="cpu")
    for top in range(0, seq.q_len, ROWS):
        part = slice(top, min(top + ROWS, seq.q_len))
        mask, tree = seq.mask(part, slice(0, seq.kv_len)), seq.tree(part, slice(0, seq.kv_len))
        seen = torch.ones((), dtype=torch.bool, device="cpu") if mask is None else mask[:heads].cpu()
        seen = seen if seen.dtype == torch.bool else seen != -torch.inf
        seen = seen if tree is None else seen & tree.cpu()
        if p.mods is not None and p.mods.mask is not None:
            own = cells_of(seq.b, p.heads, *seq.positions(part, slice(0, seq.kv_len)))
            kept = visible_to(p.mods, own, seq.tensors.captured)
            seen = seen if kept is None else seen & kept.cpu()
        visible = seen & (lo[part, None] <= kpos) & (kpos < hi[part, None])  # [1 or H, n, m] or [n, m]
        count += int(visible.sum()) * (p.heads // (len(visible) if visible.ndim > 2 else 1))
    return count
