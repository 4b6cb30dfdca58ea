"""The gradients of a derivative in a direction, tile by tile: no memory of Lq * Lk.

Phi = <dout, out'> + <dlse, lse'>, where out' and lse' are what `tangents.py` computes in a direction x'. Its gradients
by the inputs x are those of a loss of a jvp (reverse over forward), those of a gradient in the direction x' (double
backward: <dout, out'> is <x', dx>), and the derivative of a gradient (forward over reverse). With

    G = dout V^T    G' = dout V'^T    delta = rowsum(dout * out) - dlse    dS = P (G - delta)
    kappa = rowsum(dout * out')

Phi is sum dS s' + sum P G' - delta P_sink sink', so by s' it has the gradient dS of a backward pass, and by s

    E = dS (s' - lse') + P (G' - kappa)

Both go through score_mod (whose slope depends on s), the masks' sums, softcap (likewise) and scale to

    dQ = E K + dS K'    dK = E^T Q + dS^T Q'    dV = (P (s' - lse'))^T dout

With dropout, G and G' are those of the kept cells, as is P in dV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.expression.cells import add_captured, cells_of, moved
from ...core.plan import Plan
from ...core.tensors import BackwardTensors, TangentTensors, sequences
from .backward import add_biases
from .tangents import Cells, Keys, Rows
from .tiles import no_autocast, tile_states

Tensor = torch.Tensor


def run_second_order(plan: Plan, tensors: BackwardTensors, tangents: TangentTensors) -> None:
    """Writes the gradients in `tensors`; reads the rest, `tangents.out` and `tangents.lse` too."""
    p = plan.problem
    states = tile_states(plan, tensors.forward)
    for gradient in tensors.gradients().values():  # padding rows, keys past a length, hidden keys
        gradient.zero_()
    wide = torch.float32 if p.device.type == "mps" else torch.float64  # of sums over any number of cells
    captured = {number: x.to(wide) for number, x in tensors.dcaptured.items()}
    with no_autocast(p.device.type):
        for seq in sequences(p, tensors.forward):
            if seq.q_len:
                rows = Rows.of(plan, seq, tangents.inputs, None if states is None else states[seq.b])
                _SecondOrder(rows, tensors, tangents, captured).run()
    for number, x in captured.items():
        tensors.dcaptured[number].copy_(x)


@dataclass(slots=True)
class _Incoming:
    """What a tile of rows is given: `[H, BQ]`, 0 in rows that are not live."""

    rows: slice
    dout: Tensor  # grouped, [Hkv, G * BQ, Dv]
    delta: Tensor
    lse: Tensor  # the tangent of lse
    kappa: Tensor


@dataclass(slots=True)
class _SecondOrder:
    """One sequence."""

    own: Rows
    tensors: BackwardTensors
    tangents: TangentTensors
    captured: dict[int, Tensor]  # the gradients of captured tensors so far

    def run(self) -> None:
        seq, b = self.own.seq, self.tensors
        p, work = seq.problem, self.own.lse.dtype
        kv_row, keys = 0 if p.form == "varlen" else seq.b, slice(seq.kv_start, seq.kv_start + seq.kv_len)
        dk, dv = (
            None if x is None else torch.zeros(p.kv_heads, seq.kv_len, x.shape[-1], dtype=work, device=x.device)
            for x in (b.dk, b.dv)
        )
        for rows in self.own.tiles():
            given = self._incoming(rows)
            q, moved_q = self.own.queries(rows)
            q, moved_q = _finite(q), None if moved_q is None else _finite(moved_q)
            dq = torch.zeros_like(q)
            for tile, c in self.own.cells(rows):
                by_s, by_moved = self._by_scores(given, tile, c, dv)
                add_biases(b, seq, by_s, rows, c.cols)
                by_s, by_moved = self._through_softcap(c, by_s, by_moved)
                by_s, by_moved = (self.own.grouped(x) for x in (by_s, by_moved))
                if b.dq is not None:
                    dq.baddbmm_(by_s, tile.k if tile.finite else _finite(tile.k))
                    if tile.moved_k is not None:
                        dq.baddbmm_(by_moved, tile.moved_k if tile.finite else _finite(tile.moved_k))
                if dk is not None:
                    dk[:, c.cols] += by_s.mT @ q
                    if moved_q is not None:
                        dk[:, c.cols] += by_moved.mT @ moved_q
            if b.dq is not None:
                at = slice(seq.q_start + rows.start, seq.q_start + rows.stop)
                b.dq[seq.row, :, at] = dq.mul_(p.scale).view(p.heads, -1, p.head_dim).to(b.dq.dtype)
        if b.dk is not None and dk is not None:
            b.dk[kv_row, :, keys] = dk.to(b.dk.dtype)  # q has the scale
        if b.dv is not None and dv is not None:
            b.dv[kv_row, :, keys] = dv.to(b.dv.dtype)

    def _incoming(self, rows: slice) -> _Incoming:
        """Also adds to the gradients of sinks."""
        own, seq, work = self.own, self.own.seq, self.own.lse.dtype
        at = seq.row, slice(None), slice(seq.q_start + rows.start, seq.q_start + rows.stop)
        live = own.live[:, rows]
        dout, out, moved_out = (
            torch.where(live[..., None], x[at].to(work), 0.0)
            for x in (self.tensors.dout, self.tensors.forward.out, self.tangents.out)
        )
        lse = torch.where(live, self.tangents.lse[at].to(work), 0.0)
        by_out = (dout * out).sum(-1)
        kappa = (dout * moved_out).sum(-1)
        delta = by_out
        if self.tensors.dlse is not None:
            dlse = torch.where(live, self.tensors.dlse[at].to(work), 0.0)
            delta = by_out - dlse
        if self.tensors.dsinks is not None:
            # Phi by the sink's logit is P_sink (W - omega), with W = -delta sink' and omega = kappa - lse' delta.
            weights, still = own.sink_weights(rows), lse * delta - kappa
            by_sink = weights * still - own.of_sink(rows) * delta
            self.tensors.dsinks += by_sink.sum(-1)
        return _Incoming(rows, own.grouped(dout), delta, lse, kappa)

    def _by_scores(self, given: _Incoming, keys: Keys, c: Cells, dv: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gradients by what score_mod was given and by its tangent; adds to those of values."""
        moved_s = c.moved - given.lse[..., None]
        seq, place = self.own.seq, (given.rows, c.cols)
        by_weight = seq.dropped((given.dout @ keys.v.mT).view(c.prob.shape), *place)
        by_moved = (by_weight - given.delta[..., None]).mul_(c.prob)  # dS
        by_s = by_moved * moved_s
        if keys.moved_v is None:
            by_s -= c.prob * given.kappa[..., None]
        else:
            by_moved_v = seq.dropped((given.dout @ keys.moved_v.mT).view(c.prob.shape), *place)
            by_s += (by_moved_v - given.kappa[..., None]).mul_(c.prob)
        if c.visible is not None and not keys.finite:  # v may be NaN under a hidden cell
            by_s, by_moved = (torch.where(c.visible, x, 0.0) for x in (by_s, by_moved))
        if dv is not None:
            dv[:, c.cols] += self.own.grouped(seq.dropped(moved_s.mul_(c.prob), *place)).mT @ given.dout
        mods = seq.problem.mods
        if mods is not None and mods.score is not None:
            return self._through_score_mod(given.rows, c, by_s, by_moved)
        return by_s, by_moved

    def _through_score_mod(self, rows: slice, c: Cells, by_s: Tensor, by_moved: Tensor) -> tuple[Tensor, Tensor]:
        """Over visible cells alone, in a list: derivatives of a function may be anything elsewhere."""
        seq, mods = self.own.seq, self.own.seq.problem.mods
        assert mods is not None
        assert c.visible is not None
        captured = seq.tensors.captured
        at = c.visible.nonzero(as_tuple=True)
        qpos, kpos = seq.positions(rows, c.cols)
        cells = cells_of(seq.b, seq.problem.heads, qpos[at[1], 0], kpos[0, at[2]]) | {"h": at[0]}
        s, moved_s, by_result, by_moved_result = (x[at] for x in (c.given, c.moved_given, by_s, by_moved))
        everywhere = torch.ones_like(s, dtype=torch.bool)
        add_captured(mods, self.captured, by_result, everywhere, s, cells, captured)
        with torch.enable_grad():
            leaves = {n: captured[n].detach().to(x.dtype, copy=True).requires_grad_() for n, x in self.captured.items()}
            s, moved_s = s.requires_grad_(), moved_s.requires_grad_()
            given = tuple(leaves.get(n, x) for n, x in enumerate(captured))
            result = moved(mods, s, moved_s, cells, given, self.own.tangent.tensors.captured)
            inputs = (moved_s, s, *leaves.values())
            found = torch.autograd.grad(result, inputs, by_moved_result, allow_unused=True, materialize_grads=True)
        for number, x in zip(leaves, found[2:], strict=True):
            self.captured[number] += x
        slope = moved(mods, s.detach(), by_result, cells, captured, ())
        results = torch.zeros_like(by_s), torch.zeros_like(by_moved)
        results[0][at], results[1][at] = found[1] + slope, found[0]
        return results

    def _through_softcap(self, c: Cells, by_s: Tensor, by_moved: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients by scale q k, and by its tangent."""
        if c.tanh is None:
            return by_s, by_moved
        slope = 1 - c.tanh * c.tanh
        bend = -2 / self.own.seq.problem.softcap * c.tanh * slope * c.moved_product
        found = by_s * slope + by_moved * bend, by_moved * slope
        if c.visible is None:
            return found
        return torch.where(c.visible, found[0], 0.0), torch.where(c.visible, found[1], 0.0)


def _finite(x: Tensor) -> Tensor:
    """Replaces non-finite values by 0: hidden ones have no effect, and a row that sees one has lse NaN."""
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)
