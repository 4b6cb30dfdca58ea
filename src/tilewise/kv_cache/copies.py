"""Copies and pickles of caches. They are deep: a copy shares no memory that is written.

A copy is exact, free pages included. A pickle holds only the slots or pages with tokens, since other memory may hold
old data. Objects with addresses (writers, views, locks) are made anew.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ..core.storage import as_bytes
from .serialization.save import held_pages, held_rows
from .stores import PageStore, RowStore, empty_pages, empty_rows, named_tensors

if TYPE_CHECKING:
    from .contiguous import KVCache
    from .paged import PagedKVCache

Cache = TypeVar("Cache", "KVCache", "PagedKVCache")


def _own(cache: Any) -> dict[str, Any]:
    """Sizes and formats."""
    return {name: value for name, value in vars(cache).items() if name != "store"}


def deep(cache: Cache, memo: dict[int, Any]) -> Cache:
    """`copy.deepcopy`."""
    new = object.__new__(type(cache))
    memo[id(cache)] = new
    vars(new).update({name: copy.deepcopy(value, memo) for name, value in _own(cache).items()})
    new.store = cache.store.copy(memo)
    return new


def gathered(cache: KVCache, rows: np.ndarray | None, start: int, capacity: int) -> KVCache:
    """A new cache with copies of some rows, from slot `start` on."""
    new = object.__new__(type(cache))
    vars(new).update(_own(cache) | {"batch": cache.batch if rows is None else len(rows), "capacity": capacity})
    which = slice(None) if rows is None else rows
    length, first = cache.store.length[which] - start, cache.store.first[which].copy()
    new.store = RowStore(*empty_rows(new), length.astype(np.int32), first)
    slots = capacity if cache.ring else int(length.max(initial=0))
    tensors = (named_tensors(x.store.k, x.store.v) for x in (new, cache))
    for (_, to), (_, source) in zip(*tensors, strict=True):
        to, stored = as_bytes(to)[:, :, :slots], as_bytes(source)[:, :, start : start + slots]
        if rows is None:
            to.copy_(stored)
        else:
            for row, which_row in enumerate(rows.tolist()):  # torch's index would copy twice
                to[row].copy_(stored[which_row])
    return new


def _state(cache: Any, stored: dict[str, torch.Tensor]) -> dict[str, Any]:
    bits = {name: as_bytes(x) for name, x in stored.items()}  # torch cannot unpickle float8
    return _own(cache) | {"device": str(cache.device), "held": bits}


def rows_state(cache: KVCache) -> dict[str, Any]:
    """What a pickle of a `KVCache` holds."""
    return _state(cache, held_rows(cache)) | {"_length": cache.store.length, "_first": cache.store.first}


def set_rows(cache: KVCache, state: dict[str, Any]) -> None:
    state = dict(state)
    stored, length, first = (state.pop(name) for name in ("held", "_length", "_first"))
    vars(cache).update(state | {"device": torch.device(state["device"])})
    cache.store = RowStore(*empty_rows(cache), length.copy(), first.copy())
    for name, x in named_tensors(cache.store.k, cache.store.v):
        part = stored[name].to(cache.device)
        as_bytes(x)[:, :, : part.shape[2]] = part


def pages_state(cache: PagedKVCache) -> dict[str, Any]:
    """What a pickle of a `PagedKVCache` holds."""
    pages, stored = held_pages(cache)
    return _state(cache, stored) | {"_sequences": cache.store.sequences, "pages": pages}


def set_pages(cache: PagedKVCache, state: dict[str, Any]) -> None:
    state = dict(state)
    stored, sequences, pages = (state.pop(name) for name in ("held", "_sequences", "pages"))
    vars(cache).update(state | {"device": torch.device(state["device"])})
    cache.store = PageStore(*empty_pages(cache), sequences)
    at = torch.from_numpy(pages).to(cache.device)
    for name, x in named_tensors(cache.store.k, cache.store.v):
        as_bytes(x)[:, at] = stored[name].to(cache.device)
