"""Functions of the user in Triton kernels: in the interpreter, in processes of its own, and compiled ahead of time."""

import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED, backward_kernels, compile_kernel, forward_kernels
from interpreted import check
from slow import slowly
from test_triton_aot import BF16, DECODE, F32, PAGED, VARLEN, mask, problem
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.triton import config, mod_printer, shared_memory
from tilewise.core.expression.mods import is_wide, mods_of

FORWARD = """
import torch
import mod_calls
torch.set_num_threads(1)
work = {name: lambda name=name: mod_calls.call_of(name, "triton") for name in mod_calls.FUNCTIONS}
work |= {f"drawn {n}": lambda n=n: mod_calls.drawn_call(n, "triton") for n in range(64)}
others = mod_calls.other_forms, mod_calls.splits_and_indices, mod_calls.hidden_cells, mod_calls.repeated
others += mod_calls.skipped_tiles, mod_calls.a_tile_too_few
work |= {f.__name__: lambda f=f: f("triton") for f in others}
"""
CALLS = ["score", "mask", "both", "nothing", "hides", "number", "with others", "masks", "bool mask", "positions"]


def test_calls_in_the_interpreter():
    check(FORWARD, *CALLS, "splits_and_indices", "hidden_cells", "repeated")


def test_other_forms_in_the_interpreter():
    check(FORWARD, "other_forms")


@pytest.mark.parametrize("seeds", [range(12), *slowly(range(12, 64))], ids=str)
def test_drawn_expressions_in_the_interpreter(seeds):
    check(FORWARD, *(f"drawn {n}" for n in seeds))


def test_tiles_that_a_mask_mod_hides_are_skipped():
    check(FORWARD, "skipped_tiles")
    check(FORWARD, "a_tile_too_few")


MUTANTS = """
from tilewise.backends.triton import mod_operations, mod_printer
from tilewise.core.expression.evaluate import evaluate
from tilewise.core.expression.mods import Bound, mods_of
from tilewise import attention

ORIGINAL = mod_printer.operation, mod_printer.load_text

def swapped(node, args, exact):
    return ORIGINAL[0](node, args[::-1] if node.op == "sub" else args, exact)

def rounded_to_zero(node, args, exact):
    return f"{args[0]} // {args[1]}" if node.op == "floordiv" else ORIGINAL[0](node, args, exact)

def sign_of_x(node, args, exact):
    return f"{args[0]} % {args[1]}" if node.op == "mod" else ORIGINAL[0](node, args, exact)

def another_index(indices, dtype, at, wide):
    return ORIGINAL[1]([*indices][::-1], dtype, at, wide)

x = torch.randn(8, 8) * 3
CASES = {
    "operands swapped": (0, swapped, "|sub q k;float %0;add s %1|%2 -", ()),
    "rounded to 0": (0, rounded_to_zero, "|sub q k;floordiv %0 3;float %1;add s %2|%3 -", ()),
    "another remainder": (0, sign_of_x, "|sub q k;mod %0 3;float %1;add s %2|%3 -", ()),
    "another index": (1, another_index, "float32:2|mod q 8;mod k 8;load0 %0 %1;add s %2|%3 -", (x,)),
}

def found(name):
    place, mutant, text, tensors = CASES[name]
    q, k, v = (mod_calls.draw(1, 2, 40, 16) for _ in range(3))
    def right():
        mod_printer.compiled.cache_clear()
        bound = Bound(mods_of(text), tensors)
        got, want = (attention(q, k, v, score_mod=bound, backend=b) for b in ("triton", "reference"))
        return torch.allclose(got, want, atol=1e-4, equal_nan=True)
    assert right()
    setattr(mod_printer, ("operation", "load_text")[place], mutant)
    assert not right()

work = {name: lambda name=name: found(name) for name in CASES}
"""


def test_mutants_of_the_printer_are_found():
    for name in ("operands swapped", "rounded to 0", "another remainder", "another index"):
        check(FORWARD + MUTANTS, name)  # plans keep what is printed: each has a process of its own


