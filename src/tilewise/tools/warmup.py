"""`tilewise warmup`: compiles what first calls would have to wait for."""

from __future__ import annotations

import time

from ..dispatch import planner


def warmup() -> int:
    """Compiles the CPU kernels and keeps them on disk; returns the exit status."""
    from ..backends.cpu import unusable

    reason = unusable()
    if reason is not None:
        print(f"the CPU kernels cannot be compiled: {reason}")
        return 1
    from ..backends.cpu import compiler, kernel_cache

    assert "cpu" in planner.BACKENDS
    start = time.perf_counter()
    for done, name in enumerate(compiler.ALL, start=1):
        compiler.function(name)
        print(f"{done:2} of {len(compiler.ALL)}  {name:14} {time.perf_counter() - start:6.1f} s", flush=True)
    folder = kernel_cache.cache_directory()
    kept = {file.name.split(".")[0] for file in folder.glob("*.nbc")}
    if len(kept & {name.replace(" ", "_") for name in compiler.ALL}) < len(compiler.ALL):
        print(f"not all could be kept in {folder}")
        return 1
    print(f"kept in {folder}")
    return 0
