"""A sequence of a `PagedKVCache` as plain tensors in their stored form, and back: between processes and layouts.

Rows are `[layers, tokens, heads, columns]`, independent of the page size; layers and heads can be sliced. Quantised
data stays the same, bit for bit. The caller moves the tensors, with `distributed.send_sequence` or shared memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.options import is_int
from ..core.storage import as_bytes
from ..errors import CacheFull, InvalidArgument
from .formats import size
from .integers import integer
from .serialization.save import formats
from .stores import named_tensors

if TYPE_CHECKING:
    from .paged import PagedKVCache

Part = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
MOST_HEADS = 2**20  # in a manifest
SAME = ("head_dim", "value_dim", "dtype", "v_dtype", "group", "rotate", "latent")


def runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive pages.

    >>> runs(np.array([4, 5, 6, 1, 9, 10]))
    [(4, 3), (1, 1), (9, 2)]
    """
    if not len(pages):
        return []
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    ends = np.append(starts[1:], len(pages))
    return [(int(pages[a]), int(b - a)) for a, b in zip(starts, ends, strict=True)]


def export(
    cache: PagedKVCache, sequence: int, layers: tuple[int, int] | None, heads: tuple[int, int] | None, first_head: int
) -> Part:
    layers, heads = _range("layers", layers, cache.layers), _range("heads", heads, cache.kv_heads)
    first_head = _first_head(cache, first_head)
    with cache.store.lock:
        sequences = cache.store.sequences
        slot = sequences.slot("sequence", sequence)
        for layer in range(*layers):
            sequences.check_written("sequence", sequence, slot, layer)
        pages, length = sequences.pages(slot).copy(), int(sequences.length[slot])
        known = int(sequences.known[slot])
        ids = sequences.ids[pages].reshape(-1)[:known].copy()
        tensors = {}
        for name, x in named_tensors(cache.store.k, cache.store.v):
            # [layers, pages, page_size, heads, ...]
            data = as_bytes(x)[layers[0] : layers[1], :, :, heads[0] : heads[1]]
            parts = [data[:, first : first + count] for first, count in runs(pages)]
            rows = torch.cat(parts, 1) if parts else data[:, :0]
            tensors[name] = rows.flatten(1, 2)[:, :length].contiguous().view(x.dtype)
    tensors["ids"] = torch.from_numpy(ids)
    about = formats(cache) | {
        "layers": list(layers), "heads": [first_head + head for head in heads], "tokens": length, "known": known,
        "checksums": {name: checksum(x) for name, x in tensors.items()},
    }  # fmt: skip
    return about, tensors


