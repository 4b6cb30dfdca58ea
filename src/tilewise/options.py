"""Options brought into one form, with their errors. Each function takes what a user may write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from .errors import InvalidArgument
from .problem import Window


@dataclass(slots=True)
class Options:
    """The options that all entry points share, as the caller gave them."""

    scale: Any = None
    causal: Any = False
    q_offset: Any = None
    window: Any = None
    chunk: Any = None
    mask: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    kv_lengths: Any = None
    layout: Any = "bhld"
    tile_map: Any = None
    split_size: Any = None
    return_lse: Any = False
    out: Any = None
    allow_tf32: Any = False
    validate: Any = None


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def as_window(window: Any) -> Window:
    """`W` means W keys with the query's own, `(left, right)` counts keys beside it, None is unlimited."""
    remedy = "window=W is W keys with the query's own; None, not -1, is unlimited"
    if window is None:
        return (None, None)
    if is_int(window):
        if window < 1:
            raise InvalidArgument("window", window, "1 or more keys", remedy)
        return (window - 1, None)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise InvalidArgument("window", repr(window), "an int or a pair (left, right)", remedy)
    for side in window:
        if side is not None and (not is_int(side) or side < 0):
            raise InvalidArgument("window", repr(window), "sides that are None or an int of 0 or more", remedy)
    return (window[0], window[1])


def as_chunk(chunk: Any) -> int:
    if chunk is None:
        return 0
    if not is_int(chunk) or chunk < 1:
        raise InvalidArgument("chunk", repr(chunk), "None or an int of 1 or more")
    return int(chunk)


def as_split_size(split_size: Any) -> int | None:
    if split_size is not None and (not is_int(split_size) or split_size < 1):
        raise InvalidArgument("split_size", repr(split_size), "None or an int of 1 or more keys")
    return split_size


def as_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    return _finite("scale", scale)


def as_softcap(softcap: Any) -> float:
    if softcap is None:
        return 0.0
    value = _finite("softcap", softcap)
    if value < 0:
        raise InvalidArgument("softcap", softcap, "a positive number", "None or 0.0 turns it off")
    return value


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(name, repr(value), "True or False")
    return value


def as_tile(name: str, tile: Any) -> tuple[int, int]:
    if not (isinstance(tile, (tuple, list)) and len(tile) == 2 and all(is_int(t) and t >= 1 for t in tile)):
        raise InvalidArgument(name, repr(tile), "a pair (BQ, BK) of ints of 1 or more")
    return (tile[0], tile[1])


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):  # a tensor could hide a wait for its device
        raise InvalidArgument(name, repr(value), "a finite number")
    if not math.isfinite(value):
        raise InvalidArgument(name, value, "a finite number")
    return float(value)
