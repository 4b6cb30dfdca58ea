"""Tiled attention in plain torch: any call on any device, memory that does not grow with length.

It is what runs where no kernel can. For each sequence and each tile of BQ query rows it walks the tiles of BK keys that
hold a visible cell, with the online softmax: running maximum m, sum l and output acc, rescaled when m grows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ...core.mask_rules import key_span, key_spans
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import Sequence, Tensors, sequences
from ...core.tile_map import FULL, MIXED, SKIP, TileMap

FEW = 16  # query rows of a KV head


def supports(problem: Problem) -> str | None:
    return None


def plan(problem: Problem) -> Plan:
    # Fixed but for the heads, so that a sequence gives the same bits in any batch: about 4 MiB of scores a tile.
    tile = (128 if problem.heads <= 16 else 64, 512)
    cells = problem.heads * tile[0] * tile[1]
    notes = ["plain torch in tiles: right on any device, not fast"]
    if problem.split_size:
        notes.append("split_size: keys are walked in one pass, which is batch-invariant already")
    if problem.device.type != "cpu" and problem.has_lengths:
        notes.append("lengths are read on the host: the call waits for the device")
    return Plan(problem, "torch", "tiled online softmax", tile, workspace_bytes=4 * 3 * cells, notes=tuple(notes))


def run(plan: Plan, tensors: Tensors) -> None:
    p = plan.problem
    states = _tile_states(plan, tensors)
    if p.packed_q:  # rows that belong to no sequence
        tensors.out.zero_()
        if tensors.lse is not None:
            tensors.lse.fill_(-torch.inf)
    with _no_autocast(p.device.type):
        for seq in sequences(p, tensors):
            for top in range(0, seq.q_len, plan.tile[0]):
                rows = slice(top, min(top + plan.tile[0], seq.q_len))
                _attend_rows(plan, seq, rows, None if states is None else states[seq.b][top // plan.tile[0]])


def _no_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would run float32 products in bfloat16."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _tile_states(plan: Plan, tensors: Tensors) -> list[list[list[int]]] | None:
    """The map's state of each of the plan's tiles, `[B][nq][nk]`; a tile is computed for all heads at once."""
    p, tile_map = plan.problem, tensors.tile_map
    if tile_map is None:
        if p.mask is None or tensors.mask is None:
            return None
        kept = tuple(slice(0, 1) if broadcast else slice(None) for broadcast in p.mask.broadcast)
        tile_map = TileMap.from_mask(tensors.mask[kept], plan.tile)
    states = tile_map.retile(plan.tile).states
    low, high = states.amin(1), states.amax(1)
    nq, nk = (-(-n // t) for n, t in zip((p.q_len, p.kv_len), plan.tile, strict=True))
    merged = torch.where(low == high, low, MIXED).expand(p.batch, nq, nk)
    return merged.tolist()


def _attend_rows(plan: Plan, seq: Sequence, rows: slice, states: list[int] | None) -> None:
    """One tile of query rows over all its keys."""
    p, t = seq.problem, seq.tensors
    H, n, device = p.heads, rows.stop - rows.start, t.q.device
    # torch may be set to run float32 products in fewer bits; float64 ones it leaves alone. Products of a few rows have
    # on some CPUs more than twice the error of those of one row.
    few = p.q_dtype == torch.float32 and seq.q_len * p.group <= FEW and p.device.type == "cpu"
    work = torch.float64 if few or torch.get_float32_matmul_precision() != "highest" else torch.float32
    q = seq.q[:, rows].to(work).reshape(p.kv_heads, p.group * n, p.head_dim)  # [Hkv, G * BQ, D]
    m = torch.full((H, n), -torch.inf, dtype=work, device=device)
    l = torch.zeros_like(m)
    acc = torch.zeros(H, n, p.value_dim, dtype=work, device=device)

    # Spans move right as rows go down, so the first row has the leftmost start and the last row the rightmost end.
    first = key_span(p.rules, seq.q_offset + rows.start, seq.kv_len)
    last = key_span(p.rules, seq.q_offset + rows.stop - 1, seq.kv_len)
    BK = plan.tile[1]
    for tile in range(first[0] // BK, -(-last[1] // BK)):
        cols = slice(tile * BK, min((tile + 1) * BK, seq.kv_len))
        state = MIXED if states is None else states[tile]
        if states is not None and state == SKIP:
            continue
        masked = t.mask is not None and state != FULL
        inside = last[0] <= cols.start and first[1] >= cols.stop
        k, v = seq.keys(cols.start, cols.stop, work), seq.values(cols.start, cols.stop, work)  # [Hkv, BK, D]
        s = (q @ k.mT).view(H, n, -1) * p.scale  # [H, BQ, BK]
        s, visible = _adjust(seq, s, rows, cols, masked, not inside)

        top = torch.maximum(m, s.amax(-1))
        base = torch.where(top == -torch.inf, 0.0, top)  # nothing seen yet: -inf - -inf would be NaN
        shrink = (m - base).exp()
        prob = (s - base[..., None]).exp()
        l = l * shrink + prob.sum(-1)
        acc = acc * shrink[..., None] + _weigh(prob, v, visible)
        m = top

    if t.sinks is not None:
        sink = t.sinks.to(work)[:, None]
        top = torch.maximum(m, sink)
        base = torch.where(top == -torch.inf, 0.0, top)
        shrink = (m - base).exp()
        weight = torch.where(sink == torch.inf, 1.0, (sink - base).exp())  # of a sink of +inf all, of one of -inf none
        l, acc, m = l * shrink + weight, acc * shrink[..., None], top
    total = torch.where(l == 0, 1.0, l)
    seq.out[:, rows] = (acc / total[..., None]).to(p.q_dtype)
    if seq.lse is not None:
        seq.lse[:, rows] = (m + total.log()).float()


def _adjust(
    seq: Sequence, s: torch.Tensor, rows: slice, cols: slice, masked: bool, edge: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softcap, biases, then -inf where a cell is not visible; the visible cells, or None if all are."""
    p, device = seq.problem, s.device
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    qpos = (seq.q_offset + torch.arange(rows.start, rows.stop, device=device))[:, None]
    kpos = torch.arange(cols.start, cols.stop, device=device)[None, :]
    if seq.slopes is not None:
        s = s - seq.slopes.to(s.dtype)[:, None, None] * (qpos - kpos).abs()
    visible: torch.Tensor | None = None
    if edge:
        lo, hi = key_spans(p.rules, qpos, seq.kv_len)  # [BQ, 1]
        visible = ((lo <= kpos) & (kpos < hi)).expand_as(s)
    mask = seq.mask(rows, cols) if masked else None
    if mask is not None:
        if mask.dtype == torch.bool:
            visible = mask if visible is None else visible & mask
        else:
            s = s + mask.to(s.dtype)
            seen = mask != -torch.inf
            visible = seen if visible is None else visible & seen
    return (s, None) if visible is None else (torch.where(visible, s, -torch.inf), visible)


def _weigh(prob: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """`prob [H, BQ, BK] @ v [Hkv, BK, Dv]`; a value under an invisible cell cannot matter, not even as 0 * inf."""
    H, n, cols = prob.shape
    grouped = prob.reshape(v.shape[0], -1, cols)  # [Hkv, G * BQ, BK]; a mask's strides may have come into prob
    finite = v.isfinite()
    if visible is None or bool(finite.all()):
        return (grouped @ v).view(H, n, -1)
    out = (grouped @ torch.where(finite, v, 0.0)).view(H, n, -1)
    stray = torch.where(finite, 0.0, v).repeat_interleave(H // v.shape[0], 0)  # [H, BK, Dv]
    return out + torch.where(visible[..., None], prob[..., None] * stray[:, None], 0.0).sum(-2)
