"""Checks that both caches share: new rows, counts, ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.arrays import with_memory
from ..core.kv_store import RowFormat
from ..core.options import as_offset
from ..errors import InvalidArgument
from ..validation.arguments import FLOATS
from .integers import integer

if TYPE_CHECKING:
    from .contiguous import KVCache
    from .paged import PagedKVCache

MOST = 2**31 - 1  # tokens of a sequence and of a call: kernels count in int32


def rows(name: str, x: Any, heads: int, fmt: RowFormat, device: torch.device, packed: bool) -> torch.Tensor:
    """New keys or values as `[B, Hkv, L, D]`, or `[1, Hkv, T, D]` if they are packed."""
    x = with_memory(name, x)
    form = "[T, Hkv, D]" if packed else "[B, Hkv, L, D]"
    if x.ndim != (3 if packed else 4):
        raise InvalidArgument(name, f"shape {tuple(x.shape)}", form)
    if packed:
        x = x.transpose(0, 1)[None]
    if x.shape[1] != heads or x.shape[3] != fmt.width:
        given = f"{x.shape[1]} heads of {x.shape[3]}"
        raise InvalidArgument(name, given, f"{heads} heads of {fmt.width}, in the form {form}")
    if x.dtype not in FLOATS:
        raise InvalidArgument(name, x.dtype, "float32, float16 or bfloat16")
    if x.device != device:
        raise InvalidArgument(name, f"device {x.device}", f"{device}, where the cache is")
    if x.requires_grad and torch.is_grad_enabled():
        remedy = f"call under torch.no_grad(), or hand in {name}.detach()"
        raise InvalidArgument(
            name, "a tensor that requires grad", "one that does not: a cache has no gradients", remedy
        )
    x = x.detach()
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def both_rows(cache: KVCache | PagedKVCache, k: Any, v: Any, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """New keys and values, as `rows`."""
    k = rows("k", k, cache.kv_heads, cache.k_format, cache.device, packed)
    if cache.latent:
        if v is not None:
            raise InvalidArgument("v", "values for a latent cache", "None: they are the first elements of k")
        return k, k[..., : cache.v_format.width]
    v = rows("v", v, cache.kv_heads, cache.v_format, cache.device, packed)
    if k.shape[:3] != v.shape[:3]:
        given, want = (tuple(x.shape[:3]) for x in (v, k))
        raise InvalidArgument("v", f"(batch, heads, rows) = {given}", f"{want}, as k")
    return k, v


def new_rows(cache: PagedKVCache, k: Any, v: Any, counts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """New keys and values as `[B, Hkv, L, D]`, or packed as `[1, Hkv, T, D]`, and which; checked against `counts`."""
    packed = len(getattr(k, "shape", ())) == 3
    k, v = both_rows(cache, k, v, packed)
    if packed and k.shape[2] != counts.sum():
        raise InvalidArgument("k", f"{k.shape[2]} packed rows", f"{int(counts.sum())}, one for each new token")
    if not packed and (k.shape[0] != len(counts) or k.shape[2] < counts.max(initial=0)):
        want = f"{len(counts)} rows of {int(counts.max(initial=0))} or more, one for each sequence"
        raise InvalidArgument("k", f"{k.shape[0]} rows of {k.shape[2]} tokens", want)
    return k, v, packed


def ints(name: str, source: Any, expected: str) -> np.ndarray:
    """A list, array or tensor of ints as a NumPy array; bools are refused."""
    try:
        if isinstance(source, torch.Tensor):
            source = source.cpu().numpy()
        values = np.asarray(source)
    except (ValueError, TypeError, RuntimeError):
        raise InvalidArgument(name, repr(source), expected) from None
    if values.size and values.dtype.kind not in "iu":
        raise InvalidArgument(name, f"{values.dtype} of shape {values.shape}", expected)
    if isinstance(source, (list, tuple)) and bool in set(map(type, source)):
        raise InvalidArgument(name, "a bool among ints", expected)
    return values


def counts(name: str, source: Any, batch: int, most: int | None = None) -> np.ndarray:
    """New tokens of each sequence, or one number for all, as int64 `[batch]`."""
    limit = MOST if most is None else most
    number = None if getattr(source, "shape", ()) else integer(source)
    if number is not None and 0 <= number <= limit:
        return np.full(batch, number, dtype=np.int64)
    expected = f"ints, one for each of {batch} rows"
    values = ints(name, source if number is None else [number] * batch, expected)
    if values.shape != (batch,):
        raise InvalidArgument(name, f"{values.dtype} of shape {values.shape}", expected)
    wrong = (values < 0) | (values > limit)
    if wrong.any():
        bad = int(np.argmax(wrong))
        allowed = f"0 to {limit}" + ("" if most is None else ", the rows that were given")
        raise InvalidArgument(f"{name}[{bad}]", int(values[bad]), allowed)
    return values.astype(np.int64)


def offsets(source: Any, batch: int, q_len: int, kv_len: int) -> np.ndarray:
    """`q_offset` of each row, as int64 `[batch]`."""
    expected = f"None, an int or ints, one for each of {batch} rows"
    number = None if getattr(source, "shape", ()) else integer(source)
    values = ints("q_offset", source if number is None else [number] * batch, expected)
    if values.shape != (batch,):
        raise InvalidArgument("q_offset", f"{values.dtype} of shape {values.shape}", expected)
    for b, offset in enumerate(values.tolist()):
        as_offset(offset, q_len, kv_len, f"q_offset[{b}]")
    return values.astype(np.int64)


def dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise InvalidArgument("dtype", repr(value), "a torch.dtype")
    return value


def index(name: str, value: Any, size: int, what: str) -> int:
    number = integer(value)
    if number is None or not 0 <= number < size:
        raise InvalidArgument(name, repr(value), f"a {what}, 0 to {size - 1}")
    return number


def indices(name: str, source: Any, size: int) -> np.ndarray:
    """Indices below `size`, in any order, as int64 `[n]`."""
    expected = f"ints from 0 to {size - 1}"
    values = ints(name, source, expected)
    if values.ndim != 1 or bool(((values < 0) | (values >= size)).any()):
        raise InvalidArgument(name, repr(source), expected)
    return values.astype(np.int64)


def evenly(name: str, x: Any, batch: int, dim: int = 2) -> int:
    """Tokens of each sequence, all having the same number: of `[B, Hkv, L, D]` or packed `[T, Hkv, D]`."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) == 3:
        if batch == 0 or shape[0] % batch:
            remedy = "give counts"
            raise InvalidArgument(name, f"{shape[0]} packed rows", f"as many for each of {batch} sequences", remedy)
        return int(shape[0]) // batch
    if len(shape) != 4 or shape[0] != batch:
        raise InvalidArgument(name, f"shape {shape}", f"rank 4 with {batch} rows, one for each sequence, or packed")
    return int(shape[dim])


