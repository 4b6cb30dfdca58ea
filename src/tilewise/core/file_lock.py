"""Locks of files against other processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from . import forks

locked: set[int] = set()  # files that lock others out as long as a process has them open


def wait_for_lock(handle: int, seconds: float) -> bool:
    """Locks an open file until `release`. The system releases the lock of a killed process.

    False if another process still has it after `seconds`. True where files cannot be locked: nobody has it.
    """
    locked.add(handle)
    try:
        import fcntl  # not on Windows
    except ImportError:
        return True
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return True


def release(handle: int) -> None:
    """Closes a file that `wait_for_lock` has locked or waited for."""
    with suppress(KeyError, OSError):  # a forked child has closed it
        locked.remove(handle)
        os.close(handle)


def _release_all() -> None:
    for handle in list(locked):
        release(handle)


forks.in_children(_release_all)
