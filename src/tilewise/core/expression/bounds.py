"""Bounds of operations on tiles: for each operation of `node.py`, from the bounds of its arguments to its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .build import LEAST, MOST

Tensor = torch.Tensor
ROUNDING = 1e-6  # relative: of float32 operations, and of their approximations in kernels
LARGEST, TINY = 3.4028234663852886e38, 1.1754943508222875e-38


class Range(NamedTuple):
    """Bounds of a node on each tile, of shapes that broadcast: int64, float64, or bools (False < True)."""

    lo: Tensor
    hi: Tensor
    nan: Tensor | None = None  # floats: where it may be NaN

    @property
    def maybe_nan(self) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=self.lo.device) if self.nan is None else self.nan


def point(x: Tensor) -> Range:
    """Known values."""
    return Range(x, x)


# Numbers


def wrapped(x: Range) -> Range:
    """Ints that may not fit in 32 bits may be anything."""
    if x.lo.dtype != torch.int64:
        return x
    out = (x.lo < LEAST) | (x.hi > MOST)
    return Range(torch.where(out, LEAST, x.lo), torch.where(out, MOST, x.hi)) if bool(out.any()) else x


def rounded(lo: Tensor, hi: Tensor, nan: Tensor | None = None) -> Range:
    """Bounds of a float operation whose exact results are in `[lo, hi]`; beyond float32 is infinite."""
    lo = torch.where(lo.isfinite(), lo - lo.abs() * ROUNDING - TINY, lo)
    hi = torch.where(hi.isfinite(), hi + hi.abs() * ROUNDING + TINY, hi)
    lo = torch.where(lo < -LARGEST, -math.inf, lo.clamp_max(LARGEST))
    hi = torch.where(hi > LARGEST, math.inf, torch.where(hi == -math.inf, hi, hi.clamp_min(-LARGEST)))
    return Range(lo, hi, nan)


def _nan_of(*args: Range, more: Tensor | None = None) -> Tensor | None:
    found = more
    for x in args:
        if x.nan is not None:
            found = x.nan if found is None else found | x.nan
    return found


def _is_float(x: Range) -> bool:
    return x.lo.dtype == torch.float64


def _add(a: Range, b: Range) -> Range:
    if not _is_float(a):
        return Range(a.lo + b.lo, a.hi + b.hi)
    opposite = ((a.hi == math.inf) & (b.lo == -math.inf)) | ((a.lo == -math.inf) & (b.hi == math.inf))
    lo, hi = a.lo + b.lo, a.hi + b.hi
    lo, hi = torch.where(lo.isnan(), -math.inf, lo), torch.where(hi.isnan(), math.inf, hi)
    return rounded(lo, hi, _nan_of(a, b, more=opposite))


def _neg(a: Range) -> Range:
    return Range(-a.hi, -a.lo, a.nan)


def _of_corners(results: list[Tensor], a: Range, b: Range, unknown: Tensor) -> Range:
    """A float operation that is monotone in each argument: its bounds are among the corners, where none is NaN."""
    corners = torch.stack(torch.broadcast_tensors(*results))
    unknown = unknown | corners.isnan().any(0)
    lo = torch.where(unknown, -math.inf, corners.amin(0))
    hi = torch.where(unknown, math.inf, corners.amax(0))
    return rounded(lo, hi, _nan_of(a, b, more=unknown))


def _pairs(operation: Callable[[Tensor, Tensor], Tensor], a: Range, b: Range) -> list[Tensor]:
    return [operation(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]


def _mul(a: Range, b: Range) -> Range:
    corners = _pairs(torch.mul, a, b)
    if not _is_float(a):
        low = torch.minimum(torch.minimum(corners[0], corners[1]), torch.minimum(corners[2], corners[3]))
        high = torch.maximum(torch.maximum(corners[0], corners[1]), torch.maximum(corners[2], corners[3]))
        return Range(low, high)
    zero_by_inf = (_has_zero(a) & _has_inf(b)) | (_has_inf(a) & _has_zero(b))
    return _of_corners(corners, a, b, zero_by_inf)


def _has_zero(x: Range) -> Tensor:
    return (x.lo <= 0) & (x.hi >= 0)


def _has_inf(x: Range) -> Tensor:
    return (x.lo == -math.inf) | (x.hi == math.inf)


def _div(a: Range, b: Range) -> Range:
    near_zero = (b.lo <= TINY) & (b.hi >= -TINY)  # a kernel may flush it to 0
    return _of_corners(_pairs(torch.div, a, b), a, b, near_zero | (_has_inf(a) & _has_inf(b)))


def _floordiv(a: Range, b: Range) -> Range:
    zero = _has_zero(b)
    sizes = torch.maximum(a.lo.abs(), a.hi.abs())

    def divide(x: Tensor, y: Tensor) -> Tensor:
        return torch.div(x, torch.where(y == 0, 1, y), rounding_mode="floor")

    corners = torch.stack(torch.broadcast_tensors(*_pairs(divide, a, b)))
    return Range(torch.where(zero, -sizes - 1, corners.amin(0)), torch.where(zero, sizes + 1, corners.amax(0)))


def _mod(a: Range, b: Range) -> Range:
    known = (b.lo == b.hi) & (b.lo != 0)
    safe = torch.where(known, b.lo, 1)
    first, last = (torch.div(x, safe, rounding_mode="floor") for x in (a.lo, a.hi))
    exact = known & (first == last)
    lo = torch.where(exact, a.lo - first * safe, torch.minimum(b.lo + 1, torch.zeros_like(b.lo)))
    hi = torch.where(exact, a.hi - last * safe, torch.maximum(b.hi - 1, torch.zeros_like(b.hi)))
    return Range(lo, hi)


def _abs(a: Range) -> Range:
    lo = torch.where(a.lo > 0, a.lo, torch.where(a.hi < 0, -a.hi, torch.zeros_like(a.lo)))
    return Range(lo, torch.maximum(a.lo.abs(), a.hi.abs()), a.nan)


def _extreme(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Range, Range], Range]:
    return lambda a, b: Range(operation(a.lo, b.lo), operation(a.hi, b.hi), _nan_of(a, b))


def _rising(function: Callable[[Tensor], Tensor], least: float, most: float) -> Callable[[Range], Range]:
    """A function that never falls, with results from `least` to `most`."""

    def rule(a: Range) -> Range:
        lo, hi, nan = rounded(function(a.lo), function(a.hi), a.nan)
        return Range(lo.clamp(least, most), hi.clamp(least, most), nan)

    return rule


def _of_positive(function: Callable[[Tensor], Tensor]) -> Callable[[Range], Range]:
    """The same for one that has no results below 0. Near 0, a kernel may take 0."""

    def rule(a: Range) -> Range:
        below = a.lo < 0
        small = a.lo <= TINY
        lo = torch.where(small, function(torch.zeros_like(a.lo)), function(a.lo.clamp_min(0)))
        return rounded(lo, function(a.hi.clamp_min(0)), _nan_of(a, more=below))

    return rule


def _rsqrt(a: Range) -> Range:
    lo = torch.rsqrt(a.hi.clamp_min(0))
    hi = torch.where(a.lo <= TINY, math.inf, torch.rsqrt(a.lo.clamp_min(TINY)))
    return rounded(lo, hi, _nan_of(a, more=a.lo < 0))


def _wave(a: Range) -> Range:
    one = torch.ones_like(a.lo)
    return rounded(-one, one, _nan_of(a, more=_has_inf(a)))


def _where(c: Range, a: Range, b: Range) -> Range:
    lo = torch.where(c.lo, a.lo, torch.where(c.hi, torch.minimum(a.lo, b.lo), b.lo))
    hi = torch.where(c.lo, a.hi, torch.where(c.hi, torch.maximum(a.hi, b.hi), b.hi))
    if a.nan is None and b.nan is None:
        return Range(lo, hi)
    return Range(lo, hi, (c.hi & a.maybe_nan) | (~c.lo & b.maybe_nan))


def _to_float(a: Range) -> Range:
    lo, hi = a.lo.double(), a.hi.double()
    if a.lo.dtype == torch.bool or not bool((torch.maximum(lo.abs(), hi.abs()) > 2**24).any()):
        return Range(lo, hi)
    return rounded(lo, hi)


def _to_int(a: Range) -> Range:
    if not _is_float(a):
        return Range(a.lo.long(), a.hi.long())
    lo, hi = (x.clamp(LEAST, MOST).trunc().long() for x in (a.lo, a.hi))
    if a.nan is None:
        return Range(lo, hi)
    return Range(torch.where(a.nan, lo.clamp_max(0), lo), torch.where(a.nan, hi.clamp_min(0), hi))


NUMBERS: dict[str, Callable[..., Range]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _neg(b)),
    "mul": _mul,
    "div": _div,
    "floordiv": _floordiv,
    "mod": _mod,
    "max": _extreme(torch.maximum),
    "min": _extreme(torch.minimum),
    "neg": _neg,
    "abs": _abs,
    "where": _where,
    "float": _to_float,
    "int": _to_int,
    "exp": _rising(torch.exp, 0.0, math.inf),
    "exp2": _rising(torch.exp2, 0.0, math.inf),
    "tanh": _rising(torch.tanh, -1.0, 1.0),
    "sigmoid": _rising(torch.sigmoid, 0.0, 1.0),
    "log": _of_positive(torch.log),
    "log2": _of_positive(torch.log2),
    "sqrt": _of_positive(torch.sqrt),
    "rsqrt": _rsqrt,
    "sin": _wave,
    "cos": _wave,
    "floor": lambda a: Range(a.lo.floor(), a.hi.floor(), a.nan),
    "ceil": lambda a: Range(a.lo.ceil(), a.hi.ceil(), a.nan),
}


# Bits of ints


def _bits(op: str) -> Callable[[Range, Range], Range]:
    operation = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}[op]

    def rule(a: Range, b: Range) -> Range:
        known, positive = (a.lo == a.hi) & (b.lo == b.hi), (a.lo >= 0) & (b.lo >= 0)
        exact = operation(a.lo, b.lo)
        if op == "and":
            most = torch.minimum(a.hi, b.hi)
        else:  # all bits below that of the larger one
            most = torch.exp2(torch.frexp(torch.maximum(a.hi, b.hi).double())[1].double()).long() - 1
        lo = torch.where(known, exact, torch.where(positive, 0, LEAST))
        return Range(lo, torch.where(known, exact, torch.where(positive, most, MOST)))

    return rule


BITS: dict[str, Callable[..., Range]] = {op: _bits(op) for op in ("and", "or", "xor")} | {
    "not": lambda a: Range(-1 - a.hi, -1 - a.lo)
}


# Conditions


def _eq(a: Range, b: Range) -> Range:
    nan = _nan_of(a, b)
    never = (a.hi < b.lo) | (b.hi < a.lo)
    always = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
    return Range(always if nan is None else always & ~nan, ~never)


def _less(sure: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        nan, always = _nan_of(a, b), sure(a.hi, b.lo)
        return Range(always if nan is None else always & ~nan, sure(a.lo, b.hi))

    return rule


def _not(a: Range) -> Range:
    return Range(~a.hi, ~a.lo)


def _xor(a: Range, b: Range) -> Range:
    known = (a.lo == a.hi) & (b.lo == b.hi)
    return Range(known & (a.lo ^ b.lo), ~known | (a.lo ^ b.lo))


BOOLS: dict[str, Callable[..., Range]] = {
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
    "lt": _less(torch.lt),
    "le": _less(torch.le),
    "and": lambda a, b: Range(a.lo & b.lo, a.hi & b.hi),
    "or": lambda a, b: Range(a.lo | b.lo, a.hi | b.hi),
    "xor": _xor,
    "not": _not,
    "where": lambda c, a, b: Range(
        torch.where(c.lo, a.lo, torch.where(c.hi, a.lo & b.lo, b.lo)),
        torch.where(c.lo, a.hi, torch.where(c.hi, a.hi | b.hi, b.hi)),
    ),
}
