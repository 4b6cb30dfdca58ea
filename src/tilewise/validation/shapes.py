"""Shapes that are legal but hardly meant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

MOST_HEADS = 256  # of any known model
USUAL = frozenset((1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 71, 72, 80, 96, 112, 128))

_warned = False


def warn_if_transposed(heads: int, rows: int, k_shape: Sequence[int], form: str) -> None:
    """Warns, once in a process, of tensors that are nearly certainly `[B, L, H, D]` given as `[B, H, L, D]`, or the
    other way round: more heads than any model has, over as many rows as models have heads, in q and in K.
    """
    global _warned
    kv_heads, keys = k_shape[1:3]
    if heads <= MOST_HEADS or _warned or kv_heads <= MOST_HEADS:
        return
    if not (rows > 1 and rows in USUAL and keys in USUAL and rows % keys == heads % kv_heads == 0):
        return
    _warned = True
    other = "'bhld'" if form == "[B, L, H, D]" else "'blhd'"
    warnings.warn(
        f"q as {form} has {heads} heads of {rows} rows each: if these are {heads} rows of {rows} heads, layout={other} "
        "(or transpose(1, 2) of q, k and v) says so; otherwise the result is wrong",
        stacklevel=2,
    )
