"""Scalar options: each `as_...` function checks what a caller may write and brings it into one form.

**Positions fit in 32 bits, with room.** With `LIMIT` = 2**29, whatever passes the checks obeys:

    Lq, Lk <= LIMIT                                        of each sequence
    q_offset + Lq <= LIMIT and Lk - q_offset <= LIMIT      so that |qpos - kpos| < LIMIT for every pair, -LIMIT < qpos
    0 <= left, right < LIMIT - 1, or None                  a wider side hides nothing: it becomes None
    1 <= chunk <= 2 * LIMIT                                a larger one hides the same: chunks also end at position 0
    1 <= split_size <= LIMIT
    k_stride, q_stride >= 1                                and |qpos|, |kpos|, |qpos - kpos| <= LIMIT as above

A kernel may therefore compute `qpos - left`, `qpos + right + 1`, `qpos // chunk * chunk + chunk` and `qpos - kpos` in
int32, also for the rows that pad a tile (with a `q_stride` those may wrap, but their spans are not used). Values in
tensors of offsets or lengths on a GPU are not read unless `validate=True`; out of range they give a meaningless result.

A `scale` that float32 rounds to 0 becomes 0, so that plan and kernel agree on its sign. A softcap is 0 or a normal
float32 number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from typing_extensions import TypedDict

from ..errors import InvalidArgument
from .expression.spans import Rules, least
from .mask_rules import PLAIN_PLACES, MaskRules, Offset, Places, Window

LIMIT = 2**29  # of positions and lengths: see above
Array = Any  # a torch tensor, a NumPy array, or anything with __dlpack__; results are of q's kind
Width = int | tuple[int | None, int | None]
LARGEST, LEAST = 3.4028234663852886e38, 1.1754943508222875e-38  # of normal float32 numbers


class RuleOptions(TypedDict, total=False):
    """The options that become `MaskRules`: rules, and positions of queries and keys."""

    causal: bool
    q_offset: Array | int | None
    k_start: Array | int
    k_stride: Array | int
    q_stride: Array | int
    window: Width | None
    chunk: int | None


STATISTICS = ("return_aux", "key_mass_queries", "weight_indices")  # options that request statistics


@dataclass(slots=True)
class Options:
    """The options of all entry points, unchecked. `signatures.py` says which entry point has which."""

    cu_seqlens_q: Any = None  # paged attention of packed queries; varlen attention has it as an argument
    max_q: Any = None
    max_k: Any = None

    scale: Any = None
    causal: Any = False
    q_offset: Any = None
    k_start: Any = 0
    k_stride: Any = 1
    q_stride: Any = 1
    window: Any = None
    chunk: Any = None
    mask: Any = None
    tree_mask: Any = None
    positions: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    q_bias: Any = None
    k_bias: Any = None
    sinks: Any = None
    score_mod: Any = None
    mask_mod: Any = None
    key_indices: Any = None
    block_indices: Any = None
    block_size: Any = None
    k_shared: Any = None
    dropout_p: Any = 0.0
    dropout_seed: Any = None
    kv_lengths: Any = None
    layout: Any = "bhld"
    tile_map: Any = None
    split_size: Any = None
    return_lse: Any = False
    return_aux: Any = None
    key_mass_queries: Any = None
    weight_indices: Any = None
    out: Any = None
    allow_tf32: Any = False
    deterministic: Any = True
    validate: Any = None
    backend: Any = None


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def to_int(value: Any) -> Any:
    """A NumPy integer as an int; anything else unchanged."""
    if type(value) is int or isinstance(value, bool) or not isinstance(value, Integral):
        return value
    return int(value)


def as_window(window: Any) -> Window:
    """(left, right): the keys on each side of the query's own. `W` is W keys with its own; None is unlimited."""
    remedy = "window=W means W keys with the query's own; None, not -1, means unlimited"
    if window is None:
        return (None, None)
    window = to_int(window)
    if is_int(window):
        if window < 1:
            raise InvalidArgument("window", window, "1 or more keys", remedy)
        return (_side(window - 1), None)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise InvalidArgument("window", repr(window), "an int or a pair (left, right)", remedy)
    left, right = map(to_int, window)
    for side in (left, right):
        if side is not None and (not is_int(side) or side < 0):
            raise InvalidArgument("window", repr(window), "sides that are None or an int of 0 or more", remedy)
    return (_side(left), _side(right))


def _side(keys: int | None) -> int | None:
    return None if keys is None or keys >= LIMIT - 1 else keys


def as_offset(offset: int, q_len: int, kv_len: int, name: str = "q_offset") -> int:
    """The position of the first query, checked against `LIMIT`."""
    if not kv_len - LIMIT <= offset <= LIMIT - q_len:
        raise InvalidArgument(name, offset, f"{kv_len - LIMIT} to {LIMIT - q_len}: Lk - {LIMIT} to {LIMIT} - Lq")
    return offset


PLACES = ("k_start", "k_stride", "q_stride")  # in the order of `MaskRules.places`


