"""What mslsim computes, beside numpy and ml_dtypes: simdgroup operations, 8 x 8 matrices, 16-bit floats, positions."""

import ml_dtypes
import numpy as np
import pytest

from mslsim import compile_shader, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

SOURCE = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
typedef TYPE T;

// out[operation][thread]
kernel void simd_operations(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                            constant int& n [[buffer(2)]], uint t [[thread_index_in_threadgroup]]) {
  const float v = x[t];
  device float* o = out + t;
  *o = simd_sum(v);                          o += n;
  *o = simd_max(v);                          o += n;
  *o = simd_min(v);                          o += n;
  *o = simd_shuffle(v, ushort(7));           o += n;
  *o = simd_shuffle_xor(v, ushort(5));       o += n;
  *o = simd_shuffle_down(v, ushort(3));      o += n;
  *o = simd_shuffle_up(v, ushort(4));        o += n;
  *o = simd_broadcast(v, ushort(31));        o += n;
  *o = simd_broadcast_first(v);              o += n;
  *o = simd_prefix_exclusive_sum(v);         o += n;
  *o = simd_any(v > 1.5f) ? 1.0f : 0.0f;     o += n;
  *o = simd_all(v > -9.0f) ? 1.0f : 0.0f;    o += n;
  *o = float(popcount(uint(ulong(simd_ballot(v > 0.0f))))); o += n;
  *o = float(simd_sum(int(v * 8.0f)));       o += n;
  const float4 w = simd_shuffle_xor(float4(v, v + 1.0f, v + 2.0f, v + 3.0f), ushort(1));
  *o = w.x + w.w;
}

