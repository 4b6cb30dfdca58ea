"""Forward mode in plain torch, tile by tile: the derivative of `out` and `lse` in a direction, no memory of Lq * Lk.

`out` and `lse` are there already, so one pass over the tiles has two accumulators and no running max. With a dot for
a derivative in the direction:

    P = exp(s - lse)              s' = scale (q' k + q k'), through softcap, biases and score_mod
    lse' = sum P s' + P_sink sink'
    out' = sum P s' v + sum P v' - lse' out

with P after dropout in the last line. `second_order.py` differentiates that once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ...core import large_lse
from ...core.expression.cells import cells_of, moved
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import Sequence, TangentTensors, Tensors, sequences
from .tiles import no_autocast, tile_states, tiles_of_keys, weighted_sum, with_biases, with_mods, work_dtype

Tensor = torch.Tensor


def plan_derivatives(problem: Problem) -> Plan:
    tile = (128 if problem.heads <= 16 else 64, 256)
    return Plan(problem, "torch", "tiled derivatives", tile, workspace_bytes=4 * 8 * problem.heads * tile[0] * tile[1])


def run_tangent(plan: Plan, tensors: Tensors, tangents: TangentTensors) -> None:
    """Writes `tangents.out` and `tangents.lse`; reads the call's inputs, `out` and `lse`."""
    p = plan.problem
    tangents.out.zero_()  # rows of packed queries that are in no sequence
    tangents.lse.zero_()
    states = tile_states(plan, tensors)
    with no_autocast(p.device.type):
        for seq in sequences(p, tensors):
            own = Rows.of(plan, seq, tangents.inputs, None if states is None else states[seq.b])
            at = seq.row, slice(None), slice(seq.q_start, seq.q_start + seq.q_len)
            out, lse = tangents.out[at], tangents.lse[at]
            for rows in own.tiles():
                out[:, rows], lse[:, rows] = _move(own, rows)


def _move(own: Rows, rows: slice) -> tuple[Tensor, Tensor]:
    """The derivatives of these rows' `out` and `lse`."""
    p, work = own.seq.problem, own.lse.dtype
    n = rows.stop - rows.start
    lse = own.of_sink(rows)  # [H, BQ]
    out = torch.zeros(p.kv_heads, p.group * n, p.value_dim, dtype=work, device=lse.device)
    for keys, c in own.cells(rows):
        weighted = torch.mul(c.prob, c.moved, out=c.moved)
        lse += weighted.sum(-1)
        for weights, v in ((weighted, keys.v), (c.prob, keys.moved_v)):
            if v is None:
                continue
            weights = own.seq.dropped(weights, rows, c.cols)
            if c.visible is None or keys.finite:
                out.baddbmm_(own.grouped(weights), v)
            else:
                out += weighted_sum(weights, v, c.visible).view(out.shape)
    moved = out.view(p.heads, n, -1) - lse[..., None] * own.seq.out[:, rows].to(work)
    return torch.where(own.live[:, rows, None], moved, 0.0), torch.where(own.live[:, rows], lse, 0.0)


@dataclass
class Keys:
    """A tile of keys and values `[Hkv, BK, D]`, and their tangents, None where they do not move."""

    k: Tensor
    v: Tensor
    moved_k: Tensor | None
    moved_v: Tensor | None

    @cached_property
    def finite(self) -> bool:
        """All of them; asked for where cells are hidden."""
        return all(bool(x.isfinite().all()) for x in (self.k, self.v, self.moved_k, self.moved_v) if x is not None)


@dataclass(slots=True)
class Cells:
    """A tile of cells, `[H, BQ, BK]`."""

    cols: slice
    prob: Tensor  # 0 where hidden, and in rows that are not live
    moved: Tensor  # the tangents of scores; 0 where hidden
    visible: Tensor | None  # None if all are
    tanh: Tensor | None  # of a softcap
    moved_product: Tensor  # of scale q k
    given: Tensor  # the scores that score_mod was given, and their tangents
    moved_given: Tensor


