"""Merges or sums up to 8 partial results in one pass: each is read once, and the result is written once.

Rows are cut into blocks, one for each program, which keeps them in registers [BR, W]:

    top = max lse_i;  w_i = exp(lse_i - top);  out = sum w_i out_i / sum w_i;  lse = top + log(sum w_i)

A part whose weight is 0 is left out whatever its `out` holds. Parts may be cut from larger tensors: dims that lie
together are one, those around them another, with a stride of its own in each part. A plain sum (`SUM`: the gradients of
rows that several parts have) has no lse and adds in float32, in the order of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

import triton

from ..gpu.flags import ceil_pow2
from ..gpu.kernel import INTERPRETED, Kernel

MOST = 8
ELEMENTS = 4096  # of a block


@triton.jit
def top_of(L, at, ok, top):  # type: ignore[no-untyped-def]
    lse = tl.load(L + at, mask=ok, other=float("-inf")).to(tl.float32)  # [BR]
    return tl.maximum(top, lse, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def add(  # type: ignore[no-untyped-def]
    X, L, outer, inner, x_a, l_a, d, ok, base, total, mixed, D: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """One part, weighed."""
    if SUM:
        cells = ok[:, None] & (d < D)[None, :]
        x = tl.load(X + (outer * x_a + inner * D)[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
        return total, mixed + x
    lse = tl.load(L + outer * l_a + inner, mask=ok, other=float("-inf")).to(tl.float32)  # [BR]
    weight = tl.where((base == float("inf")) & (lse == float("inf")), 1.0, tl.exp(lse - base))
    cells = ok[:, None] & (d < D)[None, :]
    x = tl.load(X + (outer * x_a + inner * D)[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)  # [BR, W]
    return total + weight, mixed + tl.where((weight == 0.0)[:, None], 0.0, x * weight[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    X0, X1, X2, X3, X4, X5, X6, X7, L0, L1, L2, L3, L4, L5, L6, L7, OUT, LSE,
    x0_a, x1_a, x2_a, x3_a, x4_a, x5_a, x6_a, x7_a, l0_a, l1_a, l2_a, l3_a, l4_a, l5_a, l6_a, l7_a,
    rows, total_rows, D: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, N: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    X, L = (X0, X1, X2, X3, X4, X5, X6, X7), (L0, L1, L2, L3, L4, L5, L6, L7)
    x_a = (x0_a, x1_a, x2_a, x3_a, x4_a, x5_a, x6_a, x7_a)
    l_a = (l0_a, l1_a, l2_a, l3_a, l4_a, l5_a, l6_a, l7_a)
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR]
    ok = row < total_rows
    outer, inner = row // rows, row % rows
    d = tl.arange(0, W)
    top = tl.full([BR], float("-inf"), tl.float32)
    if not SUM:
        for i in tl.static_range(N):
            top = top_of(L[i], outer * l_a[i] + inner, ok, top)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BR], tl.float32)
    mixed = tl.zeros([BR, W], tl.float32)
    for i in tl.static_range(N):
        total, mixed = add(X[i], L[i], outer, inner, x_a[i], l_a[i], d, ok, base, total, mixed, D, SUM)
    total = tl.where(total == 0.0, 1.0, total)  # of a sum, too
    cells = ok[:, None] & (d < D)[None, :]
    tl.store(OUT + (row * D)[:, None] + d[None, :], (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=cells)
    if not SUM:
        tl.store(LSE + row, top + tl.log(total), mask=ok)


def split_dim(tensors: Sequence[torch.Tensor]) -> int | None:
    """The first dim from which on every tensor lies together, if the dims before it are one in each."""
    shape = tensors[0].shape
    for first in range(len(shape)):
        if all(_together(x, first, len(shape)) and _together(x, 0, first) for x in tensors):
            return first
    return None


def _together(x: torch.Tensor, first: int, end: int) -> bool:
    """Whether dims `first` to `end` are one dim; the last dims of all have unit stride then."""
    dims = [(x.shape[i], x.stride(i)) for i in range(first, end) if x.shape[i] != 1]
    if end == x.ndim and dims and dims[-1][1] != 1:
        return False
    return all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(dims))


def outer_stride(x: torch.Tensor, first: int) -> int:
    """From one index of the dims before `first` to the next."""
    strides = [x.stride(i) for i in range(first) if x.shape[i] != 1]
    return strides[-1] if strides else 0


def prepare(states: Sequence[Any]) -> tuple[Kernel, tuple[int, int], dict[str, Any]] | None:
    """The kernel, its grid and arguments; None for parts that lie in other ways."""
    return _prepared([out for out, _ in states], [lse for _, lse in states], states[0][0].dtype)


def prepare_sum(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[Kernel, tuple[int, int], Any] | None:
    return _prepared(parts, None, dtype)


def _prepared(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor] | None, dtype: torch.dtype
) -> tuple[Kernel, tuple[int, int], dict[str, Any]] | None:
    shape = outs[0].shape
    if len(outs) > MOST or not outs[0].numel():
        return None
    of_outs, of_lses = split_dim(outs), 0 if lses is None else split_dim(lses)
    if of_outs is None or of_lses is None:
        return None
    first = max(of_outs, of_lses)
    if first == len(shape) - 1 or not all(_together(x, 0, first) for x in (*outs, *(lses or ()))):
        return None
    D, rows, count = shape[-1], shape[first:-1].numel(), shape[:-1].numel()
    given: dict[str, Any] = {"OUT": torch.empty(shape, dtype=dtype, device=outs[0].device)}
    given["LSE"] = torch.empty(shape[:-1] if lses else (1,), dtype=torch.float32, device=outs[0].device)
    for i in range(MOST):
        out = outs[min(i, len(outs) - 1)]
        lse = lses[min(i, len(lses) - 1)] if lses else given["LSE"]
        given |= {f"X{i}": out, f"L{i}": lse, f"x{i}_a": outer_stride(out, first)}
        given[f"l{i}_a"] = outer_stride(lse, first) if lses else 0
    W = ceil_pow2(D)
    BR = max(1, ELEMENTS // W)
    kernel = Kernel(merge_kernel, {"D": D, "W": W, "BR": BR, "N": len(outs), "SUM": lses is None})
    return kernel, (-(-count // BR), 1), given | {"rows": rows, "total_rows": count}


def merge_states(states: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`out` and `lse` of all parts; None where plain torch has to do it."""
    given = _run(prepare(states))
    return None if given is None else (given["OUT"], given["LSE"])


def sum_parts(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Their sum, added in float32; None where plain torch has to do it."""
    given = _run(prepare_sum(parts, dtype))
    return None if given is None else given["OUT"]


def _run(made: tuple[Kernel, tuple[int, int], dict[str, Any]] | None) -> dict[str, Any] | None:
    if made is None:
        return None
    kernel, grid, given = made
    if INTERPRETED:
        kernel.first(grid, given)
    else:
        with torch.cuda.device(given["OUT"].device):
            kernel.first(grid, given)
    return given
