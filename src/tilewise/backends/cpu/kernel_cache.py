"""The disk cache of compiled kernels, one file each.

A file holds code: object files of kernels, and pickles of compiled loops. It is read only if the file and its folder
belong to this user or root and nobody else can write to them. It begins with a digest of its contents and its key, so a
damaged file, or one of another kernel, is never loaded. Files are written under another name and renamed, so processes
may write at the same time or be killed. If several processes need the same kernel, one compiles it and the others wait.

Kernels that a release brings with the package (`prebuilt.py`) come first.

A file that cannot be read is compiled again and rewritten; if it cannot be written, every process compiles. Each is
warned of once, and neither fails a call.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba

from ...core.cache_home import cache_home, others_may_change
from ...core.file_lock import release, wait_for_lock
from ...core.private.numba import pickled, unpickled

FORMAT = b"tilewise kernel 2\n"
STALE = 3600  # seconds after which a file that was never put in place is removed
# No link is followed, a pipe that nobody writes to is not waited for, and on Windows bytes stay as they are.
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
LOCK_WAIT = 60  # seconds to wait for another process; it may have been stopped
# Files of `core` with constants of kernels, on which their code depends, and that make an expression from its text.
EXPRESSION = tuple(f"expression/{name}.py" for name in ("build", "derivative", "mods", "node", "text"))
CORE_SOURCES = ("dropout.py", "large_lse.py", "mask_rules.py", "private/numba.py", "storage.py", *EXPRESSION)
T = TypeVar("T")
REMEDY = "remove it, or set TILEWISE_CACHE_DIR to a folder of your own"


class Distrusted(Exception):
    """A file or folder that is not trusted."""


class Damaged(Exception):
    """A file that is not what was written."""


def cache_directory() -> Path:
    """The folder of compiled kernels."""
    return cache_home() / f"cpu-{fingerprint()}"


@cache
def sources() -> str:
    """A digest of the kernels' sources."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    core = [package.parents[1] / "core" / name for name in CORE_SOURCES]
    for source in [*sorted(package.rglob("*.py")), *core]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def fingerprint() -> str:
    """A digest of the sources and the compiler's versions: cached code is never stale."""
    versions = f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}"
    return hashlib.sha256(f"{versions} {sources()}".encode()).hexdigest()[:16]


class CachedKernel:
    """The cached code of one function; `stamp` identifies its source if that is not part of `sources`."""

    suffix = "o"

    def __init__(self, name: str, stamp: str = "") -> None:
        self.name, self.stamp = name, stamp

    def key(self, signature: Any, cpu: Any) -> bytes:
        """The key of a file: the function, its signature, and the CPU that it is compiled for."""
        what = fingerprint(), self.name, self.stamp, str(signature), cpu
        return hashlib.sha256(repr(what).encode()).digest()

    def file(self, key: bytes) -> str:
        return f"{self.name}.{key.hex()[:16]}.{self.suffix}"

    def load(self, key: bytes, restore: Callable[[bytes], T]) -> T | None:
        """`restore` applied to the cached code; None if it is missing or cannot be used."""
        file = self.file(key)
        try:
            return restore(read(file, key))
        except FileNotFoundError:
            return None
        except Exception as error:  # unpickling raises anything
            warn(error, f"{cache_directory() / file} cannot be read ({describe(error)}): compiling its kernel again")
        return None

    def save(self, key: bytes, contents: bytes) -> None:
        try:
            write(self.file(key), key, contents)
        except (Distrusted, OSError) as error:
            place = f"{cache_directory()} ({describe(error)})"
            warn(error, f"cannot write to the kernel cache {place}: every process will compile its own kernels")


class CachedLoop(CachedKernel):
    """A compiled loop, with the interface of Numba's `FunctionCache`."""

    suffix = "nbc"

    @property
    def cache_path(self) -> str:
        return str(cache_directory())

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        key = self.key(signature, target_context.codegen().magic_tuple())
        return self.load(key, lambda code: unpickled(code, target_context))

    def save_overload(self, signature: Any, result: Any) -> None:
        if not (result.lifted or result.library.has_dynamic_globals):
            self.save(self.key(signature, result.library.codegen.magic_tuple()), pickled(result))


def read(file: str, key: bytes) -> bytes:
    """The contents that `write` stored for this key; raises if the file holds anything else."""
    with _folder(create=False) as (at, folder):
        handle = os.open(folder + file, READ, dir_fd=at)
        with open(handle, "rb") as opened:
            status = os.fstat(handle)
            reason = None if stat.S_ISREG(status.st_mode) else "is not a regular file"
            _trust(cache_directory() / file, reason or others_may_change(status))
            return checked(opened.read(), key)


def checked(file: bytes, key: bytes) -> bytes:
    """The contents of a file, if it is of this key."""
    contents = file[len(FORMAT) + 32 :]
    if file[: len(FORMAT) + 32] != header(key, contents):
        raise Damaged("its checksum does not match")
    return contents


def header(key: bytes, contents: bytes) -> bytes:
    """The header of a file."""
    return FORMAT + hashlib.sha256(key + contents).digest()


def write(file: str, key: bytes, contents: bytes) -> None:
    """Writes a file atomically."""
    with _folder(create=True) as (at, folder):
        draft = f"{file}.{secrets.token_hex(8)}.tmp"  # an unguessable name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(folder + draft, flags, 0o600, dir_fd=at)
        try:
            with open(handle, "wb") as opened:
                opened.write(header(key, contents))
                opened.write(contents)
            os.replace(folder + draft, folder + file, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with suppress(OSError):
                os.unlink(folder + draft, dir_fd=at)
            raise
        _remove_stale(file, at, folder)


@contextmanager
def file_lock(file: str) -> Iterator[None]:
    """Locks a file against other processes. The system releases the lock of a killed process.

    Goes on without after `LOCK_WAIT` seconds, and where files cannot be locked.
    """
    name, handle = f"{file}.lock", None
    with suppress(Distrusted, OSError):
        with _folder(create=True) as (at, folder):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            handle = os.open(folder + name, flags, 0o600, dir_fd=at)
        wait_for_lock(handle, LOCK_WAIT)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(Distrusted, OSError), _folder(create=False) as (at, folder):
                os.unlink(folder + name, dir_fd=at)  # waiting processes have it open, and then find the kernel
            release(handle)


def _remove_stale(file: str, at: int | None, folder: str) -> None:
    """Removes unfinished files of killed processes."""
    with suppress(OSError):
        for name in os.listdir(folder if at is None else at):
            if name.startswith(f"{file}.") and name.endswith(".tmp"):
                with suppress(OSError):  # another process was faster
                    if time.time() - os.stat(folder + name, dir_fd=at).st_mtime > STALE:
                        os.unlink(folder + name, dir_fd=at)


@contextmanager
def _folder(create: bool) -> Iterator[tuple[int | None, str]]:
    """The checked folder as a descriptor, so that it cannot be replaced, and a prefix for names."""
    path = cache_directory()
    if create:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    if os.open not in os.supports_dir_fd:  # Windows, where a user's folder is private
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
        raise Distrusted(f"not loading kernels: {path} {reason}, so that others could run code through it; {REMEDY}")


def describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, Distrusted | Damaged) else f"{type(error).__name__}: {error}"


_warned: set[type] = set()


def warn(error: Exception, message: str) -> None:
    """Warns once for each type of error, whichever file it is."""
    if type(error) not in _warned:
        _warned.add(type(error))
        warnings.warn(f"tilewise: {message}", RuntimeWarning, stacklevel=2)
