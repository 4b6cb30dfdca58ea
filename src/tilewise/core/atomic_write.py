"""Files that commands write: checked before the work begins, and written atomically."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path

from ..errors import InvalidArgument

MOST_NAME = 200  # bytes of a file's name that its draft's name repeats: file systems allow 255


def check_target(option: str, path: Path | None) -> None:
    """Refuses a path that cannot be written, by creating an empty draft beside it. None is no file."""
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


def write_whole(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Writes a file atomically: a draft is renamed, so an earlier file is never half overwritten. Streams are written
    directly. `mode`: the file's, whatever the process' umask is.
    """
    data = content.encode() if isinstance(content, str) else content
    if _is_stream(path):
        path.write_bytes(data)
        return
    real = path.resolve()  # a symbolic link is kept
    draft = _draft(real)
    try:
        with draft.open("xb") as file:
            if mode is not None:
                draft.chmod(mode)
            file.write(data)
        draft.replace(real)
    finally:
        draft.unlink(missing_ok=True)


def write_or_rescue(path: Path, content: str) -> None:
    """`write_whole`; if that fails, as on a full disk, the content goes to a temporary file, whose name is printed."""
    try:
        write_whole(path, content)
    except OSError as error:
        descriptor, kept = tempfile.mkstemp(prefix="tilewise-", suffix=path.suffix)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        print(f"{path} cannot be written ({error.strerror or error}); kept in {kept}", file=sys.stderr, flush=True)


def _is_stream(path: Path) -> bool:
    """Whether it exists and is not a plain file, as /dev/stdout."""
    return path.exists() and not path.is_file()


def _draft(real: Path) -> Path:
    """A name beside a file, unguessable, so that nobody can place a link there beforehand."""
    name = os.fsdecode(os.fsencode(real.name)[:MOST_NAME])
    return real.with_name(f".{name}.{secrets.token_hex(4)}.part")
