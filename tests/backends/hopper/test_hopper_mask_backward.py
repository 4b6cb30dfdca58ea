"""The Hopper backward kernels for additive masks: compiled ahead of time, what they refuse, when they are chosen."""

import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)


from aot import SHARED
from test_hopper_backward import H200, built, given, problem
from tilewise.backends import hopper
from tilewise.backends.gpu.gluon import TensorDescriptor
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.kernel import backward
from tilewise.backends.hopper.bwd.mask_sums import mask_sums
from tilewise.backends.hopper.bwd.narrow_launch import NarrowLauncher
from tilewise.backends.hopper.descriptors import has_tiles, mask_descriptor
from tilewise.core.problem import MaskSpec
from tilewise.dispatch import planner
from tilewise.testing.case import Case
from tilewise.testing.gradients import make_gradients
from uniform_registers import stale

BF16, F32 = torch.bfloat16, torch.float32
GRADS = ("q", "k", "v", "mask")


def masked(D=64, own=(True, True), dtype=BF16, grads=GRADS, softcap=0.0, **rules):
    """With a mask of its own for each batch row and head, as `own` says."""
    p = problem(D, B=8, H=16, Hkv=16, L=2048, **rules)
    return replace(p, mask=MaskSpec(dtype, (not own[0], not own[1], False, False)), grads=grads, softcap=softcap)


