"""Operations of printed functions that Triton has no name for: as `core/expression/evaluate.py` defines them."""

import triton.language as tl

import triton

from .score_mod import tanh


@triton.jit
def larger(x, y):
    """NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tanh_of(x):
    return tanh(x, True)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def floor_quotient(x, y):
    """x / y of ints, rounded down; 0 by 0. By -1 it is -x, also of the least int, whose quotient does not fit."""
    safe = tl.where((y == 0) | (y == -1), 1, y)
    quotient = x // safe  # rounded towards 0
    rest = x - quotient * safe
    quotient = quotient - ((rest != 0) & ((rest < 0) != (safe < 0))).to(tl.int32)
    return tl.where(y == 0, 0, tl.where(y == -1, 0 - x, quotient))


@triton.jit
def floor_remainder(x, y):
    """The remainder of that, with the sign of y; 0 by 0."""
    safe = tl.where((y == 0) | (y == -1), 1, y)
    rest = x - x // safe * safe
    rest = tl.where((rest != 0) & ((rest < 0) != (safe < 0)), rest + safe, rest)
    return tl.where((y == 0) | (y == -1), 0, rest)


@triton.jit
def nearest_int(x):
    """Towards 0; the nearest int if it does not fit; 0 of NaN."""
    inside = tl.where((x >= -2147483648.0) & (x < 2147483648.0), x, 0.0)  # false for NaN
    y = inside.to(tl.int32)
    return tl.where(x >= 2147483648.0, 2147483647, tl.where(x < -2147483648.0, -2147483648, y))


@triton.jit
def clamped(index, size):
    """An index into a dim: from the end if it is negative, then clamped."""
    index = tl.where(index < 0, index + size, index)
    return tl.maximum(tl.minimum(index, size - 1), 0)


@triton.jit
def apply_mods(s, visible, cells, S: tl.constexpr):
    """What the functions of the user make of scores `s` [BM, BK], and which of the visible cells they leave. `cells`:
    batch row, heads, positions of queries and of keys, which broadcast to the scores, and the captured tensors.
    """
    b, h, q, k, captured = cells
    given = s
    if S.mods.score is not None:
        s = tl.broadcast_to(S.mods.score(given, b, h, q, k, captured), given.shape)
        visible = visible & (s != float("-inf"))
    if S.mods.mask is not None:
        visible = visible & S.mods.mask(given, b, h, q, k, captured)
    return s, visible


@triton.jit
def differentiate_mods(s, cells, S: tl.constexpr):
    """The scores that functions of the user make of `s`, -inf in cells that they hide; the derivative by `s`, and a
    tuple of those by elements of captured tensors.
    """
    b, h, q, k, captured = cells
    given = s
    slope = 1.0
    by_loads = ()
    if S.mods.score is not None:
        s, slope, by_loads = S.mods.score(given, b, h, q, k, captured)
        s = tl.broadcast_to(s, given.shape)
    if S.mods.mask is not None:
        s = tl.where(S.mods.mask(given, b, h, q, k, captured), s, float("-inf"))
    return s, slope, by_loads
