"""torch's own threads, by its OpenMP runtime if that is GNU's.

They spin for a while after each parallel region. Other threads would have to share the cores with them, and be woken.
Gain: cpu 2 in benchmarks/cpu/LOG.md.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

# `parallel(function, argument, threads, 0)` calls `void function(argument)` in up to `threads` threads, including the
# caller.
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def find_parallel() -> Any:
    """`GOMP_parallel` of the runtime that this process has loaded, if there is one; see `PARALLEL`."""
    try:
        mapped = Path("/proc/self/maps").read_text()
        file = next(line.split(maxsplit=5)[5] for line in mapped.splitlines() if "/libgomp" in line)
        return PARALLEL(("GOMP_parallel", ctypes.CDLL(file)))
    except (OSError, StopIteration, IndexError, AttributeError):
        return None
