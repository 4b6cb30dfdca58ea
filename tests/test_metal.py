"""The Metal backend without an Apple GPU: the conformance suite in the simulator, and its plain functions."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

import mslsim
import tilewise
from conformance import Conformance
from metal_sim import needs_simulator, simulator
from mslsim.lint import lint
from tilewise import planner
from tilewise.backends import metal as backend
from tilewise.backends.metal import device, heuristics, launch, params, text
from tilewise.backends.metal.spec import KINDS, Config, Operand, operand, padded
from tilewise.conformance.case import Case, make
from tilewise.conformance.check import check_case
from tilewise.conformance.properties import SOME, same
from tilewise.errors import Unsupported
from tilewise.problem import MaskSpec, Problem, QuantSpec
from tilewise.tensors import Tensors

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@needs_simulator
class TestMetal(Conformance):
    backend = "metal"

    @pytest.fixture(autouse=True)
    def simulated(self):
        with simulator():
            yield


def problem(**changes):
    sizes = {
        "form": "dense", "device": torch.device("mps"), "batch": 2, "heads": 8, "kv_heads": 8, "q_len": 512,
        "kv_len": 512, "head_dim": 64, "value_dim": 64, "q_dtype": torch.float16, "k_dtype": torch.float16,
        "v_dtype": torch.float16, "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return Problem(**(sizes | changes))


# Each width that was promised, in each type, ragged and with D != Dv, prefill and decode.
WIDTHS = [
    Case(B=1, H=2, Hkv=1, Lq=n, Lk=45, D=d, Dv=e, dtype=t, causal=True)
    for t in ("f32", "f16", "bf16")
    for d, e in ((40, 0), (64, 0), (96, 0), (128, 0), (256, 0), (512, 0), (64, 96))
    for n in (1, 37)
]


@needs_simulator
@pytest.mark.parametrize("case", WIDTHS, ids=str)
def test_every_width_in_every_type(case):
    with simulator():
        check_case(case, "metal")


@needs_simulator
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("hostile", [False, True])
def test_neither_the_schedule_nor_the_layout_of_matrices_matters(seed, hostile):
    """The same bits in any order of threadgroups, simdgroups and lanes, wherever a matrix's cells lie."""
    with simulator():
        plain = [make(case).call("metal", return_lse=True) for case in SOME]
    with simulator(seed=seed, hostile_layout=hostile, workers=2):
        for case, first in zip(SOME, plain, strict=True):
            same(str(case), first, make(case).call("metal", return_lse=True))


