"""Tiled attention in plain torch: any call on any device, in memory that does not grow with length.

It runs where no kernel can. For each sequence and each tile of BQ query rows it iterates over the tiles of BK
keys that hold a visible cell, with the online softmax: running max m, sum l and output acc, rescaled when m grows.
Its gradients are in `backward.py`.
"""

from __future__ import annotations

import torch

from ...core.plan import Plan
from ...core.problem import Problem, WriteProblem
from ...core.tensors import Sequence, Tensors, sequences
from .backward import plan_backward as plan_backward
from .backward import run_backward as run_backward
from .backward import supports_backward as supports_backward
from .kv_write import Append
from .second_order import run_second_order as run_second_order
from .statistics import plan_statistics as plan_statistics
from .statistics import run_statistics as run_statistics
from .statistics_gradients import run_statistics_gradients as run_statistics_gradients
from .tangents import plan_derivatives as plan_derivatives
from .tangents import run_tangent as run_tangent
from .tiles import adjust, no_autocast, products, tile_states, tiles_of_keys, weighted_sum, work_dtype

DOWNSCALE = 2.0**-32  # of weights, if the sum of large values overflows where their mean does not


def takes_shared(problem: Problem) -> bool:
    """`k_shared` is joined to K tile by tile."""
    return True


def supports(problem: Problem | WriteProblem) -> str | None:
    return None


supports_write = supports
writer = Append


def plan(problem: Problem) -> Plan:
    # Depends on the heads only, so that a sequence gives the same bits in any batch: about 4 MiB of scores a tile.
    tile = (128 if problem.heads <= 16 else 64, 512)
    cells = problem.heads * tile[0] * tile[1]
    notes = ["plain torch in tiles: correct on any device, but slow"]
    if problem.split_size:
        notes.append("split_size: keys are read in one pass, which is batch-invariant already")
    if problem.device.type != "cpu" and problem.has_lengths:
        notes.append("lengths are read on the host: the call waits for the device")
    return Plan(problem, "torch", "tiled online softmax", tile, workspace_bytes=4 * 3 * cells, notes=tuple(notes))


def run(plan: Plan, tensors: Tensors) -> None:
    p = plan.problem
    if p.device.type == "meta":  # there is nothing to write
        return
    states = tile_states(plan, tensors)
    if p.packed_q:  # padding rows, in no sequence
        tensors.out.zero_()
        if tensors.lse is not None:
            tensors.lse.fill_(-torch.inf)
    with no_autocast(p.device.type):
        for seq in sequences(p, tensors):
            for top in range(0, seq.q_len, plan.tile[0]):
                rows = slice(top, min(top + plan.tile[0], seq.q_len))
                _attend_rows(plan, seq, rows, None if states is None else states[seq.b][top // plan.tile[0]])


def _attend_rows(plan: Plan, seq: Sequence, rows: slice, states: list[int] | None) -> None:
    """One tile of query rows over all its keys."""
    out, lse = _normalised(plan, seq, rows, states, 1.0)
    if not bool(out.isfinite().all()):
        again, _ = _normalised(plan, seq, rows, states, DOWNSCALE)
        out = torch.where(out.isfinite(), out, again)
    seq.out[:, rows] = out.to(seq.problem.q_dtype)
    if seq.lse is not None:
        seq.lse[:, rows] = lse.to(seq.lse.dtype)


def _normalised(
    plan: Plan, seq: Sequence, rows: slice, states: list[int] | None, downscale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` `[H, BQ, Dv]` and `lse` `[H, BQ]` of these rows; sums are of weights times `downscale`."""
    p, t = seq.problem, seq.tensors
    H, n, device = p.heads, rows.stop - rows.start, t.q.device
    work = work_dtype(seq)
    q = seq.q[:, rows].to(work).reshape(p.kv_heads, p.group * n, p.head_dim)  # [Hkv, G * BQ, D]
    m = torch.full((H, n), -torch.inf, dtype=work, device=device)
    l = torch.zeros_like(m)
    acc = torch.zeros(H, n, p.value_dim, dtype=work, device=device)

    for cols, masked, edge, chosen in tiles_of_keys(seq, rows, plan.tile[1], states):
        k, v = seq.keys_and_values(cols.start, cols.stop, work)  # [Hkv, BK, D]
        s = products(q, k).view(H, n, -1) * p.scale  # [H, BQ, BK]
        s, visible = adjust(seq, s, rows, cols, masked, edge, chosen)

        top = torch.maximum(m, s.amax(-1))
        base = torch.where(top == -torch.inf, 0.0, top)  # nothing seen yet: -inf - -inf would be NaN
        alpha = (m - base).exp()
        prob = (s - base[..., None]).exp()
        l = l * alpha + prob.sum(-1)
        prob = seq.dropped(prob, rows, cols)
        acc = acc * alpha[..., None] + weighted_sum(prob if downscale == 1 else prob * downscale, v, visible)
        m = top

    if t.sinks is not None:
        sink = t.sinks.to(work)[:, None]
        top = torch.maximum(m, sink)
        base = torch.where(top == -torch.inf, 0.0, top)
        alpha = (m - base).exp()
        weight = torch.where(sink == torch.inf, 1.0, (sink - base).exp())  # 1 for +inf, 0 for -inf
        l, acc, m = l * alpha + weight, acc * alpha[..., None], top
    total = torch.where(l == 0, 1.0, l)
    out = acc / total[..., None]
    return out if downscale == 1 else out / downscale, m + total.log()
