"""Loads caches and prefixes from files of `save.py`. A file is checked before memory is allocated for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.devices import as_device
from ...core.kv_store import RowFormat
from ...core.storage import as_bytes
from ...errors import InvalidArgument
from .. import hadamard
from ..checks import MOST
from ..formats import MOST_LAYERS, formats_of, size
from ..prefix_cache import LOST, ROOT
from ..stores import named_tensors
from ..transfer import new_sequence
from . import files
from .save import Path, formats

if TYPE_CHECKING:
    from ..contiguous import KVCache
    from ..paged import PagedKVCache

FORMATS = {
    "kv_heads": int, "head_dim": int, "value_dim": int, "dtype": str, "v_dtype": str, "group": int, "rotate": bool,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"latent": int}
ROWS = FORMATS | {"batch": int, "capacity": int, "ring": bool, "slots": int}
PREFIX = FORMATS | {"layers": int, "tokens": int, "known": int}
PAGES = FORMATS | {"layers": int, "num_pages": int, "page_size": int, "created": int, "kept": int}
LARGEST = 2**62  # of sequence ids and node numbers: leaves room for new ones


def _formats(about: files.About) -> tuple[RowFormat, RowFormat]:
    size("kv_heads", about["kv_heads"])
    names = ("head_dim", "value_dim", "dtype", "v_dtype", "group", "latent")
    k, v = formats_of(*(about.get(name) for name in names))
    if about["rotate"]:
        if "latent" in about:
            raise InvalidArgument("rotate", "True with latent", "False")
        hadamard.check("head_dim", k.width)
        hadamard.check("value_dim", v.width)
    return k, v


def _token_bytes(about: files.About) -> int:
    """Bytes of a token's key and value, one head."""
    k, v = _formats(about)
    return k.bytes if "latent" in about else k.bytes + v.bytes


def _stores(about: files.About, *rows: int) -> files.Shapes:
    """The tensors of K and V, with rows of shape `rows`."""
    shapes: files.Shapes = {}
    for name, fmt in zip("k" if "latent" in about else "kv", _formats(about), strict=False):
        shapes[name] = ((*rows, fmt.columns), fmt.dtype)
        if fmt.scales:
            shapes[f"{name}_scales"] = ((*rows, fmt.scales), torch.float32)
    return shapes


def _memory(device: torch.device) -> int | None:
    """Total memory of a device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _check_memory(path: Path, bytes_: int, device: torch.device) -> None:
    """Refuses a file that declares a cache larger than the device's memory, however small the file."""
    available = _memory(device)
    if available is not None and bytes_ > available:
        raise files.refused(path, f"a cache of {bytes_} bytes", f"at most {available}, what the device has")


# KVCache


def load_rows(kind: type[KVCache], path: Path, device: Any) -> KVCache:
    device = as_device(device)

    def declare(about: files.About, file_shapes: dict[str, files.Shape]) -> files.Shapes:
        _formats(about)  # first: sizes depend on it
        batch, capacity = size("batch", about["batch"], 0), size("capacity", about["capacity"], 1, MOST)
        slots = size("slots", about["slots"], 0, capacity)
        _check_memory(path, batch * about["kv_heads"] * capacity * _token_bytes(about), device)
        numbers = ((batch,), torch.int32)
        return _stores(about, batch, about["kv_heads"], slots) | {"lengths": numbers, "first": numbers}

    about, tensors = files.read(path, "KVCache", ROWS, declare, OPTIONAL)
    slots, capacity = about.pop("slots"), about["capacity"]
    length, first = (tensors[name].numpy().astype(np.int64) for name in ("lengths", "first"))
    tokens = length - first
    wrong = (first < 0) | (tokens < 0) | (tokens > capacity) | (first > 0 if not about["ring"] else False)
    if wrong.any():
        b = int(np.argmax(wrong))
        given = f"row {b} with tokens {first[b]} to {length[b]}"
        raise files.refused(path, given, f"0 to {capacity} tokens" + (" from 0 on" if not about["ring"] else ""))
    if slots != min(capacity, int(length.max(initial=0))):
        raise files.refused(
            path, f"{slots} slots", f"{min(capacity, int(length.max(initial=0)))}, as the rows' lengths"
        )
    cache: KVCache = files.allocate_or_refuse(path, lambda: kind(**about, device=device))
    for name, x in named_tensors(cache.store.k, cache.store.v):
        as_bytes(x)[:, :, :slots] = as_bytes(tensors[name]).to(cache.device)
    cache.store.set(length, first)
    return cache


# PagedKVCache: one sequence


def load_prefix(cache: PagedKVCache, path: Path) -> int:
    mine = formats(cache) | {"layers": cache.layers}

    def declare(about: files.About, file_shapes: dict[str, files.Shape]) -> files.Shapes:
        for name, value in ({"latent": None} | mine).items():
            if about.get(name) != value:
                raise files.refused(path, f"{name} {about.get(name)!r}", f"{value!r}, as the cache has")
        length = size("tokens", about["tokens"], 0, MOST)
        known = size("known", about["known"], 0, length)
        return _stores(about, cache.layers, length, cache.kv_heads) | {"ids": ((known,), torch.int64)}

    about, tensors = files.read(path, "prefix", PREFIX, declare, OPTIONAL)
    whole = {"layers": (0, cache.layers), "heads": (0, cache.kv_heads)}
    return new_sequence(cache, about["tokens"], about["known"], [(whole, tensors)])


