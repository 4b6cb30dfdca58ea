"""The Hopper backward kernels: compiled ahead of time, and their choices as plain numbers."""

import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED
from hopper_aot import build
from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.kernel import backward
from tilewise.backends.hopper.bwd.launch import LISTING
from tilewise.backends.hopper.bwd.narrow_launch import COMBINE_ROWS, NarrowLauncher
from tilewise.backends.hopper.bwd.nonfinite import fix_up as fix_up_kernel
from tilewise.backends.hopper.bwd.prepost import clear_rest, combine_splits, list_blocks, postprocess, preprocess
from tilewise.core.mask_rules import MaskRules, query_span
from tilewise.core.problem import Problem
from tilewise.core.storage import stored_as
from tilewise.core.tensors import BackwardTensors, Tensors
from uniform_registers import stale

H200 = nvidia(90)


def problem(D=128, B=4, H=16, Hkv=4, L=4096, packed=False, dtype="bf16", **rules):
    stored = stored_as(dtype)
    return Problem(
        form="varlen" if packed else "dense", device=torch.device("cuda"), batch=B, heads=H, kv_heads=Hkv, q_len=L,
        kv_len=L, head_dim=D, value_dim=D, q_dtype=stored.dtype, k_format=stored, v_format=stored, scale=0.1,
        packed_q=packed, total_q=B * L if packed else 0, rules=MaskRules(**rules), grads=("q", "k", "v"),
        return_lse=True,
    )  # fmt: skip


def tensors_of(p):
    """A call's tensors, without memory."""
    B, L = (1, p.total_q) if p.packed_q else (p.batch, p.q_len)

    def heads(h):
        return torch.empty(B, L, h, p.head_dim, dtype=p.q_dtype, device="meta").transpose(1, 2)

    def ints(n):
        return torch.empty(n, dtype=torch.int32, device="meta")

    q, k, v, out = (heads(h) for h in (p.heads, p.kv_heads, p.kv_heads, p.heads))
    f = Tensors(q, k, v, out, torch.empty(B, p.heads, L, device="meta"))
    if p.packed_q:
        f.cu_seqlens_q = f.cu_seqlens_k = ints(p.batch + 1)
    if p.rules.kv_lengths:
        f.kv_lengths = ints(p.batch)
    dmask = None
    if p.mask is not None:
        sizes = (p.batch, p.heads, p.q_len, p.kv_len)
        own = [1 if free else n for n, free in zip(sizes, p.mask.broadcast, strict=True)]
        f.mask = torch.empty(own, dtype=p.mask.dtype, device="meta").expand(sizes)
        dtype = torch.float32 if any(p.mask.broadcast) else p.mask.dtype
        dmask = torch.empty(own, dtype=dtype, device="meta") if "mask" in p.grads else None
    return BackwardTensors(f, heads(p.heads), None, heads(p.heads), *[k, v], dmask)


def given(p):
    """A call's launches and their arguments."""
    launcher = NarrowLauncher(p, H200)
    tensors = launcher.tensors(tensors_of(p), Workspaces(torch.device("meta")))
    return launcher, launcher.arguments(tensors) | launcher.descriptors(tensors) | launcher.partials(tensors)


def built(function, arguments, constants=("S",)):
    return build(function, {name: arguments[name] for name in function.arg_names}, constants, options=OPTIONS)


PROBLEMS = [
    *(problem(D, causal=causal) for D in (64, 128) for causal in (False, True)),
    problem(B=1, H=32, Hkv=8, L=1024, q_offset=0, causal=True),  # split
    problem(64, packed=True, causal=True, window=(1023, None), kv_lengths=True),
    problem(128, window=(100, 50), dtype="f16"),
    replace(problem(128, causal=True), softcap=50.0),
    problem(64, B=1, H=32, Hkv=32, L=16384, causal=True, window=(1023, None)),
]


@pytest.mark.parametrize(
    "p",
    [pytest.param(p, marks=[pytest.mark.slow] * (n not in (1, 2))) for n, p in enumerate(PROBLEMS)],
    ids=lambda p: config.spec_of(p, H200).dtype + "-" + "-".join([f"D{p.head_dim}", *p.options()]).replace(" ", ""),
)
def test_kernels_fit_and_keep_their_products_in_flight(p):
    _, arguments = given(p)
    made = built(backward, arguments)
    assert made.shared <= SHARED[90]
    assert "serialized" not in made.report
    assert stale(made.sass) == []
    for loop in made.loops:
        whole = sum("FSEL" in x for x in loop) < 16  # blocks that are seen whole
        # In others a consumer's half may be hidden: a step of a wait and, of 64 rows, four products.
        hidden = 0 if whole or p.head_dim == 64 else 1
        # Of one step: all five products, none of them twice, and one for each row statistic that is added so.
        assert sum("HGMMA" in x for x in loop) == (33 if p.softcap else 34) + 4 * hidden
        assert not any("STS.64" in x for x in loop)  # dQ is stored 16 bytes at a time, without bank conflicts
        # A wait for each of: S, dP, dV with dQ, dK. More would be the compiler's own.
        assert sum("WARPGROUP.DEPBAR" in x for x in loop) == 4 + hidden
        if whole:
            # Nothing is spilled there (with every rule at once, one register); a few invariants may be read again.
            assert sum("STL" in x for x in loop) <= (p.packed_q and p.rules.kv_lengths)
            assert sum("LDL" in x for x in loop) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("p", PROBLEMS[-4:-1], ids=("packed", "dense", "softcap"))
