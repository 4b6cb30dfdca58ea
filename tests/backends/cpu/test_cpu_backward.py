"""The CPU's backward pass: the conformance suite, and bits that do not depend on the number of threads."""

from dataclasses import replace

import pytest
import torch

from conformance import BackwardConformance
from tilewise import attention, attention_backward
from tilewise.backends.cpu import compiler
from tilewise.backends.cpu.kernel_cache import cache_directory
from tilewise.testing.case import Case
from tilewise.testing.gradients import check_gradients, make_gradients


class TestCpuBackward(BackwardConformance):
    backend = "cpu"


FEW_SEE = {"window": 24, "softcap": 1e30, "offset": -536870712, "mask": "bhqk", "mask_kind": "f32", "pattern": "rows"}
AFFINE = {"window": 2**31 - 1, "chunk": 2**63 - 1, "alibi": "h", "offset": "rows", "k_stride": 3, "q_stride": "rows"}


@pytest.mark.parametrize(
    "case",
    [
        Case(form="varlen", causal=True, H=15, Hkv=3, Lq=1, D=48, Dv=32, sinks="mixed", lengths=(63, 8),
             q_lengths=(70, 8), tile=(34, 43), **FEW_SEE),
        Case(form="varlen", causal=True, B=3, H=1, Hkv=1, Lq=1, D=81, Dv=89, k="bf16", sinks=True, lengths=(64, 59, 5),
             q_lengths=(43, 1, 43), used=(38, 7, 5), **AFFINE),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_of_sinks_are_summed_as_exactly_as_torch_does(case):
    """Rows of packed queries lie far apart: torch's own sum over them in float32 rounds five times as much."""
    check_gradients(case, "cpu")


# More keys than a block of them, and more rows than a panel of queries: most cells of a plain call are in whole blocks.
PATHS = {
    "f32": Case(B=2, H=2, Hkv=1, Lq=40, Lk=150),
    "f16": Case(B=2, H=2, Hkv=1, Lq=40, Lk=150, dtype="f16"),
    "bf16": Case(B=2, H=2, Hkv=1, Lq=40, Lk=150, dtype="bf16"),  # cells in registers, where the CPU has AVX-512 BF16
    "bf16, wide": Case(B=1, H=2, Lq=40, Lk=150, D=264, Dv=264, dtype="bf16"),  # cells in memory
    "packed": Case(form="varlen", H=2, Hkv=1, q_lengths=(40, 3), lengths=(150, 70), dtype="bf16"),
    "chosen keys": Case(B=2, H=2, Hkv=1, Lq=40, Lk=150, indices="h60", dtype="bf16"),
    "chosen blocks": Case(B=2, H=2, Hkv=1, Lq=40, Lk=150, indices="5", block=16),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 30},
    "window of both sides": {"window": (20, 3)},
    "chunk": {"chunk": 40},
    "offset": {"causal": True, "offset": 60},
    "offsets of rows": {"causal": True, "offset": "rows"},
    "strides": {"causal": True, "k_start": 3, "k_stride": 2, "q_stride": 3},
    "alibi": {"alibi": "bh"},
    "softcap": {"softcap": 3.0},
    "scale below 0": {"scale": -0.3},
    "sinks": {"sinks": True},
    "mask": {"mask": "bhqk"},
    "mask of whole tiles": {"mask": "hqk", "pattern": "blocks"},
    "mask, added": {"mask": "b1qk", "mask_kind": "f32"},
    "biases": {"q_bias": "bh", "k_bias": "1h"},
    "tree": {"tree": "b"},
    "tree with positions": {"tree": "b", "positions": True, "window": 9},
    "lengths and a window": {"lengths": (101, 64), "causal": True, "window": 40},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("path", PATHS)
def test_each_option_on_each_path(path, option):
    """A specialised loop that forgets one gives wrong gradients here."""
    case, options = PATHS[path], dict(OPTIONS[option])
    if "lengths" in options:
        lengths = options.pop("lengths")[: case.B]
        options["used" if case.form == "varlen" else "lengths"] = lengths
    if case.form == "varlen":  # its options are of each head, or of each sequence
        options |= {"mask": "hqk"} if options.get("mask") else {}
        options |= {"q_bias": "h", "k_bias": "h"} if options.get("q_bias") else {}
    check_gradients(replace(case, **options), "cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, H=1, Lq=500, Lk=700, D=64),  # one chain of key blocks, which wait for each other
        Case(B=1, H=4, Hkv=2, Lq=400, D=40, causal=True, dtype="bf16"),
        Case(B=2, H=2, Lq=300, D=32, window=(100, 50), sinks=True, alibi="h"),
        Case(B=3, Hkv=1, form="varlen", q_lengths=(300, 1, 200), lengths=(300, 290, 200), causal=True, dtype="f16"),
        *(Case(B=2, H=2, Lq=200, Lk=300, D=32, mask=dims, mask_kind="f32") for dims in ("qk", "bhq1", "h1k")),
        Case(B=1, H=4, Hkv=1, Lq=130, Lk=700, D=40, indices="90", causal=True),
        Case(B=1, H=4, Hkv=2, Lq=300, Lk=700, D=64, indices="h5", block=48, dtype="bf16"),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_threads(case, threads):
    made = make_gradients(case)
    threads(1)
    alone = {name: x.clone() for name, x in made.run("cpu").items()}
    for count in (2, 3, 5):
        threads(count)
        for _ in range(3):
            for name, x in made.run("cpu").items():
                assert torch.equal(x, alone[name]), (name, count)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 200)}], ids=str)
