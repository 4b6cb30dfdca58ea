"""The Metal backend without an Apple GPU: its texts, and the conformance suite in the simulator."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import mslsim
import tilewise
from conformance import Conformance
from metal_sim import needs_simulator, problem, simulator
from mslsim.lint import lint
from slow import slowly
from strategies import cases
from tilewise.backends.metal import config, launch, text
from tilewise.backends.metal.options import MASK_KINDS
from tilewise.backends.metal.spec import Operand, Options, Spec
from tilewise.core.storage import PLAIN, quantised_names, stored_as
from tilewise.core.tensors import Tensors
from tilewise.errors import Unsupported
from tilewise.testing.case import Case, Inputs, make
from tilewise.testing.cases import CASES
from tilewise.testing.check import Mismatch, check_call, check_case
from tilewise.testing.properties import SOME, same

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@needs_simulator
class TestMetal(Conformance):
    backend = "metal"
    refused = ("indices", "k_start", "k_stride", "q_stride", "q_bias", "k_bias", "tree", "dropout")

    @pytest.fixture(autouse=True)
    def simulated(self):
        with simulator():
            yield

    # Nearly each case has a text of its own, which g++ compiles in two seconds on a new machine.
    @pytest.mark.parametrize("case", [*CASES[::3], *slowly(*CASES[1::3], *CASES[2::3])], ids=str)
    def test_case(self, case):
        super().test_case(case)


# Each width that was promised, in each type, ragged and with D != Dv, prefill and decode.
WIDTHS = [
    Case(B=1, H=2, Hkv=1, Lq=n, Lk=45, D=d, Dv=e, dtype=t, causal=True)
    for t in ("f32", "f16", "bf16")
    for d, e in ((40, 0), (64, 0), (96, 0), (128, 0), (256, 0), (512, 0), (64, 96))
    for n in (1, 37)
]
# And the twelve kernels that others have for as many combinations.
MASKED = [
    Case(B=1, H=2, Hkv=1, Lq=37, Lk=70, D=d, dtype=t, mask="hqk", mask_kind=kind)
    for d in (64, 256, 512)
    for t in ("f16", "bf16")
    for kind in ("bool", t)
]


@needs_simulator
@pytest.mark.parametrize("stored", [{"dtype": "f32"}, {"dtype": "bf16"}, {"k": "int8/32", "v": "int8/32"}], ids=str)
def test_decode_reads_rows_with_v_in_k_once(stored):
    """Nothing is missed without V's own loads, by which a V elsewhere is read."""
    case = Case(H=4, Hkv=2, Lq=1, Lk=90, D=96, Dv=64, latent=True, lengths=(90, 31), sinks=True, **stored)
    with simulator(change=lambda text: text.replace("WIDE>(v, v_scales, lane", "WIDE>(h.v, h.v_scales, lane")):
        check_case(case, "metal")
        with pytest.raises(Mismatch):
            check_case(replace(case, latent=False), "metal")


@needs_simulator
@pytest.mark.parametrize("case", [*WIDTHS, *MASKED], ids=str)
def test_every_width_in_every_type(case):
    with simulator():
        check_case(case, "metal")


@needs_simulator
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_schedule_does_not_matter(seed):
    """The same bits in any order of threadgroups, simdgroups and lanes."""
    with simulator():
        plain = [make(case).call("metal", return_lse=True) for case in SOME]
    with simulator(seed=seed, workers=2):
        for case, first in zip(SOME, plain, strict=True):
            same(str(case), first, make(case).call("metal", return_lse=True))


@needs_simulator
def test_tiles_rely_on_the_layout_of_matrices_that_apples_gpus_have():
    """As MLX's kernels do (test_mslsim_mlx.py). Decode of few rows has no matrices."""
    with simulator(hostile_layout=True):
        check_case(Case(Lq=1, Lk=70), "metal")
        with pytest.raises(Mismatch):
            check_case(Case(Lq=40, Lk=70), "metal")


@needs_simulator
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("stored", ["f16", "bf16", "int8/32"])
def test_rows_that_begin_anywhere(wide, stored):
    """Whether K and V are read 16 bytes at a time or element by element: the same bits."""
    dtype = "bf16" if stored == "bf16" else "f16"
    case = Case(Hkv=2, Lq=33, Lk=70, D=64, dtype=dtype, k=stored, v=stored, causal=True)
    with simulator() as gpu:
        inputs = make(case)
        first = inputs.call("metal")
        q = inputs.args[0]
        if not wide:  # the same numbers at another address
            inputs = replace(
                inputs, args=(torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape), *inputs.args[1:])
            )
        assert inputs.call("metal").equal(first)
        assert len(gpu.kept) == (1 if wide else 2)


@needs_simulator
@pytest.mark.parametrize("Lq", [1, 37])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(Lq):
    """As in the oracle: NaN, infinities of one and of both signs, in some columns."""
    q, k, v = (torch.randn(1, 2, n, 96, generator=torch.Generator().manual_seed(n)) for n in (Lq, 70, 71))
    v = v[:, :, :70].clone()
    for key, column, value in ((60, 3, "nan"), (50, 4, "inf"), (40, 5, "inf"), (45, 5, "-inf"), (69, 90, "-inf")):
        v[:, :, key, column] = float(value)
    for rules in ({"causal": True}, {"causal": True, "window": 8}, {"mask": torch.rand(Lq, 70) < 0.5}):
        want = tilewise.attention(q, k, v, backend="reference", **rules)
        with simulator():
            got = tilewise.attention(q, k, v, backend="metal", **rules)
        torch.testing.assert_close(got, want, equal_nan=True, atol=1e-4, rtol=0)


