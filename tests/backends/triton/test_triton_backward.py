"""The Triton backend's backward pass without a GPU: the suite in Triton's interpreter, kernels compiled ahead of time.

The interpreter takes over the whole process, so the suite runs in processes of its own. It has no bfloat16 products:
float16 stands for it, and bfloat16 is left to a GPU.
"""

import itertools
import random
import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aot import SHARED, Signature, backward_kernels, backward_of, backward_shared, compile_kernel, kernels_for
from interpreted import as_on, interpreted, names, sample, shares
from interpreted import check as checked
from problem_space import draw
from slow import slowly
from test_triton_aot import ALL, BF16, F16, F32, VARLEN, count, loops, mask, problem
from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.gpu.target import amd, nvidia
from tilewise.backends.triton.bwd import config as bwd_config
from tilewise.backends.triton.bwd import dense_mask
from tilewise.core.problem import GRADS, Selection
from tilewise.core.tensors import sequences
from tilewise.reference import visible_cells
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.gradient_properties import GRADIENT_PROPERTIES
from tilewise.testing.gradients import make_gradients

LONG = ("L1023", "Lk5000", "Lk1000", "L255", "L150", "Lk700", "Lk900")
# Four rows, of which torch gets all scores right to a quarter of an ulp: twice that is less than rounding them takes.
LUCKY = ("Hkv2-L1-Lk31-D64",)
REFUSED = [c for c in GRADIENTS if (c.indices or c.positions) and c.mask and c.mask_kind != "bool"]
INTERPRETED = [c for c in GRADIENTS if c not in REFUSED and not any(word in str(c) for word in ("bf16", *LONG, *LUCKY))]
FIRST = 13  # cases of the sample, which have every option; `make test` runs these
SHARES = 20  # of the cases that are not in the sample, about half a minute each
RUN = """
import sys, torch
from dataclasses import replace
from tilewise.testing import gradient_properties as properties
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.gradients import check_gradients, make_gradients
torch.set_num_threads(1)
def half(case):
    return replace(case, dtype="f16") if case.dtype == "bf16" else case
properties.make_gradients = lambda case, *given, **options: make_gradients(half(case), *given, **options)
properties.check_gradients = lambda case, *given, **options: check_gradients(half(case), *given, **options)
work = {str(c): lambda c=c: check_gradients(c, "triton") for c in GRADIENTS}
work |= {name: lambda check=check: check("triton", "cpu") for name, check in properties.GRADIENT_PROPERTIES.items()}
"""


def test_gradients_in_the_interpreter():
    cases = sample(INTERPRETED)[:FIRST]
    checked(RUN, *cases)
    assert set().union(*map(names, cases)) == set().union(*map(names, INTERPRETED))


@pytest.mark.slow
def test_gradients_of_each_kind_of_option_in_the_interpreter():
    checked(RUN, *sample(INTERPRETED)[FIRST:])


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_other_gradients_in_the_interpreter(share):
    checked(RUN, *shares(INTERPRETED, SHARES)[share])


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENT_PROPERTIES)
def test_gradient_properties_in_the_interpreter(name):
    checked(RUN, name)


FIXUP = """
import torch
from tilewise.testing.case import Case
from tilewise.testing.gradients import make_gradients
from tilewise.testing.gradient_properties import _with_filler
for rules in ({"causal": True}, {"mask": "qk", "mask_kind": "f32"}):
    case = Case(B=1, H=2, Hkv=1, Lq=50, Lk=50, D=32, dtype="f16", **rules)
    clean = {name: x.clone() for name, x in make_gradients(case).run("triton").items()}
    seen = torch.ones(50, 50).tril().bool()
    if "mask" in rules:
        seen = make_gradients(case).call.tensors.forward.mask[0, 0] != -torch.inf
    for name, unseen, gone in (("k", ~seen[:, 40], "q"), ("q", ~seen[40], "k"), ("q", ~seen[40], "v")):
        got = _with_filler(make_gradients(case), name, float("nan"), "triton")
        assert got[gone][:, :, ~unseen].isnan().any(), (rules, name)
        assert torch.equal(got[gone][:, :, unseen], clean[gone][:, :, unseen]), (rules, name, gone)
"""


