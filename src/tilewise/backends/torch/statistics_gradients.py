"""Gradients through statistics in plain torch, tile by tile: no memory of Lq * Lk.

All that have one are functions of the weights P. With X the gradient by P,

    X = -dentropy (log P + 1) + dkey_mass + dweights at their keys
    dS = P (X - delta)     delta = rowsum(P X)     and by a sink  -P_sink delta

which is the backward pass of `backward.py` with X for dout V^T and a delta of its own. P is computed from the rows' own
max and sum: where scores are large, `lse` has no digits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.plan import Plan
from ...core.tensors import BackwardTensors, Sequence, Statistics, sequences
from .backward import _Rows
from .statistics import RowSums, scores, tiles_of_rows
from .tiles import no_autocast, tile_states, work_dtype


def run_statistics_gradients(plan: Plan, tensors: BackwardTensors, incoming: Statistics) -> None:
    """Writes the gradients in `tensors`. `incoming` has those by `entropy`, `key_mass` and `weights`."""
    states = tile_states(plan, tensors.forward)
    for gradient in tensors.gradients().values():  # padding rows, keys past a length, hidden keys
        gradient.zero_()
    with no_autocast(plan.problem.device.type):
        wide = torch.float32 if plan.problem.device.type == "mps" else torch.float64  # of sums over any number of cells
        captured = {number: x.to(wide) for number, x in tensors.dcaptured.items()}
        for seq in sequences(plan.problem, tensors.forward):
            if seq.q_len:
                own = None if states is None else states[seq.b]
                _StatisticRows.through(plan, seq, tensors, incoming.of(seq), captured, own).run(plan, own)
        for number, x in captured.items():
            tensors.dcaptured[number].copy_(x)


@dataclass(slots=True)
class _StatisticRows(_Rows):
    """One sequence, and the gradients by its statistics."""

    incoming: Statistics
    total: torch.Tensor  # [H, Lq]: P = exp(s - lse) / total, and `lse` is the rows' max

    @classmethod
    def through(
        cls, plan: Plan, seq: Sequence, tensors: BackwardTensors, incoming: Statistics,
        captured: dict[int, torch.Tensor], states: list[list[int]] | None,
    ) -> _StatisticRows:  # fmt: skip
        p, t = seq.problem, seq.tensors
        assert seq.lse is not None
        live, base = seq.lse.isfinite(), torch.zeros(seq.lse.shape, dtype=work_dtype(seq), device=t.q.device)
        dq = base.new_zeros(p.heads, seq.q_len, p.head_dim)
        none = base.new_zeros(()).expand(p.heads, seq.q_len, p.value_dim)
        delta, total = torch.zeros_like(base), torch.ones_like(base)
        self = cls(seq, tensors, none, base, delta, live, dq, captured, incoming, total)
        for rows, of_rows in tiles_of_rows(plan, seq, states):
            sums = RowSums.of(plan, seq, rows, of_rows)
            base[:, rows] = torch.where(live[:, rows], sums.base, 0.0)
            total[:, rows] = sums.total
            for cols, s, visible in scores(plan, seq, rows, of_rows, base.dtype):
                probs = sums.weights(s, visible)
                delta[:, rows] += (probs * self._by_weights(rows, cols, s, probs)).sum(-1)
        delta.masked_fill_(~live, 0.0)
        if tensors.dsinks is not None:
            assert t.sinks is not None
            weight = torch.where(live, (t.sinks.to(base.dtype)[:, None] - base).exp() / total, 0.0)
            tensors.dsinks -= (weight * delta).sum(-1)
        return self

    def weights(self, s: torch.Tensor, rows: slice) -> torch.Tensor:
        return (s - self.lse[:, rows, None]).exp() / self.total[:, rows, None]

    def by_weights(
        self, rows: slice, cols: slice, s: torch.Tensor, probs: torch.Tensor, dout: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return self._by_weights(rows, cols, s, probs)

    def _by_weights(self, rows: slice, cols: slice, s: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """X of a tile. Where P is 0 it does not matter, but has to be finite."""
        given, work = self.incoming, s.dtype
        x = torch.zeros_like(s)
        if given.entropy is not None:
            log = torch.where(probs == 0, 0.0, s - self.lse[:, rows, None] - self.total[:, rows, None].log())
            x -= given.entropy[:, rows, None].to(work) * (log + 1)
        if given.key_mass is not None:
            counted = max(0, given.first_query(self.seq) - rows.start)
            x[:, counted:] += given.key_mass[:, None, cols].to(work)
        if given.weights is not None and given.indices is not None:
            own = given.indices[:, rows].long() - cols.start  # [H, BQ, n]
            count = cols.stop - cols.start
            own = torch.where((own >= 0) & (own < count), own, count)  # others into a spare column
            spread = torch.zeros((*s.shape[:2], count + 1), dtype=work, device=s.device)
            x += spread.scatter_add_(-1, own, given.weights[:, rows].to(work))[..., :-1]
        return x
