"""Tensors in a safetensors file, with a digest of all of it: a file that is cut off or altered is refused.

The format: 8 bytes, the length of the header; the header, JSON; then the tensors' bytes, one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import InvalidArgument

VERSION = "1"
NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER = 100 << 20


def write(path: str | os.PathLike[str], kind: str, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes all of it or nothing: an earlier file stays until the new one is whole."""
    entries, end = {}, 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + size]}
        end += size
    meta = {"kind": kind, "version": VERSION, "about": json.dumps(about, sort_keys=True)}
    digest = _digest(meta, entries)
    for x in tensors.values():
        digest.update(_bytes(x))
    header = json.dumps({"__metadata__": {**meta, "digest": digest.hexdigest()}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path = Path(path)
    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for x in tensors.values():
                file.write(_bytes(x))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What was written, on the CPU."""
    path = Path(path)
    with path.open("rb") as file:
        size = path.stat().st_size
        meta, entries = _header(path, file, size)
        if meta.get("kind") != kind:
            raise _refused(path, f"a file of kind {meta.get('kind')!r}", f"kind {kind!r}")
        if meta.get("version") != VERSION:
            raise _refused(path, f"version {meta.get('version')!r}", f"version {VERSION!r}, which this tilewise writes")
        found = meta.pop("digest", None)
        digest, tensors = _digest(meta, entries), {}
        for name, entry in entries.items():
            tensors[name] = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            file.readinto(_bytes(tensors[name]))
            digest.update(_bytes(tensors[name]))
        if digest.hexdigest() != found:
            raise _refused(path, "contents that do not agree with their digest", "the file as it was saved")
    return json.loads(meta["about"]), tensors


def expect(path: Any, tensors: dict[str, torch.Tensor], wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Refuses a file whose tensors are not those that its description says."""
    if set(tensors) != set(wanted):
        raise _refused(path, f"tensors {sorted(tensors)}", f"{sorted(wanted)}")
    for name, (shape, dtype) in wanted.items():
        x = tensors[name]
        if tuple(x.shape) != shape or x.dtype != dtype:
            raise _refused(path, f"{name} {tuple(x.shape)} {x.dtype}", f"{shape} {dtype}")


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The description and the tensors' places, which together make up the file to its last byte."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, LONGEST_HEADER):
        raise _refused(path, f"{size} bytes, which end within the header", "a whole file")
    try:
        entries = json.loads(file.read(length))
        meta, end = entries.pop("__metadata__"), 0
        for entry in entries.values():
            count = 1
            for n in entry["shape"]:
                count *= n
            begin, end_of_it = entry["data_offsets"]
            if begin != end or end_of_it - begin != count * DTYPES[entry["dtype"]].itemsize or count < 0:
                raise ValueError("tensors that overlap")
            end = end_of_it
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(path, f"a header that makes no sense ({error})", "a file that tilewise has saved") from None
    if size != 8 + length + end:
        raise _refused(path, f"{size} bytes", f"{8 + length + end}, as its header says")
    return meta, entries


def _digest(meta: dict[str, str], entries: dict[str, Any]) -> Any:
    return hashlib.sha256(json.dumps([meta, entries], sort_keys=True).encode())


def _bytes(x: torch.Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")


def _refused(path: Any, given: str, expected: str) -> InvalidArgument:
    return InvalidArgument("path", f"{path}: {given}", expected)
