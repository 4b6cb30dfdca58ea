"""Whether this process came from a fork after which torch's threads are gone.

GNU's OpenMP waits for ever for threads that a fork has not copied. So its threads are left alone in a process that was
forked with torch in it: this module is imported before torch is, and sees forks from then on. If torch came first, the
system is asked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FORKED_WITHOUT_EXEC = 0x40  # of the flags in /proc/self/stat


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
