"""Arguments that both caches share, and the operands that a cache passes to a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from ..core.kv_store import RowFormat, Store
from ..core.problem import MAX_HEAD_DIM
from ..core.storage import short_name
from ..errors import InvalidArgument
from ..quantised import Quantised
from . import hadamard
from .integers import integer

MOST_LAYERS = 2**16  # each has a number for every sequence
Made = TypeVar("Made")


def operand(store: Store) -> torch.Tensor | Quantised:
    """A store as K, V or pages of a call."""
    if not store.format.is_quantised:
        return store.data
    return Quantised(store.data, store.scales, store.format.name, store.format.group)  # type: ignore[arg-type]


def size(argument: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    """An int from `least` to `most`; kernels count in int32."""
    number = integer(value)
    if number is None or not least <= number <= most:
        # Python refuses to print an int of thousands of digits.
        given = repr(value) if number is None or number.bit_length() <= 64 else f"an int of {number.bit_length()} bits"
        raise InvalidArgument(argument, given, f"an int, {least} to {most}")
    return number


def allocate_or_refuse(make: Callable[[], Made], **sizes: int) -> Made:
    """Calls `make`, which allocates memory. Errors become `InvalidArgument`, except a GPU that is out of memory."""
    try:
        return make()
    except torch.OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError, OverflowError, ValueError) as error:
        given = " x ".join(map(str, sizes.values()))
        raise InvalidArgument(" x ".join(sizes), given, "sizes that fit in memory", str(error)) from error


def flag(argument: str, value: Any) -> bool:
    """Checks for True or False: a string or a number is more likely a mistake."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(argument, repr(value), "True or False")
    return bool(value)


def described(cache: Any, **facts: Any) -> str:
    """The `repr` of a cache: sizes, storage and contents."""
    k, v = cache.k_format, cache.v_format
    facts |= {"kv_heads": cache.kv_heads, "head_dim": k.width}
    facts |= {"latent" if cache.latent else "value_dim": v.width} if v.width != k.width else {}
    facts |= {"dtype": repr(k.name)} | ({"v_dtype": repr(v.name)} if v.name != k.name else {})
    facts |= {"group": k.group or v.group} if k.group or v.group else {}
    facts |= {"rotate": True} if cache.rotate else {}
    facts |= {"device": repr(str(cache.device)), "nbytes": cache.nbytes}
    return f"{type(cache).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"


def token_bytes(cache: Any) -> int:
    """Bytes of a token's key and value in one head, scales included."""
    return int(cache.k_format.bytes + (0 if cache.latent else cache.v_format.bytes))


def check_rotation(cache: Any) -> None:
    if cache.rotate and cache.latent:
        raise InvalidArgument(
            "rotate", "True with latent", "False: V is a slice of K here, so rotating K would also rotate V"
        )
    if cache.rotate:
        hadamard.check("head_dim", cache.k_format.width)
        hadamard.check("value_dim", cache.v_format.width)


def head_width(argument: str, value: Any) -> int:
    return size(argument, value, 1, MAX_HEAD_DIM)


def formats_of(
    head_dim: Any, value_dim: Any, dtype: Any, v_dtype: Any, group: Any, latent: Any = None
) -> tuple[RowFormat, RowFormat]:
    """The formats of K and V, from the arguments that both caches share."""
    width = head_width("head_dim", head_dim)
    value_width = width if value_dim is None else head_width("value_dim", value_dim)
    k = RowFormat.of("dtype", dtype, group, width)
    if latent is not None:
        v = RowFormat.of("dtype", dtype, group, size("latent", latent, 1, width - 1))
        if k.storage.packing > 1:
            given, wanted = f"{k.name!r} with latent", "one whose first elements are its first bytes"
            raise InvalidArgument("dtype", given, wanted, "use 'int8'")
        for name, given, own in (("value_dim", value_dim, v.width), ("v_dtype", v_dtype, k.name)):
            if given is not None and short_name(given) != own:
                raise InvalidArgument(name, f"{given!r} with latent", f"None or {own!r}: values are in the keys")
        return k, v
    return k, RowFormat.of("v_dtype", dtype if v_dtype is None else v_dtype, group, value_width)
