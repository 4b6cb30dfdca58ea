"""Gradients in plain torch, tile by tile: any call on any device, deterministic, no memory of size Lq * Lk.

For each sequence and each tile of BK keys it iterates over the tiles of BQ rows that see any of them, recomputing P:

    P = exp(s - lse)                          dV += dropout(P)^T dout
    dS = P * (dropout(dout V^T) - delta)      dK += scale dS^T Q        dQ += scale dS K

with delta = rowsum(dout * out) - dlse, and dS through the softcap's derivative before the last two. The gradient of a
mask is dS, that of a bias its sum over keys or queries, that of a sink -exp(sink - lse) delta, that of a slope
-dS |qpos - kpos|, each summed. Sums are float32 or wider; dQ of a sequence stays in float32 until all its keys are
done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ...core import large_lse
from ...core.expression.cells import add_captured, cells_of, slopes
from ...core.mask_rules import query_span
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import BackwardTensors, Sequence, sequences
from ...core.tile_map import FULL, MIXED, SKIP
from .tiles import no_autocast, span_ends, tile_states, with_biases, with_mods, work_dtype


def supports_backward(problem: Problem) -> str | None:
    return None


def plan_backward(problem: Problem) -> Plan:
    tile = (128 if problem.heads <= 16 else 64, 256)
    cells = problem.heads * tile[0] * tile[1]
    rows = problem.heads * problem.q_len
    workspace = 4 * (5 * cells + rows * (problem.head_dim + 3))
    return Plan(problem, "torch", "tiled gradients", tile, workspace_bytes=workspace)


def run_backward(plan: Plan, tensors: BackwardTensors, lse_is_right: bool = False) -> None:
    """Writes the gradients. `lse_is_right`: rows with a large lse are corrected already (`core/large_lse.py`)."""
    p = plan.problem
    assert tensors.forward.lse is not None
    if not lse_is_right and large_lse.has_large(tensors.forward.lse):
        large_lse.run(plan_backward, partial(run_backward, lse_is_right=True), p, tensors)
        return
    states = tile_states(plan, tensors.forward)
    for gradient in tensors.gradients().values():  # padding rows, keys past a length, hidden keys
        gradient.zero_()
    with no_autocast(p.device.type):
        wide = torch.float32 if p.device.type == "mps" else torch.float64  # of sums over any number of cells
        captured = {number: x.to(wide) for number, x in tensors.dcaptured.items()}
        for seq in sequences(p, tensors.forward):
            if seq.q_len:
                _Rows.of(seq, tensors, captured, plan.tile[0]).run(plan, None if states is None else states[seq.b])
        for number, x in captured.items():
            tensors.dcaptured[number].copy_(x)


@dataclass(slots=True)
class _Rows:
    """One sequence: its rows' lse and delta, and dq. Tiles of q and dout are converted one by one."""

    seq: Sequence
    tensors: BackwardTensors
    dout: torch.Tensor  # [H, Lq, Dv]
    lse: torch.Tensor  # [H, Lq], in the compute dtype; 0 in rows that are not live
    delta: torch.Tensor  # [H, Lq]; likewise
    live: torch.Tensor  # bool [H, Lq]: the lse is finite
    dq: torch.Tensor  # [H, Lq, D]
    captured: dict[int, torch.Tensor]  # the gradients of captured tensors so far

    @classmethod
    def of(cls, seq: Sequence, tensors: BackwardTensors, captured: dict[int, torch.Tensor], step: int) -> _Rows:
        p, work = seq.problem, work_dtype(seq)
        rows = slice(seq.q_start, seq.q_start + seq.q_len)
        assert seq.lse is not None
        live = seq.lse.isfinite()
        lse = torch.where(live, seq.lse, 0.0).to(work)
        dq = torch.zeros(p.heads, seq.q_len, p.head_dim, dtype=work, device=lse.device)
        self = cls(seq, tensors, tensors.dout[seq.row, :, rows], lse, torch.zeros_like(lse), live, dq, captured)
        for top in range(0, seq.q_len, step):
            tile = slice(top, top + step)
            self.delta[:, tile] = (self.dout_of(tile) * seq.out[:, tile].to(work)).sum(-1)
        if tensors.dlse is not None:
            self.delta -= torch.where(live, tensors.dlse[seq.row, :, rows].to(work), 0.0)
        if tensors.dsinks is not None:
            assert seq.tensors.sinks is not None
            weight = torch.where(live, (seq.tensors.sinks.to(work)[:, None] - lse).exp(), 0.0)
            tensors.dsinks -= (weight * self.delta).sum(-1)
        return self

    def dout_of(self, rows: slice) -> torch.Tensor:  # [H, BQ, Dv]
        """A tile of dout, 0 in rows that are not live."""
        return torch.where(self.live[:, rows, None], self.dout[:, rows].to(self.lse.dtype), 0.0)

    def run(self, plan: Plan, states: list[list[int]] | None) -> None:
        """Iterates over the tiles of keys, and for each over the tiles of rows that see some of it."""
        seq, b, (BQ, BK) = self.seq, self.tensors, plan.tile
        p = seq.problem
        kv_row = 0 if p.form == "varlen" else seq.b
        for left in range(0, seq.kv_len, BK):
            cols = slice(left, min(left + BK, seq.kv_len))
            # Query spans move down from key to key: the first key has the first row, the last key the last row.
            above, below = 0, seq.q_len
            if not p.positions:
                above = query_span(seq.rules, cols.start, seq.q_offset, seq.q_len)[0]
                below = query_span(seq.rules, cols.stop - 1, seq.q_offset, seq.q_len)[1]
            k, v = seq.keys_and_values(cols.start, cols.stop, self.lse.dtype)  # [Hkv, BK, D]
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for top in range(max(0, above) // BQ * BQ, below, BQ):
                state = MIXED if states is None else states[top // BQ][left // BK]
                if state != SKIP:
                    masked = p.mask is not None and state != FULL
                    self.add_tile(slice(top, min(top + BQ, seq.q_len)), cols, k, v, dk, dv, masked)
            keys = slice(seq.kv_start + cols.start, seq.kv_start + cols.stop)
            if b.dk is not None:
                b.dk[kv_row, :, keys] = (dk * p.scale).to(b.dk.dtype)
            if b.dv is not None:
                b.dv[kv_row, :, keys] = dv.to(b.dv.dtype)
        if b.dq is not None:
            b.dq[seq.row, :, seq.q_start : seq.q_start + seq.q_len] = (self.dq * p.scale).to(b.dq.dtype)

    def add_tile(
        self,
        rows: slice,
        cols: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        masked: bool,
    ) -> None:
        seq, b = self.seq, self.tensors
        p, n = seq.problem, rows.stop - rows.start

        def grouped(x: torch.Tensor) -> torch.Tensor:  # [H, BQ, n] to [Hkv, G * BQ, n]
            return x.reshape(p.kv_heads, p.group * n, -1)

        chosen = seq.chosen(rows, cols)
        if chosen is not None and not bool(chosen.any()):
            return
        first, last = span_ends(seq, rows)
        inside = last[0] <= cols.start and first[1] >= cols.stop
        q, dout = grouped(seq.q[:, rows].to(self.lse.dtype)), grouped(self.dout_of(rows))
        live = self.live[:, rows, None]
        s = (q @ k.mT).view(p.heads, n, -1) * p.scale  # [H, BQ, BK]
        fading = 1 - torch.tanh(s / p.softcap).square() if p.softcap else None
        given, visible = with_biases(seq, s, rows, cols, masked, not inside, chosen)
        s, visible = with_mods(seq, given, visible, rows, cols)
        probs = torch.where(live if visible is None else visible & live, self.weights(s, rows), 0.0)
        if b.dv is not None:
            dv += grouped(seq.dropped(probs, rows, cols)).mT @ dout
        if set(p.grads) <= {"v", "sinks"}:
            return
        ds = probs * (self.by_weights(rows, cols, s, probs, dout, v) - self.delta[:, rows, None])
        ds = ds if visible is None else torch.where(visible, ds, 0.0)  # v may be NaN under a hidden cell
        if p.mods is not None and p.mods.score is not None:
            ds = self.through_score_mod(ds, given, visible, rows, cols)
        add_biases(b, seq, ds, rows, cols)
        if fading is not None:
            ds = torch.where(visible, ds * fading, 0.0) if visible is not None else ds * fading
        if b.dk is not None:
            dk += grouped(ds).mT @ _finite(q, visible)
        if b.dq is not None:
            self.dq[:, rows] += (grouped(ds) @ _finite(k, visible)).view(p.heads, n, -1)

    def weights(self, s: torch.Tensor, rows: slice) -> torch.Tensor:
        """P of visible cells `[H, BQ, BK]`."""
        return (s - self.lse[:, rows, None]).exp()

    def by_weights(
        self, rows: slice, cols: slice, s: torch.Tensor, probs: torch.Tensor, dout: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """The gradients by the weights of these cells `[H, BQ, BK]`."""
        return self.seq.dropped((dout @ v.mT).view(s.shape), rows, cols)

    def through_score_mod(
        self, ds: torch.Tensor, s: torch.Tensor, visible: torch.Tensor | None, rows: slice, cols: slice
    ) -> torch.Tensor:
        """dS by the scores `s` that score_mod was given; adds the gradients of what it captures."""
        seq, mods, captured = self.seq, self.seq.problem.mods, self.seq.tensors.captured
        assert mods is not None
        assert visible is not None
        own = cells_of(seq.b, seq.problem.heads, *seq.positions(rows, cols))
        add_captured(mods, self.captured, ds, visible, s, own, captured)
        if mods.by_score is None:
            return ds
        return torch.where(visible, ds * slopes(mods, [mods.by_score], s, own, captured)[0], 0.0)


def add_biases(b: BackwardTensors, seq: Sequence, ds: torch.Tensor, rows: slice, cols: slice) -> None:
    """Adds a tile `[H, BQ, BK]` of gradients by scores to those of the mask, biases and slopes."""
    p = seq.problem
    if b.dmask is not None and p.mask is not None:
        _add_mask(b.dmask, p.mask.broadcast, ds, seq.b, rows, cols)
    if b.dq_bias is not None:
        b.dq_bias[seq.row, :, seq.q_start + rows.start : seq.q_start + rows.stop] += ds.sum(-1)
    if b.dk_bias is not None:
        own = slice(seq.kv_start + cols.start, seq.kv_start + cols.stop)
        b.dk_bias[0 if p.form == "varlen" else seq.b, :, own] += ds.sum(-2)
    if b.dalibi_slopes is not None:
        qpos, kpos = seq.positions(rows, cols)
        b.dalibi_slopes[seq.b] -= (ds * (qpos - kpos).abs()).sum((-1, -2))


def _finite(x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Replaces non-finite values by 0: hidden ones have no effect, and a row that sees one has lse NaN."""
    return x if visible is None else torch.nan_to_num(x, 0.0, 0.0, 0.0)


def _add_mask(
    dmask: torch.Tensor, broadcast: tuple[bool, ...], ds: torch.Tensor, b: int, rows: slice, cols: slice
) -> None:
    """Adds a tile `[H, BQ, BK]` to the mask's gradient, summed over the mask's broadcast dims."""
    one_row, one_head, one_query, one_key = broadcast
    summed = [dim for dim, one in enumerate((one_head, one_query, one_key)) if one]
    where = (0 if one_row else b, slice(None), slice(None) if one_query else rows, slice(None) if one_key else cols)
    dmask[where] += (ds.sum(summed, keepdim=True) if summed else ds).to(dmask.dtype)