@dataclass(slots=True)
class Rows:
    """The query rows of one sequence, its keys, and their tangents."""

    plan: Plan
    seq: Sequence
    tangent: Sequence  # the same sequence of the tangents
    states: list[list[int]] | None
    lse: Tensor  # [H, Lq], in the compute dtype; 0 in rows that are not live
    live: Tensor  # bool [H, Lq]: the lse is finite
    share: Tensor | None  # [H, Lq]: what exp(s - lse) is multiplied by, where lse has no digits for sums
    keys: dict[int, Keys]
    all_live: bool

    @classmethod
    def of(cls, plan: Plan, seq: Sequence, tangents: Tensors, states: list[list[int]] | None) -> Rows:
        work = work_dtype(seq)
        assert seq.lse is not None
        live = seq.lse.isfinite()
        lse = torch.where(live, seq.lse, 0.0).to(work)
        all_live = bool(live.all())
        self = cls(plan, seq, replace(seq, tensors=tangents), states, lse, live, None, {}, all_live)
        if large_lse.has_large(seq.lse):
            still = cls(plan, seq, replace(seq, tensors=NOTHING), states, lse, live, None, {}, all_live)
            self.share = torch.ones_like(lse)
            for rows in self.tiles():
                total = still.sink_weights(rows)
                for _, c in still.cells(rows):
                    total = total + c.prob.sum(-1)
                self.share[:, rows] = large_lse.share(lse[:, rows], total)
        return self

    def tiles(self) -> list[slice]:
        step, end = self.plan.tile[0], self.seq.q_len
        return [slice(top, min(top + step, end)) for top in range(0, end, step)]

    def grouped(self, x: Tensor) -> Tensor:
        """`[H, BQ, n]` as `[Hkv, G * BQ, n]`."""
        p = self.seq.problem
        return x.reshape(p.kv_heads, p.group * x.shape[1], -1)

    def queries(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Grouped queries times scale, and their tangents."""
        t, work, scale = self.tangent.tensors, self.lse.dtype, self.seq.problem.scale
        q = self.grouped(self.seq.q[:, rows].to(work)) * scale
        return q, None if t.q is None else self.grouped(self.tangent.q[:, rows].to(work)) * scale

    def sink_weights(self, rows: slice) -> Tensor:  # [H, BQ]
        """The weight of each row's sink; 0 without one."""
        sinks = self.seq.tensors.sinks
        if sinks is None:
            return torch.zeros_like(self.lse[:, rows])
        weights = (sinks.to(self.lse.dtype)[:, None] - self.lse[:, rows]).exp()
        weights = weights if self.share is None else weights * self.share[:, rows]
        return torch.where(self.live[:, rows], weights, 0.0)

    def of_sink(self, rows: slice) -> Tensor:  # [H, BQ]
        """What a sink's tangent gives to that of lse."""
        moved = self.tangent.tensors.sinks
        weights = self.sink_weights(rows)
        return weights * (0.0 if moved is None else moved.to(weights.dtype)[:, None])

    def keys_of(self, cols: slice) -> Keys:
        """Converted once for all tiles of rows."""
        if (known := self.keys.get(cols.start)) is None:
            t, work, own = self.tangent.tensors, self.lse.dtype, (cols.start, cols.stop)
            k, v = self.seq.keys_and_values(*own, work)
            moved_k = None if t.k is None else self.tangent.keys(*own, work)
            moved_v = None if t.v is None else self.tangent.values(*own, work)
            known = self.keys[cols.start] = Keys(k, v, moved_k, moved_v)
        return known

    def cells(self, rows: slice) -> Any:
        """Yields the tiles of keys that these rows may see, as (Keys, Cells)."""
        q, moved_q = self.queries(rows)
        states = None if self.states is None else self.states[rows.start // self.plan.tile[0]]
        for cols, masked, edge, chosen in tiles_of_keys(self.seq, rows, self.plan.tile[1], states):
            keys = self.keys_of(cols)
            yield keys, self._cells(rows, cols, keys, q, moved_q, masked, edge, chosen)

    def _cells(
        self, rows: slice, cols: slice, keys: Keys, q: Tensor, moved_q: Tensor | None, masked: bool, edge: bool,
        chosen: Tensor | None,
    ) -> Cells:  # fmt: skip
        seq, p, n = self.seq, self.seq.problem, rows.stop - rows.start
        s = (q @ keys.k.mT).view(p.heads, n, -1)  # [H, BQ, BK]; q has the scale
        product = torch.zeros_like(s) if moved_q is None else (moved_q @ keys.k.mT).view(s.shape)
        if keys.moved_k is not None:
            product.view(p.kv_heads, p.group * n, -1).baddbmm_(q, keys.moved_k.mT)
        tanh = torch.tanh(s / p.softcap) if p.softcap else None
        moved_given = product if tanh is None else product * (1 - tanh * tanh)
        moved_given = self._with_moved_biases(moved_given, rows, cols)
        given, visible = with_biases(seq, s, rows, cols, masked, edge, chosen)
        s, visible = with_mods(seq, given, visible, rows, cols)
        moved_s = moved_given
        if p.mods is not None and p.mods.score is not None:
            own = cells_of(seq.b, p.heads, *seq.positions(rows, cols))
            moved_s = moved(p.mods, given, moved_given, own, seq.tensors.captured, self.tangent.tensors.captured)
        # `given` is read again only by second derivatives of a score_mod.
        prob = (s - self.lse[:, rows, None] if p.mods is not None else s.sub_(self.lse[:, rows, None])).exp_()
        if self.share is not None:
            prob *= self.share[:, rows, None]
        live = self.live[:, rows, None]
        if visible is not None:
            moved_s = torch.where(visible, moved_s, 0.0)
            prob = torch.where(visible & live, prob, 0.0)
        elif not self.all_live:
            prob = torch.where(live, prob, 0.0)
        return Cells(cols, prob, moved_s, visible, tanh, product, given, moved_given)

    def _with_moved_biases(self, s: Tensor, rows: slice, cols: slice) -> Tensor:
        tangent = self.tangent
        if tangent.slopes is not None:
            qpos, kpos = self.seq.positions(rows, cols)
            s = s - tangent.slopes.to(s.dtype)[:, None, None] * (qpos - kpos).abs()
        if (bias := tangent.bias(rows, cols, s.dtype)) is not None:
            s = s + bias
        mask = tangent.mask(rows, cols)
        return s if mask is None else s + mask.to(s.dtype)


NOTHING = Tensors(*[None] * 4)  # type: ignore[arg-type]  # no input moves
