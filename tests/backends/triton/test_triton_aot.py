"""The Triton kernels that the heuristics choose, compiled ahead of time for GPUs that are not here.

They must compile, fit the shared memory, use Hopper's own products on sm_90, and keep their loops free of spills.
"""

import itertools
import re
import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import triton
from aot import SHARED, attend_of, compile_kernel, forward_kernels, half_way, shared_of
from assembler import disassembled
from problem_space import problem_of
from slow import slowly
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.triton import config, shared_memory
from tilewise.core.problem import MaskSpec, Selection
from tilewise.core.storage import PLAIN, stored_as

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def problem(D=128, Dv=0, dtype=BF16, kv=None, **changes):
    sizes = {
        "form": "dense", "device": torch.device("cuda"), "batch": 4, "heads": 16, "kv_heads": 4, "q_len": 4096,
        "kv_len": 4096, "head_dim": D, "value_dim": Dv or D, "q_dtype": dtype, "k_format": PLAIN[kv or dtype],
        "v_format": PLAIN[kv or dtype], "scale": 0.1, "q_offset": 0,
    }  # fmt: skip
    return problem_of(**(sizes | changes))


DECODE = {"q_len": 1, "q_offset": 4095}
PAGED = {"form": "paged", "q_len": 1, "kv_lengths": True, "q_offset": "end"}
VARLEN = {"form": "varlen", "packed_q": True, "total_q": 4096, "q_len": 1024, "q_offset": "end"}
ALL = {
    "causal": True,
    "window": (100, 3),
    "chunk": 512,
    "softcap": 9.0,
    "alibi": True,
    "sinks": True,
    "return_lse": True,
}


def quantised(kind, group):
    return dict.fromkeys(("k_format", "v_format"), stored_as(kind, group))


NARROW = ("fp8_e4m3", "int8", "int4")


def mask(dtype, *broadcast):
    return {"mask": MaskSpec(dtype, broadcast or (True, True, False, False))}


