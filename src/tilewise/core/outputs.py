"""Files that commands write: whether they can be written is asked before the work, and each is written whole."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path

from ..errors import InvalidArgument

MOST_NAME = 200  # bytes of a name that its draft repeats: file systems end names at 255


def check_target(option: str, path: Path | None) -> None:
    """Whether a file can be written, by writing an empty draft beside it; None is no file."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise InvalidArgument(option, f"{path}, a folder", "the name of a file")
        if not path.parent.is_dir():
            raise InvalidArgument(option, f"{path}", "a file in a folder that exists")
        if _is_stream(path):
            with path.open("ab"):
                return
        draft = _draft(path.resolve())
        draft.open("xb").close()
        draft.unlink()
    except OSError as error:
        raise InvalidArgument(option, f"{path}", "a file that can be written", error.strerror or str(error)) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes all of it or nothing, so that an earlier file is not lost half way. A pipe or a device is written to."""
    data = content.encode() if isinstance(content, str) else content
    if _is_stream(path):
        path.write_bytes(data)
        return
    real = path.resolve()  # a link stays one
    draft = _draft(real)
    try:
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(real)
    finally:
        draft.unlink(missing_ok=True)


def write_or_rescue(path: Path, content: str) -> None:
    """`write_whole`; where that fails, such as on a full disk, the content is kept in a temporary file, and named."""
    try:
        write_whole(path, content)
    except OSError as error:
        descriptor, kept = tempfile.mkstemp(prefix="tilewise-", suffix=path.suffix)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        print(f"{path} cannot be written ({error.strerror or error}); kept in {kept}", file=sys.stderr, flush=True)


def _is_stream(path: Path) -> bool:
    """Something that is there and is no plain file, such as /dev/stdout."""
    return path.exists() and not path.is_file()


def _draft(real: Path) -> Path:
    """A name beside a file that nobody can have prepared a link under."""
    name = os.fsdecode(os.fsencode(real.name)[:MOST_NAME])
    return real.with_name(f".{name}.{secrets.token_hex(4)}.part")
