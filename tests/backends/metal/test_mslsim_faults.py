"""Every detector of mslsim refuses a kernel that has its mistake, at the right line, and passes the corrected one."""

import pytest
import torch

from mslsim import Fault, compile_shader, unwritten, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

# Each mistake stands under FLAW, its correction beside it. `!` marks the line that a message must name.
SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant constexpr int N = 64;

kernel void barrier_missing(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  s[t] = float(t);
#if !FLAW
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  out[t] = s[N - 1 - t];  // !
}
kernel void barrier_of_other_memory(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  s[t] = float(t);
  threadgroup_barrier(FLAW ? mem_flags::mem_device : mem_flags::mem_threadgroup);
  out[t] = s[N - 1 - t];  // !
}
kernel void written_while_read(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  s[t] = float(t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float x = s[N - 1 - t];
#if !FLAW
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  s[t] = x;  // !
  out[t] = s[t];
}
kernel void written_by_two(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  s[FLAW ? t / 2 : t] = float(t);  // !
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = s[FLAW ? t / 2 : t];
}
// Within a simdgroup, its own barrier is enough; across simdgroups it is not.
kernel void simdgroup_barrier_too_narrow(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  s[t] = float(t);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = s[FLAW ? N - 1 - t : t ^ 31u];  // !
}
// A simdgroup's operations order no memory.
kernel void shuffle_is_no_barrier(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  s[t] = float(t);
  const float x = simd_sum(float(t));
#if !FLAW
  simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
  out[t] = s[t ^ 1u] + x;  // !
}
// Lanes 0 and 1 read before lane 1 writes: the reader that matters is not the last one.
kernel void earlier_reader(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[1];
  if (t == 0) s[0] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = t < 2u ? s[0] : 0.0f;
#if !FLAW
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  if (t == 1u) s[0] = 2.0f;  // !
}
kernel void matrix_store_then_read(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[2 * N];
  threadgroup float* mine = s + t / 32 * N;
  simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(3.0f), mine, 8);
#if !FLAW
  simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
  out[t] = mine[t % 32];  // !
}
kernel void matrix_store_then_load(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[2 * N];
  threadgroup float* mine = s + t / 32 * N;
  simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(3.0f), mine, 8);
