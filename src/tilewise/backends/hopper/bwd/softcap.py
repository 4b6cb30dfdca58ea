"""The softcap of the backward kernel: capped logits and their derivative, with few MUFU instructions."""

from ...gpu.gluon import gl, gluon
from ..fwd.softmax import tanh
from .mask import masked

LOG2E = gl.constexpr(1.4426950408889634)
CELLS = gl.constexpr(32)  # cells of a thread that share a branch


@gluon.constexpr_function
def tanh_text(cells):
    """PTX of tanh(y) of `cells` cells: a polynomial if all of a warp are within 0.6, whose absolute error of 1.2e-6 is
    lost in 16-bit probabilities; else 1 - 2 / (1 + exp(2 y)), with two more MUFU instructions.
    """
    c1, c3, c5, c7 = "0f3F7FFFDC", "0fBEAA9161", "0f3E05B662", "0fBD27A596"
    end, one, minus_two, double_log2e = "0f3F19999A", "0f3F800000", "0fC0000000", "0f4038AA3B"
    lines = ["{ .reg .pred far; .reg .f32 m<4>, u, t;"]
    for n in range(cells):
        m = f"m{n % 4}"
        lines.append(f"abs.f32 t, ${cells + n};")
        lines.append(f"mov.f32 {m}, t;" if n < 4 else f"max.f32 {m}, {m}, t;")
    lines.append("max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2;")
    lines.append(f"setp.gt.f32 far, m0, {end}; vote.sync.any.pred far, far, 0xffffffff; @far bra.uni FAR;")
    for n in range(cells):
        y = f"${cells + n}"
        lines.append(f"mul.f32 u, {y}, {y}; fma.rn.f32 t, u, {c7}, {c5}; fma.rn.f32 t, t, u, {c3};")
        lines.append(f"fma.rn.f32 t, t, u, {c1}; mul.f32 ${n}, t, {y};")
    lines.append("bra.uni DONE; FAR:")
    for n in range(cells):
        lines.append(f"mul.f32 t, ${cells + n}, {double_log2e}; ex2.approx.ftz.f32 t, t; add.f32 t, t, {one};")
        lines.append(f"rcp.approx.ftz.f32 t, t; fma.rn.f32 ${n}, t, {minus_two}, {one};")
    return " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def tanh_operands(cells):
    return ",".join(["=f"] * cells + ["f"] * cells)


@gluon.jit
def near_tanh(y):
    TEXT: gl.constexpr = tanh_text(CELLS)
    OPERANDS: gl.constexpr = tanh_operands(CELLS)
    return gl.inline_asm_elementwise(TEXT, OPERANDS, [y], gl.float32, is_pure=True, pack=CELLS)


@gluon.jit
def one_less_square(t):
    TEXT: gl.constexpr = "{ .reg .f32 n; neg.f32 n, $1; fma.rn.f32 $0, $1, n, 0f3F800000; }"
    return gl.inline_asm_elementwise(TEXT, "=f,f", [t], gl.float32, is_pure=True, pack=1)


@gluon.jit
def capped(a, x, minus_lse, bias=None):
    """P [64, BM] of dot products x: exp2 of the capped logits minus lse; and the softcap's derivative."""
    cap = a.softcap * LOG2E
    if a.S.exact_tanh or a.S.near_tanh:
        y = x * (a.scale / a.softcap)
        t = near_tanh(y) if a.S.near_tanh else tanh(y, True)
        if a.S.mask:
            exponent = masked(t, a.softcap, bias, minus_lse)
        else:
            exponent = gl.fma(t, cap, minus_lse)
        slope = one_less_square(t) if a.S.near_tanh else 1.0 - t * t
    else:  # tanh(y) = 1 - r with r = 2 / (1 + exp(2 y)); the exp may be infinite
        e = gl.exp2(x * (2.0 * LOG2E * a.scale / a.softcap))
        half = gl.fma(e, 0.5, 0.5)
        r = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [half], gl.float32, is_pure=True, pack=1)
        if a.S.mask:
            exponent = masked(r, -a.softcap, bias + a.softcap, minus_lse)
        else:
            exponent = gl.fma(r, -cap, minus_lse + cap)
        slope = r * (2.0 - r)
    return gl.exp2(exponent), slope
