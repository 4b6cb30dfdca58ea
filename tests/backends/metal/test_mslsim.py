"""mslsim is called as torch.mps.compile_shader is: what goes in, how, and what is refused."""

import numpy as np
import pytest
import torch

from mslsim import Fault, compile_shader, unwritten, why_not
from mslsim.mutants import barriers, mutate

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

SOURCE = """
#include <metal_stdlib>
using namespace metal;
// kernel void not_a_kernel(device float* x [[buffer(0)]]) {}
#if 0
kernel void left_out(device float* x [[buffer(0)]]) {}
#endif
kernel void copy(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                 uint t [[thread_position_in_grid]]) {
  out[t] = x[t];
}
// Without an attribute buffers are numbered as they come.
kernel void fill(device float* out, constant float& value, uint t [[thread_position_in_grid]]) { out[t] = value; }
template <typename T>
kernel void numbers(device long* out [[buffer(0)]], constant T* values [[buffer(1)]],
                    uint t [[thread_position_in_grid]]) {
  out[t] = long(float(values[t]) * 4.0f);
}
template [[host_name("numbers_long")]] [[kernel]] void numbers<long>(device long*, constant long*, uint);
template [[host_name("numbers_int")]] [[kernel]] decltype(numbers<int>) numbers<int>;
template [[host_name("numbers_short")]] [[kernel]] decltype(numbers<short>) numbers<short>;
template [[host_name("numbers_char")]] [[kernel]] decltype(numbers<char>) numbers<char>;
template [[host_name("numbers_uchar")]] [[kernel]] decltype(numbers<uchar>) numbers<uchar>;
template [[host_name("numbers_float")]] [[kernel]] decltype(numbers<float>) numbers<float>;
template [[host_name("numbers_half")]] [[kernel]] decltype(numbers<half>) numbers<half>;
template [[host_name("numbers_bfloat")]] [[kernel]] decltype(numbers<bfloat>) numbers<bfloat>;
kernel void shift(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint t [[thread_position_in_grid]]) {
  const float v = x[t + 1];
  threadgroup_barrier(mem_flags::mem_device);
  out[t] = v;
}
[[max_total_threads_per_threadgroup(128)]] kernel void limited(device float* out [[buffer(0)]],
                                                               uint t [[thread_position_in_grid]]) {
  threadgroup half2 rows[3][8];
  threadgroup int one, two;
  if (t == 0) { rows[2][7] = half2(1.0h, 2.0h); one = 3; two = 4; out[0] = float(rows[2][7].y) + float(one * two); }
}
kernel void accumulate(device float* out [[buffer(0)]], uint t [[thread_position_in_grid]]) { out[t] += 1.0f; }
"""


@pytest.fixture(scope="module")
def library():
    return compile_shader(SOURCE)


def test_kernels_are_listed_and_unknown_ones_refused(library):
    assert (
        sorted(n for n in dir(library) if not n.startswith("numbers")) == "accumulate copy fill limited shift".split()
    )
    assert "numbers_half" in dir(library)
    with pytest.raises(AttributeError, match="left_out"):
        library.left_out  # noqa: B018


def test_tensors_are_views_with_their_offsets(library):
    x = torch.arange(20.0)
    out = torch.zeros(4, 6)
    library.copy(x[3:], out[2, 1:], threads=5)
    assert out[2].tolist() == [0, 3, 4, 5, 6, 7]
    assert out.sum() == 25
    with pytest.raises(Fault, match="has 5 elements") as caught:
        library.copy(x[:5], out, threads=6)
    assert caught.value.kind == "bounds"


def test_numpy_arrays_are_taken_too(library):
    out = np.zeros(5, np.float32)
    library.copy(np.arange(10, dtype=np.float32)[5:], out)
    assert out.tolist() == [5, 6, 7, 8, 9]


def test_threads_are_those_of_the_first_tensor_unless_given(library):
    out = torch.zeros(1000)
    library.fill(out, 2.5)
    assert (out == 2.5).all()


@pytest.mark.parametrize(
    ("kernel", "values", "casts"),
    [
        ("long", [1, 1 << 40], None),
        ("int", [1, 7], {1: "int32"}),
        ("int", [1, 7], "int32"),
        ("short", [1, -7], "int16"),
        ("char", [1, -7], "int8"),
        ("uchar", [1, 200], "uint8"),
        ("float", [1.5, 2.25], None),
        ("half", [1.5, 2.25], {1: "fp16"}),
        ("bfloat", [1.5, 2.25], {1: "bf16"}),
        ("bfloat", (3, 4), {1: "bf16"}),
    ],
)
def test_numbers_arrive_in_their_types(library, kernel, values, casts):
    out = torch.zeros(2, dtype=torch.long)
    getattr(library, f"numbers_{kernel}")(out, values, arg_casts=casts)
    assert out.tolist() == [int(np.float32(v) * 4) for v in values]


