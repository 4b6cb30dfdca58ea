"""Forked processes: which threads and locks they have.

A fork copies the calling thread alone. GNU's OpenMP then waits forever for torch's threads, so such a process must not
use them: `forked` says whether this one was forked after torch was loaded. This module is imported before torch and
registers hooks for forks. If torch was imported earlier, /proc tells.

A lock that another thread holds would stay locked in the child. So the package's locks are made by `new_lock`, and made
anew in children. A fork waits for kernels that other threads compile (`let_finish`): LLVM's memory must not be copied
while it changes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC of the flags in /proc/self/stat
PATIENCE = 60.0  # seconds that a fork waits for a lock of `let_finish`

# The owners of locks, by id, attribute and kind of lock.
_owners: WeakValueDictionary[tuple[int, str, Callable[[], Any]], Any] = WeakValueDictionary()
_waited_for: list[tuple[Any, str]] = []
_in_children: list[Callable[[], None]] = []
_held = threading.local()  # by the thread that forks


def new_lock(owner: Any, name: str, kind: Callable[[], Any] = threading.Lock) -> Any:
    """A lock that the caller stores as attribute `name` of `owner`, an object or a module. Forked children replace it
    there.
    """
    _owners[id(owner), name, kind] = owner
    return kind()


def let_finish(owner: Any, name: str, kind: Callable[[], Any]) -> None:
    """The same for a lock that is there, and that forks wait for: the one that was registered last comes first."""
    _owners[id(owner), name, kind] = owner
    _waited_for.insert(0, (owner, name))


def in_children(function: Callable[[], None]) -> None:
    """Calls a function at the start of each forked child."""
    _in_children.append(function)


def _came_from_a_fork() -> bool:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return bool(int(fields[6]) & FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


forked = "torch" in sys.modules and _came_from_a_fork()


def _before() -> None:
    locks = [getattr(owner, name) for owner, name in _waited_for]
    _held.locks = [lock for lock in locks if lock.acquire(timeout=PATIENCE)]


def _in_parent() -> None:
    for lock in reversed(_held.locks):
        lock.release()


def _in_child() -> None:
    global forked
    forked = True
    for (_, name, kind), owner in list(_owners.items()):
        setattr(owner, name, kind())
    for function in _in_children:
        function()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