BACKWARD = """
import math
import torch
from drawn_mods import captured, drawn
from mod_gradient_calls import (
    AXES, D, H, OPTIONS, PER_DTYPE, TABLE, agree, check, draw, drawn_of_axis, gradients, random
)
from tilewise.core.expression.mods import Bound
torch.set_num_threads(1)
SUMMED = [name for name in AXES if "cells" not in name]

def call(seed, bound, of_captured=True):
    dtype = (torch.float32, torch.float16)[seed % 2]
    q, k, v = (draw(2, n, length, D, dtype=dtype) for n, length in ((H, 45), (2, 70), (2, 70)))
    served = OPTIONS[: 5 if of_captured else 6]  # with other strides, q - k is no distance of rows and keys
    options = served[seed % len(served)] | {"score_mod": bound}
    check(q, k, v, options, PER_DTYPE[dtype], True, "triton", of_captured)

def by_axis(name):
    f32, f16 = torch.float32, torch.float16
    for heads, q_len, k_len, dtype in ((2, 90, 170, f32), (1, 130, 40, f16), (4, 5, 9, f32)):
        q, k, v = (draw(2, n, m, D, dtype=dtype) for n, m in ((H, q_len), (heads, k_len), (heads, k_len)))
        check(q, k, v, {"score_mod": AXES[name](TABLE), "causal": True}, PER_DTYPE[dtype], backend="triton")

def packed():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 41, 120], [0, 55, 97, 180]))
    q, k, v = draw(125, H, D), draw(185, 2, D), draw(185, 2, D)
    scale = torch.tensor([1.0, 0.5, 0.25])
    for name in SUMMED:
        mod = AXES[name](TABLE)
        options = {"score_mod": lambda s, b, h, q, k, mod=mod: mod(s * scale[b], b, h, q, k)}
        options["mask_mod"] = lambda b, h, q, k: (k + b) % 5 != 0
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        got = check(q, k, v, options, 1e-5, backend="triton", of_captured=False)
        assert (got["q"][120:] == 0).all(), name
        options["score_mod"] = mod
        check(q, k, v, options, 1e-5, backend="triton")

def selected():
    q, k, v = draw(1, H, 90, D), draw(1, 2, 128, D), draw(1, 2, 128, D)
    order = torch.rand(1, 2, 3, 4, generator=random).argsort(-1)[..., :2].int()
    options = {"block_indices": order, "block_size": 32, "causal": True}
    for name in ("rows", "distances"):
        check(q, k, v, options | {"score_mod": AXES[name](TABLE)}, 1e-5, backend="triton")

def hidden():  # NaN in hidden keys, in elements and derivatives that only hidden cells have; rows that see nothing
    table = TABLE.clone()
    table[:, 395:] = torch.nan
    options = {
        "mask_mod": lambda b, h, q, k: (k % 7 != 3) & (q > 11) & (q < 80),
        "score_mod": lambda s, b, h, q, k: torch.where(k % 5 == 1, -math.inf, s * TABLE[h, k]) + table[
            h, torch.where(k % 7 == 3, 399, k)
        ] / torch.where(k % 7 == 3, 0.0, 1.0),
    }
    q, k, v, dout = (draw(1, n, 90, D) for n in (H, 2, 2, H))
    clean, out_lse = gradients(q, k, v, dout, None, options, "triton")
    for name, x in clean.items():
        assert x.isfinite().all(), name
    for name in "kv":
        assert (clean[name][:, :, 3::7] == 0).all() and (clean[name][:, :, 1::5] == 0).all()
    assert (clean["q"][:, :, :12] == 0).all() and (clean["q"][:, :, 80:] == 0).all()
    k[:, :, 3::7], v[:, :, 3::7] = torch.nan, torch.inf
    dirty, _ = gradients(q, k, v, dout, None, options, "triton", out_lse)
    agree(dirty, clean, 1e-6)
    agree(dirty, gradients(q, k, v, dout, None, options, "reference", out_lse)[0], 1e-5)

def with_dropout():
    for name in ("rows", "distances"):
        q, k, v = (draw(2, n, 70, D) for n in (H, 2, 2))
        options = {"score_mod": AXES[name](TABLE), "causal": True, "dropout_p": 0.3, "dropout_seed": 5}
        check(q, k, v, options, 1e-5, backend="triton")

def repeated():
    q, k, v, dout = (draw(2, n, 90, D) for n in (H, 2, 2, H))
    options = {"score_mod": AXES["distances"](TABLE), "causal": True}
    first, out_lse = gradients(q, k, v, dout, None, options, "triton")
    for table in (TABLE, TABLE * 2, TABLE):
        options["score_mod"] = AXES["distances"](table)
        again, own = gradients(q, k, v, dout, None, options, "triton")
        agree(again, gradients(q, k, v, dout, None, options, "reference", own)[0], 1e-5)
    again, _ = gradients(q, k, v, dout, None, options, "triton", out_lse)
    assert all(torch.equal(x, first[name]) for name, x in again.items())

work = {f"axis {name}": lambda name=name: by_axis(name) for name in SUMMED}
work |= {f"drawn {n}": lambda n=n: call(n, Bound(drawn(n, mask=n % 3 > 0), captured()), False) for n in range(24)}
work |= {f"of axis {n}": lambda n=n: call(n, drawn_of_axis(n)) for n in range(48)}
work |= {f.__name__: f for f in (packed, selected, hidden, repeated, with_dropout)}
"""


