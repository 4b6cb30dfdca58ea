"""Tensors in a safetensors file with a digest: a truncated or altered file is refused.

The format: 8 bytes with the length of the header; the header, JSON; then the tensors' bytes. A file is data and never
code. A malicious file can have a right digest, so everything that it declares is checked, before memory is allocated
for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...errors import InvalidArgument

VERSION = "1"
NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER = 1 << 20  # bytes; ours have a few KB

About = dict[str, Any]
Shape = tuple[int, ...]
Shapes = dict[str, tuple[Shape, torch.dtype]]


def as_path(path: Any) -> Path:
    """The path, if it can be the name of a file."""
    try:
        text = os.fspath(path)
        if isinstance(text, str) and text and "\0" not in text:
            os.fsencode(text)
            return Path(text)
    except (TypeError, UnicodeEncodeError):
        pass
    raise InvalidArgument("path", repr(path), "the name of a file, a str or a pathlib.Path")


def write(path: str | os.PathLike[str], kind: str, about: About, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a file atomically: an earlier one stays until the new one is complete and on disk."""
    path = as_path(path)
    _check_target(path)
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
    # An unguessable name, created exclusively: no symbolic link is followed, and no two writers share a draft.
    draft = path.with_name(f".{secrets.token_hex(12)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        number = os.open(draft, flags, 0o666)
    except OSError as error:  # name the folder: the caller does not know the draft
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with open(number, "wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for x in tensors.values():
                file.write(_bytes(x))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _check_target(path: Path) -> None:
    """Refuses devices and pipes, also behind links: a rename would replace them by a file."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # it does not exist, or its folder does not: then creating the draft fails too
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise refused(path, kind, "a plain file, which is replaced, or a name that is free")


def _sync_folder(folder: Path) -> None:
    """Syncs the folder, where that is possible, so that the new name is on disk too."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read(
    path: str | os.PathLike[str],
    kind: str,
    fields: dict[str, type],
    declare: Callable[[About, dict[str, Shape]], Shapes],
    optional: dict[str, type],
) -> tuple[About, dict[str, torch.Tensor]]:
    """Reads a file; its tensors are on the CPU.

    Args:
        fields: the names and types of the fields of its description.
        optional: likewise fields that may be missing.
        declare: returns the tensors that a file with this description must have; it is given the shapes that the file
            declares. Called before any tensor is read; raises if the description makes no sense.
    """
    path = as_path(path)
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise refused(path, "not a regular file", "a file that tilewise has saved")
        meta, entries = _header(path, file, status.st_size)
        if meta.get("kind") != kind:
            raise refused(path, f"a file of kind {meta.get('kind')!r}", f"kind {kind!r}")
        if meta.get("version") != VERSION:
            raise refused(path, f"version {meta.get('version')!r}", f"version {VERSION!r}, which this tilewise writes")
        about = _about(path, meta, fields, optional)
        declared = {name: (tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in entries.items()}
        try:
            expected = declare(about, {name: shape for name, (shape, _) in declared.items()})
        except InvalidArgument as error:
            if error.argument == "path":
                raise
            raise refused(path, f"a malformed description ({error})", "one of a cache") from None
        _expect(path, declared, expected)
        digest, tensors = _digest({name: text for name, text in meta.items() if name != "digest"}, entries), {}
        for name, (shape, dtype) in declared.items():
            make = partial(torch.empty, shape, dtype=dtype, device="cpu")
            x = tensors[name] = allocate_or_refuse(path, make)
            if x.numel() and file.readinto(_bytes(x)) != x.nbytes:
                raise refused(path, "a file that was truncated while it was read", "one that nobody is writing")
            digest.update(_bytes(x))
        if digest.hexdigest() != meta.get("digest"):
            raise refused(path, "contents that do not match their checksum", "the file as it was saved")
    return about, tensors


def allocate_or_refuse(path: Any, make: Callable[[], Any]) -> Any:
    """The result of `make()`; the error names the file if there is no memory for it."""
    try:
        return make()
    except (MemoryError, RuntimeError, InvalidArgument) as error:
        reason = error.__cause__ or error  # the allocator's error
        raise refused(path, f"more than fits in memory ({reason})", "a cache that fits") from None


def refused(path: Any, given: str, expected: str) -> InvalidArgument:
    return InvalidArgument("path", f"{path}: {given}", expected)


def _without_waiting(path: str, flags: int) -> int:
    """An opener that does not block on a pipe without a writer, so that it can be refused."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _about(path: Path, meta: dict[str, str], fields: dict[str, type], optional: dict[str, type]) -> About:
    """The description of a file; refuses other fields, or values of other types."""
    try:
        about = _parse(meta.get("about", ""))
    except (ValueError, RecursionError) as error:
        raise refused(path, f"a description that cannot be read ({error})", "JSON") from None
    if not isinstance(about, dict) or about.keys() - optional.keys() != fields.keys():
        given = sorted(about) if isinstance(about, dict) else type(about).__name__
        raise refused(path, f"a description of {given}", f"{sorted(fields)}")
    for name, kind in (fields | optional).items():
        if name in about and type(about[name]) is not kind:
            raise refused(path, f"{name} {str(about[name])[:80]!r}", f"a value of type {kind.__name__}")
    return about


def _expect(path: Path, declared: Shapes, expected: Shapes) -> None:
    """Refuses a file whose tensors do not match its description."""
    if declared.keys() != expected.keys():
        raise refused(path, f"tensors {sorted(declared)}", f"{sorted(expected)}")
    for name, (shape, dtype) in expected.items():
        if declared[name] != (shape, dtype):
            raise refused(path, f"{name} {declared[name][0]} {declared[name][1]}", f"{shape} {dtype}")


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The description and the tensors' offsets, which must cover the file to its last byte."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, LONGEST_HEADER):
        raise refused(path, f"{size} bytes, which end within the header", "a whole file")
    try:
        entries = _parse(file.read(length).decode())
        meta, end = entries.pop("__metadata__"), 0
        if not all(isinstance(text, str) for text in meta.values()):
            raise ValueError("metadata that is not text")
        for entry in entries.values():
            if entry.keys() != {"dtype", "shape", "data_offsets"}:
                raise ValueError("a tensor with other fields")
            if not all(type(n) is int and 0 <= n <= 2**62 for n in (*entry["shape"], *entry["data_offsets"])):
                raise ValueError("sizes that are not valid")
            begin, end_of_it = entry["data_offsets"]
            bytes_of_it = DTYPES[entry["dtype"]].itemsize
            for n in entry["shape"]:
                bytes_of_it *= n
            if begin != end or end_of_it - begin != bytes_of_it:
                raise ValueError("tensors that overlap")
            end = end_of_it
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refused(path, f"a malformed header ({error})", "a file that tilewise has saved") from None
    if size != 8 + length + end:
        raise refused(path, f"{size} bytes", f"{8 + length + end}, as its header says")
    return meta, entries


def _parse(text: str) -> Any:
    """Parses JSON; refuses duplicate names, of which parsers take different ones."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            raise ValueError("a name that occurs twice")
        return parsed

    return json.loads(text, object_pairs_hook=once)


def _digest(meta: dict[str, str], entries: dict[str, Any]) -> Any:
    return hashlib.sha256(json.dumps([meta, entries], sort_keys=True).encode())


def _bytes(x: torch.Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(b"")
