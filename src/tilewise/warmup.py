"""`tilewise warmup`: compiles what first calls would have to wait for."""

from __future__ import annotations

import time

from . import planner


def warmup() -> int:
    """Compiles the CPU kernels and keeps them on disk; returns the exit status."""
    try:
        from .backends.cpu import compiled
    except ImportError as error:
        print(f"the CPU kernels need numba, which cannot be imported: {error}")
        return 1
    assert "cpu" in planner.BACKENDS
    start = time.perf_counter()
    for done, name in enumerate(compiled.ALL, start=1):
        compiled.function(name)
        print(f"{done:2} of {len(compiled.ALL)}  {name:14} {time.perf_counter() - start:6.1f} s", flush=True)
    print(f"kept in {compiled.cache_directory()}")
    return 0
