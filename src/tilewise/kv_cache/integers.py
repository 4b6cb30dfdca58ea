"""Ints as callers give them: Python's, NumPy's or a tensor with one element; never a bool."""

from __future__ import annotations

from operator import index
from typing import Any


def integer(value: Any) -> int | None:
    """`value` as an int, or None if it is not an int.

    >>> import numpy as np
    >>> [integer(x) for x in (3, np.int64(3), True, np.True_, 3.0, "3")]
    [3, 3, None, None, None, None]
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return index(value)
    except (TypeError, ValueError, RuntimeError):
        return None