HOT = {
    "D64": problem(64), "D64-causal": problem(64, causal=True), "D128": problem(), "D128-causal": problem(causal=True),
    "D128-window": problem(causal=True, window=(1023, None)), "D256": problem(256),
    "D256-causal": problem(256, causal=True), "D256-softcap": problem(256, causal=True, softcap=50.0),
    "D192/128": problem(192, 128, causal=True), "f16": problem(dtype=F16, causal=True),
    "bool mask": problem(**mask(torch.bool)), "additive mask": problem(**mask(BF16)),
    "varlen": problem(**VARLEN, causal=True),
    "decode-D64": problem(64, **DECODE), "decode-D128": problem(**DECODE), "decode-D256": problem(256, **DECODE),
    "decode-D512": problem(512, **DECODE),
    "paged16-D128": problem(**PAGED, page_size=16), "paged128-D128": problem(**PAGED, page_size=128),
    "int8": problem(**DECODE, **quantised("int8", 128)), "int4": problem(**DECODE, **quantised("int4", 128)),
    "fp8": problem(**DECODE, **quantised("fp8_e4m3", 128)), "D72": problem(72), "D72-causal": problem(72, causal=True),
    "D512": problem(512), "D512-causal": problem(512, causal=True), "varlen-full": problem(**VARLEN),
    "paged16-D512": problem(512, **PAGED, page_size=16), "paged16-D64": problem(64, **PAGED, page_size=16),
    "paged16-D256": problem(256, **PAGED, page_size=16), "paged24-D128": problem(**PAGED, page_size=24),
    **{f"paged16-{kind}": problem(**PAGED, page_size=16, **quantised(kind, 64)) for kind in NARROW},
    "paged128-int8": problem(**PAGED, page_size=128, **quantised("int8", 64)),
    "paged16-int4-D256": problem(256, **PAGED, page_size=16, **quantised("int4", 64)),
    "int8-D64": problem(64, **DECODE, **quantised("int8", 64)),
    "paged16-int4-D64": problem(64, **PAGED, page_size=16, **quantised("int4", 64)),
    **{f"paged16-{kind}-groups-of-32": problem(**PAGED, page_size=16, **quantised(kind, 32)) for kind in NARROW},
    "fp8-groups-of-64": problem(**DECODE, **quantised("fp8_e4m3", 64)),
    "chosen-D128": problem(**DECODE, selection=Selection(2048)),
    "chosen-paged16-D128": problem(**PAGED, page_size=16, selection=Selection(2048)),
    "chosen-paged64-latent": problem(
        576, 512, **PAGED, page_size=64, heads=16, kv_heads=1, selection=Selection(2048)
    ),
    "blocks-D128-causal": problem(causal=True, selection=Selection(16, 64)),
}  # fmt: skip
OTHERS = {
    "D576-all": problem(576, 512, **ALL), "D72-all": problem(72, 40, **ALL),
    "f32-D64": problem(64, dtype=F32, causal=True), "f32-D128": problem(dtype=F32), "f32-D256": problem(256, dtype=F32),
    "tf32": problem(dtype=F32, allow_tf32=True), "bf16 over f16": problem(kv=F16, causal=True),
    "f32 over f16": problem(64, dtype=F32, kv=F16), "int4 prefill": problem(causal=True, **quantised("int4", 64)),
    "fp8 of 32 prefill": problem(**quantised("fp8_e4m3", 32)),
    "mask-all": problem(64, **ALL, **mask(F32, *(False,) * 4)),
    "decode-mask": problem(**(DECODE | {"q_len": 8}), causal=True, **mask(torch.bool)),
    "decode-all": problem(64, **(DECODE | {"q_len": 4}), **ALL),
    "paged5-f32": problem(64, dtype=F32, **PAGED, page_size=5),
    "paged16-int8-causal": problem(**(PAGED | {"q_len": 2}), page_size=16, causal=True, **quantised("int8", 64)),
    "biases": problem(causal=True, q_bias=True, k_bias=True),
    "biases-all": problem(64, **ALL, q_bias=True, k_bias=True, **mask(F32, *(False,) * 4)),
    "paged16-biases": problem(**(PAGED | {"q_len": 2}), page_size=16, causal=True, k_bias=True),
    "paged16-tree": problem(**(PAGED | {"q_len": 8}), page_size=16, tree=True),
    "paged16-tree-positions": problem(**(PAGED | {"q_len": 8}), page_size=16, tree=True, positions=True, chunk=99),
    "paged16-codebook4": problem(**PAGED, page_size=16, **quantised("codebook4", 64)),
    "tree-all": problem(64, **ALL, tree=True, **mask(F32, *(False,) * 4)),
    "strides": problem(causal=True, window=(999, None), places=(1, 4, 3)),
    "strides-rows-all": problem(64, **ALL, places="rows"),
    "chosen-all": problem(64, **(DECODE | {"q_len": 40}), **ALL, **mask(F32, *(False,) * 4), selection=Selection(100)),
    "chosen-int8": problem(**PAGED, page_size=16, **quantised("int8", 64), selection=Selection(512, 1, True)),
    "chosen-packed": problem(**VARLEN, selection=Selection(64)),
    "blocks-f32": problem(64, dtype=F32, selection=Selection(9, 48)),
    "paged-packed": problem(**(PAGED | {"q_len": 700}), page_size=16, packed_q=True, total_q=2000, causal=True),
}  # fmt: skip
IN_K = PAGED | {"page_size": 64, "kv_heads": 1, "v_in_k": True}
LATENT = {
    f"latent-{kind}-{heads}": problem(576, 512, **IN_K, heads=heads, **quantised(kind, 128))
    for kind in ("int8", "fp8_latent")
    for heads in (16, 128)
}
OTHERS |= LATENT


def loops(built):
    """The instructions of each loop that multiplies matrices."""
    code, spans = disassembled(built.sass)
    return [code[a:b] for a, b in spans if any("MMA" in x for x in code[a:b])]


def count(body, pattern):
    return sum(bool(re.search(pattern, x)) for x in body)


@pytest.mark.parametrize("name", HOT)
def test_hot_kernels_on_hopper(name):
    p = HOT[name]
    built = attend_of(p, 90)
    assert built.shared <= SHARED[90]
    assert ("wgmma" in built.ptx) == (p.q_len > 1)
    assert "cp.async" in built.ptx  # the keys are on their way while others are multiplied
    if p.q_len == 1 and built.frame == 0:
        return  # nothing can be spilled, and no product waits for another: not worth the time of a disassembler
    bodies = loops(built)
    assert bodies
    for body in bodies:
        assert count(body, r"\b(STL|LDL)") <= 2, "spills in a loop"
        # A product that waits for the one before it would be followed by a barrier each: registers ran out.
        assert count(body, "WARPGROUP.DEPBAR") <= 4


