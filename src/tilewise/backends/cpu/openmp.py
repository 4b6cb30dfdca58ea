"""torch's own threads, by the OpenMP runtime that torch calls.

They spin for a while after each parallel region. Other threads would have to share the cores with them, and be woken.
Gain: cpu 2 in benchmarks/cpu/LOG.md.

A process may have several runtimes, each with threads of its own: wheels bring copies of libgomp (scikit-learn,
sentencepiece), and LD_PRELOAD puts one before all others (libiomp5, libomp). All of these have GNU's `GOMP_parallel`.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ...core.private.torch import LIBRARY

# `parallel(function, argument, threads, 0)` calls `void function(argument)` in up to `threads` threads, including the
# caller.
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .*?(/.*/lib(?:gomp|iomp5|omp)[-.][^/]*)")


def find_parallel() -> Any:
    """`GOMP_parallel` of the runtime that torch calls, if it has one: see `PARALLEL`.

    The loader looks for torch's symbols in the global scope first, which LD_PRELOAD fills, then in the libraries that
    torch's module needs. So do we.
    """
    if sys.platform != "linux":
        return None
    for scope in (None, LIBRARY):
        try:
            library = ctypes.CDLL(scope)
            parallel = PARALLEL(("GOMP_parallel", library))
            if has_torchs_threads(library):
                return parallel
        except (OSError, AttributeError):  # no such file, no such symbol
            pass
    return None


def has_torchs_threads(library: Any) -> bool:
    """Whether a runtime is the one that torch calls: torch sees a number of threads that is set here.

    The number is the calling thread's own, and is set back. Runtimes have one team for each thread that calls them, so
    torch's parallel regions and ours run in the same threads.
    """
    threads, set_threads = torch.get_num_threads(), library.omp_set_num_threads
    if library.omp_get_max_threads() != threads:
        return False
    other = threads - 1 if threads > 1 else 2
    set_threads(other)
    try:
        return torch.get_num_threads() == other
    finally:
        set_threads(threads)


def mapped_runtimes(address: int = 0) -> tuple[list[str], str]:
    """The files of all OpenMP runtimes in this process, and of the one that a function at `address` is in."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return [], ""
    found = [match.groups() for match in map(MAPPED.match, lines) if match]
    at = [file for start, end, file in found if int(start, 16) <= address < int(end, 16)]
    return sorted({file for *_, file in found}), at[0] if at else ""
