"""From dot products to logits, in natural units and float32, in the order of semantics.md: scale, softcap, ALiBi, bias.

Nothing here may depend on whether a tile is masked: a tile that a map calls full must give the same bits as the same
tile read through a mask of zeros. Kernels are compiled without fused multiply-adds for this reason.
"""

import triton.language as tl

import triton

from ..gpu.flags import TANH_3, TANH_5, TANH_7

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
C3: tl.constexpr = tl.constexpr(TANH_3)
C5: tl.constexpr = tl.constexpr(TANH_5)
C7: tl.constexpr = tl.constexpr(TANH_7)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """`(1 - t) / (1 + t)` with `t = exp(-2 |x|)`: no overflow, absolute error of about 1e-7. EXACT: near 0, where
    `1 - t` cancels, a polynomial, with a relative error of 1e-7.
    """
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    y = tl.where(x < 0, -y, y)
    if EXACT:
        u = x * x
        y = tl.where(u < 0.0625, x + x * u * (C3 + u * (C5 + u * C7)), y)
    return y


@triton.jit
def logits(
    s, scale, softcap, qpos, kpos, slope, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, ALIBI: tl.constexpr
):  # fmt: skip
    """Dot products `s` [BM, BK] to logits; `qpos`, `slope` [BM, 1], `kpos` [1, BK]."""
    s = s * scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap, EXACT)
    if ALIBI:
        s = s - slope * tl.abs(qpos - kpos).to(tl.float32)
    return s


@triton.jit
def rank_one(n, ok, added, S: tl.constexpr):
    """Biases of a tile's rows and of keys `n` [BK]: their sum [BM, BK], or one alone, [BM, 1] or [1, BK]."""
    own, at, row_ok, stride = added
    if S.k_bias:
        if S.pack == 1:
            other = tl.load(at + n.to(tl.int64) * stride, mask=ok, other=0.0)[None, :]
        else:  # rows of several heads
            there = row_ok[:, None] & ok[None, :]
            other = tl.load(at[:, None] + n.to(tl.int64)[None, :] * stride, mask=there, other=0.0)
        own = own + other
    return own
