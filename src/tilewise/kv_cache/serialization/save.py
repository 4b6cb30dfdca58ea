"""Saves caches and prefixes to files, in their storage format. `load.py` reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.storage import as_bytes
from ..prefix_cache import LOST
from ..stats import tokens_of_pages
from ..stores import named_tensors
from . import files

if TYPE_CHECKING:
    from ..contiguous import KVCache
    from ..paged import PagedKVCache

Path = str | os.PathLike[str]


def formats(cache: Any) -> dict[str, Any]:
    """The storage of a cache, as files describe it."""
    k, v = cache.k_format, cache.v_format
    groups = [fmt.group for fmt in (k, v) if fmt.scales]  # of formats without a fixed group
    return {
        "kv_heads": cache.kv_heads, "head_dim": k.width, "value_dim": v.width, "dtype": k.name, "v_dtype": v.name,
        "group": groups[0] if groups else 64, "rotate": cache.rotate,
    } | ({"latent": v.width} if cache.latent else {})  # fmt: skip


# KVCache


def held_rows(cache: KVCache) -> dict[str, torch.Tensor]:
    """All rows up to the longest length, on the CPU; slots without a token are zeros."""
    slots = min(cache.capacity, int(cache.store.length.max(initial=0)))
    lengths = cache.store.length if not cache.ring else np.minimum(cache.store.length, cache.capacity)
    tensors = {}
    for name, x in named_tensors(cache.store.k, cache.store.v):
        kept = as_bytes(x)[:, :, :slots].cpu().clone(memory_format=torch.contiguous_format)
        for b, n in enumerate(lengths.tolist()):
            kept[b, :, n:] = 0
        tensors[name] = kept.view(x.dtype)
    return tensors


def save_rows(cache: KVCache, path: Path) -> None:
    tensors = held_rows(cache)
    slots = tensors["k"].shape[2]
    about = formats(cache) | {"batch": cache.batch, "capacity": cache.capacity, "ring": cache.ring, "slots": slots}
    tensors["lengths"], tensors["first"] = (
        torch.from_numpy(cache.store.length.copy()),
        torch.from_numpy(cache.store.first.copy()),
    )
    files.write(path, "KVCache", about, tensors)


# PagedKVCache


def save_prefix(cache: PagedKVCache, path: Path, sequence: int) -> None:
    """Saves the rows of a sequence, and its known token ids."""
    with cache.store.lock:
        sequences = cache.store.sequences
        slot = sequences.slot("sequence", sequence)
        sequences.check_written("sequence", sequence, slot)
        pages, length = sequences.pages(slot).copy(), int(sequences.length[slot])
        known = int(sequences.known[slot])
        ids = sequences.ids[pages].reshape(-1)[:known].copy()
        at = torch.from_numpy(pages).to(cache.device, torch.int64)
        tensors = {
            name: as_bytes(x)[:, at].flatten(1, 2)[:, :length].cpu().contiguous().view(x.dtype)
            for name, x in named_tensors(cache.store.k, cache.store.v)
        }
    tensors["ids"] = torch.from_numpy(ids)
    files.write(path, "prefix", formats(cache) | {"layers": cache.layers, "tokens": length, "known": known}, tensors)


def held_pages(cache: PagedKVCache) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """The used pages, then the kept ones, on the CPU; slots without a token are zeros."""
    sequences, pool = cache.store.sequences, cache.store.sequences.pool
    pages = np.concatenate([np.flatnonzero(pool.refs), np.fromiter(pool.kept, np.int64, len(pool.kept))])
    tokens = tokens_of_pages(sequences, np.minimum(sequences.length, sequences.written.max(0, initial=0)))
    empty = torch.from_numpy(np.arange(cache.page_size) >= tokens[pages][:, None])  # [U, page_size]
    at, tensors = torch.from_numpy(pages).to(cache.device), {}
    for name, x in named_tensors(cache.store.k, cache.store.v):
        kept = as_bytes(x)[:, at].cpu().contiguous()
        kept[:, empty] = 0
        tensors[name] = kept.view(x.dtype)
    return pages, tensors


def save_pages(cache: PagedKVCache, path: Path) -> None:
    """Saves all used and kept pages, the sequences and the prefix index."""
    with cache.store.lock:
        manager, pool = cache.store.sequences, cache.store.sequences.pool
        live = list(manager.slot_of.items())
        for number, slot in live:
            manager.check_written("sequence", number, slot)
        pages, tensors = held_pages(cache)
        place = np.zeros(cache.num_pages, dtype=np.int32)
        place[pages] = np.arange(len(pages))
        slots = np.array([slot for _, slot in live], dtype=np.int64)
        width = max((len(manager.pages(slot)) for slot in slots), default=0)
        table = np.zeros((len(live), width), dtype=np.int32)
        for i, slot in enumerate(slots):
            table[i, : len(manager.pages(slot))] = place[manager.pages(slot)]
        # Not the numbers of removed nodes: a cache loaded from the file would reuse them.
        at = [node if pool.index.holds(node) else LOST for node in manager.node[slots].tolist()]
        nodes = [(n, node.parent, place[node.page]) for n, node in pool.index.nodes.items()]
        lists = {
            "ids": manager.known_ids()[pages], "table": table,
            "sequences": np.array([n for n, _ in live], dtype=np.int64),
            "length": manager.length[slots], "known": manager.known[slots], "node": np.array(at, dtype=np.int64),
            "depth": manager.depth[slots], "nodes": np.array(nodes, dtype=np.int64).reshape(-1, 3),
        }  # fmt: skip
        about = formats(cache) | {
            "layers": cache.layers, "num_pages": cache.num_pages, "page_size": cache.page_size,
            "created": manager.created, "kept": len(pool.kept),
        }  # fmt: skip
    files.write(path, "PagedKVCache", about, tensors | {name: torch.from_numpy(x) for name, x in lists.items()})
