"""Compiled kernels on disk, one file each.

A file holds code: objects of kernels, and pickle of compiled loops. It is read only if its folder and the file itself
belong to this user or to root and nobody else may write to them. It begins with a digest of its contents and of what
they are for, so that a damaged file, or one of another kernel, is never loaded. It is written under another name and
put in place whole: processes may do so at once, or be killed at it. Of processes that want the same kernel at the same
time one compiles it, and the others wait for its file.

Releases bring objects of kernels with the package (`prebuilt.py`): these are looked for first.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from ...core.places import cache_home, others_may_change

FORMAT = b"tilewise kernel 2\n"
STALE = 3600  # seconds after which a file that was never put in place is removed
# No link is followed, a pipe that nobody writes to is not waited for, and on Windows bytes stay as they are.
READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
PATIENCE = 60  # seconds to wait for another process; it may have been stopped
T = TypeVar("T")
REMEDY = "remove it, or set TILEWISE_CACHE_DIR to a folder of your own"


class Distrusted(Exception):
    """Why a file or a folder is not used."""


class Damaged(Exception):
    """A file that is not what was written."""


def cache_directory() -> Path:
    """Where compiled kernels are kept."""
    return cache_home() / f"cpu-{fingerprint()}"


@cache
def sources() -> str:
    """A digest of what kernels are made of."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    core = [package.parents[1] / "core" / name for name in ("mask_rules.py", "storage.py")]
    for source in [*sorted(package.rglob("*.py")), *core]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def fingerprint() -> str:
    """Of these sources and of what compiles them: kept code is never stale."""
    versions = f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}"
    return hashlib.sha256(f"{versions} {sources()}".encode()).hexdigest()[:16]


class Kept:
    """The kept code of one function; `stamp` names what it was made of, beside the kernels' sources."""

    suffix = "o"

    def __init__(self, name: str, stamp: str = "") -> None:
        self.name, self.stamp = name, stamp

    def key(self, signature: Any, cpu: Any) -> bytes:
        """What a file is for, with the CPU that it is compiled for."""
        what = fingerprint(), self.name, self.stamp, str(signature), cpu
        return hashlib.sha256(repr(what).encode()).digest()

    def file(self, key: bytes) -> str:
        return f"{self.name}.{key.hex()[:16]}.{self.suffix}"

    def load(self, key: bytes, restore: Callable[[bytes], T]) -> T | None:
        """What `restore` makes of the code; None if it is not there or cannot be used."""
        file = self.file(key)
        try:
            return restore(read(file, key))
        except FileNotFoundError:
            return None
        except Exception as error:  # unpickling raises anything
            warn(error, f"{cache_directory() / file} cannot be read ({words(error)}): its kernel is compiled again")
        return None

    def save(self, key: bytes, contents: bytes) -> None:
        try:
            write(self.file(key), key, contents)
        except (Distrusted, OSError) as error:
            warn(error, f"kernels cannot be kept in {cache_directory()} ({words(error)}): every process compiles them")


class KeptLoop(Kept):
    """A compiled loop, as Numba's own `FunctionCache` is used."""

    suffix = "nbc"

    @property
    def cache_path(self) -> str:
        return str(cache_directory())

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # functions of Numba's that kept code is linked with
        key = self.key(signature, target_context.codegen().magic_tuple())
        return self.load(key, lambda code: CompileResult._rebuild(target_context, *pickle.loads(code)))

    def save_overload(self, signature: Any, result: Any) -> None:
        if not (result.lifted or result.library.has_dynamic_globals):
            self.save(self.key(signature, result.library.codegen.magic_tuple()), dumps(result._reduce()))


def read(file: str, key: bytes) -> bytes:
    """What `write` was given for this key; an error if that is not what the file holds."""
    with _folder(create=False) as (at, folder):
        handle = os.open(folder + file, READ, dir_fd=at)
        with open(handle, "rb") as opened:
            status = os.fstat(handle)
            reason = None if stat.S_ISREG(status.st_mode) else "is no plain file"
            _trust(cache_directory() / file, reason or others_may_change(status))
            return checked(opened.read(), key)


def checked(file: bytes, key: bytes) -> bytes:
    """What a file holds, if that is for this key."""
    contents = file[len(FORMAT) + 32 :]
    if file[: len(FORMAT) + 32] != head(key, contents):
        raise Damaged("its digest is wrong")
    return contents


def head(key: bytes, contents: bytes) -> bytes:
    """What a file begins with."""
    return FORMAT + hashlib.sha256(key + contents).digest()


def write(file: str, key: bytes, contents: bytes) -> None:
    """Puts a file in place, whole or not at all."""
    with _folder(create=True) as (at, folder):
        draft = f"{file}.{secrets.token_hex(8)}.tmp"  # a name that nobody can know before
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        handle = os.open(folder + draft, flags, 0o600, dir_fd=at)
        try:
            with open(handle, "wb") as opened:
                opened.write(head(key, contents))
                opened.write(contents)
            os.replace(folder + draft, folder + file, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with suppress(OSError):
                os.unlink(folder + draft, dir_fd=at)
            raise
        _remove_stale(file, at, folder)


@contextmanager
def alone(file: str) -> Iterator[None]:
    """Waits while another process is in here for the same file. After `PATIENCE` seconds, and where files cannot be
    locked, it goes on. The system takes back the lock of a process that is killed.
    """
    name, handle = f"{file}.lock", None
    with suppress(ImportError, Distrusted, OSError):
        import fcntl  # not on Windows

        with _folder(create=True) as (at, folder):
            handle = os.open(folder + name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=at)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(Distrusted, OSError), _folder(create=False) as (at, folder):
                os.unlink(folder + name, dir_fd=at)  # who waits has it open, and finds the kernel then
            os.close(handle)


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


def words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, Distrusted | Damaged) else f"{type(error).__name__}: {error}"


_said: set[type] = set()


def warn(error: Exception, words: str) -> None:
    """Says it once, of whichever file it is seen first."""
    if type(error) not in _said:
        _said.add(type(error))
        warnings.warn(f"tilewise: {words}", RuntimeWarning, stacklevel=2)
