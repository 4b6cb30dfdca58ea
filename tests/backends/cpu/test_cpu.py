"""The CPU backend: conformance, random problems, its vector layer."""

import os
import platform
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from numba import njit

from conformance import LatentRows
from strategies import cases
from tilewise import attention, paged_attention, plan
from tilewise.backends.cpu.codegen import numba_ops
from tilewise.backends.cpu.codegen.dtypes import CODES
from tilewise.backends.cpu.codegen.load_store import transpose
from tilewise.backends.cpu.codegen.vector import W, microkernel
from tilewise.backends.cpu.mainloop.score_mod import softcap_cells
from tilewise.testing.case import Case
from tilewise.testing.check import check_case


@pytest.fixture(autouse=True)
def _threads():
    """Tests that set the number of threads leave it as it was."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class TestCpu(LatentRows):
    backend = "cpu"


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, H=4, Hkv=2, D=1, Dv=34, v="int8/32", form="varlen", k_bias="h", lengths=(13,), q_lengths=(14,),
             mask="bhqk", mask_kind="f16", pattern="least", tree="b"),
        Case(B=1, H=10, Hkv=2, D=1, Dv=2, form="varlen", window=1, k_bias="h", lengths=(2,), q_lengths=(25,),
             mask="hqk", mask_kind="f16", pattern="least"),
        Case(H=4, Hkv=2, Lq=1, Lk=30, D=8, k_bias="bh", q_bias="bh", mask="bhqk", mask_kind="f16", pattern="least"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mask_of_large_numbers_comes_after_biases(case):
    check_case(case, "cpu", draws=4)


def test_a_softcap_far_above_the_scores_changes_nothing():
    case = Case(B=1, H=5, Hkv=1, D=1, Dv=1, form="varlen", causal=True, softcap=1e6, scale=1.0, alibi="h")
    check_case(replace(case, lengths=(147,), q_lengths=(122,)), "cpu", draws=4)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(most=150, indices=True))
def test_random_problems(case):
    check_case(case, "cpu", draws=4)


@pytest.fixture(scope="module")
def address():
    """A float32 array on a cache line, and its address."""

    def make(values):
        values = np.asarray(values, dtype=np.float32)
        memory = np.zeros(values.size + 16, dtype=np.float32)
        start = (-memory.ctypes.data % 64) // 4
        memory[start : start + values.size] = values.ravel()
        return memory[start : start + values.size].reshape(values.shape)

    return make


class TestVectors:
    """The vector layer, one operation at a time."""

    @pytest.mark.parametrize("factor", [None, 0.18033688, 11.5])
    def test_exp2(self, address, factor):
        """Also of a product, exact until its rest beside a whole number is rounded."""
        times = np.float32(1.0 if factor is None else factor)
        x = address(np.linspace(-130 / times, 20 / times, 16 * 4096))
        y = address(np.zeros_like(x))

        @microkernel("iii")
        def exp2(e, source, to, count):
            with e.loop(count, W) as i:
                at = e.load(source, i)
                e.store(e.exp2(at) if factor is None else e.exp2_of_product(at, e.f32s(float(times))), to, i)

        run = njit(lambda a, b, n: exp2(a, b, n))
        run(x.ctypes.data, y.ctypes.data, x.size)
        product = x.astype(np.float64) * np.float64(times)
        want = np.exp2(product)
        there = product >= -126.4999
        ulps = np.abs(y[there] - want[there]) / np.spacing(want[there].astype(np.float32))
        assert ulps.max() < 2
        assert (y[product < -126.5001] == 0).all()
        special = address([0.0, 1.0, -1.0, -np.inf] * 4)
        result = address(np.zeros(16))
        run(special.ctypes.data, result.ctypes.data, 16)
        assert result[[0, 3]].tolist() == [1.0, 0.0]
        assert factor or result[[1, 2]].tolist() == [2.0, 0.5]
        for bits in (0x7FC00000, 0xFFFFFFFF, 0x7F800001):
            special.view(np.uint32)[:] = bits
            run(special.ctypes.data, result.ctypes.data, 16)
            assert np.isnan(result).all()

    def test_softcap(self, address):
        x = address(np.concatenate([np.linspace(-40, 40, 8000), np.geomspace(1e-6, 1, 192)]))
        y = x.copy()
        y = address(y)
        run = njit(lambda a, n: softcap_cells(a, W, n, np.float32(1.0), np.float32(1.0)))
        run(y.ctypes.data, y.size // W)
        want = np.tanh(x.astype(np.float64))
        error = np.abs(y - want) / np.spacing(np.abs(want).astype(np.float32))
        assert error.max() < 4

    @pytest.mark.parametrize("count", [1, 2, 4, 8])
    def test_sums(self, count, address):
        if count > W:
            count = W
        x, y = address(np.random.default_rng(0).standard_normal((count, W))), address(np.zeros(16))

        @microkernel("ii")
        def sums(e, source, to):
            e.store(e.sums([e.load(source, i * W) for i in range(count)]), to)

        njit(lambda a, b: sums(a, b))(x.ctypes.data, y.ctypes.data)
        np.testing.assert_allclose(y[:count], x.sum(1), rtol=1e-5, atol=1e-6)

    def test_transpose(self, address):
        x, y = address(np.arange(W * W).reshape(W, W)), address(np.zeros((W, W)))
        njit(lambda a, b: transpose(b, W, a, W))(x.ctypes.data, y.ctypes.data)
        np.testing.assert_array_equal(y, x.T)

    @pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "int8", "fp8_e4m3"])
    @pytest.mark.parametrize("width", [1, W - 1, W, 5 * W + 3])
    def test_every_bit_pattern_is_converted(self, kind, width, address):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8,
                 "fp8_e4m3": torch.float8_e4m3fn}[kind]  # fmt: skip
        size = dtype.itemsize
        patterns = torch.arange(min(256**size, 65536)).to({1: torch.uint8, 2: torch.int32, 4: torch.int32}[size])
        raw = patterns.to(torch.int16).view(dtype) if size == 2 else patterns.view(dtype)
        if size == 4:
            raw = torch.randn(4096)
        ones = torch.ones(18)
        for start in range(0, len(raw) - width, max(1, width)):
            if start > 64 * width and start < len(raw) - 64 * width and size > 1:
                continue  # the ends hold infinities, NaN and the smallest numbers
            part = raw[start : start + width].clone()
            to = address(np.full(up_to(width), 7.0))
            call_row_to_f32(to.ctypes.data, part.data_ptr(), CODES[kind], width, up_to(width), ones.data_ptr())
            want = part.float().numpy()
            assert np.array_equal(to[:width], want, equal_nan=True)
            assert (to[width:] == 0).all() or np.isnan(to[width:]).all()


def up_to(width):
    return -(-width // W) * W


@njit
def call_row_to_f32(to, source, dtype, width, padded, scales):
    numba_ops.row_to_f32(to, source, dtype, width, padded, scales, 0, 128)


def test_heads_of_pages_are_read_together():
    """Eight keys of a head, then of the next; with one head there is nothing to share."""
    lengths, table = torch.tensor([2000], dtype=torch.int32), torch.arange(125, dtype=torch.int32)[None]
    batches = {}
    for heads in (1, 8):
        q, pages = torch.randn(1, 8, 1, 64), torch.randn(125, 16, heads, 64)
        chosen = plan(q, pages, pages, block_table=table, context_lens=lengths, backend="cpu")
        batches[heads] = chosen.detail.params.head_batch
        rows = pages.flatten(0, 1).transpose(0, 1)[None]
        want = attention(q, rows, rows, backend="cpu", return_lse=True)
        got = paged_attention(q, pages, pages, table, lengths, backend="cpu", return_lse=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert batches == {1: 1, 8: 4 if torch.get_num_threads() > 1 else 8}


@pytest.mark.parametrize("keys", [1, 95, 96, 97, 127, 128, 129, 224, 225])
def test_a_short_rest_of_keys_goes_with_the_last_tile(keys):
    """Decode takes up to 32 keys more in its last tile; with a mask, whose tiles are fixed, it does not."""
    q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, keys, 64), torch.randn(1, 2, keys, 64)
    want = attention(q, k, v, backend="reference")
    mask = torch.ones(1, keys, dtype=torch.bool)
    for result in (attention(q, k, v, backend="cpu"), attention(q, k, v, mask=mask, backend="cpu")):
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_length():
    q = torch.randn(1, 2, 8, 128)
    sizes = {n: plan(q, *torch.randn(2, 1, 2, n, 128), backend="cpu") for n in (1000, 100_000)}
    for p in sizes.values():
        scratch = p.workspace_bytes / torch.get_num_threads()
        assert scratch < 4 * 2**20
    wide = torch.randn(1, 16, 5000, 576)
    assert plan(wide, wide, wide, backend="cpu").workspace_bytes / torch.get_num_threads() < 4 * 2**20


@pytest.mark.slow
def test_kept_code_of_several_processes_fits_together(tmp_path):
    """Kernels compiled by different processes, in different orders, are found and linked by a third."""
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path)}
    orders = [
        ["worker", "qk f16"],
        ["pv f16", "qk bf16", "pv f32"],
        ["pv bf16", "combine", "qk f32", "schedule"],
    ]
    code = "import sys; from tilewise.backends.cpu import compiler; [compiler.function(name) for name in sys.argv[1:]]"
    for names in orders:
        subprocess.run([sys.executable, "-c", code, *names], env=environment, check=True)
    check = (
        "import torch; from tilewise.testing.case import Case; from tilewise.testing.check import check_case\n"
        "for t in ('f32', 'f16', 'bf16'):\n"
        "    for n in (1, 70):\n"
        "        check_case(Case(Hkv=1, Lq=n, Lk=300, D=128, dtype=t), 'cpu')"
    )
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    assert len(kept) == sum(map(len, orders))
    done = subprocess.run([sys.executable, "-c", check], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items()), "compiled again"


def test_warmup_compiles_everything(capsys):
    from tilewise.tools.cli import main

    assert main(["warmup"]) == 0
    text = capsys.readouterr().out
    assert "prefill" in text
    assert "pv int4" in text
    assert "append" in text
    assert "kept in" in text


x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these are vector sets of x86")
FEATURES = {8: "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2", 4: "-avx2,+avx,+fma,+f16c,+sse4.2"}  # by floats in a vector


def run_with_vectors(width, code, **environment):
    """Runs `code` in a process whose kernels have vectors of `width` floats."""
    environment |= {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": FEATURES[width]}
    code = f"from tilewise.backends.cpu.codegen.vector import W\nassert W == {width}, W\n{code}"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@x86
@pytest.mark.slow
@pytest.mark.parametrize(("width", "peers"), [(8, "AVX2"), (4, "SSE4_2")])
def test_other_vector_widths(width, peers, tmp_path):
    """The whole suite on narrower vectors than this machine has, torch held to the same: its error is the measure."""
    run_with_vectors(
        width,
        "from tilewise.testing.cases import CASES\n"
        "from tilewise.testing.check import check_case\n"
        "from tilewise.testing.properties import PROPERTIES\n"
        "for case in CASES: check_case(case, 'cpu')\n"
        "for check in PROPERTIES.values(): check('cpu', 'cpu')\n"
        "from tilewise.testing.cases import GRADIENTS\n"
        "from tilewise.testing.gradients import check_gradients\n"
        "from tilewise.errors import Unsupported\n"
        "for case in GRADIENTS:\n"
        "    try: check_gradients(case, 'cpu')\n"
        "    except Unsupported: pass\n",
        MKL_ENABLE_INSTRUCTIONS=peers,
        ATEN_CPU_CAPABILITY="avx2" if width == 8 else "default",
        TILEWISE_CACHE_DIR=str(tmp_path),
    )


@x86
def test_decode_of_groups_of_three_with_vectors_of_eight():
    """Fewer keys are in flight there: the sums of three rows are no power of two."""
    run_with_vectors(
        8,
        "from tilewise.testing.case import Case\n"
        "from tilewise.testing.check import check_case\n"
        "check_case(Case(B=2, H=9, Hkv=3, Lq=1, Lk=150, D=128), 'cpu')\n",
    )


@x86
def test_gradients_of_few_rows_with_vectors_of_four():
    """Blocks of rows are longer than a vector there, as on ARM: rows past the last are zeros up to whole blocks."""
    run_with_vectors(
        4,
        "from tilewise.testing.case import Case\n"
        "from tilewise.testing.gradients import check_gradients\n"
        "for case in (Case(Lq=20, Lk=90, causal=True, window=(10, 3)), Case(B=1, H=3, Lq=1, D=64, causal=True)):\n"
        "    check_gradients(case, 'cpu')\n",
    )