SHARED_BY_ALL = (False, False)
PROBLEMS = {
    "dense": masked(),
    "dense-D128-causal": masked(128, causal=True),
    "shared": masked(own=SHARED_BY_ALL),
    "shared-D128": masked(128, own=SHARED_BY_ALL),
    "dense-f32": masked(dtype=F32),
    "dense-softcap": masked(softcap=30.0),
    "no-gradient": masked(grads=("q", "k", "v")),
    "shared-f32-window": masked(own=(True, False), dtype=F32, window=(100, 50)),
}
SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("name", [pytest.param(x, marks=SLOW * (x != "dense")) for x in PROBLEMS])
def test_kernels_fit_and_keep_their_products_in_flight(name):
    p = PROBLEMS[name]
    made = built(backward, given(p)[1])
    assert made.shared <= SHARED[90]
    assert "serialized" not in made.report
    assert stale(made.sass) == []
    for loop in made.loops:
        whole = sum("FSEL" in x for x in loop) < 16
        hidden = 0 if whole or p.head_dim == 64 else 1
        # All five products of a step, and one for each row statistic that is added so.
        assert sum("HGMMA" in x for x in loop) == (33 if p.softcap else 34) + 4 * hidden
        assert sum("WARPGROUP.DEPBAR" in x for x in loop) == 4 + hidden
        if p.mask.dtype == BF16:  # the mask's tile goes to registers 8 cells at a time, transposed on the way
            ways = 1 if p.softcap else 2  # one for a huge lse
            assert sum("LDSM" in x for x in loop) == ways * (8 if p.head_dim == 64 else 4)
            assert sum("UTMASTG" in x for x in loop) == (name in ("dense", "dense-D128-causal"))
            single = sum(" LDG" in f" {x}" or " STG" in f" {x}" for x in loop)  # cells one by one
            assert single == (64 if p.softcap else 0)
            if whole and not p.softcap:  # next to nothing is spilled
                assert sum("STL" in x or "LDL" in x for x in loop) <= 8
                # Cells are loaded while dP is computed, by the second consumer before its turn.
                products = [n for n, x in enumerate(loop) if "HGMMA" in x]
                first_cells = next(n for n, x in enumerate(loop) if "LDSM" in x)
                assert first_cells < products[0] or products[p.head_dim // 16] < first_cells
                assert first_cells < products[p.head_dim // 16 + 1]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=SLOW * (x != "shared")) for x in ("shared", "shared-D128", "shared-f32-window")],
)
def test_sums_fit_and_keep_their_products_in_flight(name):
    p = PROBLEMS[name]
    made = built(mask_sums, given(p)[1])
    assert made.shared <= SHARED[90]
    assert "serialized" not in made.report
    assert stale(made.sass) == []
    for loop in made.loops:  # of a pair: S and dP, and of each a row statistic
        assert sum("HGMMA" in x for x in loop) == 2 * p.head_dim // 16 + 2
        assert sum("WARPGROUP.DEPBAR" in x for x in loop) == 2
        if p.mask.dtype == BF16:  # the mask's cells stay in registers; some are spilled where an lse is huge, before
            exponentials = next(n for n, x in enumerate(loop) if "MUFU.EX2" in x)
            assert not any("STL" in x or "LDL" in x for x in loop[exponentials:])


def test_programs_that_store_cells_of_a_mask_have_one_key_block():
    assert not config.persistent(PROBLEMS["dense"])  # D=64: h200/LOG.md, backward #15
    assert config.persistent(PROBLEMS["dense-D128-causal"])
    assert config.persistent(PROBLEMS["shared"])
    assert config.persistent(PROBLEMS["no-gradient"])


def test_few_planes_at_once_read_the_same_rows_of_a_mask():
    planes = {name: config.planes_at_once(p, config.spec_of(p, H200), H200) for name, p in PROBLEMS.items()}
    assert planes["dense"] == planes["shared"] == 8  # h200/LOG.md, backward #17
    unmasked = replace(PROBLEMS["shared"], mask=None, grads=("q", "k", "v"))
    assert config.planes_at_once(unmasked, config.spec_of(unmasked, H200), H200) == 24


def test_what_is_not_served_is_refused_by_name():
    assert all(config.refusal(p) is None for p in PROBLEMS.values())
    p = masked()
    refused = {
        "bool masks": masked(dtype=torch.bool),
        "broadcast over queries or keys": replace(p, mask=MaskSpec(BF16, (False, False, True, False))),
        "other types": masked(dtype=torch.float64),
        "tile maps": replace(p, tile_map=(64, 64)),
        "packed": replace(p, packed_q=True, form="varlen", total_q=9),
        "head dims over 128": masked(256),
        "with kv_lengths": masked(own=SHARED_BY_ALL, kv_lengths=True),
    }
    for what, q in refused.items():
        assert what in config.refusal(q), what
    assert config.refusal(masked(kv_lengths=True)) is None  # a sum alone is over sequences
    assert config.refusal(masked(own=SHARED_BY_ALL, kv_lengths=True, grads=("q",))) is None


def test_the_planner_leaves_masks_to_triton_whose_cells_threads_would_read(monkeypatch):
    monkeypatch.setattr(hopper, "_machine_refusal", lambda p: None)
    monkeypatch.setattr(hopper, "target_of", lambda device: H200)
    monkeypatch.setattr(planner.load("triton"), "target_of", lambda device: H200)
    monkeypatch.setattr(planner.load("triton"), "supports_backward", lambda p: None)
    monkeypatch.setattr(planner.load("triton"), "plan_backward", lambda p: replace(hopper.plan_backward(p), kernel="T"))
    planner.choose.cache_clear()
    for name in ("dense", "dense-D128-causal", "shared", "shared-D128", "no-gradient"):
        assert planner.choose(PROBLEMS[name]).passed_over == ()
    assert "summed by a launch of its own" in str(planner.choose(PROBLEMS["shared"]))
    left = {
        "float32 masks": PROBLEMS["dense-f32"],
        "float32": PROBLEMS["shared-f32-window"],
        "16 bytes": replace(PROBLEMS["shared"], kv_len=2001),
        "softcap": PROBLEMS["dense-softcap"],
    }
    for what, p in left.items():
        plan = planner.choose(p)
        assert plan.kernel == "T"
        assert what in dict(plan.passed_over)["hopper"]
        assert planner.choose(p, "hopper").kernel != "T"  # by its name it is served
    planner.choose.cache_clear()


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3, 40, 64), (0, 0, 64, 1), True),
        ((2, 3, 40, 64), (7680, 2560, 64, 1), True),
        ((1, 3, 40, 64), (5, 2560, 64, 1), True),  # the stride of one element does not matter
        ((2, 3, 40, 63), (0, 0, 63, 1), False),
        ((2, 3, 40, 64), (0, 0, 1, 40), False),
        ((2, 3, 40, 64), (0, 0, 0, 1), False),
    ],
)
def test_which_masks_tma_copies(shape, strides, expected):
    x = torch.zeros(60000, dtype=BF16)
    assert has_tiles(x.as_strided(shape, strides)) == expected
    if expected:
        own = mask_descriptor(x.as_strided(shape, strides), 64)
        assert own.shape == [1 if n > 1 and not s else n for n, s in zip(shape[:2], strides[:2], strict=True)] + [
            40,
            64,
        ]
        assert not has_tiles(x[1:].as_strided(shape, strides))


@pytest.mark.parametrize(("dims", "kind"), [("bhqk", "bf16"), ("bhqk", "f32"), ("qk", "bf16"), ("b1qk", "f32")])
def test_which_kernels_are_launched(dims, kind):
    launched = []

    def launch(kernel, grid, given):
        described = [name for name, x in kernel.arguments(given).items() if isinstance(x, TensorDescriptor)]
        launched.append((kernel.function.__name__, grid, described))

    case = Case(B=2, H=4, Lq=300, Lk=520, D=64, dtype="bf16", mask=dims, mask_kind=kind, causal=True)
    call = make_gradients(case).call
    recorder = Workspaces(call.tensors.dout.device)
    recorder.launch = launch
    NarrowLauncher(call.problem, H200).launch(recorder, call.tensors)
    names = [name for name, *_ in launched]
    shared = dims != "bhqk"
    assert names == ["preprocess", "backward", "postprocess", *["mask_sums"] * shared, "fix_up"]
    described = launched[names.index("backward")][2]
    assert ("mask" in described) == (kind == "bf16")
    assert ("dmask" in described) == (kind == "bf16" and not shared)
    if shared:  # 3 blocks of 128 queries, 5 tiles of 128 keys
        assert launched[3][1] == ((2 if dims == "b1qk" else 1) * 3 * 5, 1)
