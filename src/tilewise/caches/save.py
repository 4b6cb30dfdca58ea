"""Caches and prefixes to files and back, as they are stored: nothing is quantised again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import InvalidArgument
from . import files

if TYPE_CHECKING:
    from .contiguous import KVCache
    from .paged import PagedKVCache

Path = str | os.PathLike[str]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _formats(cache: Any) -> dict[str, Any]:
    k, v = cache.k_format, cache.v_format
    return {
        "kv_heads": cache.kv_heads, "head_dim": k.width, "value_dim": v.width, "dtype": k.name, "v_dtype": v.name,
        "group": k.group or v.group or 64, "rotate": cache.rotate,
    }  # fmt: skip


def _stores(cache: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of K and V, with their names."""
    pairs = (("k", cache._k), ("v", cache._v))
    parts = [(f"{name}{end}", x) for name, store in pairs for end, x in (("", store.data), ("_scales", store.scales))]
    return [(name, x) for name, x in parts if x is not None]


def _shapes(cache: Any, rows: tuple[int, ...]) -> Shapes:
    """Of those tensors with other rows."""
    return {name: ((*rows, x.shape[-1]), x.dtype) for name, x in _stores(cache)}


def _index(x: torch.Tensor) -> torch.Tensor:
    """float8 as bytes: torch cannot index it everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


# KVCache


def save_rows(cache: KVCache, path: Path) -> None:
    """All rows up to the longest; slots that hold no token are zeros."""
    slots = min(cache.capacity, int(cache._length.max(initial=0)))
    about = _formats(cache) | {"batch": cache.batch, "capacity": cache.capacity, "ring": cache.ring, "slots": slots}
    held = cache._length if not cache.ring else np.minimum(cache._length, cache.capacity)
    tensors = {}
    for name, x in _stores(cache):
        kept = _index(x)[:, :, :slots].cpu().clone(memory_format=torch.contiguous_format)
        for b, n in enumerate(held.tolist()):
            kept[b, :, n:] = 0
        tensors[name] = kept.view(x.dtype)
    tensors["lengths"], tensors["first"] = torch.from_numpy(cache._length.copy()), torch.from_numpy(cache._first.copy())
    files.write(path, "KVCache", about, tensors)


def load_rows(kind: type[KVCache], path: Path, device: Any) -> KVCache:
    about, tensors = files.read(path, "KVCache")
    slots = about.pop("slots")
    cache = kind(**about, device=device)
    numbers = ((cache.batch,), torch.int32)
    files.expect(
        path, tensors, _shapes(cache, (cache.batch, cache.kv_heads, slots)) | {"lengths": numbers, "first": numbers}
    )
    for name, x in _stores(cache):
        _index(x)[:, :, :slots] = _index(tensors[name]).to(cache.device)
    cache._set(tensors["lengths"].numpy(), tensors["first"].numpy())
    return cache


# PagedKVCache: one sequence


def save_prefix(cache: PagedKVCache, path: Path, sequence: int) -> None:
    """The rows of a sequence, one after the other, and its token ids as far as they are known."""
    with cache._lock:
        books = cache._sequences
        slot = books.slot("sequence", sequence)
        pages, length = books.pages(slot).copy(), int(books.length[slot])
        known = int(books.known[slot])
        ids = books.ids[pages].reshape(-1)[:known].copy()
    at = torch.from_numpy(pages).to(cache.device, torch.int64)
    tensors = {
        name: _index(x)[:, at].flatten(1, 2)[:, :length].cpu().contiguous().view(x.dtype) for name, x in _stores(cache)
    }
    tensors["ids"] = torch.from_numpy(ids)
    files.write(path, "prefix", _formats(cache) | {"layers": cache.layers, "tokens": length, "known": known}, tensors)


def load_prefix(cache: PagedKVCache, path: Path) -> int:
    about, tensors = files.read(path, "prefix")
    mine = _formats(cache) | {"layers": cache.layers}
    for name, value in mine.items():
        if about.get(name) != value:
            raise InvalidArgument("path", f"{path}: {name} {about.get(name)!r}", f"{value!r}, as the cache has")
    length, known = about["tokens"], about["known"]
    shapes = _shapes(cache, (cache.layers, length, cache.kv_heads)) | {"ids": ((known,), torch.int64)}
    files.expect(path, tensors, shapes)
    with cache._lock:
        sequence = cache.create()
        try:
            first = cache.extend(sequence, known, tokens=tensors["ids"])
            rest = cache.extend(sequence, length - known)
        except Exception:
            cache.free(sequence)
            raise
        slots = np.arange(length)
        pages = cache._sequences.pages(cache._sequences.slot_of[sequence])
        page, slot = (torch.from_numpy(x).to(cache.device, torch.int64)
                      for x in (pages[slots // cache.page_size], slots % cache.page_size))  # fmt: skip
        for name, x in _stores(cache):
            _index(x)[:, page, slot] = _index(tensors[name]).to(cache.device)
        first._written()
        rest._written()
    return sequence


# PagedKVCache: all of it


def save_pages(cache: PagedKVCache, path: Path) -> None:
    """Every page that is used or kept, the sequences and the prefix index."""
    with cache._lock:
        books, pool = cache._sequences, cache._sequences.pool
        pages = np.concatenate([np.flatnonzero(pool.refs), np.fromiter(pool.kept, np.int64, len(pool.kept))])
        number = np.zeros(cache.num_pages, dtype=np.int32)
        number[pages] = np.arange(len(pages))
        live = list(books.slot_of.items())
        slots = np.array([slot for _, slot in live], dtype=np.int64)
        width = max((len(books.pages(slot)) for slot in slots), default=0)
        table = np.zeros((len(live), width), dtype=np.int32)
        for i, slot in enumerate(slots):
            table[i, : len(books.pages(slot))] = number[books.pages(slot)]
        nodes = [(n, node.parent, number[node.page]) for n, node in pool.index.nodes.items()]
        at = torch.from_numpy(pages).to(cache.device)
        tensors = {name: _index(x)[:, at].cpu().contiguous().view(x.dtype) for name, x in _stores(cache)}
        lists = {
            "ids": books.ids[pages], "table": table, "sequences": np.array([n for n, _ in live], dtype=np.int64),
            "length": books.length[slots], "known": books.known[slots], "node": books.node[slots],
            "depth": books.depth[slots], "nodes": np.array(nodes, dtype=np.int64).reshape(-1, 3),
        }  # fmt: skip
        about = _formats(cache) | {
            "layers": cache.layers, "num_pages": cache.num_pages, "page_size": cache.page_size,
            "created": books.created, "kept": len(pool.kept),
        }  # fmt: skip
    files.write(path, "PagedKVCache", about, tensors | {name: torch.from_numpy(x) for name, x in lists.items()})


def load_pages(kind: type[PagedKVCache], path: Path, device: Any) -> PagedKVCache:
    about, tensors = files.read(path, "PagedKVCache")
    created, kept = about.pop("created"), about.pop("kept")
    cache = kind(**about, device=device)
    U, S = len(tensors["ids"]), len(tensors["sequences"])
    shapes = _shapes(cache, (cache.layers, U, cache.page_size, cache.kv_heads))
    shapes |= dict.fromkeys(("sequences", "length", "known", "node", "depth"), ((S,), torch.int64))
    shapes |= {"ids": ((U, cache.page_size), torch.int64), "table": (tuple(tensors["table"].shape), torch.int32)}
    files.expect(path, tensors, shapes | {"nodes": ((len(tensors["nodes"]), 3), torch.int64)})
    for name, x in _stores(cache):
        _index(x)[:, :U] = _index(tensors[name]).to(cache.device)
    lists = {name: x.numpy() for name, x in tensors.items() if name not in _shapes(cache, ())}
    cache._sequences.restore(lists, created, kept)
    return cache