@pytest.mark.parametrize(("rows", "keys", "width"), [(200, 805, 64), (130, 500, 40), (64, 390, 264)])
def test_cells_made_in_registers_have_the_bits_of_those_in_memory(rows, keys, width, options):
    """A mask that hides nothing: its call keeps float32 tiles of scores, a plain one in bf16 does not."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 6, n, width, dtype=torch.bfloat16) for n in (rows, keys, keys, rows))
    found = []
    for mask in (None, torch.ones(rows, keys, dtype=torch.bool)):
        out, lse = attention(q, k, v, mask=mask, return_lse=True, backend="cpu", **options)
        found.append(attention_backward(q, k, v, out, lse, dout, mask=mask, backend="cpu", **options)[:3])
    for name, one, other in zip(("dq", "dk", "dv"), *found, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("case", [Case(B=1, H=4, Hkv=2, Lq=300, Lk=805, D=64, dtype="bf16", causal=True),
                                  Case(B=1, H=3, Lq=140, Lk=500, D=128, dtype="bf16")], ids=str)  # fmt: skip
def test_bf16_over_several_blocks_of_keys(case):
    check_gradients(case, "cpu")


@pytest.mark.parametrize("name", ["backward", "backward selected", "schedule_backward", "delta"])
def test_kernels_are_kept(name):
    """`tilewise warmup` compiles them ahead, and they are found on disk then."""
    assert name in compiler.KERNELS
    compiler.kernel(name)
    assert list(cache_directory().glob(f"{compiler.symbol(name)}.*.o"))


def test_default_dtype_does_not_matter():
    """Sums are float32 whatever torch makes by default."""
    case = Case(B=1, H=2, Lq=70, D=32, causal=True, alibi="h", mask="hq1", mask_kind="f32", sinks=True)
    plain = {name: x.clone() for name, x in make_gradients(case).run("cpu").items()}
    made = make_gradients(case)
    torch.set_default_dtype(torch.float64)
    try:
        other = made.run("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    for name, x in plain.items():
        assert torch.equal(x, other[name]), name


SPARSE = [
    Case(B=1, H=3, Lq=40, Lk=900, D=64, indices="200", dtype=t, alibi="h", softcap=9.0, causal=True)
    for t in ("f32", "bf16")
]  # several key blocks, and rows of a tile with lists of their own
SPARSE += [
    Case(B=1, H=4, Hkv=2, Lq=150, Lk=900, D=72, indices="h4", block=n, dtype="bf16", window=(300, 9)) for n in (24, 100)
]
SPARSE += [
    Case(B=2, H=2, Lq=50, Lk=450, D=32, indices="7", block=16, mask=dims, mask_kind="f32", q_bias="bh", k_bias="1h")
    for dims in ("bhqk", "qk", "hq1", "b11k")
]
SPARSE += [Case(B=1, H=2, Lq=50, Lk=450, D=32, indices="90", mask="bhqk", mask_kind="bf16", dtype="bf16")]


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_selected_keys_of_several_blocks(case):
    check_gradients(case, "cpu")


@pytest.mark.parametrize("block", [1, 16])
def test_what_is_not_validated_reads_and_writes_no_other_memory(block):
    """Repeated indices count once, and those of no key are ignored: a list has never more entries than a block keys."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 40, 32) for _ in range(4))
    blocks = -(-40 // block)
    indices = torch.randint(blocks, (1, blocks, 3), dtype=torch.int32)
    name = {"key_indices": indices} if block == 1 else {"block_indices": indices, "block_size": block}
    own = indices.sort(-1).values
    own[..., 1:][own[..., 1:] == own[..., :-1]] = -1  # each once
    once = {**name, next(iter(name)): own}
    out, lse = attention(q, k, v, return_lse=True, **once)
    right = attention_backward(q, k, v, out, lse, dout, backend="cpu", **once)
    wild = torch.tensor([2**31 - 1, -(2**31), blocks, -1], dtype=torch.int32).expand(1, blocks, 4)
    many = torch.cat([indices.repeat(1, 1, 300), wild], -1)
    name = {**name, next(iter(name)): many}
    found = attention_backward(q, k, v, out, lse, dout, backend="cpu", validate=False, **name)
    for which, one, other in zip(("dq", "dk", "dv"), found, right, strict=False):
        assert torch.equal(one, other), which
