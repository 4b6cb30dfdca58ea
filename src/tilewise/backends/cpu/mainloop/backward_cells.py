"""Micro-kernels over the cells of a tile in the backward pass: W query rows of one key, keys `step` floats apart."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from ....core.private.numba import bfloat
from ..codegen.vector import F32, I16, I32, Emit, Value, W, microkernel
from ..gemm.backward import VECTORS, rows_times
from ..gemm.fp32 import KEYS, PANEL
from .softmax import LOG2E


def _probs(masked: bool) -> Any:
    @microkernel("iiiiiif")
    def probs(e: Emit, s: Value, ds: Value, step: Value, count: Value, lse: Value, delta: Value, scale: Value) -> None:
        """Scores s to P = exp(s * scale - lse), and dP in `ds` to dS = P (dP - delta); both 0 where s is -inf."""
        b = e.builder
        minus_lse, delta, scale, log2e = b.fneg(e.load(lse)), e.load(delta), e.splat(scale), e.f32s(LOG2E)
        with e.loop(count) as j:
            at = b.mul(j, step)
            x, dp = e.load(s, at), e.load(ds, at)
            p = e.exp2_of_product(e.fma(x, scale, minus_lse), log2e)
            y = b.fmul(p, b.fsub(dp, delta))
            if masked:  # select: V may be NaN there, and the row's lse too
                hidden = b.fcmp_ordered("==", x, e.f32s(-math.inf))
                p, y = b.select(hidden, e.zeros, p), b.select(hidden, e.zeros, y)
            e.store(p, s, at)
            e.store(y, ds, at)

    return probs


probs_full, probs_masked = _probs(False), _probs(True)


@microkernel("iiiif")
def softcap_derivative(e: Emit, s: Value, to: Value, step: Value, count: Value, cap: Value) -> None:
    """The derivative of a softcap at the capped score s: 1 - (s / cap)^2."""
    b = e.builder
    cap = e.splat(cap)
    with e.loop(count) as j:
        at = b.mul(j, step)
        x = b.fdiv(e.load(s, at), cap)
        e.store(e.fma(b.fneg(x), x, e.f32s(1.0)), to, at)


@microkernel("iiiii")
def multiply_cells(e: Emit, ds: Value, step: Value, d: Value, d_step: Value, count: Value) -> None:
    """ds *= d, but 0 where ds is 0: in a hidden cell d may be NaN."""
    b = e.builder
    with e.loop(count) as j:
        at = b.mul(j, step)
        x, factor = e.load(ds, at), e.load(d, b.mul(j, d_step))
        e.store(b.select(b.fcmp_ordered("==", x, e.zeros), e.zeros, b.fmul(x, factor)), ds, at)


@microkernel("iiiiiii")
def add_distances(
    e: Emit, ds: Value, step: Value, count: Value, sums: Value, positions: Value, key: Value, stride: Value
) -> None:
    """sums[r] += sum of ds[j, r] |positions[r] - stride (key + j)|."""
    b = e.builder
    total, position = e.var(e.zeros), e.load_i32(positions)
    with e.loop(count) as j:
        away = b.sub(position, e.splat_i32(b.trunc(b.mul(stride, b.add(key, j)), I32)))
        distance = e.call("fabs", b.sitofp(away, e.vector(F32)))
        total.set(e.fma(e.load(ds, b.mul(j, step)), distance, total.get()))
    e.store(b.fadd(e.load(sums), total.get()), sums)


@microkernel("iiii")
def sum_keys(e: Emit, ds: Value, step: Value, count: Value, to: Value) -> None:
    """to[r] = sum of ds[j, r]."""
    total = e.var(e.zeros)
    with e.loop(count) as j:
        total.set(e.builder.fadd(e.load(ds, e.builder.mul(j, step)), total.get()))
    e.store(total.get(), to)


@microkernel("iii")
def zero_nonfinite(e: Emit, to: Value, source: Value, count: Value) -> None:
    """Copies `count` floats, a multiple of W, with non-finite values replaced by 0."""
    b = e.builder
    with e.loop(count, W) as i:
        x = e.load(source, i)
        e.store(b.select(b.fcmp_ordered("==", b.fsub(x, x), e.zeros), x, e.zeros), to, i)


@microkernel("iiiff>f")
def dot_minus(e: Emit, x: Value, y: Value, count: Value, factor: Value, minus: Value) -> Value:
    """factor * (dot product of `count` floats, a multiple of W) - minus, in float64 and rounded once."""
    b, f64 = e.builder, ir.DoubleType()
    wide = ir.VectorType(f64, W)
    total = e.var(ir.Constant(wide, [0.0] * W))
    with e.loop(count, W) as i:
        product = b.fmul(b.fpext(e.load(x, i), wide), b.fpext(e.load(y, i), wide))
        total.set(b.fadd(total.get(), product))
    scaled = b.fmul(e.reduce(total.get(), b.fadd), b.fpext(factor, f64))
    return b.fptrunc(b.fsub(scaled, b.fpext(minus, f64)), F32)


# bf16


def _bits(e: Emit, x: Value) -> Value:
    """float32 to bf16, as 16-bit integers."""
    return e.builder.bitcast(e.builder.fptrunc(x, e.vector(bfloat())), e.vector(I16))


def _pair(e: Emit, low: Value, high: Value) -> Value:
    b, wide = e.builder, e.vector(I32)
    return b.or_(b.zext(low, wide), b.shl(b.zext(high, wide), e.i32s(16)))


def _load_16(e: Emit, address: Value, offset: Value) -> Value:
    return e.load_i16(e.builder.add(address, e.builder.mul(offset, e.i64(2))))


def _store_16(e: Emit, bits: Value, address: Value, offset: Value) -> None:
    e.builder.store(bits, e.pointer(address, offset, I16, bits.type)).align = 2


@microkernel("iii")
def copy_16(e: Emit, to: Value, source: Value, count: Value) -> None:
    """`count` 16-bit numbers, a multiple of W."""
    with e.loop(count, W) as i:
        _store_16(e, _load_16(e, source, i), to, i)


@microkernel("iii")
def round_cells(e: Emit, to: Value, cells: Value, count: Value) -> None:
    """Rounds `count` floats, a multiple of W, to bf16; in place, to the first half of their memory."""
    with e.loop(count, W) as i:
        _store_16(e, _bits(e, e.load(cells, i)), to, i)


@microkernel("iiii")
def pair_cells(e: Emit, to: Value, x: Value, y: Value, count: Value) -> None:
    """Two rows of `count` floats to pairs of bf16 numbers."""
    with e.loop(count, W) as i:
        e.store(_pair(e, _bits(e, e.load(x, i)), _bits(e, e.load(y, i))), to, i)


@microkernel("iiiiifiii")
def probs_of_dots(
    e: Emit, keys: Value, width: Value, q: Value, depth: Value, lse: Value, scale: Value, probs: Value, to: Value,
    ld: Value,
) -> None:  # fmt: skip
    """P of KEYS keys and a panel of rows that all see them, fused into K Q^T: float32 to `probs` [KEYS, PANEL], and
    bf16 to `to`, whose rows have `ld` numbers.
    """
    b = e.builder
    sums = rows_times(e, keys, width, q, e.i64(PANEL), depth, VECTORS, True)
    scale, log2e = e.splat(scale), e.f32s(LOG2E)
    for j in range(VECTORS):
        minus_lse = b.fneg(e.load(lse, j * W))
        for i in range(KEYS):
            p = e.exp2_of_product(e.fma(sums[i][j].get(), scale, minus_lse), log2e)
            e.store(p, probs, i * PANEL + j * W)
            _store_16(e, _bits(e, p), to, b.add(b.mul(ld, e.i64(i)), e.i64(j * W)))


@microkernel("iiiiiiiii")
def ds_of_dots(
    e: Emit, values: Value, width: Value, dout: Value, depth: Value, delta: Value, probs: Value, to: Value,
    pairs: Value, ld: Value,
) -> None:  # fmt: skip
    """dS of the same, fused into V dO^T: bf16 to `to`, and in pairs of keys."""
    b = e.builder
    sums = rows_times(e, values, width, dout, e.i64(PANEL), depth, VECTORS, True)
    for j in range(VECTORS):
        minus = e.load(delta, j * W)
        for i in range(0, KEYS, 2):
            both = []
            for n in (i, i + 1):
                x = b.fmul(e.load(probs, n * PANEL + j * W), b.fsub(sums[n][j].get(), minus))
                both.append(_bits(e, x))
                _store_16(e, both[-1], to, b.add(b.mul(ld, e.i64(n)), e.i64(j * W)))
            e.store(_pair(e, *both), pairs, b.add(b.mul(ld, e.i64(i // 2)), e.i64(j * W)))


def _pair_rows(finite: bool) -> Any:
    @microkernel("iiii")
    def pair_rows(e: Emit, to: Value, x: Value, y: Value, count: Value) -> None:
        """Interleaves two rows of `count` bf16 numbers, with non-finite values replaced by 0 if `finite`."""
        b, kind = e.builder, e.vector(I16)

        def take(row: Value, i: Value) -> Value:
            bits = _load_16(e, row, i)
            if not finite:
                return bits
            top = ir.Constant(kind, [0x7F80] * W)
            return b.select(b.icmp_signed("==", b.and_(bits, top), top), ir.Constant(kind, [0] * W), bits)

        with e.loop(count, W) as i:
            e.store(_pair(e, take(x, i), take(y, i)), to, i)

    return pair_rows


pair_rows, pair_rows_finite = _pair_rows(False), _pair_rows(True)
