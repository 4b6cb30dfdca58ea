"""torch's own threads: its OpenMP runtime, where that is GNU's.

Those threads keep their cores busy for a while after each product, waiting for the next one. Threads beside them would
have to share the cores, and to be woken. Gain: cpu 2 in benchmarks/cpu/LOG.md.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

# `parallel(function, argument, threads, 0)` calls `void function(argument)` in up to so many threads, the caller among
# them.
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def find_parallel() -> Any:
    """`GOMP_parallel` of the runtime that this process has loaded, if there is one; see `PARALLEL`."""
    try:
        mapped = Path("/proc/self/maps").read_text()
        file = next(line.split(maxsplit=5)[5] for line in mapped.splitlines() if "/libgomp" in line)
        return PARALLEL(("GOMP_parallel", ctypes.CDLL(file)))
    except (OSError, StopIteration, IndexError, AttributeError):
        return None
