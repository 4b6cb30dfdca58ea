"""Every option on every path of the CPU backend: a specialised loop that forgets one gives a wrong result here."""

from dataclasses import replace

import pytest
import torch

from tilewise import attention
from tilewise.backends.cpu import compiler
from tilewise.backends.cpu.gemm import amx, gemv_vnni
from tilewise.backends.cpu.params import Params
from tilewise.dispatch.planner import choose
from tilewise.testing.case import Case, Inputs, make
from tilewise.testing.check import check_call, check_case

KEYS = 150  # more than a tile: the first is whole for most rows
PATHS = {
    "decode f32": Case(Hkv=2, Lq=2, Lk=KEYS, D=64),
    "decode f16": Case(Hkv=2, Lq=2, Lk=KEYS, D=64, dtype="f16"),
    "decode bf16": Case(Hkv=1, Lq=2, Lk=KEYS, D=64, dtype="bf16"),  # by AMX where there is
    "decode, widened": Case(Hkv=2, Lq=2, Lk=KEYS, D=20),
    "decode int8": Case(Hkv=2, Lq=2, Lk=KEYS, D=128, k="int8/64", v="int8/64"),  # integer dots (VNNI)
    "decode int4": Case(Hkv=2, Lq=2, Lk=KEYS, D=128, k="int4/64", v="int4/64"),
    "decode int8, widened": Case(Hkv=2, Lq=2, Lk=KEYS, D=72, k="int8/32", v="int8/32"),
    "decode fp8": Case(Hkv=2, Lq=2, Lk=KEYS, D=64, k="fp8_e4m3/32", v="fp8_e4m3/32"),
    "decode in splits": Case(Hkv=2, Lq=2, Lk=KEYS, D=64, split_size=64),
    "decode int8 in splits": Case(Hkv=2, Lq=2, Lk=KEYS, D=128, k="int8/64", v="int8/64", split_size=64),
    "pages": Case(form="paged", Hkv=2, Lq=2, D=64, lengths=(KEYS, 97)),  # head batches
    "pages int8": Case(form="paged", Hkv=2, Lq=2, D=128, lengths=(KEYS, 97), k="int8/64", v="int8/64"),
    "pages, packed": Case(form="paged", Hkv=2, D=64, q_lengths=(2, 40), lengths=(KEYS, 97)),
    "packed": Case(form="varlen", Hkv=2, D=64, q_lengths=(2, 40), lengths=(KEYS, 97)),
    "prefill f32": Case(Hkv=2, Lq=70, Lk=KEYS, D=64),
    "prefill f16": Case(Hkv=2, Lq=70, Lk=KEYS, D=64, dtype="f16"),
    "prefill bf16": Case(Hkv=2, Lq=70, Lk=KEYS, D=64, dtype="bf16"),
    "prefill int8": Case(Hkv=2, Lq=70, Lk=KEYS, D=128, k="int8/64", v="int4/64"),
    "prefill of pages": Case(form="paged", Hkv=2, Lq=40, D=64, lengths=(KEYS, 97)),
}
OPTIONS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 30},
    "window of both sides": {"window": (20, 3)},
    "chunk": {"chunk": 40},
    "offset": {"causal": True, "offset": 60},
    "offset before the keys": {"causal": True, "offset": -1},
    "offsets of rows": {"causal": True, "offset": "rows"},
    "alibi": {"alibi": "bh"},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.7},
    "scale below 0": {"scale": -0.3},
    "sinks": {"sinks": True},
    "mask": {"mask": "bhqk"},
    "mask, added": {"mask": "bhqk", "mask_kind": "f32"},
    "mask, near 0": {"mask": "hqk", "mask_kind": "f32", "pattern": "near"},
    "mask of whole tiles": {"mask": "hqk", "pattern": "blocks"},
    "lengths": {"lengths": (101, 7)},
    "lengths and a window": {"lengths": (101, 64), "causal": True, "window": 40},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("path", PATHS)
def test_each_option_on_each_path(path, option):
    """Twice: a repeated call takes the call cache."""
    case = replace(PATHS[path], **OPTIONS[option])
    if case.form == "varlen" and "lengths" in OPTIONS[option]:
        case = replace(PATHS[path], used=(101, 64), **{k: v for k, v in OPTIONS[option].items() if k != "lengths"})
    check_case(case, "cpu")
    inputs = make(case)
    plain = {**inputs.options, "return_lse": True, "backend": "cpu"}
    first, again = (inputs.entry(*inputs.args, **plain) for _ in range(2))
    assert first.out.equal(again.out)
    assert first.lse.equal(again.lse)


def test_the_paths_are_those_of_the_backend():
    """Each case takes the kernels that it is here for."""

    def kernels(path):
        params = choose(make(PATHS[path]).checked().problem, "cpu").detail.params
        return {name: getattr(params, name) for name, _ in Params._fields_}

    for path in PATHS:
        k = kernels(path)
        decode, prefill = k["decode"] != 0, (k["prefill"] or k["prefill_tiles"]) != 0
        assert decode == ("prefill" not in path)
        assert prefill == ("prefill" in path or "packed" in path)
        assert (k["split_size"] > 0) == ("splits" in path)
        assert (k["qk"] != 0) == (decode and "widened" not in path)
        few_bits = path.startswith(("decode int", "pages int")) and "widened" not in path
        assert (k["dot_qk"] != 0) == (k["dot_pv"] != 0) == (few_bits and gemv_vnni.has_vnni())
        assert (k["matrix_qk"] != 0) == (path == "decode bf16" and amx.usable())
    assert kernels("pages")["head_batch"] == 2
    assert compiler.KERNELS


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2e-3, 1e-4, 3e-5])
def test_a_mask_whose_cells_are_near_0_is_not_left_out(rows, kind, size):
    """Whole tiles of cells that are nearly, but not, 0; q is large, so that weights differ by as much."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 4, rows, 64, generator=g), *torch.randn(2, 1, 2, 300, 64, generator=g)
    mask = ((torch.rand(rows, 300, generator=g) - 0.5) * 2 * size).to(kind)
    mask[:, 200:] = 0
    state = attention(q, k, v * 100, mask=mask, backend="cpu", return_lse=True)
    check_call(Inputs(attention, (q, k, v * 100), {"mask": mask}).checked(), *state)
    without = attention(q, k, v * 100, backend="cpu")
    assert (state.out - without).abs().amax() > 20 * torch.finfo(torch.float32).eps * 100


def test_one_cell_that_is_not_0_makes_a_tile_mixed():
    """The last key of a tile, of one head and row; the others get the bits that they get without a mask."""
    q, k, v = torch.randn(1, 4, 70, 64), *torch.randn(2, 1, 4, 192, 64)
    plain = attention(q, k, v, mask=torch.zeros(4, 70, 192), backend="cpu")
    for key in (0, 95, 96, 191):
        mask = torch.zeros(4, 70, 192)
        mask[2, 69, key] = 1e-3
        got = attention(q, k, v * 1.0, mask=mask, backend="cpu")
        assert not got[:, 2, 69].equal(plain[:, 2, 69])
        assert got[:, :2].equal(plain[:, :2])


@pytest.mark.parametrize(("keys", "head_dim"), [(7, 88), (7, 128), (4, 96)])
def test_few_keys_are_as_exact_as_torch(keys, head_dim):
    """Torch's dot products with few keys are summed in lanes: one run of 128 elements rounds twice as much."""
    check_case(Case(B=2 if keys == 4 else 1, H=8, Lq=200, Lk=keys, D=head_dim), "cpu")
