"""Key and block indices, and positions of a tree's nodes, as a dense mask: the kernels' gradients of such calls.

Tiles that the mask hides are skipped, so that a call with block indices takes the time of its blocks, and one with key
indices that of the tiles in which any query of a tile selects any key. The mask takes a byte for each query and key of
each list, and replaces the call's own mask, which it includes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....core.mask_rules import NO_RULES, visible_by_position
from ....core.problem import MaskSpec, Problem
from ....core.tensors import Tensors

MOST_BYTES = 4 << 30


def is_needed(problem: Problem) -> bool:
    return problem.selection is not None or problem.positions


def refusal(problem: Problem) -> str | None:
    """Why a problem cannot be computed by a dense mask, or None."""
    if not is_needed(problem):
        return None
    what = "positions of a tree" if problem.selection is None else str(problem.selection)
    if "mask" in problem.grads:
        return f"it has no gradient of a mask with {what}"
    if size_of(problem) > MOST_BYTES:
        return f"{what} as a dense mask would take {size_of(problem) / 2**30:.1f} GiB, over {MOST_BYTES >> 30}"
    return None


def size_of(problem: Problem) -> int:
    """Bytes of the mask; 0 if none is needed."""
    p = problem
    if not is_needed(p):
        return 0
    cell = 1 if p.mask is None else p.mask.dtype.itemsize
    return p.batch * planes(p) * p.q_len * p.kv_len * cell


def planes(problem: Problem) -> int:
    """Heads of the mask: 1, the KV heads, or all heads."""
    p = problem
    if p.mask is not None and not p.mask.broadcast[1]:
        return p.heads
    return p.kv_heads if p.selection is not None and p.selection.by_head else 1


def heads_of_plane(problem: Problem) -> int:
    """How many query heads share a plane of a mask that has several."""
    count = planes(problem) if is_needed(problem) else 1
    return problem.heads // count if count > 1 else 1


def masked_problem(problem: Problem) -> Problem:
    """The problem with the mask, and without what the mask replaces."""
    p = problem
    if not is_needed(p):
        return p
    mask = MaskSpec(torch.bool if p.mask is None else p.mask.dtype, (False, planes(p) == 1, False, False))
    p = replace(p, mask=mask, selection=None, tile_map=None)
    if p.positions:  # the rules are by these positions
        p = replace(p, rules=replace(NO_RULES, kv_lengths=p.rules.kv_lengths), tree=False, positions=False)
    return p


def masked_tensors(problem: Problem, t: Tensors) -> Tensors:
    """The tensors of `masked_problem`. Reads nothing on the host."""
    p = problem
    mask = torch.ones((), dtype=torch.bool, device=t.q.device)
    if p.selection is not None:
        mask = chosen_cells(p, t)
    if p.positions:
        mask = mask & tree_cells(p, t)
    if t.mask is not None and p.mask is not None:
        own = t.mask[:, :1] if p.mask.broadcast[1] else t.mask
        if 1 < mask.shape[1] < own.shape[1]:
            mask = mask.repeat_interleave(p.group, 1)
        mask = mask & own if p.mask.is_bool else torch.where(mask, own, -torch.inf)
    mask = mask.expand(p.batch, planes(p), p.q_len, p.kv_len).contiguous()
    mask = mask.expand(-1, p.heads, -1, -1) if planes(p) == 1 else mask
    t = replace(t, mask=mask, key_indices=None, tile_map=None)
    return replace(t, tree_mask=None, positions=None, q_offset=None, places=None) if p.positions else t


def chosen_cells(problem: Problem, t: Tensors) -> torch.Tensor:  # [B, 1 or Hkv, Lq, Lk]
    """The cells that key or block indices select."""
    p, selection = problem, problem.selection
    assert selection is not None
    assert t.key_indices is not None
    indices = t.key_indices if selection.by_head else t.key_indices[:, :1]
    if t.cu_seqlens_q is not None:  # rows of each sequence; what is past its last row is not read
        rows = t.cu_seqlens_q[:-1, None].long() + torch.arange(p.q_len, device=t.q.device)  # [B, Lq]
        indices = indices[0][:, rows.clamp_max(p.total_q - 1)].transpose(0, 1)
    columns = -(-p.kv_len // selection.block)
    own = indices.long()
    own = torch.where((own >= 0) & (own < columns), own, columns)  # out of range: into a spare column
    blocks = torch.zeros(*own.shape[:3], columns + 1, dtype=torch.bool, device=own.device).scatter_(3, own, True)
    if selection.block == 1:
        return blocks[..., :columns]
    row, key = (torch.arange(n, device=own.device) // selection.block for n in (p.q_len, p.kv_len))
    return blocks[:, :, row][..., key]


def tree_cells(problem: Problem, t: Tensors) -> torch.Tensor:  # [B, 1, Lq, Lk]
    """The cells that a tree mask and the rules leave, by the positions of the tree's nodes."""
    p, device = problem, t.q.device
    assert t.tree_mask is not None
    assert t.positions is not None

    def counts(cu: torch.Tensor | None, otherwise: int) -> torch.Tensor:
        return torch.full((p.batch,), otherwise, device=device) if cu is None else cu.diff()

    keys = counts(t.cu_seqlens_k, p.kv_len) if t.kv_lengths is None else t.kv_lengths
    own_keys = (keys - counts(t.cu_seqlens_q, p.q_len)).long()[:, None]  # [B, 1]: the first of the queries' own keys
    key = torch.arange(p.kv_len, device=device)[None]
    node = key - own_keys  # [B, Lk]
    column = node.clamp(0, p.q_len - 1)
    qpos = torch.maximum(t.positions.expand(p.batch, -1).long(), own_keys)  # [B, Lq]
    kpos = torch.where(node < 0, key, qpos.gather(1, column))
    tree = t.tree_mask.expand(p.batch, -1, -1).gather(2, column[:, None].expand(-1, p.q_len, -1))
    return ((tree | (node < 0)[:, None]) & visible_by_position(p.rules, qpos[..., None], kpos[:, None]))[:, None]
