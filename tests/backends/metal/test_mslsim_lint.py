"""The lint takes what Apple's compiler is known to take, and names the line of what it is not."""

import pytest

import test_mslsim
import test_mslsim_numbers
from mslsim.lint import lint
from mslsim.mutants import mutate

GOOD = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
typedef half T;
constant constexpr int N = 64;
struct Tensors { device const T* x; threadgroup float* s; };
template <int M> inline float sum(device const T* x, threadgroup float* s, int n) {
  float total = 0.0f;
  for (int i = 0; i < n && i < M; i++) total += float(x[i]) + s[i];
  return total;
}
kernel void f(device const T* x [[buffer(0)]], device float* out [[buffer(1)]], constant int* ints [[buffer(2)]],
              const constant float& scale [[buffer(3)]], uint3 at [[thread_position_in_grid]],
              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float s[N], other[2][8];
  const Tensors t = {x, s};
  s[lane] = float(x[lane]);
  other[lane % 2][lane % 8] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  simdgroup_float8x8 a, b = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(a, t.s, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(b, a, a, b);
  const float m = max(simd_sum(s[lane]), fast::exp2(scale));
  out[at.x] = sum<N>(t.x, t.s, ints[0]) * m;
}
"""

REFUSED = {
    "address space changed": ("  const Tensors t = {x, s};", "  const Tensors t = {x, (threadgroup float*)x};"),
    "threadgroup as device": ("sum<N>(t.x, t.s, ints[0])", "sum<N>(t.s, t.s, ints[0])"),
    "address space lost": ("  s[lane] = float(x[lane]);", "  const T* p = x; s[lane] = float(p[lane]);"),
    "constant written": ("  s[lane] = float(x[lane]);", "  ints[0] = 1; s[lane] = 0.0f;"),
    "const device written": ("  s[lane] = float(x[lane]);", "  x[lane] = T(1.0f); s[lane] = 0.0f;"),
    "if constexpr": ("  s[lane] = float(x[lane]);", "  if constexpr (N > 3) s[lane] = float(x[lane]);"),
    "structured binding": (
        "  s[lane] = float(x[lane]);",
        "  int two[2] = {1, 2}; auto [c, d] = two; s[lane] = float(c + d);",
    ),
    "lambda": ("  s[lane] = float(x[lane]);", "  auto g = [&](uint i) { return float(x[i]); }; s[lane] = g(lane);"),
    "unknown function": ("simd_sum(s[lane])", "simd_add(s[lane])"),
    "max of two types": ("max(simd_sum(s[lane]), fast::exp2(scale))", "max(at.x, 1)"),
    "half into float matrices": ("  simdgroup_float8x8 a,", "  simdgroup_half8x8 h; simdgroup_float8x8 a,"),
    "mathematics of bfloat": ("fast::exp2(scale)", "float(exp2(bfloat(scale)))"),
    "double": ("  float total = 0.0f;", "  double total = 0.0f;"),
    "not ASCII": ("  float total = 0.0f;", "  float total = 0.0f; // \N{RIGHTWARDS ARROW}"),
}


def test_a_good_text_passes():
    assert lint(GOOD) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    old, new = REFUSED[name]
    bad = mutate(GOOD, old, new)
    if name == "half into float matrices":
        bad = mutate(bad, "multiply_accumulate(b, a, a, b)", "multiply_accumulate(b, h, h, b)")
        assert lint(bad, mixed_matrices=True) == []
    complaints = lint(bad)
    wanted = next(i for i, (a, b) in enumerate(zip(GOOD.splitlines(), bad.splitlines(), strict=True), 1) if a != b)
    if name == "half into float matrices":
        wanted = 1 + bad[: bad.index("multiply_accumulate")].count("\n")
    assert wanted in [c.line for c in complaints], complaints


@pytest.mark.parametrize("type_", ["float", "half", "bfloat"])
def test_kernels_that_are_executed_elsewhere_pass(type_):
    assert lint(test_mslsim_numbers.SOURCE.replace("TYPE", type_)) == []


def test_templates_pass():
    bare = "\n".join(line for line in test_mslsim.SOURCE.splitlines() if "rows[2][7] =" not in line)
    assert lint(bare) == []