def test_gradients_in_the_interpreter():
    check(
        BACKWARD,
        *(f"axis {name}" for name in ("rows", "keys", "distances", "buckets")),
        "hidden",
        "repeated",
        "with_dropout",
    )


def test_gradients_of_packed_and_selected_keys_in_the_interpreter():
    check(BACKWARD, "packed", "selected")


@pytest.mark.parametrize("seeds", [range(6), *slowly(range(6, 24))], ids=str)
def test_gradients_of_drawn_expressions_in_the_interpreter(seeds):
    check(BACKWARD, *(f"drawn {n}" for n in seeds), *(f"of axis {n}" for n in seeds))


@pytest.mark.slow
def test_gradients_of_more_drawn_loads_in_the_interpreter():
    check(BACKWARD, *(f"of axis {n}" for n in range(24, 48)))


GRADIENT_MUTANTS = """
from tilewise.backends.triton import mod_printer
from tilewise.core import mod_gradients

def mutated(change):
    text = mod_printer.printed
    def other(name, own, more, tensors, wide):
        if more is not None:
            own, more = change(list(own), list(more))
        return text(name, own, more, tensors, wide)
    mod_printer.printed = other

def off_by_one(p, t, axis, count, right=mod_gradients.axis_positions):
    b, q, k = right(p, t, axis, count)
    return b, q + (axis == "distances"), k

MUTANTS = {
    "no derivative by the score": lambda: mutated(lambda own, more: ([own[0], mod_printer.const(1.0)], more)),
    "that of the score for a load's": lambda: mutated(lambda own, more: (own, [own[1]] * len(more))),
    "loads exchanged": lambda: mutated(lambda own, more: (own, more[::-1])),
    "distances off by one": lambda: setattr(mod_gradients, "axis_positions", off_by_one),
}

def tried():
    q, k, v = draw(1, H, 40, D), draw(1, 2, 60, D), draw(1, 2, 60, D)
    t = TABLE
    mod = lambda s, b, h, q, k: torch.tanh(s / 5) * t[h, q - k + 70] * 4 + s * t[0, (q - k).abs()]
    check(q, k, v, {"score_mod": mod}, 1e-5, backend="triton")

def found(name):
    tried()
    MUTANTS[name]()
    try:
        tried()
    except AssertionError:
        return
    raise ValueError("not found")

work = {name: lambda name=name: found(name) for name in MUTANTS}
"""


@pytest.mark.parametrize(
    "name",
    ["no derivative by the score", "that of the score for a load's", "loads exchanged", "distances off by one"],
)
def test_mutants_of_gradients_are_found(name):
    check(BACKWARD + GRADIENT_MUTANTS, name)


def test_offsets_of_64_bits_are_printed():
    text = "float32:2|load0 q k;add s %0|%1 -"
    narrow, wide = (mod_printer.ModFunctions(mods_of(text), wide) for wide in (False, True))
    assert "int64" not in narrow.text
    assert wide.text.count(".to(tl.int64) *") == 2
    assert repr(narrow) != repr(wide), "they would share a kernel in Triton's cache"


