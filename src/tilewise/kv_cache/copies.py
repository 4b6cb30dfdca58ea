"""Copies and pickles of caches: deep, with nothing in common that is written.

A copy is exact, free pages and all. A pickle holds the slots or pages that hold tokens, and nothing of the memory
beside them, which may be anyone's. What holds addresses (writers, views, locks) is made anew.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..core.storage import as_bytes
from .serialization.save import held_pages, held_rows, stores

if TYPE_CHECKING:
    from .contiguous import KVCache
    from .paged import PagedKVCache

DERIVED = ("_write", "_on_device", "_writers", "_lock", "_latest", "_splits", "_pages")  # by `_set_up`
Cache = TypeVar("Cache", "KVCache", "PagedKVCache")


def _own(cache: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cache).items() if name not in DERIVED}


def deep(cache: Cache, memo: dict[int, Any]) -> Cache:
    """`copy.deepcopy`."""
    new = object.__new__(type(cache))
    memo[id(cache)] = new
    vars(new).update({name: copy.deepcopy(value, memo) for name, value in _own(cache).items()})
    new._set_up()
    return new


def _state(cache: Any, held: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = {name: value for name, value in _own(cache).items() if name not in ("_k", "_v")}
    bits = {name: as_bytes(x) for name, x in held.items()}  # torch cannot unpickle float8
    return state | {"device": str(cache.device), "held": bits}


def _begin(cache: Any, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = dict(state)
    held = state.pop("held")
    vars(cache).update(state | {"device": torch.device(state["device"])})
    cache._k, cache._v = cache._stores()
    return held


def rows_state(cache: KVCache) -> dict[str, Any]:
    """What a pickle of a `KVCache` holds."""
    return _state(cache, held_rows(cache))


def set_rows(cache: KVCache, state: dict[str, Any]) -> None:
    held = _begin(cache, state)
    cache._length, cache._first = cache._length.copy(), cache._first.copy()
    for name, x in stores(cache):
        part = held[name].to(cache.device)
        as_bytes(x)[:, :, : part.shape[2]] = part
    cache._set_up()


def pages_state(cache: PagedKVCache) -> dict[str, Any]:
    """What a pickle of a `PagedKVCache` holds."""
    pages, held = held_pages(cache)
    return _state(cache, held) | {"pages": pages}


def set_pages(cache: PagedKVCache, state: dict[str, Any]) -> None:
    at = torch.from_numpy(state["pages"])
    held = _begin(cache, {name: value for name, value in state.items() if name != "pages"})
    for name, x in stores(cache):
        as_bytes(x)[:, at.to(cache.device)] = held[name].to(cache.device)
    cache._set_up()
