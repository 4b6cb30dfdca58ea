"""Backward passes over rows whose |lse| is so large that float32 cannot represent log(sum) in it.

P = exp(s - lse) needs lse to an absolute error far below 1. A row whose every logit has a bias of -1e9 has P = 1 / n,
but its lse rounds to -1e9, which would give P = 1. So a first backward pass computes the sums of such rows' P, and
their dout and dlse are divided by them: dS and dV are linear in both. Sums below 1 are kept: in a ring, lse may cover
more keys than the call has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch

from .expression.mods import with_rows
from .mod_tiles import sequence_places
from .plan import Plan
from .problem import CAPTURED, Problem
from .storage import stored_as
from .tensors import BackwardTensors, Tensors, as_fields

LARGE = 2.0**17  # up to here float32 rounds lse by at most 1 / 128


def has_large(lse: torch.Tensor) -> bool:
    return lse.dtype == torch.float32 and bool(_large(lse).any())


def _large(lse: torch.Tensor) -> torch.Tensor:
    return lse.isfinite() & (lse.abs() > LARGE)


def share(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """What weights exp(s - lse) are multiplied by, whose sums are `total`."""
    return torch.where(_large(lse) & (total > 1), 1 / total, 1.0)


def run(
    plan_backward: Callable[[Problem], Plan],
    run_backward: Callable[[Plan, BackwardTensors], None],
    problem: Problem,
    tensors: BackwardTensors,
) -> None:
    """Runs the backward pass with corrected rows, in float32: 16 bits would round the scaled dout."""
    float32 = stored_as("f32")
    problem = replace(problem, q_dtype=torch.float32, k_format=float32, v_format=float32, v_in_k=False)
    t = tensors.forward
    t = replace(t, q=t.q.float(), k=t.k.float(), v=t.v.float(), out=t.out.float())
    assert t.lse is not None
    total = _sums(plan_backward, run_backward, problem, t)
    if t.sinks is not None:
        total += (t.sinks[:, None] - t.lse).exp()
    factor = share(t.lse, total)
    wide = {name: torch.empty_like(x, dtype=_wide(name, x)) for name, x in tensors.gradients().items()}
    dlse = None if tensors.dlse is None else tensors.dlse * factor
    made = replace(tensors, forward=t, dout=tensors.dout.float() * factor[..., None], dlse=dlse, **as_fields(wide))
    run_backward(plan_backward(problem), made)
    for name, x in tensors.gradients().items():
        x.copy_(made.gradients()[name])


def _sums(
    plan_backward: Callable[[Problem], Plan],
    run_backward: Callable[[Plan, BackwardTensors], None],
    p: Problem,
    t: Tensors,
) -> torch.Tensor:
    """The sums of P of all rows, in the shape of lse: of dS = -P, by what is added to the scores of a row."""
    lse = t.lse
    assert lse is not None
    incoming = torch.zeros_like(t.out), torch.full_like(lse, -1.0)
    if p.mods is None or p.mods.by_score is None or p.positions:
        t = t if t.q_bias is not None else replace(t, q_bias=torch.zeros_like(lse))
        sums = BackwardTensors(t, *incoming, dq_bias=torch.empty_like(lse))
        run_backward(plan_backward(replace(p, q_bias=True, grads=("q_bias",), dlse=True)), sums)
        assert sums.dq_bias is not None
        return -sums.dq_bias
    # A score_mod scales the gradient of q_bias: an element of a captured tensor is added to its result.
    number, places = len(p.mods.tensors), sequence_places(p, t)
    ints = (torch.as_tensor(x, dtype=torch.int32, device=p.device) for x in (places.q_start, places.q_stride))
    start, stride = (x.expand(p.batch) for x in ints)
    rows = lse.new_zeros(p.batch, p.heads, p.q_len)
    t = replace(t, captured=(*t.captured, rows, start, stride))
    sums = BackwardTensors(t, *incoming, dcaptured={number: torch.empty_like(rows)})
    grads = (f"{CAPTURED}{number}",)
    run_backward(plan_backward(replace(p, mods=with_rows(p.mods), grads=grads, dlse=True)), sums)
    found = -sums.dcaptured[number]
    if t.cu_seqlens_q is None:
        return found
    total, ends = torch.zeros_like(lse), t.cu_seqlens_q.tolist()
    for b, (first, end) in enumerate(pairwise(ends)):
        total[0, :, first:end] = found[b, :, : end - first]
    return total


def _wide(name: str, gradient: torch.Tensor) -> torch.dtype:
    return torch.float32 if name in ("q", "k", "v") else gradient.dtype
