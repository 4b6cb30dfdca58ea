"""Flipped (transposed) products of decode over quantised caches, whose columns are the few rows of q; and what decides
on them: head packing, hidden cells, storage.
"""

from __future__ import annotations

from ...core.problem import Problem
from ..gpu.flags import ceil_pow2
from .operands import operand
from .spec import Config


def pack_of(group: int, limit: int = 64) -> int:
    """How many of a group's query heads share a tile: the most that divide it and stay within `limit`."""
    return max(n for n in range(1, min(group, limit) + 1) if group % n == 0)


def hides(problem: Problem) -> bool:
    """Whether cells of a tile may be hidden: values under them must not affect a row, not even NaN."""
    return (
        problem.mask is not None
        or problem.tree
        or problem.biased
        or problem.mods is not None
        or (problem.rules.by_position and problem.sharing_queries > 1)
    )


def is_f16_quantised(problem: Problem) -> bool:
    """Whether K and V are quantised and multiplied in float16, with scales applied outside of the products."""
    p = problem
    k = operand(p, p.head_dim, p.k_format, True, 16)
    v = operand(p, p.value_dim, p.v_format, False, 16)
    return k.factored and v.factored and k.work == v.work == "f16"


def is_packed(problem: Problem) -> bool:
    """Whether a byte of K and of V holds more than one element."""
    return problem.k_format.packing > 1 < problem.v_format.packing


def has_wide_bytes(problem: Problem) -> bool:
    """Whether K and V are quantised to bytes and wider than 256 columns: with 64 rows of q no registers are left."""
    p = problem
    return is_f16_quantised(p) and p.k_format.packing == p.v_format.packing == 1 and max(p.head_dim, p.value_dim) > 256


def flips(problem: Problem) -> bool:
    """Whether products are flipped: keys are their rows, and up to 8 rows of q the columns. Only if no key is hidden:
    flipped products have no non-finite fix-up.
    """
    p = problem
    wide = max(p.head_dim, p.value_dim)
    few = pack_of(p.group) * p.sharing_queries <= 8 and wide <= 256
    return few and is_f16_quantised(p) and not hides(p)


def pieces(problem: Problem) -> int:
    """Scale groups of a row if they divide its bytes into pieces, the same for K and V; else 1. The nibbles of an int4
    byte are half a row apart, so that two groups share the same bytes.
    """
    p = problem
    if not p.k_format.is_quantised or p.k_format != p.v_format or p.head_dim != p.value_dim:
        return 1
    width, group = p.head_dim, p.k_format.group
    stored = p.k_format.columns(width)
    return width // group if width == ceil_pow2(width) and stored > group else 1


def flipped_columns(problem: Problem) -> int:
    """Columns of flipped products: 8, or 16 where groups of 32 need as many, since pieces of 32 bytes are not read in
    pairs.
    """
    p = problem
    small = p.k_format.group == 32
    return 16 if small and 8 < pack_of(p.group) * p.sharing_queries * pieces(p) <= 16 else 8


def row_groups(problem: Problem, c: Config) -> int:
    """Scale groups with their own columns in flipped products, 1 for none (`scale_groups.py`).

    Not where groups do not divide the bytes of a row, as int4 in groups of 64.
    """
    p = problem
    groups = pieces(p)
    return groups if flips(p) and pack_of(p.group) * p.sharing_queries * groups <= c.BM <= 16 else 1