def test_ints_without_a_cast_are_int64_which_an_int_pointer_reads_in_halves(library):
    out = torch.zeros(2, dtype=torch.long)
    library.numbers_int(out, [1, 2])
    assert out.tolist() == [4, 0]


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        ((None, torch.zeros(1)), {}, RuntimeError, "argument 0: NoneType"),
        ((torch.zeros(1), []), {}, RuntimeError, "empty list"),
        ((torch.zeros(1), ["a"]), {}, RuntimeError, "not a list"),
        ((torch.zeros(1), [0.0] * 1025), {}, RuntimeError, "4100 bytes"),
        ((torch.zeros(1), 300), {"arg_casts": "int8"}, OverflowError, "does not fit int8"),
        ((torch.zeros(1), 3), {"arg_casts": "int64"}, RuntimeError, "int64"),
        ((torch.zeros(1), 3), {"arg_casts": 3}, RuntimeError, "arg_casts"),
        ((1.0, 2.0), {}, RuntimeError, "threads: not given"),
        ((torch.zeros(1), 1.0), {"threads": (1, 1, 1, 1)}, RuntimeError, "one to three"),
        ((torch.zeros(1), 1.0), {"threads": 0}, RuntimeError, "empty"),
        ((torch.zeros(1), 1.0), {"threads": (1, 1), "group_size": 1}, RuntimeError, "another rank"),
        (
            (torch.zeros(1), 1.0),
            {"threads": (1, 1), "group_size": (64, 17)},
            ValueError,
            "1088 threads, more than 1024",
        ),
        ((torch.zeros(1, device="meta"), 1.0), {}, RuntimeError, "on the CPU"),
    ],
)
def test_what_is_refused(library, args, options, error, words):
    with pytest.raises(error, match=words):
        library.fill(*args, **options)


def test_an_argument_for_every_buffer(library):
    with pytest.raises(Fault, match=r"buffer\(1\) value gets no argument") as caught:
        library.fill(torch.zeros(1))
    assert caught.value.kind == "unbound"


def test_properties(library):
    assert library.copy.max_threads_per_threadgroup == 1024
    assert library.copy.thread_execution_width == 32
    assert library.copy.static_thread_group_memory_length == 0
    assert library.limited.max_threads_per_threadgroup == 128
    assert library.limited.static_thread_group_memory_length == 3 * 8 * 4 + 16 + 16
    out = torch.zeros(1)
    library.limited(out, threads=1)
    assert out.item() == 14
    with pytest.raises(ValueError, match="more than 128"):
        library.limited(out, threads=256, group_size=256)
    narrow = compile_shader(SOURCE, max_threads=256)
    assert narrow.limited.static_thread_group_memory_length == 3 * 8 * 4 + 16 + 16
    with pytest.raises(ValueError, match="more than 256"):
        narrow.fill(out, 1.0, threads=512, group_size=512)


def test_tensors_that_overlap_share_their_memory(library):
    x = torch.arange(65.0)
    library.shift(x, x, threads=64, group_size=64)
    assert x.tolist() == [*range(1, 65), 64]
    with pytest.raises(Fault, match=r"x \(buffer 0\) = out \(buffer 1\)") as caught:
        library.shift(x, x, threads=64, group_size=32)  # another group reads what this one writes
    assert caught.value.kind == "race"


def test_unwritten_memory_becomes_written(library):
    x = unwritten(torch.zeros(8))
    with pytest.raises(Fault) as caught:
        library.accumulate(x)
    assert caught.value.kind == "uninitialised"
    library.fill(x[:4], 1.0)
    library.accumulate(x[:4])
    with pytest.raises(Fault):
        library.accumulate(x)
    assert x[:4].tolist() == [2] * 4


def test_errors_of_the_compiler_are_syntax_errors():
    with pytest.raises(SyntaxError, match=r"kernel.metal:3.*simd_add"):
        compile_shader(
            "#include <metal_stdlib>\nusing namespace metal;\nkernel void f(device float* x) { x[0] = simd_add(1.0f); }"
        )
    with pytest.raises(SyntaxError, match=r"kernel.metal:3.*'x' is used uninitialized"):
        compile_shader("#include <metal_stdlib>\n\nkernel void f(device float* out) { float x; out[0] = x; }")
    with pytest.raises(SyntaxError, match="line 2: 'é' is not ASCII"):
        compile_shader("#include <metal_stdlib>\n// é\n")
    with pytest.raises(SyntaxError, match="cannot pass"):
        compile_shader("kernel void f(threadgroup float* s [[threadgroup(0)]]) {}")


MIXED = """#include <metal_stdlib>
using namespace metal;
kernel void f(device float* x) {
  simdgroup_half8x8 a = make_filled_simdgroup_matrix<half, 8, 8>(2.0h);
  simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_multiply_accumulate(c, a, a, c);
  simdgroup_store(c, x, 8);
}
"""


def test_matrices_of_several_types_only_if_asked():
    with pytest.raises(SyntaxError, match="simdgroup_multiply_accumulate"):
        compile_shader(MIXED)
    x = torch.zeros(64)
    compile_shader(MIXED, mixed_matrices=True).f(x, threads=32, group_size=32)
    assert (x == 33).all()


BARRIERS = """a; threadgroup_barrier(mem_flags::mem_device |
  mem_flags::mem_threadgroup); // simdgroup_barrier(x);
if (c) simdgroup_barrier(mem_flags::mem_none);
"""


def test_barriers_are_found_and_deleted():
    first, second = barriers(BARRIERS)
    assert (first.kind, first.line, second.kind, second.line) == ("threadgroup", 1, "simdgroup", 3)
    assert first.without.startswith("a; ; //")
    assert second.without.endswith("if (c) ;\n")


def test_a_mutant_that_is_none_is_refused():
    assert mutate("a b a", "a", "c", count=2) == "c b c"
    with pytest.raises(ValueError, match="wanted 1 times in the text, found 2 times"):
        mutate("a b a", "a", "c")