TABLE = "|sub q k;load0 h %0;tanh s;mul %2 20.0;add %3 %1|%4 -"
MODS = {
    "table": "float32:2" + TABLE,
    "documents": "int64:1 bool:1 bfloat16:1 float64:1|load0 q;load0 k;eq %0 %1;load1 k;and %2 %3;load2 q;load3 b;"
    "lt %5 %6;or %4 %7|- %8",
    "every operation": "float16:1 int8:0|float q;floordiv q 7;mod k b;mod k 8;div s 3.0;floor %4;int %5;load0 %6;load1;"
    "sin %0;cos %9;exp %10;log %11;exp2 s;log2 %13;sqrt %14;rsqrt %15;sigmoid %16;tanh %17;ceil %18;abs %19;neg %20;"
    "max %21 s;min %22 %12;float %1;float %2;float %3;float %8;add %24 %25;add %28 %26;sub %29 %27;mul %30 %23;"
    "add %31 %7;xor q k;not %33;lt %34 h;where %35 %32 s;ne q 3;le s 0.0|%36 %37",
}
KERNELS = {
    "table": problem(mods=mods_of(MODS["table"]), causal=True),
    "documents": problem(mods=mods_of(MODS["documents"])),
    "every operation": problem(64, mods=mods_of(MODS["every operation"]), **VARLEN),
    "float32": problem(64, dtype=F32, mods=mods_of(MODS["table"])),
    "decode": problem(**DECODE, mods=mods_of(MODS["table"])),
    "pages": problem(**PAGED, page_size=16, mods=mods_of(MODS["documents"])),
    "mask": problem(mods=mods_of(MODS["table"]), **mask(BF16)),
    "D256": problem(256, mods=mods_of(MODS["table"])),
}


@pytest.mark.parametrize("arch", [90, *slowly(80, 86, 100, 120)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_and_fit(name, arch):
    p, target = KERNELS[name], nvidia(arch)
    c = config.config_of(p, target)
    bound = shared_memory.needed(p, c, config.spec(p, c, target), target)
    for kernel, given in forward_kernels(p, target):
        built = compile_kernel(kernel, given, arch)
        assert built.shared <= SHARED[arch]
        assert built.shared <= bound or kernel.function.__name__ != "fwd_kernel"


GRADIENTS = ("q", "k", "v", "captured0")
MORE = "float32:2|sub q k;load0 h %0;load0 h k;load0 b q;mul s %1;add %4 %2;add %5 %3|%6 -"
BACKWARD_KERNELS = {
    "table": problem(64, mods=mods_of(MODS["table"]), causal=True, grads=GRADIENTS, return_lse=True),
    "three loads": problem(mods=mods_of(MORE), grads=GRADIENTS, return_lse=True),
    "documents": problem(mods=mods_of(MODS["documents"]), grads=("q", "k", "v"), return_lse=True),
    "every operation": problem(
        64, mods=mods_of(MODS["every operation"]), grads=("q", "k", "v"), return_lse=True, **VARLEN
    ),
    "float32": problem(64, dtype=F32, mods=mods_of(MODS["table"]), grads=GRADIENTS, return_lse=True),
    "D256": problem(256, mods=mods_of(MODS["table"]), grads=GRADIENTS, return_lse=True),
    "mask": problem(mods=mods_of(MODS["table"]), grads=(*GRADIENTS, "mask"), return_lse=True, **mask(BF16)),
}  # fmt: skip


@pytest.mark.parametrize("arch", [90, *slowly(80, 86, 100, 120)])
@pytest.mark.parametrize("name", BACKWARD_KERNELS)
def test_backward_kernels_compile_and_fit(name, arch):
    for _, kernel, given in backward_kernels(BACKWARD_KERNELS[name], arch):
        assert compile_kernel(kernel, given, arch).shared <= SHARED[arch]


def test_elements_of_captured_tensors_count_as_shared_memory():
    """They are copied in advance, as keys are."""
    p = KERNELS["table"]
    target = nvidia(90)
    c = config.config_of(p, target)
    built = compile_kernel(*next(forward_kernels(p, target)), 90)
    plain = problem(causal=True)
    assert built.shared > shared_memory.needed(plain, c, config.spec(plain, c, target), target)


def test_a_table_as_large_as_memory_is_read_by_wide_offsets():
    x = torch.empty(3, 2**30, device="meta")
    assert is_wide((x,))
    assert not is_wide((x[:1, :9],))
