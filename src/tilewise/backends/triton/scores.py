"""From dot products to logits, in natural units and float32, in the order that SPEC gives: scale, softcap, ALiBi, bias.

Nothing here may depend on whether a tile is masked: a tile that a map calls full must give the same bits as the same
tile read through a mask of zeros. Kernels are compiled without fused multiply-adds for this reason.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """`(1 - t) / (1 + t)` with `t = exp(-2 |x|)`: no overflow, absolute error of about 1e-7."""
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def logits(s, scale, softcap, qpos, n, slope, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """`s` [BM, BK] of dot products to logits; `qpos`, `slope` [BM, 1], `n` [1, BK]."""
    s = s * scale
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    if ALIBI:
        s = s - slope * tl.abs(qpos - n).to(tl.float32)
    return s