def as_places(given: Sequence[int], offset: Offset, q_len: int, kv_len: int, row: str = "") -> tuple[int, int, int]:
    """`PLACES` of a call or of one sequence; checks positions and distances against `LIMIT`.

    The stride of a single row has no effect and becomes 1.
    """
    for name, value in zip(PLACES, given, strict=True):
        if not (-LIMIT if name == "k_start" else 1) <= value <= LIMIT:
            raise InvalidArgument(name + row, value, f"{-LIMIT if name == 'k_start' else 1} to {LIMIT}")
    k_start, k_stride, q_stride = given
    places = (k_start, k_stride if kv_len > 1 else 1, q_stride if q_len > 1 else 1)
    if places == PLAIN_PLACES:
        return places
    keys = (k_start, k_start + places[1] * max(0, kv_len - 1))
    first = (offset, offset) if isinstance(offset, int) else (-q_len, kv_len)
    queries = (first[0], first[1] + places[2] * max(0, q_len - 1))
    reach = max(*map(abs, (*keys, *queries)), keys[1] - queries[0], queries[1] - keys[0])
    if reach > LIMIT:
        raise InvalidArgument(
            ", ".join(name + row for name in PLACES),
            f"{tuple(given)}, with keys at {keys[0]} to {keys[1]} and queries at {queries[0]} to {queries[1]}",
            f"positions and distances of at most {LIMIT}",
        )
    return places


def as_chunk(chunk: Any) -> int:
    if chunk is None:
        return 0
    chunk = to_int(chunk)
    if not is_int(chunk) or chunk < 1:
        raise InvalidArgument("chunk", repr(chunk), "None or an int of 1 or more")
    return min(int(chunk), 2 * LIMIT)


def as_rules(
    o: Options,
    q_offset: Offset = "end",
    kv_lengths: bool = False,
    places: Places = PLAIN_PLACES,
    sizes: tuple[int, int] | None = None,
) -> MaskRules:
    """The `MaskRules` of a call's options.

    `sizes` are the longest Lq and Lk. One query at the last position has no key after it: causal hides nothing there,
    and is dropped.
    """
    causal = as_flag("causal", o.causal)
    if causal and sizes is not None and sizes[0] <= 1 and places == PLAIN_PLACES:
        causal = not (q_offset == "end" or (isinstance(q_offset, int) and q_offset >= sizes[1] - 1))
    return MaskRules(causal, as_window(o.window), as_chunk(o.chunk), q_offset, kv_lengths, places)


def with_rules(o: Options, found: Rules) -> Options | None:
    """The options with the rules that a function states too; None if no option says both."""
    chunk = as_chunk(o.chunk)
    if found.chunk and chunk and found.chunk != chunk:
        return None
    left, right = as_window(o.window)
    causal = as_flag("causal", o.causal) or found.right == 0
    left = least(left, found.left)
    right = right if causal else least(right, found.right)
    window = None if left is None and right is None else (left, right)
    return replace(o, causal=causal, window=window, chunk=chunk or found.chunk or None)


def as_block(block_size: Any) -> int:
    """Keys of a block."""
    size = to_int(block_size)
    if not is_int(size) or not 1 <= size <= LIMIT:
        raise InvalidArgument("block_size", repr(block_size), f"the keys of a block, an int of 1 to {LIMIT}")
    return int(size)


def as_block_size(o: Options) -> int:
    """The keys in a block of `block_indices`; 1 for `key_indices`."""
    if o.block_indices is not None and o.key_indices is not None:
        raise InvalidArgument(
            "block_indices",
            "both block_indices and key_indices",
            "one of them",
            "key_indices can name every key of a block",
        )
    if o.block_indices is None:
        if o.block_size is not None:
            raise InvalidArgument("block_size", "given alone", "block_indices with it")
        return 1
    return as_block(o.block_size)


def as_split_size(split_size: Any) -> int | None:
    split_size = to_int(split_size)
    if split_size is not None and (not is_int(split_size) or split_size < 1):
        raise InvalidArgument("split_size", repr(split_size), "None or an int of 1 or more keys")
    return None if split_size is None else min(split_size, LIMIT)


def as_scale(scale: Any, head_dim: int) -> float:
    number = head_dim**-0.5 if scale is None else _finite("scale", scale)
    return float(number) if struct.unpack("f", struct.pack("f", number))[0] else 0.0


def as_softcap(softcap: Any) -> float:
    if softcap is None:
        return 0.0
    value = _finite("softcap", softcap, math.inf)
    if value < 0:
        raise InvalidArgument("softcap", softcap, "a positive number", "None or 0.0 turns it off")
    return min(max(value, LEAST), LARGEST) if value else 0.0  # far above every score it changes nothing


def as_dropout_p(dropout_p: Any) -> float:
    """The probability, as a multiple of 2**-16: a cell compares a number of 16 bits with it."""
    value = _finite("dropout_p", dropout_p)
    if not 0 <= value <= 1:
        raise InvalidArgument("dropout_p", dropout_p, "0.0 to 1.0")
    return round(value * 2**16) / 2**16


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(name, repr(value), "True or False")
    return value


def as_tile(name: str, tile: Any) -> tuple[int, int]:
    sizes = tuple(map(to_int, tile)) if isinstance(tile, (tuple, list)) else ()
    if len(sizes) != 2 or not all(is_int(t) and 1 <= t <= LIMIT for t in sizes):
        raise InvalidArgument(name, repr(tile), f"a pair (BQ, BK) of ints of 1 to {LIMIT}")
    return (sizes[0], sizes[1])


def _finite(name: str, value: Any, below: float = math.nextafter(LARGEST, math.inf)) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):  # no tensors: reading one may wait for its device
        remedy = f"float({name})" + "; multiply q by a learned scale" * (name == "scale")
        raise InvalidArgument(name, repr(value), "a finite number", remedy if hasattr(value, "item") else "")
    try:
        number = float(value)
    except OverflowError:  # of a huge int
        number = math.inf
    if not abs(number) < below:
        raise InvalidArgument(name, number, "a finite number" + " of float32" * (below < math.inf))
    return number


def as_size(name: str, size: Any) -> int:
    size = to_int(size)
    if not is_int(size) or not 0 <= size <= LIMIT:
        raise InvalidArgument(name, repr(size), f"an int of 0 to {LIMIT}")
    return int(size)