def checksum(x: torch.Tensor) -> int:
    if not x.numel():  # torch cannot view it as bytes
        return 0
    return zlib.crc32(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def import_parts(cache: PagedKVCache, parts: Sequence[Part], first_head: int) -> int:
    """A new sequence from parts that have all its layers and heads. If they are refused, nothing has changed."""
    if not parts:
        raise InvalidArgument("parts", "none", "one or more (manifest, tensors)")
    first_head = _first_head(cache, first_head)
    covered = np.zeros((cache.layers, cache.kv_heads), dtype=bool)
    for i, part in enumerate(parts):
        if not isinstance(part, tuple) or len(part) != 2 or not isinstance(part[1], Mapping):
            raise InvalidArgument(
                f"parts[{i}]", f"a {type(part).__name__}", "(manifest, tensors), as export gives them"
            )
        about, tensors = part
        for name, (shape, dtype) in declared(cache, f"parts[{i}]", about).items():
            x = tensors.get(name)
            if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (shape, dtype):
                given = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
                raise InvalidArgument(f"parts[{i}]", f"{name} {given}", f"{shape} {dtype}, as its manifest says")
            if x.layout != torch.strided or x.device.type == "meta":
                given = "without data" if x.device.type == "meta" else str(x.layout)
                raise InvalidArgument(f"parts[{i}]", f"{name} {given}", "a dense tensor")
            if checksum(x) != about["checksums"].get(name):
                raise InvalidArgument(
                    f"parts[{i}]", f"{name} with another checksum", "the tensor that was exported: this one was changed"
                )
        length, known = parts[0][0]["tokens"], parts[0][0]["known"]
        if (about["tokens"], about["known"]) != (length, known):
            raise InvalidArgument(f"parts[{i}]", f"{about['tokens']} tokens", f"{length}, as parts[0]")
        (layer, end), (head, last) = about["layers"], (x - first_head for x in about["heads"])
        covered[layer:end, max(head, 0) : max(last, 0)] = True
    if not covered.all():
        layer, head = np.argwhere(~covered)[0]
        given = f"nothing of layer {layer}, head {first_head + head}"
        raise InvalidArgument(
            "parts", given, "all layers and heads of the cache", "first_head= is that of its first head"
        )
    return new_sequence(cache, length, known, parts, first_head)


def new_sequence(cache: PagedKVCache, length: int, known: int, parts: Sequence[Part], first_head: int = 0) -> int:
    """A sequence of `length` tokens, the first `known` with ids, from checked parts; on failure none is left behind."""
    with cache.store.lock:
        sequence = cache.create()
        try:
            first = cache.extend(sequence, known, tokens=parts[0][1]["ids"])
            cache.extend(sequence, length - known)
            sequences = cache.store.sequences
            own = sequences.slot_of[sequence]
            for about, tensors in parts:
                _put(cache, sequences.pages(own), length, about, tensors, first_head)
        except BaseException:
            cache.free(sequence)
            raise
        sequences.written[:, own] = length
        if first.growth.full is not None:
            sequences.commit([sequence], first.growth.full)
    return sequence


def declared(cache: PagedKVCache, where: str, about: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of a part's tensors, from its manifest, which is checked before memory is allocated."""

    def refuse(name: str, want: str) -> InvalidArgument:
        given = about.get(name) if isinstance(about, Mapping) else f"of a {type(about).__name__}"
        return InvalidArgument(where, f"{name} {given!r}", want, "pass the manifest that export returned")

    own_formats = formats(cache)
    for name in SAME:
        if not isinstance(about, Mapping) or about.get(name) != own_formats.get(name):
            raise refuse(name, f"{own_formats.get(name)!r}, as the cache has")
    counts: dict[str, int] = {}
    for name, most in (("layers", cache.layers), ("heads", MOST_HEADS)):
        x = about.get(name)
        if not isinstance(x, (list, tuple)) or len(x) != 2 or not all(map(is_int, x)) or not 0 <= x[0] <= x[1] <= most:
            raise refuse(name, f"[first, end] of at most {most}")
        counts[name] = x[1] - x[0]
    tokens, known = about.get("tokens"), about.get("known")
    if not is_int(tokens) or tokens < 0:
        raise refuse("tokens", "their number")
    if not is_int(known) or not 0 <= known <= tokens:
        raise refuse("known", f"how many of the {tokens} tokens have ids")
    if not isinstance(about.get("checksums"), Mapping):
        raise refuse("checksums", "those of its tensors")
    room = cache.num_pages * cache.page_size
    if tokens > room:
        raise CacheFull(f"a sequence of {tokens} tokens does not fit into a cache of {room}. Nothing has changed")
    shapes = {
        name: ((counts["layers"], tokens, counts["heads"], *x.shape[4:]), x.dtype)
        for name, x in named_tensors(cache.store.k, cache.store.v)
    }
    return shapes | {"ids": ((known,), torch.from_numpy(cache.store.sequences.ids[:0]).dtype)}


def _put(
    cache: PagedKVCache, pages: np.ndarray, length: int, about: Mapping[str, Any], tensors: Any, first_head: int
) -> None:
    """Copies the rows of a part into pages, a run of pages at a time."""
    layers = slice(*about["layers"])
    lo, hi = about["heads"][0] - first_head, about["heads"][1] - first_head
    into, of = slice(max(lo, 0), min(hi, cache.kv_heads)), slice(max(-lo, 0), min(hi, cache.kv_heads) - lo)
    if into.start >= into.stop:
        return  # heads that this cache does not have
    for name, x in named_tensors(cache.store.k, cache.store.v):
        rows = as_bytes(tensors[name].to(cache.device))[:, :, of]  # [layers, tokens, heads, ...]
        at = 0
        for first, count in runs(pages):
            tokens = min(count * cache.page_size, length - at)
            place = as_bytes(x)[layers, first : first + count].flatten(1, 2)  # a view: pages lie together
            place[:, :tokens, into] = rows[:, at : at + tokens]
            at += tokens


def _range(name: str, ends: Any, most: int) -> tuple[int, int]:
    pair = (0, most) if ends is None else tuple(map(integer, ends)) if isinstance(ends, (tuple, list)) else ()
    if len(pair) != 2 or pair[0] is None or pair[1] is None or not 0 <= pair[0] < pair[1] <= most:
        raise InvalidArgument(name, repr(ends), f"a range (first, end) within 0 to {most}")
    return pair[0], pair[1]


def _first_head(cache: PagedKVCache, value: Any) -> int:
    return size("first_head", value, 0, max(0, MOST_HEADS - cache.kv_heads))