# PagedKVCache: all of it


def load_pages(kind: type[PagedKVCache], path: Path, device: Any) -> PagedKVCache:
    device = as_device(device)

    def declare(about: files.About, file_shapes: dict[str, files.Shape]) -> files.Shapes:
        _formats(about)
        layers, P = size("layers", about["layers"], 1, MOST_LAYERS), size("page_size", about["page_size"])
        pages = size("num_pages", about["num_pages"], 0, MOST)
        size("created", about["created"], 0, LARGEST)
        U, S, N, width = (
            file_shapes.get(name, (0, 0))[dim] if len(file_shapes.get(name, (0, 0))) > dim else 0
            for name, dim in (("ids", 0), ("sequences", 0), ("nodes", 0), ("table", 1))
        )
        size("ids", U, 0, pages)
        size("kept", about["kept"], 0, U)
        size("nodes", N, 0, U)
        size("table", width, 0, U)
        rows = layers * P * about["kv_heads"]
        _check_memory(path, pages * (rows * _token_bytes(about) + 8 * P), device)
        shapes = _stores(about, layers, U, P, about["kv_heads"])
        shapes |= dict.fromkeys(("sequences", "length", "known", "node", "depth"), ((S,), torch.int64))
        return shapes | {
            "ids": ((U, P), torch.int64), "table": ((S, width), torch.int32), "nodes": ((N, 3), torch.int64),
        }  # fmt: skip

    about, tensors = files.read(path, "PagedKVCache", PAGES, declare, OPTIONAL)
    lists = {name: x.numpy() for name, x in tensors.items() if name.split("_")[0] not in ("k", "v")}
    if (problem := _problem(lists, about)) is not None:
        raise files.refused(path, problem, "sequences and pages that agree")
    created, kept = about.pop("created"), about.pop("kept")
    cache: PagedKVCache = files.allocate_or_refuse(path, lambda: kind(**about, device=device))
    for name, x in named_tensors(cache.store.k, cache.store.v):
        as_bytes(x)[:, : len(lists["ids"])] = as_bytes(tensors[name]).to(cache.device)
    cache.store.sequences.restore(lists, created, kept)
    return cache


def _problem(lists: dict[str, np.ndarray], about: files.About) -> str | None:
    """What is inconsistent in these lists, so that a cache made of them could access wrong memory; None if nothing."""
    P, U, kept = about["page_size"], len(lists["ids"]), about["kept"]
    numbers, length, known, depth = (lists[name] for name in ("sequences", "length", "known", "depth"))
    if len(numbers) and not (numbers[0] >= 0 and numbers[-1] < about["created"] and (np.diff(numbers) > 0).all()):
        return f"ids of sequences that are not ascending, 0 to {about['created'] - 1}"
    if ((length < 0) | (length > min(MOST, lists["table"].shape[1] * P))).any():
        return "a length beyond its pages"
    if ((known < 0) | (known > length) | (depth < 0) | (depth > known // P)).any():
        return "more known tokens than a sequence has"
    refs = np.zeros(U, dtype=np.int64)
    sequence_pages = []
    for row, n in zip(lists["table"], -(-length // P), strict=True):
        pages = row[:n]
        if n and (pages.min() < 0 or pages.max() >= U):
            return "a page that does not exist"
        refs[pages] += 1
        if len(np.unique(pages)) < n:
            return "a page that occurs twice in a sequence"
        sequence_pages.append(pages)
    if (refs[: U - kept] == 0).any() or refs[U - kept :].any():
        return "free pages that a sequence uses, or used pages that none does"
    nodes: dict[int, tuple[int, int]] = {}
    prefixes: set[tuple[int, bytes]] = set()
    for number, parent, page in lists["nodes"].tolist():
        if (
            not 0 < number <= LARGEST
            or number in nodes
            or (parent != ROOT and parent not in nodes)
            or not 0 <= page < U
        ):
            return "a prefix that does not follow another"
        nodes[number] = (parent, page)
        prefixes.add((parent, lists["ids"][page].tobytes()))
    pages_of_nodes = {page for _, page in nodes.values()}
    unique = len(prefixes) == len(pages_of_nodes) == len(nodes)
    if not unique or not pages_of_nodes.issuperset(range(U - kept, U)):
        return "a prefix that is listed twice, or not at all"
    for i, (pages, node, steps) in enumerate(zip(sequence_pages, lists["node"].tolist(), depth.tolist(), strict=True)):
        if node != ROOT and node not in nodes:
            lists["node"][i] = LOST  # it was removed; its number would be reused
            continue
        for page in pages[:steps][::-1].tolist():
            if node == ROOT or (lists["ids"][nodes[node][1]] != lists["ids"][page]).any():
                return "a sequence at a prefix that is not its own"
            node = nodes[node][0]
        if node != ROOT:
            return "a sequence at a prefix that is not its own"
    return None
