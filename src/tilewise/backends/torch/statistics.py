"""Statistics of a call in plain torch, tile by tile: any call on any device, no memory of Lq * Lk.

For each tile of query rows, a first pass over its keys with a running max m has two sums over weights relative to m:

    l = sum exp(s - m)    u = sum exp(s - m) (s - m)    entropy = -sum p log p = w log l - u / l

where a sink is part of l, and w, the share of the keys, is 1 without one. A second pass knows the weights
P = exp(s - m) / l: `key_mass` adds up their columns in a fixed order, `weights` takes those at the given keys. If those
alone are wanted, P = exp(s - lse) needs no first pass, unless scores are so large that lse has no digits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...core.large_lse import has_large
from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import Sequence, Statistics, Tensors, sequences
from .tiles import adjust, no_autocast, products, tile_states, tiles_of_keys, work_dtype

Tensor = torch.Tensor


def plan_statistics(problem: Problem) -> Plan:
    tile = (128 if problem.heads <= 16 else 64, 512)
    return Plan(problem, "torch", "tiled statistics", tile, workspace_bytes=4 * 3 * problem.heads * tile[0] * tile[1])


def run_statistics(plan: Plan, tensors: Tensors, wanted: Statistics) -> None:
    """Writes what is there in `wanted`."""
    wanted.clear()
    states = tile_states(plan, tensors)
    with no_autocast(plan.problem.device.type):
        for seq in sequences(plan.problem, tensors):
            _run(plan, seq, wanted.of(seq), None if states is None else states[seq.b])


def _run(plan: Plan, seq: Sequence, wanted: Statistics, states: list[list[int]] | None) -> None:
    device = seq.tensors.q.device
    wide = torch.float32 if device.type == "mps" else torch.float64  # of sums over any number of queries
    mass = None
    if wanted.key_mass is not None:
        mass = torch.zeros(wanted.key_mass.shape, dtype=wide, device=device)
    first = wanted.first_query(seq)
    by_cell = wanted.weights is not None
    lse = None  # where P = exp(s - lse) has digits and nothing else is wanted, it saves the first pass
    alone = wanted.max_logits is None and wanted.entropy is None
    if alone and seq.lse is not None and bool((seq.lse < torch.inf).all()) and not has_large(seq.lse):
        lse = seq.lse.to(work_dtype(seq))
    for rows, of_rows in tiles_of_rows(plan, seq, states):
        sums = RowSums.of(plan, seq, rows, of_rows) if lse is None else RowSums.of_lse(lse[:, rows])
        if wanted.max_logits is not None:
            wanted.max_logits[:, rows] = sums.top
        if wanted.entropy is not None:
            wanted.entropy[:, rows] = sums.entropy()
        if not by_cell and (mass is None or rows.stop <= first):
            continue
        for cols, s, visible in scores(plan, seq, rows, of_rows, sums.top.dtype):
            probs = sums.weights(s, visible)
            if mass is not None:
                mass[:, cols] += probs[:, max(0, first - rows.start) :].sum(1)
            if wanted.weights is not None and wanted.indices is not None:
                own = wanted.indices[:, rows].long() - cols.start  # [H, BQ, n]
                here = (own >= 0) & (own < s.shape[-1])
                found = probs.gather(-1, torch.where(here, own, 0))
                wanted.weights[:, rows] = torch.where(here, found.to(wanted.weights.dtype), wanted.weights[:, rows])
    if wanted.key_mass is not None and mass is not None:
        wanted.key_mass.copy_(mass)


def tiles_of_rows(
    plan: Plan, seq: Sequence, states: list[list[int]] | None
) -> Iterator[tuple[slice, list[int] | None]]:
    """The tiles of query rows, and the states of their tiles of keys."""
    step = plan.tile[0]
    for top in range(0, seq.q_len, step):
        yield slice(top, min(top + step, seq.q_len)), None if states is None else states[top // step]


def scores(
    plan: Plan, seq: Sequence, rows: slice, states: list[int] | None, work: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The tiles of keys that these rows may see: their scores `[H, BQ, BK]`, -inf where hidden, and the visible cells;
    None if all are.
    """
    p, n = seq.problem, rows.stop - rows.start
    q = seq.q[:, rows].to(work).reshape(p.kv_heads, p.group * n, p.head_dim)  # [Hkv, G * BQ, D]
    for cols, masked, edge, chosen in tiles_of_keys(seq, rows, plan.tile[1], states):
        k = seq.keys(cols.start, cols.stop, work)  # [Hkv, BK, D]
        s = products(q, k).view(p.heads, n, -1) * p.scale  # [H, BQ, BK]
        yield cols, *adjust(seq, s, rows, cols, masked, edge, chosen)


@dataclass(slots=True)
class RowSums:
    """The sums of a tile of rows, `[H, BQ]`."""

    top: Tensor  # the largest visible score; -inf if there is none
    base: Tensor  # what weights are relative to: finite unless a score or sink is not
    total: Tensor  # l: 1 or more, also in rows that see nothing
    keys: Tensor  # the part of it that is not the sink's
    slope: Tensor  # u
    finite: bool = False  # the base is a finite lse in every row, so that the total is 1

    @classmethod
    def of(cls, plan: Plan, seq: Sequence, rows: slice, states: list[int] | None) -> RowSums:
        p, sinks = seq.problem, seq.tensors.sinks
        work = work_dtype(seq)
        top = torch.full((p.heads, rows.stop - rows.start), -torch.inf, dtype=work, device=seq.tensors.q.device)
        base, keys, slope = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)

        def rebased(to: Tensor) -> tuple[Tensor, Tensor]:
            """`keys` and `slope` relative to another base."""
            moved = torch.where(keys == 0, 0.0, base - to)
            alpha = moved.exp()
            new = keys * alpha
            return new, torch.where(new == 0, 0.0, slope * alpha + new * moved)

        for _, s, _ in scores(plan, seq, rows, states, work):
            top = torch.maximum(top, s.amax(-1))
            to = torch.where(top == -torch.inf, 0.0, top)
            keys, slope = rebased(to)
            base = to
            below = s - base[..., None]
            weights = below.exp()
            keys = keys + weights.sum(-1)
            slope = slope + torch.where(weights == 0, 0.0, weights * below).sum(-1)
        total = keys
        if sinks is not None:
            sink = sinks.to(work)[:, None]
            to = torch.maximum(torch.where(top == -torch.inf, sink, top), sink)
            to = torch.where(to == -torch.inf, 0.0, to)
            keys, slope = rebased(to)
            base = to
            total = keys + torch.where(sink == torch.inf, 1.0, (sink - base).exp())  # 0 for -inf
        return cls(top, base, torch.where(total == 0, 1.0, total), keys, slope)

    @classmethod
    def of_lse(cls, lse: Tensor) -> RowSums:
        base, one = torch.where(lse == -torch.inf, 0.0, lse), torch.ones_like(lse)
        return cls(lse, base, one, one, one, finite=True)

    def share(self) -> Tensor:
        """The weight of all keys: 1 without a sink, 0 in rows that see nothing."""
        return self.keys / self.total

    def entropy(self) -> Tensor:
        return self.share() * self.total.log() - self.slope / self.total

    def weights(self, s: Tensor, visible: Tensor | None) -> Tensor:
        """P of a tile `[H, BQ, BK]`; 0 where hidden, in rows with a NaN too."""
        probs = (s - self.base[..., None]).exp_()
        if self.finite:  # then those of hidden cells are 0
            return probs
        probs /= self.total[..., None]
        return probs if visible is None else torch.where(visible, probs, 0.0)