#if !FLAW
  simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
  simdgroup_float8x8 m;
  simdgroup_load(m, mine, 8, ulong2(0, 0), true);  // !
  out[t] = simd_sum(float(t));
}
kernel void threads_share_an_output(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  out[FLAW ? t / 2 : t] = float(t);  // !
}
kernel void neighbour_in_device_memory(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  out[t] = float(t);
  threadgroup_barrier(FLAW ? mem_flags::mem_threadgroup : mem_flags::mem_device);
  const float x = out[N - 1 - t];  // !
  threadgroup_barrier(mem_flags::mem_device);
  out[t] = x;
}
kernel void groups_share_an_output(device float* out [[buffer(0)]], device float* wide [[buffer(1)]],
                                   uint t [[thread_position_in_grid]]) {
  wide[FLAW ? t % 64 : t] = 1.0f;  // !
}
kernel void groups_read_each_other(device float* out [[buffer(0)]], device float* wide [[buffer(1)]],
                                   uint t [[thread_position_in_grid]]) {
  wide[t] = 1.0f;
  threadgroup_barrier(mem_flags::mem_device);
  const float x = wide[FLAW ? (t + 64) % 128 : t];  // !
  if (x < 0.0f) out[t % 64] = x;
}
kernel void threadgroup_memory_unwritten(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[N];
  if (!FLAW || t != 5u) s[t] = float(t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = s[t];  // !
}
kernel void device_memory_unwritten(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
#if !FLAW
  out[t] = 0.0f;
#endif
  out[t] += float(t);  // !
}
kernel void buffer_too_short(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  out[FLAW ? t + 1 : t] = 0.0f;  // !
}
kernel void before_the_buffer(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  device float* p = out + t;
  p[FLAW ? -1 : 0] = 0.0f;  // !
}
inline void fill(threadgroup float* s, uint t, uint step) {
  s[t * step] = float(t);  // ! threadgroup_array_too_short
}
kernel void threadgroup_array_too_short(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float before[N];
  threadgroup float s[N];
  threadgroup float after[N];
  before[t] = after[t] = 0.0f;
  fill(s, t, FLAW ? 2u : 1u);
  out[t] = 1.0f;
}
kernel void matrix_past_the_end(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[2 * N];
  simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(3.0f), s + t / 32 * N + (FLAW ? 8 : 0), 8);  // !
  out[t] = 1.0f;
}
kernel void thread_array_too_short(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float mine[8];
  for (int i = 0; i < 8; i++) mine[i] = float(i);
  out[t] = mine[FLAW ? t : t % 8];  // !
}
kernel void barrier_in_one_simdgroup(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (!FLAW || t < 32u) threadgroup_barrier(mem_flags::mem_threadgroup);  // !
  out[t] = 1.0f;
}
kernel void barrier_in_some_lanes(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (!FLAW || t % 32u < 8u) threadgroup_barrier(mem_flags::mem_threadgroup);  // !
  out[t] = 1.0f;
}
kernel void sum_in_some_lanes(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float x = 1.0f;
  if (!FLAW || t % 32u < 16u) x = simd_sum(x);  // !
  out[t] = x;
}
kernel void matrix_in_some_lanes(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  if (!FLAW || t % 32u < 8u) simdgroup_load(m, out, 8);  // !
  simdgroup_multiply(m, m, m);
}
kernel void matrix_in_other_lanes(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  if (!FLAW || t % 32u >= 8u) simdgroup_load(m, out, 8);  // !
  simdgroup_multiply(m, m, m);
}
kernel void ended_before_the_barrier(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (FLAW && t >= 60u) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // !
  out[t] = 1.0f;
}
kernel void other_barrier(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (FLAW && t < 32u)
    threadgroup_barrier(mem_flags::mem_threadgroup);  // !
  else
    threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = 1.0f;
}
kernel void lanes_disagree(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[4 * N];
  simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(3.0f), s + t / 32 * N + (FLAW ? t % 2 : 0), 8);  // !
  out[t] = 1.0f;
}
kernel void offset_overflows(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  const int rows = 70000 + int(t);
  const long at = FLAW ? rows * rows : long(rows) * rows;  // !
  out[t] = at > 0 ? 1.0f : 0.0f;
}
kernel void divided_by_nothing(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  out[t] = float(100 / (FLAW ? int(t) - 3 : int(t) + 1));  // !
}
kernel void vector_misaligned(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  device const float4* p = reinterpret_cast<device const float4*>(out + (FLAW ? 1 : 0));
  const float4 x = p[0];  // !
  threadgroup_barrier(mem_flags::mem_device);
  if (t == 0) out[0] = x.y;
}
kernel void nowhere(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  device float* p = FLAW ? nullptr : out;
  p[t] = 1.0f;  // !
}
kernel void too_much_memory(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup half a[8192];
  threadgroup float s[FLAW ? 4097 : 4096];  // !
  a[t] = 0.0h;
  s[t] = float(a[t]);
  out[t] = s[t];
}
kernel void partial_simdgroup(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_multiply(m, m, m);  // !
  out[t] = 1.0f;
}
kernel void constant_written(constant float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  const_cast<float*>(out)[t] = 1.0f;  // !
}
"""

# Without a barrier, a reader may come first and find nothing, or come second and find what it must not rely on.
KINDS = {
    "barrier_missing": "race uninitialised",
    "barrier_of_other_memory": "race uninitialised",
    "written_while_read": "race",
    "written_by_two": "race",
    "simdgroup_barrier_too_narrow": "race uninitialised",
    "shuffle_is_no_barrier": "race uninitialised",
    "earlier_reader": "race",
    "matrix_store_then_read": "race",
    "matrix_store_then_load": "race",
    "threads_share_an_output": "race",
    "neighbour_in_device_memory": "race",
    "groups_share_an_output": "race",
    "groups_read_each_other": "race",
    "threadgroup_memory_unwritten": "uninitialised",
    "device_memory_unwritten": "uninitialised",
    "buffer_too_short": "bounds",
    "before_the_buffer": "bounds",
    "threadgroup_array_too_short": "bounds",
    "matrix_past_the_end": "bounds",
    "thread_array_too_short": "bounds",
    "barrier_in_one_simdgroup": "divergence",
    "barrier_in_some_lanes": "divergence",
    "sum_in_some_lanes": "divergence",
    "matrix_in_some_lanes": "divergence",
    "matrix_in_other_lanes": "divergence",
    "ended_before_the_barrier": "divergence",
    "other_barrier": "divergence",
    "lanes_disagree": "uniform",
    "offset_overflows": "arithmetic",
    "divided_by_nothing": "arithmetic",
    "vector_misaligned": "alignment",
    "nowhere": "pointer",
    "too_much_memory": "size",
    "partial_simdgroup": "partial",
    "constant_written": "read_only",
}


@pytest.fixture(scope="module")
def libraries():
    made = {flaw: compile_shader(f"#define FLAW {flaw}\n{SOURCE}") for flaw in (0, 1)}
    for flaw, library in made.items():
        library.flaw = flaw
    return made


def call(library, name):
    groups = 2 if name.startswith("groups") else 1
    out = torch.zeros(64)
    if name == "device_memory_unwritten":
        out = unwritten(out)
    args = [out, torch.zeros(128)] if groups == 2 else [out]
    threads = 40 if name == "partial_simdgroup" and library.flaw else 64 * groups
    getattr(library, name)(*args, threads=threads, group_size=64)


def wanted_line(name):
    """Of the first `!` after the kernel's name, or of the one that gives the name."""
    lines = ["", *SOURCE.splitlines()]  # FLAW's own line comes first
    named = [i for i, line in enumerate(lines, 1) if f"// ! {name}" in line]
    if named:
        return named[0]
    start = next(i for i, line in enumerate(lines, 1) if f" {name}(" in line)
    return next(i for i, line in enumerate(lines, 1) if i > start and line.endswith("// !"))


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_mistake_is_found_and_its_line_named(libraries, name, seed):
    library = libraries[1]
    library.options.seed = seed
    with pytest.raises(Fault) as caught:
        call(library, name)
    assert caught.value.kind in KINDS[name].split(), caught.value
    # Either side of a race may come second.
    assert wanted_line(name) in (caught.value.line, caught.value.other_line), caught.value
    assert caught.value.line > 0


@pytest.mark.parametrize("name", [n for n in KINDS if n != "constant_written"])
def test_without_the_mistake_nothing_is_found(libraries, name):
    library = libraries[0]
    for seed in (0, 1, 2):
        library.options.seed = seed
        call(library, name)
