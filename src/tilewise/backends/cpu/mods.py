"""Functions of the user on the CPU: their kernels, by address, and the table of the tensors that they capture.

A kernel is compiled once for each expression, and kept on disk with the others. Mainloops call it for each tile of
scores (`mainloop/mods.py`), so a new function compiles no mainloop.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from ...core.expression.mods import Mods
from . import compiler
from .codegen.vector import I64, Emit
from .mainloop.mod_kernels import ARGUMENTS, KERNELS
from .params import Params

_engines: list[Any] = []  # code is freed with its engine
NARROW = 2**31  # bytes of a tensor whose offsets fit in 32 bits


@cache
def kernel(kind: str, mods: Mods, wide: bool) -> int:
    """The address of a kernel of an expression."""

    def build(module: ir.Module, name: str) -> None:
        count = len(ARGUMENTS[kind].split())
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), name)
        builder = ir.IRBuilder(function.append_basic_block())
        KERNELS[kind](Emit(builder), mods, wide, *function.args)
        builder.ret_void()

    name = f"mod_{kind}"
    engine = compiler.compile_module(build, name, f"{mods.text} {wide}")
    _engines.append(engine)
    address: int = engine.get_function_address(name)
    return address


def table_of(captured: tuple[torch.Tensor, ...]) -> Any:
    """The table of captured tensors: of each its address, then size and stride in bytes of each dim."""
    words, kept = [], []
    for x in captured:
        if not x.numel():  # read by hidden cells alone
            x = x.new_zeros([1] * x.ndim)
            kept.append(x)
        words.append(x.data_ptr())
        size = x.element_size()
        for n, stride in zip(x.shape, x.stride(), strict=True):
            words += n, stride * size
    table: Any = (ctypes.c_int64 * max(1, len(words)))(*words)
    table.kept = kept
    return table


def is_wide(captured: tuple[torch.Tensor, ...]) -> bool:
    """Whether an offset in one of these tensors takes more than 32 bits."""
    return any(
        x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) > NARROW
        for x in captured
    )


def put_mods(params: Params, mods: Mods | None, captured: tuple[torch.Tensor, ...]) -> Any:
    """Sets the fields of the functions of a call; returns what must outlive it."""
    if mods is None:
        return None
    wide = is_wide(captured)
    for kind in ("columns", "rows"):
        setattr(params, f"mod_{kind}", kernel(kind, mods, wide))
    params.mod_scores, params.mod_masks = mods.score is not None, mods.mask is not None
    table = table_of(captured)
    params.captured = ctypes.addressof(table)
    return table