@needs_simulator
def test_the_number_of_cores_changes_the_splits_alone():
    case = Case(B=1, H=8, Hkv=2, Lq=1, Lk=1500, D=64)
    for cores in (1, 8, 40, 80):
        with simulator(cores=cores):
            inputs = make(case)
            plan = tilewise.plan(*inputs.args, backend="metal")
            assert plan.splits == config.split_count(2, -(-1500 // 32), cores)
            check_case(case, "metal")


def every_text():
    """A text of each kernel for every width, and in every type for one."""
    for width in (1, 33, 64, 72, 96, 128, 129, 192, 256, 320, 512, 576):
        for q_len in (1, 8, 64):
            p = problem(head_dim=width, value_dim=width, q_len=q_len, heads=8, kv_heads=2)
            yield p, config.config_of(p, 10)
    kinds = [name for name in quantised_names() if not stored_as(name).scales_in_row]
    for dtype, kind, q_len in product(FLOATS, (None, *kinds), (1, 64)):
        fmt = PLAIN[dtype] if kind is None else stored_as(kind, 32)
        p = problem(q_dtype=dtype, k_format=fmt, v_format=fmt, q_len=q_len)
        yield p, config.config_of(p, 10)


VARIANTS = [
    {"packed": True, "varlen": True, "causal": True, "offset": 2, "lse": True},
    {"packed": True, "page": 16, "lengths": True, "left": True, "right": True, "splits": True, "fixed_splits": True},
    {"mask": 1, "states": True, "slopes": True, "sinks": True, "offset": 1},
    {"mask": 2, "softcap": True, "natural": True, "chunk": True, "far": True},
    {"mask": 3, "natural": True, "wide": False},
    {"mask": 4, "natural": True, "splits": True, "pack": 2, "sinks": True},
]


def texts():
    made = {}
    for p, c in every_text():
        none = torch.empty(0, 0)
        found = launch.spec(p, c, Tensors(none, none, none, none))
        made[found] = text.attention(found)
    plain = Operand("half", "PLAIN", "float", 64, 64)
    for change in VARIANTS:
        found = Spec("tiled", "half", plain, plain, replace(Options(wide=True), **change), sg_rows=4)
        made[found] = text.attention(found)
        found = replace(found, kernel="vector", sg_rows=0, rows=2)
        made[found] = text.attention(found)
    return made


@needs_simulator
def test_every_kernel_stays_within_its_limits():
    """Threadgroup memory and buffers, as Metal has them. The widest kernels are the ones that could not."""
    for found, source in texts().items():
        if found.q_type == "half" and found.keys.columns in (96, 128, 256, 576):
            kernel = getattr(mslsim.compile_shader(source.torch), found.kernel)
            assert 0 < kernel.static_thread_group_memory_length <= 32768, found
        assert len(source.names) <= 31


def test_the_lint_has_no_complaint():
    """C++14, address spaces, functions that Metal has for these types; ASCII; no headers but Metal's, types after."""
    sources = [*texts().values(), *map(text.classification, MASK_KINDS.values())]
    sources += [
        text.combine(q_type, Options(splits=True, sinks=True, lse=True)) for q_type in ("float", "half", "bfloat")
    ]
    assert len(sources) > 40
    for source in (made.torch for made in sources):
        assert lint(source) == []
        assert source.isascii()
        assert re.findall(r"#include .*", source) == ["#include <metal_stdlib>", "#include <metal_simdgroup_matrix>"]
        assert source.rindex("#include") < source.index("namespace tilewise {")
        assert "function_constant" not in source
        assert len(re.findall(r"\bkernel void\b", source)) == 1


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
        assert len(gpu.kept) == 1
        tilewise.attention(x, x, x, causal=True, softcap=3.0, backend="metal")  # options are part of the text
        assert len(gpu.kept) == 2


@pytest.mark.slow  # 65 s: the simulator keeps a shadow of every byte
@needs_simulator
def test_offsets_past_2_31():
    """K and V whose last rows lie more than 2^31 elements from their first; only those rows are read."""
    torch.manual_seed(0)
    rows, width = 2**20, 2112
    assert (rows - 1) * width > 2**31
    wide = torch.empty(rows, width, dtype=torch.float16)  # 4.4 GB of which a few pages are touched
    wide[-20:, :64] = torch.randn(20, 64).half() * 3
    k = wide[None, None, :, :64]
    with simulator():
        for Lq in (2, 40):
            q = torch.randn(1, 1, Lq, 64).half()
            rules = {"window": 8, "causal": True, "return_lse": True}
            got, lse = tilewise.attention(q, k, k, q_offset=rows - 5, backend="metal", **rules)
            near = Inputs(tilewise.attention, (q, k[:, :, -20:], k[:, :, -20:]), rules | {"q_offset": 15})
            check_call(near.checked(), got, lse)
            assert got.abs().amax() > 1


@needs_simulator
def test_scales_of_any_type():
    torch.manual_seed(0)
    for scales in (torch.float32, torch.float16, torch.bfloat16):
        q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 70, 64)
        packed = tilewise.Quantised.from_float(k, "int8", 32)
        packed = replace(packed, scales=packed.scales.to(scales))
        inputs = Inputs(tilewise.attention, (q, packed, packed), {"return_lse": True})
        with simulator():
            got = inputs.call("metal")
        check_call(inputs.checked(), *got)


@pytest.mark.slow  # about two minutes
@needs_simulator
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_whole_calls_drawn_at_random(case):
    case = replace(case, **{name: Case.__dataclass_fields__[name].default for name in TestMetal.refused})
    with simulator(seed=7):
        check_case(case, "metal", draws=4)
