"""MLX in the simulator: the text that it makes of a kernel's body, and the attention kernels that it ships.

The latter run on Apple's GPUs every day: a fault found in them, or a wrong number, is one of the simulator's own."""

import re
import struct
from pathlib import Path

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


KERNELS = "mlx/backend/metal/kernels"
# From MLX's own helpers, which need more of Metal than there is here.
LIMITS = """
#include <metal_stdlib>
using namespace metal;
template <class T> struct Limits {
  static constexpr constant float finite_min = -3.0e38f;
  static constexpr constant float min = -INFINITY;
};
"""


def shipped(name, **constants):
    """A header of MLX's wheel with what it includes, function constants replaced by values."""
    root, seen = Path(mx.__file__).parent / "include", set()

    def inlined(path):
        text = "" if path in seen else (root / path).read_text()
        seen.add(path)
        return re.sub(r'^#include "(.*)"$', lambda m: inlined(m[1]), text, flags=re.MULTILINE)

    text = inlined(f"{KERNELS}/{name}").encode("ascii", "replace").decode().replace("#pragma once", "")
    text = re.sub(
        r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];",
        lambda m: f"constant {m[1]} {m[2]} = {int(constants.get(m[2], 0))};",
        text,
    )
    text = re.sub(r",\s*function_constant\(\w+\)", "", text)
    # One specialisation is enough where there are no address spaces.
    spaces = r"template <typename T>\s*struct pointer_element<(?:device|constant|threadgroup) T\*> \{[^}]*\};"
    return LIMITS + re.sub(spaces, "", text)


def instances(name, arguments):
    lines = (
        f'template [[host_name("{name}_{t}")]] [[kernel]] decltype({name}<{t}, {arguments}>) {name}<{t}, {arguments}>;'
        for t in TYPES
    )
    return "\n" + "\n".join(lines) + "\n"


TYPES = {"float": (np.float32, 1e-6), "half": (np.float16, 1e-3)}


def attention(q, k, v, causal):
    """In float64. q [H, Lq, D], k and v [Hkv, Lk, D]"""
    k, v = (np.repeat(x.astype(np.float64), len(q) // len(x), 0) for x in (k, v))
    s = np.einsum("hqd,hkd->hqk", q.astype(np.float64), k) * q.shape[-1] ** -0.5
    Lq, Lk = s.shape[1:]
    if causal:
        s = np.where(np.arange(Lk) <= np.arange(Lq)[:, None] + Lk - Lq, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,hkd->hqd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("type_", TYPES)
def test_decode_of_mlx(type_):
    library = compile_shader(shipped("sdpa_vector.h", blocks=32) + instances("sdpa_vector", 64))
    dtype, bound = TYPES[type_]
    rng = np.random.default_rng(0)
    H, Hkv, L, D = 4, 2, 77, 64
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((H, 1, D), (Hkv, L, D), (Hkv, L, D)))
    out, none = np.full((H, 1, D), np.nan, dtype), np.zeros(8, dtype)
    numbers = [H // Hkv, L, L * D, D, L * D, D, D**-0.5]  # group, keys, strides of k and v, scale
    getattr(library, f"sdpa_vector_{type_}")(
        q, k, v, out, *numbers, none, none, 1, 1, 1, none, H,
        threads=(H * 1024, 1, 1), group_size=(1024, 1, 1), arg_casts=dict.fromkeys((4, 5, 13, 14, 15, 17), "int32"),
    )  # fmt: skip
    assert np.abs(out - attention(q, k, v, causal=False)).max() < bound


@pytest.mark.parametrize("type_", TYPES)
def test_prefill_of_mlx_relies_on_the_layout_that_apples_gpus_have(type_):
    library = compile_shader(
        shipped("steel/attn/kernels/steel_attention.h", do_causal=1) + instances("attention", "32, 16, 64, 64, 4, 1")
    )
    dtype, bound = TYPES[type_]
    rng = np.random.default_rng(0)
    H, Hkv, Lq, Lk, D, BQ, BK = 2, 1, 40, 75, 64, 32, 16
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((H, Lq, D), (Hkv, Lk, D), (Hkv, Lk, D)))
    none = np.zeros(24, dtype)
    NQ, NK = -(-Lq // BQ), -(-Lk // BK)
    sizes = [1, H, D, Lq, Lk, H // Hkv, D**-0.5, NQ, NK, Lq // BQ, Lk // BK, Lq % BQ, Lk % BK, Lk - Lq]
    strides = [s for n, length in ((H, Lq), (Hkv, Lk), (Hkv, Lk), (H, Lq)) for s in (n * length * D, length * D, D)]
    params = np.frombuffer(struct.pack("<6if7i12q", *sizes, *strides), np.uint8).copy()
    errors = []
    for hostile in (False, True):
        library.options.hostile_layout = hostile
        out = np.full((H, Lq, D), np.nan, dtype)
        getattr(library, f"attention_{type_}")(
            q, k, v, out, params, none, none, none, np.zeros(H * Lq, np.float32),
            threads=(NQ * 32, H * 4, 1), group_size=(32, 4, 1),
        )  # fmt: skip
        errors.append(np.abs(out - attention(q, k, v, causal=True)).max())
    assert errors[0] < bound
    assert errors[1] > 0.1