def test_what_comes_before_and_after_compiles(p):
    _, arguments = given(p)
    flags = ("BM", "D", "PACKED", "HAS_DLSE", "HAS_SINKS", "SOFTCAP", "MASKED", "GUARDED", "CONVERTS")
    for kernel in (preprocess, postprocess):
        assert built(kernel, arguments, tuple(x for x in flags if x in kernel.arg_names)).sass
    memory = dict.fromkeys(("q", "k", "v"), arguments["OUT"])
    fix_up = built(fix_up_kernel, arguments | memory | {"BLOCK": 64}, ("S", "D", "D_V", "HAS_DLSE", "SOFTCAP", "BLOCK"))
    assert fix_up.shared <= SHARED[90]
    partials = {"DK_PARTIALS": arguments["LSE"], "DV_PARTIALS": arguments["LSE"]}
    sizes = {"kv_heads": 4, "rows": 4096, "splits": 2, "ROWS": COMBINE_ROWS}
    assert built(combine_splits, arguments | partials | sizes, ("ROWS", "D")).sass
    if p.packed_q:
        rest = {"CU": arguments["CU_Q"], "X": arguments["DQ"], "x_h": 64, "x_l": 64, "total": 9, "width": 64}
        assert built(clear_rest, arguments | rest | {"ROWS": 32}, ("ROWS", "D")).sass
        listing = {"slots": 9, "BN": 128} | LISTING
        assert built(list_blocks, arguments | listing, ("BN", "SLOTS", "RUN")).sass


def test_planes_at_once_are_planes_that_there_are():
    for D in (64, 128):
        for B, H, Hkv, L in ((1, 1, 1, 1), (16, 32, 32, 1024), (1, 32, 8, 16384), (2, 8, 1, 131072)):
            for rules in ({}, {"causal": True}, {"causal": True, "window": (0, None)}):
                p = problem(D, B, H, Hkv, L, **rules)
                assert 1 <= config.planes_at_once(p, config.spec_of(p, H200), H200) <= B * Hkv


