"""An `attend` of either cache: its options, rotation, and the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.arrays import converter_back, to_tensor, to_write
from ..core.options import PLACES, is_int
from ..errors import InvalidArgument
from ..state import map_result
from . import hadamard

# Options of the caller with values that `validate` checks
VALUES = ("positions", "q_offset", *PLACES, "tile_map", "key_indices", "block_indices")


def rounded(n: int) -> int:
    """`n` rounded up a little, so that a length that grows token by token does not need a new plan at each step.

    >>> [rounded(n) for n in (0, 7, 8, 9, 15, 17, 100, 129)]
    [0, 7, 8, 10, 16, 20, 112, 160]
    """
    step = max(1, 1 << n.bit_length() - 1 >> 2) if n else 1
    return -(-n // step) * step


def is_seq_major(options: dict[str, Any]) -> bool:
    """Whether `layout` is seq-major; the call checks the option itself."""
    layout = options.get("layout")
    return isinstance(layout, str) and layout == "blhd"


def refuse(options: dict[str, Any], names: dict[str, str]) -> None:
    """Refuses options of `attention` that the cache sets itself; `names` has the remedies."""
    for name, remedy in names.items():
        if options.get(name) is not None:
            raise InvalidArgument(name, "an option of attend", "none: the cache sets it", remedy)


def needs_packed(options: dict[str, Any]) -> bool:
    """Whether queries that not all sequences have must be left out of the call: a tree would count them, and so would
    `key_mass`.
    """
    return options.get("tree_mask") is not None or "key_mass" in (options.get("return_aux") or ())


def check_width(options: dict[str, Any], least: int, most: int | None = None) -> int | None:
    """How many keys the caller's mask, bias or tile map is for; None if no option says it.

    All that the longest row has, `least`: values of lengths on a GPU are not read, and cells past the end would be.
    """
    shapes: dict[str, Any] = {name: getattr(options.get(name), "shape", ()) for name in ("mask", "k_bias", "tile_map")}
    if shapes["mask"][-1:] == (1,):  # broadcast, as its map is
        mapped = options.get("tile_map")
        shapes |= {"mask": (), "tile_map": () if getattr(mapped, "spec", None) is None else shapes["tile_map"]}
    for name, shape in shapes.items():
        if len(shape):
            width = int(shape[-1])
            if not least <= width or (most is not None and width > most):
                limit = f"{least} or more: the longest row"
                if most is not None:
                    limit = f"{least} to {most}: the longest row, up to the capacity"
                raise InvalidArgument(name, f"{width} keys, its last dim", limit)
            return width
    return None


def attend(q: Any, call: Callable[..., Any], rotate: bool, options: dict[str, Any]) -> Any:
    """`call(q, **options)`; for a rotated cache, q is rotated like its keys and the output is rotated back."""
    if all(options.get(name) is None or is_int(options[name]) for name in VALUES):
        options.setdefault("validate", False)  # lengths and tables are the cache's own
    try:
        return _attend(q, call, rotate, options)
    except InvalidArgument as error:
        if error.argument in ("k", "v", "k_pages", "v_pages"):  # the caller gave only q
            shape = f"{tuple(getattr(q, 'shape', ()))} {getattr(q, 'dtype', '')}"
            raise InvalidArgument("q", shape, "a query that fits the cache", str(error)) from None
        raise


def _attend(q: Any, call: Callable[..., Any], rotate: bool, options: dict[str, Any]) -> Any:
    if not rotate:
        return call(q, **options)
    back, out = converter_back(q), options.pop("out", None)
    result = call(hadamard.rotate(to_tensor("q", q)), **options)

    def rotated(x: torch.Tensor) -> Any:
        x = hadamard.rotate_back(x)
        return back(x if out is None else copy_to_out(out, x))

    return map_result(result, rotated, back)


def copy_to_out(out: Any, x: torch.Tensor) -> torch.Tensor:
    """Copies a result to the caller's `out`."""
    to = to_write("out", out)
    if to.shape != x.shape or to.dtype != x.dtype or to.device != x.device:
        given = f"{tuple(to.shape)} {to.dtype} on {to.device}"
        raise InvalidArgument("out", given, f"{tuple(x.shape)} {x.dtype} on {x.device}")
    return to.copy_(x)