// d = a b + c, by way of threadgroup memory and in place.
kernel void matrices(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device const T* c [[buffer(2)]],
                     device T* out [[buffer(3)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup T s[8 * 12];
  simdgroup_matrix<T, 8, 8> ma, mb, mc, md;
  simdgroup_load(ma, a, 8);
  simdgroup_load(mb, b, 8);
  simdgroup_load(mc, c, 8);
  simdgroup_multiply_accumulate(md, ma, mb, mc);
  simdgroup_store(md, out, 8);
  simdgroup_multiply(md, ma, mb);
  simdgroup_store(md, out + 64, 8);
  simdgroup_store(ma, out + 128, 8, ulong2(0, 0), true);
  simdgroup_load(md, a, 8, ulong2(0, 0), true);
  simdgroup_multiply(md, md, mb);  // the target is an operand
  simdgroup_store(md, out + 192, 8);
  simdgroup_store(simdgroup_matrix<T, 8, 8>(T(2.0f)), out + 256, 8);
  simdgroup_store(make_filled_simdgroup_matrix<T, 8, 8>(T(3.0f)), s, 12, ulong2(2, 0));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(md, s, 12, ulong2(2, 0));
  simdgroup_store(md, out + 320, 8);
}

// Which elements a lane holds: not promised by Metal, so it differs between the layouts.
kernel void elements(device const T* a [[buffer(0)]], device T* out [[buffer(1)]],
                     uint t [[thread_index_in_threadgroup]]) {
  simdgroup_matrix<T, 8, 8> m;
  simdgroup_load(m, a, 8);
  out[2 * t] = m.thread_elements()[0];
  out[2 * t + 1] = m.thread_elements()[1];
}

kernel void arithmetic(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* out [[buffer(2)]],
                       constant int& n [[buffer(3)]], uint t [[thread_position_in_grid]]) {
  const T x = a[t], y = b[t];
  device T* o = out + t;
  *o = x + y;                                  o += n;
  *o = x - y;                                  o += n;
  *o = x * y;                                  o += n;
  *o = x / y;                                  o += n;
  *o = x * y + x;                              o += n;
  *o = T(float(x) * 3.0f + float(y));          o += n;
  *o = -x;                                     o += n;
  T z = x;
  z += y;
  z *= x;
  *o = z;                                      o += n;
  *o = x + 1;                                  o += n;
  *o = T(exp2(float(x) * 0.001f));
}

// A grid whose edges are not whole groups: out[thread] = fields.
kernel void positions(device uint* out [[buffer(0)]], uint3 at [[thread_position_in_grid]],
                      uint3 inside [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
                      uint3 size [[threads_per_threadgroup]], uint3 asked [[dispatch_threads_per_threadgroup]],
                      uint3 grid [[threads_per_grid]], uint2 groups [[threadgroups_per_grid]],
                      ushort index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]], uint width [[threads_per_simdgroup]]) {
  device uint* o = out + (at.y * grid.x + at.x) * 12;
  o[0] = at.x; o[1] = at.y; o[2] = inside.x; o[3] = inside.y; o[4] = group.x; o[5] = group.y;
  o[6] = size.x; o[7] = size.y; o[8] = index; o[9] = lane + width * simdgroup; o[10] = groups.x * 100 + groups.y;
  o[11] = asked.x;
}

kernel void atomics(device atomic_uint* count [[buffer(0)]], device atomic_float* sum [[buffer(1)]],
                    uint t [[thread_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  threadgroup atomic_int most;
  if (lane == 0) atomic_store_explicit(&most, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_max_explicit(&most, int(t), memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
  if (lane == 0)
    atomic_fetch_add_explicit(sum, float(atomic_load_explicit(&most, memory_order_relaxed)), memory_order_relaxed);
}
"""

TYPES = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", params=TYPES)
def library(request):
    made = compile_shader(SOURCE.replace("TYPE", request.param))
    made.dtype = TYPES[request.param]
    return made


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def bits(x):
    """numpy hands bfloat16 over as integers."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


@pytest.mark.parametrize("seed", [0, 1])
def test_simdgroup_operations(library, rng, seed):
    library.options.seed = seed
    n = 64
    x = rng.standard_normal(n).astype(np.float32)
    out = np.zeros((15, n), np.float32)
    library.simd_operations(x, out, n, threads=n, group_size=n, arg_casts="int32")
    lanes, v = np.arange(32), x.reshape(2, 32)
    down, up = np.full_like(v, np.nan), np.full_like(v, np.nan)
    down[:, :-3], up[:, 4:] = v[:, 3:], v[:, :-4]
    exact = {
        1: v.max(1, keepdims=True),
        2: v.min(1, keepdims=True),
        3: v[:, 7:8],
        4: v[:, lanes ^ 5],
        5: down,
        6: up,
        7: v[:, 31:],
        8: v[:, :1],
        10: (v > 1.5).any(1, keepdims=True),
        11: (v > -9).all(1, keepdims=True),
        12: (v > 0).sum(1, keepdims=True),
        13: (v * 8).astype(np.int32).sum(1, keepdims=True),
    }
    for i, want in exact.items():
        np.testing.assert_array_equal(out[i].reshape(2, 32), np.broadcast_to(want, (2, 32)), err_msg=str(i))
    close = {0: v.sum(1, keepdims=True), 9: v.cumsum(1) - v, 14: 2 * v[:, lanes ^ 1] + 3}
    for i, want in close.items():
        np.testing.assert_allclose(out[i].reshape(2, 32), np.broadcast_to(want, (2, 32)), atol=1e-5, err_msg=str(i))


@pytest.mark.parametrize("hostile", [False, True])
def test_matrices_in_both_layouts(library, rng, hostile):
    library.options.hostile_layout = hostile
    # Small integers: sums are exact in every type, in any order.
    a, b, c = (rng.integers(-3, 4, (8, 8)).astype(library.dtype) for _ in range(3))
    out = np.zeros((6, 8, 8), library.dtype)
    library.matrices(*map(bits, (a, b, c)), bits(out), threads=32, group_size=32)
    A, B, C = (m.astype(np.float32) for m in (a, b, c))
    want = [A @ B + C, A @ B, A.T, A.T @ B, 2 * np.eye(8), np.full((8, 8), 3)]
    np.testing.assert_array_equal(out.astype(np.float32), np.stack(want))


def test_the_layouts_differ_and_are_complete(library):
    a, found = bits(np.arange(64).reshape(8, 8).astype(library.dtype)), []
    for hostile in (False, True):
        library.options.hostile_layout = hostile
        out = np.zeros(64, library.dtype)
        library.elements(a, bits(out), threads=32, group_size=32)
        found.append(out.astype(int))
        assert sorted(found[-1]) == list(range(64))
    library.options.hostile_layout = False
    # As observed: lane 1 holds the third and fourth element of the first row, lane 16 the first two of the fifth.
    assert list(found[0][[2, 3, 32, 33]]) == [2, 3, 32, 33]
    assert (found[0] != found[1]).mean() > 0.9


def test_16_bit_floats_round_after_every_operation(library, rng):
    dtype = library.dtype
    n = 4096
    a = np.concatenate([rng.standard_normal(n - 8), [0.0, 65504, -65504, 1e-7, 6e-8, 1e-5, np.inf, 1e30]])
    b = rng.standard_normal(n) * 2.0 ** rng.integers(-20, 12, n)
    with np.errstate(all="ignore"):
        a, b = a.astype(np.float32).astype(dtype), b.astype(np.float32).astype(dtype)
    out = np.zeros((10, n), dtype)
    library.arithmetic(bits(a), bits(b), bits(out), n, arg_casts="int32", threads=n, group_size=128)
    f, g = a.astype(np.float32), b.astype(np.float32)
    with np.errstate(all="ignore"):
        want = [f + g, f - g, f * g, f / g, (f * g).astype(dtype).astype(np.float32) + f, f * np.float32(3) + g, -f]
        want += [(f + g).astype(dtype).astype(np.float32) * f, f + 1]
        for i, w in enumerate(want):
            np.testing.assert_array_equal(out[i].astype(np.float32), w.astype(dtype).astype(np.float32), err_msg=str(i))
        np.testing.assert_allclose(out[9].astype(np.float32), np.exp2(f * np.float32(0.001)).astype(dtype), rtol=1e-2)


@pytest.mark.parametrize("seed", [0, 5])
def test_positions_in_a_grid_with_uneven_edges(library, seed):
    library.options.seed = seed
    W, H, gx, gy = 21, 10, 8, 4
    out = np.zeros((H, W, 12), np.uint32)
    library.positions(out, threads=(W, H, 1), group_size=(gx, gy, 1))
    y, x = np.mgrid[:H, :W]
    sx, sy = np.minimum(gx, W - x // gx * gx), np.minimum(gy, H - y // gy * gy)
    index = y % gy * sx + x % gx
    want = [x, y, x % gx, y % gy, x // gx, y // gy, sx, sy, index, index, np.full_like(x, 303), np.full_like(x, gx)]
    np.testing.assert_array_equal(out, np.stack(want, -1))


@pytest.mark.parametrize("workers", [1, 2])
def test_atomics(library, workers):
    library.options.workers = workers
    count, total = np.zeros(1, np.uint32), np.zeros(1, np.float32)
    library.atomics(count, total, threads=200, group_size=64)
    library.options.workers = 1
    assert count[0] == 200
    assert total[0] == 63 + 127 + 191 + 199