def test_nan_reaches_only_what_sees_it():
    run = interpreted(FIXUP)
    assert run.returncode == 0, run.stderr[-2000:]


def test_that_needs_the_fixup():
    """The check above can fail: without the second launch NaN comes through."""
    without = "import tilewise.backends.triton.bwd.launch as launch\nlaunch.fixup_of = lambda kernel: None\n"
    run = interpreted(without + FIXUP)
    assert run.returncode == 1
    assert "AssertionError" in run.stderr


MUTANTS = """
import torch
from dataclasses import replace
from tilewise.backends.triton.bwd import config
from tilewise.backends.triton.bwd.launch import Backward
from tilewise.dispatch import planner
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch
from tilewise.testing.gradients import check_gradients
init, launches, memory, spec = Backward.__init__, Backward.launches, Backward.memory, config.spec
def wide_window(self, *given):
    init(self, *given)
    self.sizes["left"] += 1
def no_delta(self, *given):
    return (x for x in launches(self, *given) if x[0].function.__name__ != "sum_delta")
def zeros(self, t, r):
    return {name: x if x is None else x.zero_() for name, x in memory(self, t, r).items()}
def not_summed(*given, **what):
    made = spec(*given, **what)
    return replace(made, summed=(False, *made.summed[1:]))
masked = Case(Lq=20, Lk=30, mask="1k", mask_kind="f32")
for case, owner, changes in (
    (Case(H=2, Lq=40, window=7), Backward, {"__init__": wide_window}),
    (Case(H=2, Lq=40), Backward, {"launches": no_delta, "memory": zeros}),
    (masked, config, {"spec": not_summed}),
):
    check_gradients(case, "triton")
    kept = {name: getattr(owner, name) for name in changes}
    planner.choose.cache_clear()
    for name, mutant in changes.items():
        setattr(owner, name, mutant)
    try:
        check_gradients(case, "triton")
    except Mismatch:
        pass
    else:
        raise AssertionError(f"{list(changes)} passed")
    for name, own in kept.items():
        setattr(owner, name, own)
    planner.choose.cache_clear()
"""


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_gradients_of_masks_with_indices_or_positions_are_left_to_torch(case):
    made = make_gradients(case).call.problem
    assert "no gradient of a mask" in dense_mask.refusal(made)
    assert dense_mask.refusal(replace(made, grads=("q", "k", "v", "sinks"))) is None


def test_a_dense_mask_that_would_take_too_much_memory_is_refused():
    long = backward(64, selection=Selection(16), q_len=1 << 16, kv_len=(1 << 16) + 1, batch=1)
    assert "4.0 GiB" in dense_mask.refusal(long)
    assert dense_mask.refusal(replace(long, kv_len=1 << 16)) is None
    assert dense_mask.refusal(replace(long, selection=None)) is None


@pytest.mark.parametrize("case", [c for c in GRADIENTS if c.indices or c.positions], ids=str)
def test_dense_masks_leave_the_same_cells(case):
    """What indices, positions and the call's own mask leave is what the oracle sees."""
    call = make_gradients(case).clean
    p, t = call.problem, call.tensors.forward
    made, masked = dense_mask.masked_problem(p), dense_mask.masked_tensors(p, t)
    assert masked.mask.untyped_storage().nbytes() == dense_mask.size_of(p)
    assert (masked.key_indices, masked.positions) == (None, None)
    if masked.mask.shape[1] < p.heads:  # a plane for the heads of a group
        masked = replace(masked, mask=masked.mask.repeat_interleave(dense_mask.heads_of_plane(p), 1))
    for one, other in zip(sequences(p, t), sequences(made, masked), strict=True):
        assert torch.equal(visible_cells(one), visible_cells(other))


def test_mutants_are_rejected():
    """A window too wide by a key, no delta, a mask's gradient not summed over the batch."""
    run = interpreted(MUTANTS)
    assert run.returncode == 0, run.stderr[-2000:]


AMD = amd("gfx942")


def backward(D=128, Dv=0, grads=("q", "k", "v"), **changes):
    return problem(D, Dv, **({"return_lse": True} | changes), grads=grads)


