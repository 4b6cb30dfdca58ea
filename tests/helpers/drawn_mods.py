"""Random expressions, and the CPU's kernels of expressions called on cells."""

import ctypes
import random

import torch
from llvmlite import ir

from tilewise.backends.cpu.codegen.vector import I64, Emit, W
from tilewise.backends.cpu.linker import load as load_code
from tilewise.backends.cpu.mainloop.mod_kernels import ARGUMENTS, KERNELS
from tilewise.backends.cpu.mods import table_of
from tilewise.core.expression.build import const, make
from tilewise.core.expression.mods import mods_of
from tilewise.core.expression.node import load, source
from tilewise.core.expression.text import to_text
from tilewise.core.private.numba import emit_module

KEYS = 21
TENSORS = [("float32", 2), ("float32", 1), ("bfloat16", 1), ("int64", 2), ("bool", 1), ("int8", 1), ("float32", 0)]
SMOOTH = ("tanh", "sigmoid", "sin", "cos")  # of any number, and bounded


def captured():
    """Tensors of `TENSORS`: small, strided, and smaller than some of the indices that are drawn."""
    g = torch.Generator().manual_seed(1)
    return (
        torch.randn(60, 3, generator=g).T,
        torch.randn(20, generator=g)[::2],
        torch.randn(9, generator=g).bfloat16(),
        torch.randint(-5, 5, (4, 30), generator=g),
        torch.rand(11, generator=g) > 0.5,
        torch.randint(-100, 100, (7,), generator=g, dtype=torch.int8),
        torch.tensor(0.5),
    )


class Draw:
    """Draws nodes of a kind."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def draw(self, kind, depth):
        return getattr(self, f"draw_{kind}")(depth)

    def draw_int(self, depth):
        r, more = self.random, depth - 1
        if depth <= 0:
            return r.choice([*map(source, "bhqk"), const(r.randint(-3, 9))])
        form = r.randint(0, 8)
        if form < 3:
            return make(r.choice(("add", "sub", "sub", "mul", "max", "min")), self.draw_int(more), self.draw_int(0))
        if form < 5:
            return make(r.choice(("floordiv", "mod")), self.draw_int(more), r.choice((2, 3, 8, -3, self.draw_int(0))))
        if form == 5:
            return make("where", self.draw_bool(more), self.draw_int(more), self.draw_int(more))
        if form == 6:
            return load(3, (self.draw_int(more), self.draw_int(more)), "int")
        if form == 7:
            return load(5, (self.draw_int(more),), "int")
        return make(r.choice(("xor", "and", "or", "sub")), source("q"), source("k"))

    def draw_bool(self, depth):
        r, more = self.random, depth - 1
        form = r.randint(0, 5) if depth > 0 else 0
        if form < 3:
            return make(r.choice(("lt", "le", "eq", "ne")), self.draw_int(more), self.draw_int(more))
        if form == 3:
            return make(r.choice(("and", "or", "xor")), self.draw_bool(more), self.draw_bool(more))
        return make("not", self.draw_bool(more)) if form == 4 else load(4, (self.draw_int(more),), "bool")

    def draw_float(self, depth):
        r, more = self.random, depth - 1
        if depth <= 0:
            return r.choice([source("s"), source("s"), const(round(r.uniform(-2, 2), 2)), load(6, (), "float")])
        form = r.randint(0, 11)
        if form < 3:
            return make(r.choice(("add", "sub", "mul", "max", "min")), self.draw_float(more), self.draw_float(more))
        if form < 5:
            return make(r.choice(SMOOTH), self.draw_float(more))
        if form == 5:
            return make("where", self.draw_bool(more), self.draw_float(more), self.draw_float(more))
        if form == 6:
            return make("div", self.draw_float(more), make("add", make("abs", self.draw_float(more)), 1.0))
        if form == 7:
            inside = make("add", make("abs", self.draw_float(more)), 0.5)
            return make(r.choice(("log", "log2", "sqrt", "rsqrt")), inside)
        if form == 8:
            return make(r.choice(("exp", "exp2")), make("min", self.draw_float(more), 2.0))
        if form == 9:
            return load(r.choice((1, 2)), (self.draw_int(more),), "float")
        if form == 10:
            return load(0, (self.draw_int(0), self.draw_int(more)), "float")
        return make("mul", make("float", self.draw_int(more)), 0.01)


def drawn(seed, mask=True):
    """`Mods` with a score that depends on s, and a mask."""
    draw = Draw(seed)
    score = make("add", draw.draw_float(4), make("mul", source("s"), 0.5))
    return mods_of(to_text((score, draw.draw_bool(3) if mask else None), TENSORS))


_engines = []


def compiled(kind, mods, *, wide=False):
    """A kernel as it is printed now, not one kept on disk."""

    def build(module, name):
        kinds = [I64] * len(ARGUMENTS[kind].split())
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
        builder = ir.IRBuilder(function.append_basic_block())
        KERNELS[kind](Emit(builder), mods, wide, *function.args)
        builder.ret_void()

    engine = load_code(emit_module(build, "printed"))
    _engines.append(engine)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(ARGUMENTS[kind].split()))(
        engine.get_function_address("printed")
    )


def bits(x):
    return torch.tensor(x).view(torch.int32).item()


def inputs(kind, seed=0):
    """Scores `[KEYS, W]` of a vector of rows, or `[vectors, W]` of a row, and the indices of the cells."""
    g = torch.Generator().manual_seed(seed)
    if kind == "columns":  # rows of two heads
        heads = torch.tensor([1] * (W // 2) + [2] * (W - W // 2), dtype=torch.int32)
        q = torch.cat([torch.arange(30, 30 + W // 2), torch.arange(W - W // 2)]).int()
        k = torch.arange(KEYS, dtype=torch.int32)[:, None] * 2 + 3
    else:
        heads, q = torch.tensor(1, dtype=torch.int32), torch.tensor(17, dtype=torch.int32)
        k = torch.arange(2 * W, dtype=torch.int32).view(2, W) * 2 + 3
    s = torch.randn(k.shape[0], W, generator=g) * 2
    return s, {"b": torch.tensor(1), "h": heads, "q": q, "k": k}


def called(kind, fn, s, cells, tensors, factor=1.0, keep=0):
    """The scores that a kernel makes of `s`."""
    s, table = s.clone(), table_of(tensors)
    address, scale = ctypes.addressof(table), bits(factor)
    if kind == "columns":
        positions = (cells["q"] - 3).int().contiguous()
        fn(s.data_ptr(), W, len(s), 1, cells["h"].data_ptr(), positions.data_ptr(), 0, 3, 2, address, scale, keep, 0)
    else:
        fn(s.data_ptr(), len(s), 1, int(cells["h"]), int(cells["q"]) - 3, 0, 3, 2, address, scale, keep)
    return s
