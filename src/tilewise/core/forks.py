"""Whether this process was forked after torch was loaded, so that torch's threads do not exist in it.

GNU's OpenMP then waits forever for threads that the fork did not copy, so such a process must not use them. This module
is imported before torch and registers a hook for forks. If torch was imported earlier, /proc tells.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FORKED_WITHOUT_EXEC = 0x40  # PF_FORKNOEXEC of the flags in /proc/self/stat


def _came_from_a_fork() -> bool:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return bool(int(fields[6]) & FORKED_WITHOUT_EXEC)
    except (OSError, ValueError, IndexError):
        return False


forked = "torch" in sys.modules and _came_from_a_fork()


def _mark() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark)