EVERY = {"grads": GRADS, "dlse": True, "q_bias": True, "k_bias": True, "tree": True}
HOT = {
    "D64": backward(64), "D64-causal": backward(64, causal=True), "D128": backward(),
    "D128-causal": backward(causal=True), "D128-window": backward(causal=True, window=(1023, None)),
    "D128-softcap": backward(causal=True, softcap=50.0), "varlen": backward(**VARLEN, causal=True),
    "additive mask": backward(64, **mask(BF16), grads=("q", "k", "v", "mask")),
    "dense mask": backward(64, **mask(BF16, *(False,) * 4), grads=("q", "k", "v", "mask")),
    "D256-causal": backward(256, causal=True), "D512": backward(512), "D192/128": backward(192, 128, causal=True),
}  # fmt: skip
OTHERS = {
    "everything": backward(64, **ALL, **mask(BF16), **EVERY),
    "everything, dense mask": backward(72, 40, **ALL, **mask(F32, *(False,) * 4), **EVERY, dtype=F16),
    "D576-all": backward(576, 512, **ALL), "f32-D64": backward(64, dtype=F32, causal=True),
    "f32-D576": backward(576, dtype=F32, causal=True), "bf16 over f16": backward(64, kv=F16, causal=True),
    "strides": backward(64, **ALL, places="rows"),
    "biases": backward(64, causal=True, q_bias=True, k_bias=True, grads=("q", "k", "v", "q_bias", "k_bias")),
    "few": backward(q_len=3, q_offset=7, causal=True), "bool mask": backward(64, **mask(torch.bool)),
    "block indices": backward(64, selection=Selection(4, 64, by_head=True), causal=True),
}  # fmt: skip


def check(name, arch, most_waits=8):
    """Fits the shared memory that was planned for; on Hopper, its own products and few waits in the mainloops."""
    p = (HOT | OTHERS)[name]
    for kind, built in backward_of(p, arch).items():
        assert built.shared <= SHARED[arch], kind
        if arch == 90 and name in HOT and kind in ("key_gradients", "query_gradients", "mask_gradients"):
            assert "wgmma" in built.ptx
            assert "cp.async" in built.ptx or p.head_dim > 256  # where there is no room for what comes next
            bodies = loops(built)
            assert bodies
            assert min(count(body, "LDL") for body in bodies) <= 4, kind  # the innermost loop keeps all in registers
            for body in bodies:
                # A product that waits for the one before it would be followed by a barrier each.
                assert count(body, "WARPGROUP.DEPBAR") <= most_waits, kind


@pytest.mark.parametrize(
    "name",
    [
        "D128-causal",
        "additive mask",
        "biases",
        *slowly("D512", "varlen", "dense mask", "everything, dense mask", "strides"),
    ],
)
def test_kernels_on_hopper(name):
    check(name, 90)


@pytest.mark.parametrize("name", ["D64-causal", *slowly(*HOT, *OTHERS)])
def test_kernels_on_amd(name):
    for kernel, given in kernels_for((HOT | OTHERS)[name], AMD):
        signature = Signature.of(kernel.function, given | kernel.constants, kernel.constants)
        built = signature.compiled(ASTSource, kernel.function, GPUTarget("hip", "gfx942", 64), OPTIONS | kernel.options)
        assert built.metadata.shared <= AMD.shared_memory
        assert "hsaco" in built.asm