@pytest.mark.parametrize(("kind", "most", "scales"), [("fp8_e4m3", 20, 2), ("int8", 24, 2), ("int4", 21, 4)])
def test_quantised_pages_take_few_instructions(kind, most, scales):
    """What a warp issues for a key, and how it is copied: 55 and four bytes at a time where each row's page was looked
    up and four warps shared a tile of 64 keys. Both scales of a row come at once where their groups have columns of
    their own.
    """
    p = HOT[f"paged16-{kind}"]
    body = loops(attend_of(p, 90))[0]
    assert len(body) / 32 <= most
    rows = 32 * (64 if kind == "int4" else 128) * 2  # bytes of K and V in a tile
    assert count(body, r"LDGSTS.*\.128") == rows // (32 * 16)
    assert count(body, r"LDGSTS") - rows // (32 * 16) == scales, "for each key, of two groups of K and V"
    barriers = 5 if triton.__version__.startswith("3.9") else 2  # 3.9 puts three around what a warp keeps to itself
    assert count(body, "BAR.SYNC") <= barriers, "nothing is shared between warps"
    assert count(body, r"LDG\.") <= 4, "the pages of the next tile"


@pytest.mark.parametrize(("heads", "warps"), [(16, 4), (128, 8)])
def test_rows_that_hold_values_are_copied_once(heads, warps):
    """16 bytes at a time, of K alone; without the alias V's bytes come too."""
    for inside in (False, True):
        p = problem(576, 512, **PAGED, page_size=64, heads=heads, kv_heads=1, v_in_k=inside)
        c = config.config_of(p, nvidia(90))
        assert c.warps == warps
        built = attend_of(p, 90)
        lines = c.BK * (576 + (0 if inside else 512)) * 2 // (16 * 32 * warps)
        assert [count(body, r"LDGSTS.*\.128") for body in loops(built)] == [lines] * 2
        assert built.shared <= shared_memory.needed(p, c, config.spec(p, c, nvidia(90)), nvidia(90))


@pytest.mark.parametrize(("kv", "heads"), [(F32, 16), *slowly((F32, 128), (BF16, 16))])
def test_rows_of_float32_products_are_copied_once(kv, heads):
    """K stays in registers for the second product, without spills."""
    p = problem(576, 512, F32, kv, **PAGED, page_size=64, heads=heads, kv_heads=1, v_in_k=True)
    c = config.config_of(p, nvidia(90))
    built = attend_of(p, 90)
    lines = c.BK * 576 * kv.itemsize // (16 * 32 * c.warps)
    for body in loops(built):
        assert count(body, r"LDGSTS.*\.128") == lines
        assert count(body, r"\b(STL|LDL)") <= 2, "spills in a loop"
    assert built.shared <= shared_memory.needed(p, c, config.spec(p, c, nvidia(90)), nvidia(90)) <= SHARED[90]


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="counts instructions as Triton 3.6 makes them")
@pytest.mark.parametrize("heads", [16, *slowly(128)])
@pytest.mark.parametrize(("kind", "stored", "groups"), [("int8", 576, 5), ("fp8_latent", 640, 4)])
def test_rows_of_bytes_are_copied_once_with_their_scales(kind, stored, groups, heads):
    """16 bytes at a time, and a scale of each group for each key; none is loaded again for V, nothing is spilled."""
    p = LATENT[f"latent-{kind}-{heads}"]
    c = config.config_of(p, nvidia(90))
    built = attend_of(p, 90)
    for body in loops(built):
        assert count(body, r"LDGSTS.*\.128") == c.BK * stored // (16 * 32 * c.warps)
        assert count(body, r"LDGSTS\.E \[") == 2 * groups
        assert count(body, r"LDG\.") <= 1, "the next tile's page"
        assert not count(body, r"\b(STL|LDL)"), "spills in a loop"
    assert built.shared <= shared_memory.needed(p, c, config.spec(p, c, nvidia(90)), nvidia(90)) <= SHARED[90]


@pytest.mark.parametrize("dtype", [F16, *slowly(F32)])
def test_latent_rows_fit(dtype):
    """Rows of 656 bytes: three types in a row, all by the address of its first byte."""
    p = problem(576, 512, dtype, **IN_K, heads=16, **quantised("fp8_latent", 128))
    c = config.config_of(p, nvidia(90))
    built = attend_of(p, 90)
    assert built.shared <= shared_memory.needed(p, c, config.spec(p, c, nvidia(90)), nvidia(90)) <= SHARED[90]
    assert all(count(body, "LDGSTS") for body in loops(built)), "bytes are copied in advance"


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_fit(name):
    """Compiled half-way, which takes a fourth of the time; all the way below, among the slow tests."""
    assert shared_of(OTHERS[name], 90, fixup=False) <= SHARED[90]


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("name", ["D256", "additive mask", "decode-D128", "int4"])
def test_hot_kernels_fit_other_gpus(name, arch):
    assert shared_of(HOT[name], arch, fixup=False) <= SHARED[arch]


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("name", ["D128-causal", "paged16-D128", "fp8", "bf16 over f16"])
def test_some_kernels_on_other_gpus(name, arch):
    assert attend_of((HOT | OTHERS)[name], arch).shared <= SHARED[arch]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", [*HOT, *OTHERS])
