"""torch's own threads: its OpenMP runtime, where that is GNU's.

Those threads keep their cores busy for a while after each product, waiting for the next one. Threads beside them would
have to share the cores, and to be woken: with a float32 product of torch before each call, attention over 512 tokens of
12 heads of 32 took 4.9 ms by threads of our own and 3.2 ms by torch's (SDPA 3.4 ms), decode of 32/8 heads over 8192
keys 5.2 and 2.7 ms (two cores, benchmarks/cpu/threads.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def find_parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, threads, 0)` of the runtime that this process has loaded, if there is one.

    It calls `void function(argument)` in up to so many threads, the caller among them.
    """
    try:
        mapped = Path("/proc/self/maps").read_text()
        file = next(line.split(maxsplit=5)[5] for line in mapped.splitlines() if "/libgomp" in line)
        parallel = ctypes.CDLL(file).GOMP_parallel
    except (OSError, StopIteration, IndexError, AttributeError):
        return None
    parallel.restype, parallel.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel
