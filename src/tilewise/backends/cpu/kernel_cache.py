"""Compiled kernels on disk, one file each.

A file holds pickle, which is code. It is read only if its folder and the file itself belong to this user or to root and
nobody else may write to them. It begins with a digest of its contents and of what they are for, so that a damaged file,
or one of another kernel, is never loaded. It is written under another name and put in place whole: processes may do so
at once, or be killed at it.

What cannot be read is compiled again and written anew; what cannot be written is compiled by every process. Each is
said once, and neither fails a call.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from ...core.places import cache_home, others_may_change

FORMAT = b"tilewise kernel 1\n"
STALE = 3600  # seconds after which a file that was never put in place is removed
REMEDY = "remove it, or set TILEWISE_CACHE_DIR to a folder of your own"


class Distrusted(Exception):
    """Why a file or a folder is not used."""


class Damaged(Exception):
    """A file that is not what was written."""


def cache_directory() -> Path:
    """Where compiled kernels are kept."""
    return cache_home() / f"cpu-{fingerprint()}"


@cache
def fingerprint() -> str:
    """Of these sources and of what compiles them: kept code is never stale."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


class KernelCache:
    """The kept code of one function, as Numba's own `FunctionCache` is used; `stamp` names what it was made of."""

    def __init__(self, name: str, stamp: str = "") -> None:
        self.name, self.stamp = name, stamp

    @property
    def cache_path(self) -> str:
        return str(cache_directory())

    def key(self, signature: Any, codegen: Any) -> bytes:
        """What a file is for, with the CPU that Numba compiles for."""
        what = fingerprint(), self.name, self.stamp, str(signature), codegen.magic_tuple()
        return hashlib.sha256(repr(what).encode()).digest()

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled function, None if it is not there or cannot be used."""
        rtsys.initialize(target_context)  # functions of Numba's that kept code is linked with
        key = self.key(signature, target_context.codegen())
        file = self.file(key)
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(read(file, key)))
        except FileNotFoundError:
            return None
        except Exception as error:  # unpickling raises anything
            _warn(error, f"{cache_directory() / file} cannot be read ({_words(error)}): its kernel is compiled again")
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.lifted or result.library.has_dynamic_globals:
            return
        key = self.key(signature, result.library.codegen)
        try:
            write(self.file(key), key, dumps(result._reduce()))
        except (Distrusted, OSError) as error:
            _warn(
                error, f"kernels cannot be kept in {cache_directory()} ({_words(error)}): every process compiles them"
            )

    def file(self, key: bytes) -> str:
        return f"{self.name}.{key.hex()[:16]}.nbc"


def read(file: str, key: bytes) -> bytes:
    """What `write` was given for this key; an error if that is not what the file holds."""
    with _folder(create=False) as (at, folder):
        handle = os.open(folder + file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), dir_fd=at)
        with open(handle, "rb") as opened:
            status = os.fstat(handle)
            reason = None if stat.S_ISREG(status.st_mode) else "is no plain file"
            _trust(cache_directory() / file, reason or others_may_change(status))
            head, size = opened.read(len(FORMAT) + 32), status.st_size
            contents = opened.read()
    if size == 0 or head != FORMAT + _digest(key, contents):
        raise Damaged("its digest is wrong")
    return contents


def write(file: str, key: bytes, contents: bytes) -> None:
    """Puts a file in place, whole or not at all."""
    with _folder(create=True) as (at, folder):
        draft = f"{file}.{secrets.token_hex(8)}.tmp"  # a name that nobody can know before
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(folder + draft, flags, 0o600, dir_fd=at)
        try:
            with open(handle, "wb") as opened:
                opened.write(FORMAT + _digest(key, contents))
                opened.write(contents)
            os.replace(folder + draft, folder + file, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with suppress(OSError):
                os.unlink(folder + draft, dir_fd=at)
            raise
        _remove_stale(file, at, folder)


def _remove_stale(file: str, at: int | None, folder: str) -> None:
    """Removes what processes that were killed have left."""
    with suppress(OSError):
        for name in os.listdir(folder if at is None else at):
            if name.startswith(f"{file}.") and name.endswith(".tmp"):
                with suppress(OSError):  # of another process, which was faster
                    if time.time() - os.stat(folder + name, dir_fd=at).st_mtime > STALE:
                        os.unlink(folder + name, dir_fd=at)


@contextmanager
def _folder(create: bool) -> Iterator[tuple[int | None, str]]:
    """The folder: a descriptor, so that nobody can put another in its place, and a prefix of names; checked."""
    path = cache_directory()
    if create:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    if os.open not in os.supports_dir_fd:  # Windows, where a user's folder is the user's
        yield None, f"{path}{os.sep}"
        return
    _trust(path, "is a link" if path.is_symlink() else None)
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _trust(path, others_may_change(os.fstat(at)))
        yield at, ""
    finally:
        os.close(at)


def _trust(path: Path, reason: str | None) -> None:
    if reason:
        raise Distrusted(f"{path} {reason}, and kept kernels are code: {REMEDY}")


def _digest(key: bytes, contents: bytes) -> bytes:
    return hashlib.sha256(key + contents).digest()


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, Distrusted | Damaged) else f"{type(error).__name__}: {error}"


_said: set[type] = set()


def _warn(error: Exception, words: str) -> None:
    """Says it once, of whichever file it is seen first."""
    if type(error) not in _said:
        _said.add(type(error))
        warnings.warn(f"tilewise: {words}", RuntimeWarning, stacklevel=2)