def test_every_kernel_everywhere(name, arch):
    for kernel in forward_kernels((HOT | OTHERS)[name], nvidia(arch)):
        assert compile_kernel(*kernel, arch).shared <= SHARED[arch]


def sums(ttgir):
    """How many numbers each sum of a kernel adds at once."""
    for reduce in re.finditer(r'"tt\.reduce"\(.*?axis = (\d).*?\}\) : \(tensor<([\dx]+)xf32', ttgir, re.DOTALL):
        if "arith.addf" in reduce[0]:
            yield int(reduce[2].split("x")[int(reduce[1])])


def products(ttgir):
    """Shapes and precision of a kernel's float32 and 16-bit products, without the counts of non-finite values."""
    found = set()
    for line in ttgir.splitlines():
        if " warp_group_dot " in line or "tt.dot " in line or "ttng.warp_group_dot " in line:
            types = re.findall(r"(?:tensor|memdesc)<([\dx]+x\w+)", line.partition(" : ")[2])
            found.add((re.search(r"inputPrecision = (\d)", line)[1] if "inputPrecision" in line else "", *types))
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal", F32), ("window", BF16), ("bool mask", F32), ("bool mask", BF16), ("additive mask", F16)],
)
def test_a_tile_has_the_same_bits_in_every_loop(name, dtype):
    """Tiles are done masked or unmasked, in the fast kernel or in its fix-up. Sums of more than two numbers would
    follow the layout that the compiler chose for a loop.
    """
    rules = {
        "causal": {"causal": True}, "window": {"causal": True, "window": (99, None)},
        "bool mask": mask(torch.bool), "additive mask": mask(dtype),
    }[name]  # fmt: skip
    p = problem(64, dtype=dtype, **rules)
    fast, fixup = (half_way(*kernel, 90)[0] for kernel in itertools.islice(forward_kernels(p, nvidia(90)), 2))
    for ttgir in (fast, fixup):
        adds = list(sums(ttgir))
        assert adds
        assert max(adds) == 2
    assert products(fast) <= products(fixup)
    assert products(fast)


def test_plain_sums_would_be_noticed():
    """The check above can fail: a call without rules adds in any order."""
    assert max(sums(attend_of(HOT["D128"], 90).ttgir)) > 2


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_small_kernels(arch):
    """Non-finite fix-up, combining, classifying, listing, ranking; half-way."""
    for name in ("bool mask", "additive mask", "decode-D128", "varlen-full"):
        others = list(forward_kernels(HOT[name], nvidia(arch)))[1:]
        assert others
        assert all(half_way(*kernel, arch)[1] <= SHARED[arch] for kernel in others)


def operand_layouts(p, arch):
    """The layouts of products' right operands in all loops of a problem's kernels, by shape and type."""
    found = {}
    for kernel, given in forward_kernels(p, nvidia(arch)):
        if kernel.function.__name__ == "fwd_kernel":
            for line in half_way(kernel, given, arch)[0].splitlines():
                if product := re.search(r"tt\.dot .*\* tensor<(\w+), #ttg\.dot_op<\{opIdx = 1, .*?(kWidth = \d)", line):
                    found.setdefault(product[1], set()).add(product[2])
    return found


@pytest.mark.parametrize(("arch", "dtype"), [(80, F32), (90, BF16), *slowly((80, BF16), (90, F32))])
def test_all_loops_add_keys_up_in_one_order(arch, dtype):
    """Loops with and without a tree or a mask, and the fix-up, must give a tile the same bits (seen on an H200: bytes
    that Triton loads in one of them alone change the order of keys there).
    """
    few = DECODE | {"q_len": 4}
    for options in ({"tree": True}, {"causal": True}, {"tree": True, **mask(torch.bool)}):
        layouts = operand_layouts(problem(64, dtype=dtype, **few, **options), arch)
        assert layouts
        assert all(len(found) == 1 for found in layouts.values()), layouts
