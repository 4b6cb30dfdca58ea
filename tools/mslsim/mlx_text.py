"""The text that MLX makes of a kernel, without an Apple GPU: it is printed while a function is traced for export."""

import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

# What MLX puts before every kernel, as far as kernels of this project rely on it.
PRELUDE = """\
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""
_PRINTED = re.compile(r"Generated source code for `(\w+)`:\n```\n(.*?)\n```", re.DOTALL)
_HOST_NAME = re.compile(r'host_name\("(\w+)"\)')


def _printed(work: Callable[[], Any]) -> str:
    """What `work` prints, be it from C++."""
    with tempfile.TemporaryFile("w+") as out:
        kept = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            work()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        out.seek(0)
        return out.read()


def traced(function: Callable[..., Any], *arrays: Any) -> list[tuple[str, str]]:
    """Of each kernel that `function(*arrays)` calls with verbose=True: its name in the text, and the text, complete for
    `compile_shader`."""
    import mlx.core as mx

    with tempfile.TemporaryDirectory() as folder:
        text = _printed(lambda: mx.export_function(f"{folder}/traced.mlxfn", function, *arrays))
    found = []
    for m in _PRINTED.finditer(text):
        host = _HOST_NAME.search(m[2]) or re.search(r"\[\[kernel\]\]\s+void\s+(\w+)", m[2])
        if host is None:
            raise ValueError(f"no kernel in what MLX printed for {m[1]}")
        found.append((host[1], PRELUDE + m[2] + "\n"))
    return found