def token_ids(tokens: Any) -> np.ndarray:
    """Token ids as int64 `[n]`."""
    expected = "token ids, ints in one dim"
    ids = ints("tokens", tokens, expected)
    if ids.ndim != 1:
        raise InvalidArgument("tokens", f"{ids.dtype} of shape {ids.shape}", expected)
    if ids.dtype == np.uint64 and ids.size and ids.max() >= 2**63:
        raise InvalidArgument("tokens", f"an id of {ids.max()}", "ids below 2**63")
    return ids.astype(np.int64)


def new_ids(tokens: Any, counts: np.ndarray) -> np.ndarray | None:
    """The ids of new tokens, one for each; None if they are not given."""
    ids = None if tokens is None else token_ids(tokens)
    if ids is not None and len(ids) != counts.sum():
        raise InvalidArgument("tokens", f"{len(ids)} ids", f"{int(counts.sum())}, one for each new token")
    return ids


def sequence_ids(sequences: Any) -> list[int]:
    """One sequence id or several, as a list."""
    try:
        plain = sequences.tolist() if hasattr(sequences, "tolist") else sequences
        ids = [plain] if hasattr(plain, "__index__") else list(plain)
    except (TypeError, RuntimeError):
        ids = [None]
    if set(map(type, ids)) <= {int}:
        return ids
    numbers = [number for number in map(integer, ids) if number is not None]
    if len(numbers) < len(ids):
        raise InvalidArgument("sequences", repr(sequences), "an id or a list of ids")
    return numbers
