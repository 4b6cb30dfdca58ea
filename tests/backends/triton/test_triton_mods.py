"""Functions of the user in Triton kernels: in the interpreter, in processes of its own, and compiled ahead of time."""

import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED, compile_kernel, forward_kernels
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