def test_key_blocks_are_split_where_they_do_not_fill_the_gpu():
    most = config.MOST_SPLITS_PER_SM * H200.processors
    for D in (40, 64, 128):
        for B, H, Hkv, L in ((1, 1, 1, 1), (1, 32, 8, 1024), (1, 16, 2, 4096), (1, 8, 8, 512), (4, 32, 8, 4096)):
            for rules in ({}, {"causal": True}, {"causal": True, "window": (50, None)}, {"kv_lengths": True}):
                p = problem(D, B, H, Hkv, L, q_offset=0, **rules)
                splits, s = config.splits_of(p, H200), config.spec_of(p, H200)
                assert 1 <= splits <= -(-L // s.BM)
                assert s.split == (splits > 1)
                assert splits == 1 or splits * config.programs_of(p) <= most
                assert config.time_of(p, splits, H200) <= config.time_of(p, 1, H200)
                none = replace(s, split=False)
                more = config.workspace_bytes(p, s, H200) - config.workspace_bytes(p, none, H200)
                assert more <= most * config.BN * s.D * 8
                if config.programs_of(p) > most:
                    assert splits == 1
    few = problem(B=1, H=32, Hkv=8, L=1024, q_offset=0)
    assert config.programs_of(few) <= H200.processors // 2 < config.programs_of(few) * config.splits_of(few, H200)
    for other in ({"packed_q": True, "total_q": 1024}, {"softcap": 30.0}, {"q_dtype": torch.float16}, {"kv_len": 1000}):
        assert config.splits_of(replace(few, **other), H200) == 1
    assert config.splits_of(problem(B=1, H=32, Hkv=8, L=1024, q_offset=0, window=(100, None)), H200) == 1


def test_forms_are_those_that_were_fastest():
    window = {"causal": True, "window": (1023, None)}
    for want, D, more in (
        ((True, True), 128, {"B": 1, "H": 16, "Hkv": 16, "L": 16384, **window}),
        ((True, True), 64, {"B": 1, "H": 32, "Hkv": 32, "L": 16384, **window}),
        ((True, True), 64, {"B": 64, "Hkv": 16, "L": 2048, "packed": True, "causal": True}),
        ((True, True), 128, {"B": 64, "Hkv": 16, "L": 2048, "packed": True, "causal": True}),
        ((True, True), 64, {"B": 16, "Hkv": 16, "L": 1024, "causal": True}),
        ((False, True), 128, {"B": 16, "Hkv": 16, "L": 1024, "causal": True}),
        ((False, True), 128, {"B": 16, "Hkv": 16, "L": 1024}),
        ((True, True), 128, {"B": 4, "Hkv": 16, "L": 4096, "causal": True}),
        ((True, True), 64, {"B": 4, "Hkv": 16, "L": 4096, "causal": True}),
        ((False, False), 128, {"B": 4, "Hkv": 16, "L": 4096}),
        ((False, False), 128, {"B": 1, "Hkv": 16, "L": 16384, "causal": True}),
        ((False, False), 128, {"B": 16, "Hkv": 4, "L": 1024, "causal": True}),
    ):
        s = config.spec_of(problem(D, **more), H200)
        assert (s.converts, s.direct) == want, (D, more)
        assert not s.near_tanh
    capped = replace(problem(128, causal=True), softcap=50.0)
    assert config.spec_of(capped, H200).near_tanh
    assert not config.spec_of(replace(capped, softcap=1e6), H200).near_tanh


@pytest.mark.parametrize("rules", [{"causal": True}, {"window": (70, None)}, {"window": (300, 20)}, {"window": (0, 0)}])
def test_sides_are_those_of_the_rules(rules):
    p = problem(**rules)
    left, right = config.sides(p)
    for key in (0, 5, 1000, 4095):
        lo, hi = query_span(p.rules, key, 0, p.q_len)
        assert max(0, key - right) == max(0, lo)
        assert min(p.q_len, key + left + 1) == min(p.q_len, hi)


def test_what_is_not_served_is_refused_by_name():
    p = problem()
    assert config.refusal(p) is None
    assert "ALiBi" in config.refusal(replace(p, alibi=True))
    assert "rules of positions" in config.refusal(problem(chunk=7))
    assert "strides" in config.refusal(problem(places=(0, 2, 1), causal=True))
    assert config.refusal(problem(places=(3, 2, 2), q_offset=5, causal=True, window=(99, None))) is None
    assert "head dims" in config.refusal(problem(D=132))
    assert "head dims" in config.refusal(problem(D=520))
    assert "head dims" in config.refusal(replace(p, value_dim=64))
    assert "scales" in config.refusal(replace(p, scale=1e-6))
    assert "16 bytes" in config.refusal(replace(p, aligned=False))


def test_programs_are_persistent_where_few_rows_see_a_key_block():
    assert config.persistent(problem(L=1024))
    assert not config.persistent(problem(L=16384))
    assert config.persistent(problem(L=16384, causal=True, window=(1023, None)))
    rows = [config.rows_of_block(problem(L=L, causal=True)) for L in (512, 1024, 4096, 16384)]
    assert rows == sorted(rows)
    assert rows[-1] < config.rows_of_block(problem(L=16384))


def test_edges_hide_what_a_block_may_have():
    assert (config.spec_of(problem(), H200).right_edges, config.spec_of(problem(), H200).left_edges) == (0, 0)
    s = config.spec_of(problem(causal=True, window=(1023, None)), H200)
    assert (s.right_edges, s.left_edges) == (config.RIGHT, config.LEFT)
    both = config.RIGHT + config.LEFT
    for p in (
        problem(causal=True, window=(100, None)),
        problem(L=4000, window=(1023, 1023)),
        problem(window=(1023, 0), kv_lengths=True),
    ):
        assert config.spec_of(p, H200).right_edges == config.spec_of(p, H200).left_edges == both


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_grids_and_heuristics_are_those_of_the_gpu(processors):
    """An H20 has 78 SMs, an H100 on PCIe 114."""
    target, grids = nvidia(90, processors), {}

    recorder = Workspaces(torch.device("meta"))
    recorder.launch = lambda kernel, grid, given: grids.update({kernel.function.__name__: grid})
    p = problem(causal=True, B=8, L=1024)
    launcher = NarrowLauncher(p, target)
    launcher.launch(recorder, tensors_of(p))
    assert launcher.spec.persistent
    assert grids["backward"] == grids["fix_up"] == (processors, 1)
    few = problem(B=1, H=32, Hkv=8, L=1024, q_offset=0)
    assert config.programs_of(few) * config.splits_of(few, target) <= config.MOST_SPLITS_PER_SM * processors
