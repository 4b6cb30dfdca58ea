"""The text that MLX makes of a kernel's body is executed as it is."""

import numpy as np
import pytest

from mslsim import compile_shader, why_not
from mslsim.mlx_text import traced

if why_not():
    pytest.skip(why_not() or "", allow_module_level=True)

import mlx.core as mx

BODY = """
  threadgroup float rows[64];
  const uint t = thread_position_in_threadgroup.x;
  rows[t] = float(x[thread_position_in_grid.x]) * N;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_position_in_grid.x] = T(reversed(rows, t) + offset[0] + float(x_shape[0]));
"""
HEADER = "inline float reversed(const threadgroup float* rows, uint t) { return rows[63 - t]; }\n"


def test_text_of_mlx_runs():
    reverse = mx.fast.metal_kernel(
        name="reverse", input_names=["x", "offset"], output_names=["out"], source=BODY, header=HEADER
    )

    def call(x, offset):
        return reverse(
            inputs=[x, offset],
            template=[("T", mx.float16), ("N", 3)],
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(128,)],
            output_dtypes=[mx.float16],
            verbose=True,
        )

    [(name, text)] = traced(call, mx.zeros((128,)), mx.zeros((4,)))
    library = compile_shader(text)
    x = np.arange(128, dtype=np.float32)
    out = np.zeros(128, np.float16)
    # As MLX binds them: the input, its shape because the body mentions it, the second input, the output.
    getattr(library, name)(x, [128], [0.5] * 4, out, threads=128, group_size=64, arg_casts={1: "int32"})
    want = x.reshape(2, 64)[:, ::-1].reshape(-1) * 3 + 128.5
    np.testing.assert_array_equal(out, want.astype(np.float16))
