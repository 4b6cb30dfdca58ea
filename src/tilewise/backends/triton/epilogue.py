"""Epilogue: normalises and stores the state (m, l, acc) of rows, and combines split-KV partials."""

import triton.language as tl

import triton

from .kv_load import first_of, parts_of, start_of, unit_of, width_of
from .scale_groups import own_group
from .score_mod import LOG2E


@triton.jit
def empty_acc(OP: tl.constexpr, BM: tl.constexpr):
    acc = ()
    for i in tl.static_range(len(OP.widths)):
        for _ in tl.static_range(parts_of(OP)):
            acc = acc + (tl.zeros([BM, width_of(OP, i)], tl.float32),)
    return acc


@triton.jit
def normalise(m, l, acc, sink, SINKS: tl.constexpr):
    """Adds the sink and divides acc by l; m in natural units. Fully masked rows get l = 1, m = -inf, acc = 0."""
    if SINKS:
        m_new = tl.maximum(m, sink)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m - base) * LOG2E)
        l = l * alpha + tl.where(sink == float("inf"), 1.0, tl.exp2((sink - base) * LOG2E))  # inf - inf would be NaN
        m = m_new
    l = tl.where(l == 0, 1.0, l)
    result = ()
    for i in tl.static_range(len(acc)):
        x = acc[i]
        if SINKS:
            x = x * alpha[:, None]
        result = result + (x / l[:, None],)
    return m, l, result


@triton.jit
def has_nonfinite(acc):
    """Whether any element is NaN or infinite (0 * x is then NaN)."""
    found = 0
    for i in tl.static_range(len(acc)):
        found = tl.maximum(found, tl.max(tl.max((acc[i] * 0.0 != 0.0).to(tl.int32), 1), 0))
    return found != 0


@triton.jit
def store_acc(at, acc, ok, OP: tl.constexpr, ROW_GROUPS: tl.constexpr):
    """Stores chunks [BM, W] to rows `at` [BM], in the pointer's type. ROW_GROUPS: of each row its own scale group."""
    for i in tl.static_range(len(OP.widths)):
        for part in tl.static_range(parts_of(OP)):
            d = tl.arange(0, width_of(OP, i))
            inside = ok[:, None] & (d < OP.columns - first_of(OP, i))[None, :]
            if ROW_GROUPS:
                inside = inside & own_group(ok.shape[0], i, part, OP)
            x = acc[i * OP.parts + part]
            to = at[:, None] + start_of(OP, i, part) + d[None, :] * unit_of(OP)
            tl.store(to, x.to(at.dtype.element_ty), mask=inside)


@triton.constexpr_function
def splits_at_once(op, most):
    """Splits whose partials are loaded at once: as many as registers hold."""
    return max(1, min(most, 1024 // (op.columns * op.parts)))


@triton.jit
def load_acc(at, ok, OP: tl.constexpr):
    """Loads chunks [BM, W] of the split-KV partials at `at` [BM].

    They were written by other SMs, so the loads bypass L1 (`.cg`).
    """
    acc = ()
    for i in tl.static_range(len(OP.widths)):
        for part in tl.static_range(parts_of(OP)):
            d = tl.arange(0, width_of(OP, i))
            inside = ok[:, None] & (d < OP.columns - first_of(OP, i))[None, :]
            start = at[:, None] + start_of(OP, i, part) + d[None, :] * unit_of(OP)
            acc = acc + (tl.load(start, mask=inside, other=0.0, cache_modifier=".cg"),)
    return acc


@triton.jit
def combine_splits(PARTIAL, PARTIAL_ML, first, splits, ok, acc, MOST: tl.constexpr, OP: tl.constexpr):
    """Combines the partials of `splits` splits into one state (m, l, acc). `first` [BM] is the index of each row's
    first split, `acc` is all zeros.

    Up to MOST splits are loaded at once, to hide latency. They are added one by one and in order, so that neither extra
    (empty) splits nor the number of rows per program change a bit.
    """
    BS: tl.constexpr = splits_at_once(OP, MOST)
    N: tl.constexpr = len(acc)
    m = tl.full(ok.shape, float("-inf"), tl.float32)
    l = tl.zeros(ok.shape, tl.float32)
    for s0 in range(0, splits, BS):
        ms = ()
        ls = ()
        partials = ()
        for j in tl.static_range(BS):
            here = ok & (s0 + j < splits)
            at = PARTIAL_ML + (first + s0 + j) * 2
            ms = ms + (tl.load(at, mask=here, other=float("-inf"), cache_modifier=".cg"),)
            ls = ls + (tl.load(at + 1, mask=here, other=0.0, cache_modifier=".cg"),)
            partials = partials + load_acc(PARTIAL + (first + s0 + j) * (OP.columns * OP.parts), here, OP)
        m_new = m
        for j in tl.static_range(BS):
            m_new = tl.maximum(m_new, ms[j])
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2((m - base) * LOG2E)
        l = l * alpha
        sums = ()
        for i in tl.static_range(N):
            sums = sums + (acc[i] * alpha[:, None],)
        for j in tl.static_range(BS):
            weight = tl.exp2((ms[j] - base) * LOG2E)  # [BM]
            l += weight * ls[j]
            added = ()
            for i in tl.static_range(N):
                # Empty splits wrote zeros, so that no weight of 0 multiplies a stale NaN.
                added = added + (sums[i] + partials[j * N + i] * weight[:, None],)
            sums = added
        m = m_new
        acc = sums
    return m, l, acc