@pytest.mark.parametrize("gfx", ["gfx1201", *slowly("gfx942")])
def test_gradients_by_the_tiles_of_amd(gfx):
    """The same cases, cut as for AMD's GPUs."""
    cases = [c for c in sample(INTERPRETED) if not amd(gfx).too_wide(max(c.D, c.Dv), backward=True)]
    checked(RUN + as_on(gfx), *cases[: FIRST // 2 if gfx == "gfx1201" else None])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", [*HOT, *OTHERS])
def test_every_kernel_everywhere(name, arch):
    check(name, arch)


def test_few_rows_of_float32_are_not_left_to_tensor_cores():
    """They cut off what they add; of few rows torch's sums are trees, and the scores' error is most of a gradient's."""
    for name, kernel, given in backward_kernels(backward(64, dtype=F32, q_len=1), 90):
        if name == "query_gradients":
            assert kernel.constants["S"].few
            assert compile_kernel(kernel, given, 90).ttgir.count("tt.dot ") == 6  # of dQ: one product of six parts
    for p in (backward(64, dtype=F32), backward(64, dtype=F32, q_len=1, allow_tf32=True), backward(64, q_len=1)):
        assert not bwd_config.spec(p, bwd_config.Tile(16, 32, 4, 1), nvidia(90)).few


def test_offsets_of_a_mask_are_64_bits_wide_where_32_are_too_few():
    near = {}
    for kv_len in (4096, 1 << 28):
        kernels = backward_kernels(backward(64, **mask(BF16), q_len=64, kv_len=kv_len), 90)
        near[kv_len] = {kernel.constants["S"].near for name, kernel, _ in kernels if "gradients" in name}
    assert near == {4096: {True}, 1 << 28: {False}}


def test_only_a_gradient_with_tiles_that_are_skipped_is_cleared_first():
    dense = mask(BF16, *(False,) * 4)
    assert not bwd_config.skips(backward(64, **dense))
    for hidden in ({"causal": True}, {"kv_lengths": True}, {"window": (5, None)}):
        assert bwd_config.skips(backward(64, **dense, **hidden)), hidden


def differentiable(p):
    return p.form != "paged" and not p.k_format.is_quantised and not p.v_format.is_quantised


def drawn(seed, count):
    chance = random.Random(seed)
    found = (replace(draw(chance), grads=("q", "k", "v"), return_lse=True) for _ in range(40 * count))
    return [p for p in found if differentiable(p)][:count]


@pytest.mark.parametrize("target", [AMD, *map(nvidia, sorted(SHARED))], ids=lambda t: t.name)
def test_every_plan_fits(target):
    """With half of the shared memory too, where Blackwell's tiles would not fit: there registers bound them first."""
    used = []
    half = replace(target, shared_memory=target.shared_memory // 2)
    for p, t in itertools.product(drawn(target.arch, 400), (target, half)):
        c = bwd_config.config(p, t)
        for tile, side in ((c.keys, "keys"), (c.queries, "queries"), (c.mask, "queries")):
            used.append(bwd_config.needed(p, tile, side) / t.shared_memory)
            assert used[-1] <= 1, (p, tile)
            assert min(tile.BQ, tile.BK) >= 16
            s = bwd_config.spec(p, tile, t)
            assert sum(s.k.widths) >= p.head_dim
            assert sum(s.v.widths) >= p.value_dim
            assert s.q.widths == s.k.widths
            assert s.dout.widths == s.v.widths
    assert max(used) > 0.6, "the sample does not come near the limit"


def test_the_bound_can_fail():
    tile = bwd_config.Tile(64, 128, 8, 3)
    assert bwd_config.needed(backward(512), tile, "keys") > nvidia(90).shared_memory


@pytest.mark.parametrize("name", ["D128-causal", "few"])
def test_the_compiler_takes_no_more_than_the_bound(name):
    check_bound((HOT | OTHERS)[name], 90)


def check_bound(p, arch):
    c = bwd_config.config(p, nvidia(arch))
    bound = max(bwd_config.needed(p, c.keys, "keys"), bwd_config.needed(p, c.queries, "queries"))
    assert backward_shared(p, arch) <= bound <= SHARED[arch]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_the_compiler_takes_no_more_than_the_bound_of_any_problem(seed):
    check_bound(drawn(1000 + seed, 1)[0], random.Random(seed).choice(sorted(SHARED)))


def test_launches_of_a_subset_leave_out_what_nobody_asked_for():
    """A gradient that is not wanted costs no launch and no product."""
    names = {grads: [name for name, _, _ in backward_kernels(backward(64, grads=grads, **mask(F32)), 90)]
             for grads in (("q",), ("k",), ("v",), ("mask",))}  # fmt: skip
    fixed = {grads: [name for name in found if "fixup" not in name] for grads, found in names.items()}
    assert fixed[("q",)] == ["sum_delta", "query_gradients"]
    assert fixed[("k",)] == fixed[("v",)] == ["sum_delta", "key_gradients"]
    assert fixed[("mask",)] == ["sum_delta", "mask_gradients"]
