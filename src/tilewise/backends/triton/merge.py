"""Merges or sums up to 8 partial results in one pass: each is read once, and the result is written once.

Each program keeps a block of rows in registers [BR, W]:

    top = max lse_i;  w_i = exp(lse_i - top);  out = sum (w_i / sum w_i) out_i;  lse = top + log(sum w_i)

A part whose weight is 0 is skipped, whatever its `out` holds. Parts may be views of larger tensors: contiguous inner
dims are collapsed into one, outer dims into another, with a stride for each part. A plain sum (`SUM`: the gradients of
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
from ..gpu.kernel import Kernel
from ..gpu.launch_program import LaunchProgram, Recorder, launch_and_record
from ..gpu.launcher import is_aligned

MOST = 8
ELEMENTS = 1024  # of a block (h200 28)


@triton.jit
def top_of(L, at, ok, top):  # type: ignore[no-untyped-def]
    lse = tl.load(L + at, mask=ok, other=float("-inf")).to(tl.float32)  # [BR]
    return tl.maximum(top, lse, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def weight_of(L, at, ok, base):  # type: ignore[no-untyped-def]
    lse = tl.load(L + at, mask=ok, other=float("-inf")).to(tl.float32)  # [BR]
    return tl.where((base == float("inf")) & (lse == float("inf")), 1.0, tl.exp(lse - base))


@triton.jit  # type: ignore[untyped-decorator]
def add(  # type: ignore[no-untyped-def]
    X, L, outer, inner, x_a, l_a, d, ok, base, total, mixed, D: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """Adds one part with its share of the weight: shares add up to 1, so that no sum of large values overflows."""
    if SUM:
        cells = ok[:, None] & (d < D)[None, :]
        x = tl.load(X + (outer * x_a + inner * D)[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)
        return mixed + x
    share = weight_of(L, outer * l_a + inner, ok, base) / total
    cells = ok[:, None] & (d < D)[None, :]
    x = tl.load(X + (outer * x_a + inner * D)[:, None] + d[None, :], mask=cells, other=0.0).to(tl.float32)  # [BR, W]
    return mixed + tl.where((share == 0.0)[:, None], 0.0, x * share[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    X0, X1, X2, X3, X4, X5, X6, X7, L0, L1, L2, L3, L4, L5, L6, L7, OUT, LSE,
    x0_a, x1_a, x2_a, x3_a, x4_a, x5_a, x6_a, x7_a, l0_a, l1_a, l2_a, l3_a, l4_a, l5_a, l6_a, l7_a, out_a, lse_a,
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
    if not SUM:
        for i in tl.static_range(N):
            total += weight_of(L[i], outer * l_a[i] + inner, ok, base)
    total = tl.where(total == 0.0, 1.0, total)  # fully masked rows
    mixed = tl.zeros([BR, W], tl.float32)
    for i in tl.static_range(N):
        mixed = add(X[i], L[i], outer, inner, x_a[i], l_a[i], d, ok, base, total, mixed, D, SUM)
    cells = ok[:, None] & (d < D)[None, :]
    at = outer * out_a + inner * D
    tl.store(OUT + at[:, None] + d[None, :], mixed.to(OUT.dtype.element_ty), mask=cells)
    if not SUM:
        tl.store(LSE + outer * lse_a + inner, top + tl.log(total), mask=ok)


def split_dim(tensors: Sequence[torch.Tensor]) -> int | None:
    """The first dim such that, in every tensor, the dims from it on collapse into one, and so do those before it."""
    shape = tensors[0].shape
    for first in range(len(shape)):
        if all(_together(x, first, len(shape)) and _together(x, 0, first) for x in tensors):
            return first
    return None


def _together(x: torch.Tensor, first: int, end: int) -> bool:
    """Whether dims `first` to `end` collapse into one; if they are the last dims, with unit stride."""
    dims = [(x.shape[i], x.stride(i)) for i in range(first, end) if x.shape[i] != 1]
    if end == x.ndim and dims and dims[-1][1] != 1:
        return False
    return all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(dims))


def outer_stride(x: torch.Tensor, first: int) -> int:
    """The stride of the collapsed dims before `first`."""
    strides = [x.stride(i) for i in range(first) if x.shape[i] != 1]
    return strides[-1] if strides else 0


def prepare(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[Kernel, tuple[int, int], dict[str, Any]] | None:
    """The kernel, its grid and arguments; None for other memory layouts. A sum has no `lse`."""
    shape, of_lses = out.shape, [] if lse is None else [*lses, lse]
    if len(outs) > MOST or not out.numel():
        return None
    of_outs, of_them = split_dim([*outs, out]), split_dim(of_lses) if of_lses else 0
    if of_outs is None or of_them is None:
        return None
    first = max(of_outs, of_them)
    if first == len(shape) - 1 or not all(_together(x, 0, first) for x in (*outs, out, *of_lses)):
        return None
    D, rows, count = shape[-1], shape[first:-1].numel(), shape[:-1].numel()
    given: dict[str, Any] = {"OUT": out, "LSE": out if lse is None else lse, "out_a": outer_stride(out, first)}
    given["lse_a"] = 0 if lse is None else outer_stride(lse, first)
    for i in range(MOST):
        x = outs[min(i, len(outs) - 1)]
        given |= {f"X{i}": x, f"x{i}_a": outer_stride(x, first)}
        given |= {f"L{i}": given["LSE"], f"l{i}_a": 0}
        if lse is not None:
            x = lses[min(i, len(lses) - 1)]
            given |= {f"L{i}": x, f"l{i}_a": outer_stride(x, first)}
    W = ceil_pow2(D)
    BR = max(1, ELEMENTS // W)
    kernel = Kernel(merge_kernel, {"D": D, "W": W, "BR": BR, "N": len(outs), "SUM": lse is None})
    return kernel, (-(-count // BR), 1), given | {"rows": rows, "total_rows": count}


_programs: dict[Any, LaunchProgram] = {}  # by shapes and strides


def merge_into(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: Any) -> bool:
    """Writes `out` and `lse` of all parts merged or, without `lse`, their sum; False where torch has to do it."""
    tensors = [*outs, *lses, out] if lse is None else [*outs, *lses, out, lse]
    addresses = [x.data_ptr() for x in tensors]
    key = None
    if out.is_cuda and is_aligned(addresses, out.device):
        key = (lse is None, *[(x.shape, x.stride(), x.dtype) for x in tensors], out.device)
        if (program := _programs.get(key)) is not None:
            program(addresses)
            return True
    if prepare(outs, lses, out, lse) is None:
        return False

    def launch(r: Recorder, own: list[torch.Tensor]) -> None:
        n = len(outs)
        made = prepare(own[:n], (), own[-1], None) if lse is None else prepare(own[:n], own[n:-2], *own[-2:])
        assert made is not None
        r.launch(*made)

    launch_and_record(launch, tensors, _programs, key)
    return True