@needs_simulator
def test_the_number_of_cores_changes_the_splits_alone():
    case = Case(B=1, H=8, Hkv=2, Lq=1, Lk=1500, D=64)
    for cores in (1, 8, 40, 80):
        with simulator(cores=cores):
            inputs = make(case)
            plan = tilewise.plan(*inputs.args, backend="metal")
            assert plan.splits == heuristics.split_count(2, -(-1500 // 32), cores)
            check_case(case, "metal")


def every_text():
    """A text of each kernel for every width, and in every type for one."""
    for width in (1, 33, 64, 72, 96, 128, 129, 192, 256, 320, 512, 576):
        for q_len in (1, 8, 64):
            p = problem(head_dim=width, value_dim=width, q_len=q_len, heads=8, kv_heads=2)
            yield p, heuristics.config(p, 10)
    for dtype, kind, q_len in product(FLOATS, (None, *KINDS), (1, 64)):
        quant = None if kind is None else QuantSpec(kind, 32)
        p = problem(q_dtype=dtype, k_dtype=dtype, v_dtype=dtype, k_quant=quant, v_quant=quant, q_len=q_len)
        yield p, heuristics.config(p, 10)


def texts():
    made = {}
    for p, c in every_text():
        none = torch.empty(0)
        found = launch.spec(p, c, Tensors(none, none, none, none))
        made[found] = text.attention(found)
    return made


@needs_simulator
def test_every_kernel_stays_within_its_limits():
    """Threadgroup memory and buffers, as Metal has them. The widest kernels are the ones that could not."""
    for found, source in texts().items():
        if found.q_type == "half" and found.keys.columns in (96, 128, 256, 576):
            kernel = getattr(mslsim.compile_shader(source), found.kernel)
            assert 0 < kernel.static_thread_group_memory_length <= 32768, found
        assert len(text.BUFFERS[found.kernel].names) <= 31


def test_the_lint_has_no_complaint():
    """C++14, address spaces, functions that Metal has for these types; ASCII; no headers but Metal's, types after."""
    sources = [*texts().values(), *map(text.reduction, ("float", "half", "bfloat")), text.classification()]
    assert len(sources) > 30
    for source in sources:
        assert lint(source) == []
        assert source.isascii()
        assert re.findall(r"#include .*", source) == ["#include <metal_stdlib>", "#include <metal_simdgroup_matrix>"]
        assert source.rindex("#include") < source.index("typedef")
        assert "function_constant" not in source
        assert len(re.findall(r"\bkernel void\b", source)) == 1


def test_parameters_are_enough_for_mlx_and_few_enough_for_metal():
    """MLX hands arrays of fewer than 8 elements over in another address space; Metal takes 4 KiB of bytes."""
    for names, size in ((params.INTS, 4), (params.STRIDES, 8), (params.FLOATS, 4)):
        assert 8 <= len(names) <= 4096 // size
        assert len(set(names)) == len(names)


def test_it_refuses_other_devices():
    assert backend.supports(problem(device=torch.device("cpu"))) == "runs on Apple GPUs"
    assert backend.supports(problem(device=torch.device("cuda"))) == "runs on Apple GPUs"


def test_the_planner_picks_it_on_mps(monkeypatch):
    monkeypatch.setattr(device, "mps_cores", lambda: 16)
    monkeypatch.setattr(device, "_mps", None)
    planner.choose.cache_clear()
    try:
        plan = planner.choose(problem(causal=True))
        assert (plan.backend, plan.kernel, plan.tile) == ("metal", "prefill, tiled", (32, 32))
        assert "simulator only" in str(plan)
        assert [name for name, _ in plan.passed_over] == ["hopper", "triton"]
    finally:
        planner.choose.cache_clear()


def test_positions_that_do_not_fit_are_refused(monkeypatch):
    assert backend.supports(problem(q_offset=2**30)) == "positions past 2**30"
    assert backend.supports(problem(q_offset=-(2**29))) is None


def test_a_torch_without_compile_shader_is_named(monkeypatch):
    monkeypatch.delattr(torch.mps, "compile_shader")
    assert "2.7" in backend.supports(problem())


@needs_simulator
def test_a_gpu_that_allows_too_few_threads_is_refused_at_load():
    """Metal drops a launch that is too large without a word."""
    x = torch.randn(1, 2, 40, 32)
    with simulator(max_threads=96), pytest.raises(Unsupported, match="96 threads a threadgroup, it needs 128"):
        tilewise.attention(x, x, x, backend="metal")


@needs_simulator
def test_a_text_is_compiled_once():
    with simulator() as gpu:
        x = torch.randn(1, 2, 40, 32)
        for _ in range(3):
            tilewise.attention(x, x, x, causal=True, backend="metal")
        tilewise.attention(x, x, x, softcap=3.0, backend="metal")  # options are no part of the text
        assert len(gpu.kept) == 1


@pytest.mark.parametrize(
    ("groups", "tiles", "cores", "want"),
    [(8, 64, 10, 5), (1, 1000, 10, 40), (1, 1000, 80, 64), (40, 64, 10, 1), (8, 3, 10, 1), (8, 12, 10, 3)],
)  # fmt: skip
def test_splits_fill_the_cores(groups, tiles, cores, want):
    assert heuristics.split_count(groups, tiles, cores) == want


def test_split_size_fixes_the_splits_whatever_the_batch():
    for batch in (1, 7, 64):
        c = heuristics.config(problem(batch=batch, q_len=1, kv_len=1000, split_size=100), 10)
        assert (c.splits, c.split_tiles) == (8, 4)


def test_few_rows_of_a_kv_head_read_it_once():
    """All heads of a group are in one threadgroup, whatever the kernel, up to 8 of 576 columns."""
    for width in (64, 128, 256, 512, 576):
        for group in (1, 2, 4, 8):
            p = problem(q_len=1, heads=16, kv_heads=16 // group, head_dim=width, value_dim=width)
            c = heuristics.config(p, 10)
            assert c.pack == group
            assert c.kernel == ("vector" if group <= heuristics.vector_rows(width) else "tiled")
            assert c.rows >= c.pack * c.queries
            assert c.queries >= 1


def test_registers_bound_the_rows():
    assert [heuristics.vector_rows(w) for w in (32, 128, 192, 256, 512, 576)] == [8, 8, 4, 4, 2, 1]
    assert [heuristics.tile_rows(w) for w in (64, 128, 192, 256, 320, 576)] == [32, 32, 16, 16, 8, 8]


def test_large_groups_share_tiles_by_their_divisors():
    for group, rows, pack in (
        (16, 16, 16),
        (12, 16, 12),
        (7, 8, 7),
        (24, 32, 24),
        (31, 32, 31),
        (64, 32, 32),
        (37, 32, 1),
    ):
        c = heuristics.config(problem(q_len=1, heads=group, kv_heads=1, head_dim=128, value_dim=128), 10)
        assert (c.rows, c.pack) == (rows, pack) or c.kernel == "vector"


def test_packed_rows_have_tiles_enough():
    p = problem(form="varlen", packed_q=True, total_q=100, q_len=64, batch=5)
    c = heuristics.config(p, 10)
    assert heuristics.query_tiles(p, c) == 100 // 32 + 6


def test_masks_are_classified_unless_each_head_has_its_own_bias():
    c = Config("tiled", 32)
    own, shared = (False,) * 4, (True, False, False, False)
    for dtype, broadcast, want in ((torch.bool, own, True), (torch.float16, shared, True), (torch.float16, own, False)):
        assert heuristics.classifies(problem(mask=MaskSpec(dtype, broadcast)), c) is want
    bools = MaskSpec(torch.bool, own)
    assert not heuristics.classifies(problem(q_len=2, mask=bools), c), "few queries read all of it"
    assert not heuristics.classifies(problem(mask=bools, tile_map=(8, 8)), c), "there is a map"
    assert not heuristics.uses_states(problem(mask=bools), Config("tiled", 32, 4)), "rows of several heads"


def test_columns_are_filled_up_to_few_sizes():
    assert [padded(n) for n in (1, 32, 33, 96, 97, 128, 129, 192, 193, 576)] == [
        32,
        32,
        64,
        96,
        128,
        128,
        192,
        192,
        256,
        576,
    ]
    assert operand(96, torch.float16, None, None).slice == 32
    assert operand(80, torch.int8, QuantSpec("int8", 32), torch.bfloat16) == Operand("int8_t", "INT8", "bfloat", 96)
    assert operand(64, torch.uint8, QuantSpec("fp8_e4m3", 32), None).type == "uint8_t"


@pytest.mark.slow  # 65 s: the simulator keeps a shadow of every byte
@needs_simulator
def test_offsets_past_2_31():
    """K and V whose last rows lie more than 2^31 elements from their first; only those rows are read."""
    rows, width = 2**20, 2112
    assert (rows - 1) * width > 2**31
    wide = torch.empty(rows, width, dtype=torch.float16)  # 4.4 GB of which a few pages are touched
    wide[-20:, :64] = torch.randn(20, 64).half() * 3
    k = wide[None, None, :, :64]
    with simulator():
        for Lq in (2, 40):
            q = torch.randn(1, 1, Lq, 64).half()
            got = tilewise.attention(q, k, k, window=8, causal=True, q_offset=rows - 5, backend="metal")
            want = tilewise.attention(
                q, k[:, :, -20:], k[:, :, -20:], window=8, causal=True, q_offset=15, backend="reference"
            )
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-3, atol=2e-3)
            assert got.abs().amax() > 1


@needs_simulator
def test_scales_of_any_type():
    for scales in (torch.float32, torch.float16, torch.bfloat16):
        q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 70, 64)
        packed = tilewise.Quantised.from_float(k, "int8", 32)
        packed = replace(packed, scales=packed.scales.to(scales))
        want = tilewise.attention(q, packed, packed, backend="reference")
        with simulator():
            got = tilewise.attention(q, packed, packed, backend="metal")
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_workspace_is_what_the_plan_says():
    with device.stand_in(lambda text: None, cores=10):
        plan = backend.plan(problem(device=torch.device("cpu"), q_len=1, heads=8, kv_heads=2, kv_len=4096))
        assert plan.splits > 1
        assert plan.workspace_bytes == 4 * 2 * 8 * plan.splits * 66
        assert launch.workspace(torch.zeros(1), 5).numel() == 5
