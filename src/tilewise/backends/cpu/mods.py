"""Functions of the user on the CPU: their kernels, by address, and the table of the tensors that they capture.

A kernel is compiled once for each expression, and kept on disk with the others. Mainloops call it for each tile of
scores (`mainloop/mods.py`), so a new function compiles no mainloop.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from ...core.expression.build import is_const
from ...core.expression.mods import Mods, is_wide
from ...core.expression.node import Node, in_order
from ...core.expression.sums import LoadGradient
from ...core.expression.text import to_text
from ...core.mod_spans import mod_spans
from ...core.mod_tiles import mod_states
from ...core.problem import Problem
from ...core.tensors import Tensors
from . import compiler
from .codegen.vector import I64, Emit
from .config import bytes_read, is_decode
from .mainloop.mask import HI_BIT, KNOWN, LO_BIT, PLAIN_ROW
from .mainloop.mod_kernels import ARGUMENTS, KERNELS
from .params import Params, put_tensor

_engines: list[Any] = []  # code is freed with its engine
MOST_KEPT = 256  # states of tiles that no tensor changes
WORTH_SPANS = 1e-3  # of a sequence: its bits must not depend on the batch
WORTH_STATES = 5e-3  # seconds of a core; states by tensors take 0.2 to 1 ms (cpu/score-mods in benchmarks/cpu/LOG.md)


@cache
def kernel(kind: str, mods: Mods, wide: bool, parts: tuple[LoadGradient | Node, ...] | None = None) -> int:
    """The address of a kernel of an expression; `parts` are those of `gradients` and `places`."""
    more: dict[str, Any] = {} if parts is None else {"parts": parts}

    def build(module: ir.Module, name: str) -> None:
        count = len(ARGUMENTS[kind].split())
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), name)
        builder = ir.IRBuilder(function.append_basic_block())
        KERNELS[kind](Emit(builder), mods, wide, *function.args, **more)
        builder.ret_void()

    name = f"mod_{kind}"
    stamp = f"{mods.text} {wide}" + "".join(f" {part_text(x, mods)}" for x in parts or ())
    engine = compiler.compile_module(build, name, stamp)
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


def part_text(part: LoadGradient | Node, mods: Mods) -> str:
    return to_text((part if isinstance(part, Node) else part.load,), mods.tensors)


def put_mods(params: Params, p: Problem, t: Tensors, parts: tuple[LoadGradient | Node, ...] = ()) -> list[Any]:
    """Sets the fields of the functions of a call; returns what must outlive it. `parts`: of a backward pass."""
    mods, captured = p.mods, t.captured
    kept: list[Any] = []
    if mods is None:
        return kept
    spans = put_mod_spans(params, p, t)
    if spans is not None:
        kept.append(spans[0])
    if spans is not None and spans[1]:
        mods = mods.without_mask
    if params.gradients or mods.mask is not None or spans is None:  # forward, spans alone skip tiles
        kept.append(put_mod_states(params, p, t))
    wide = is_wide(captured)
    if parts:
        params.mod_columns = kernel("gradients", mods, wide, parts)
    else:
        params.mod_columns = kernel("columns", mods, wide)
    if not params.gradients:  # a backward pass has no decode
        params.mod_rows = kernel("rows", mods, wide)
    params.mod_scores, params.mod_masks = mods.score is not None, mods.mask is not None
    table = table_of(captured)
    params.captured = ctypes.addressof(table)
    return [*kept, table]


def put_mod_spans(params: Params, p: Problem, t: Tensors) -> tuple[torch.Tensor, bool] | None:
    """Sets the spans of rows by a mask_mod, if there are any and it pays; returns their tensor, and whether they are
    all of the mask_mod. Not in decode, whose tiles, and so bits, depend on where its keys end.
    """
    if t.mask is not None or p.selection is not None or is_decode(p) or work_of(p) < WORTH_SPANS * p.batch:
        return None
    if (found := mod_spans(p, t)) is None:
        return None
    spans = KNOWN + PLAIN_ROW + (found.lo << LO_BIT) + (found.hi << HI_BIT)
    put_tensor(params, "spans", spans[:, None].expand(p.batch, p.heads, p.q_len))
    return spans, found.whole


_constant: dict[tuple[Problem, tuple[int, int]], torch.Tensor | None] = {}


def put_mod_states(params: Params, p: Problem, t: Tensors) -> torch.Tensor | None:
    """Sets the states of tiles by the functions of a call, if that pays; returns what must outlive it."""
    if p.mods is None or p.positions or p.selection is not None or not may_hide(p.mods):
        return None
    tile = params.tile_rows, params.tile_keys
    varying = (*t.captured, t.kv_lengths, t.q_offset, t.cu_seqlens_q, t.cu_seqlens_k, t.places)
    if any(x is not None for x in varying):
        if work_of(p) < WORTH_STATES:
            return None
        states = mod_states(p, t, tile)
    else:
        states = _constant.get((p, tile))
        if states is None:
            if len(_constant) >= MOST_KEPT:
                _constant.clear()
            states = _constant[p, tile] = mod_states(p, t, tile)
    assert states is not None
    put_tensor(params, "mod_states", states.expand(p.batch, p.heads, *states.shape[2:]))
    return states


@cache
def may_hide(mods: Mods) -> bool:
    """Whether functions may hide a tile: a score_mod does by a -inf of its own."""
    nodes = in_order(mods.score) if mods.score is not None else []
    return mods.mask is not None or any(is_const(x, -math.inf) for x in nodes)


def work_of(p: Problem) -> float:
    """About how many seconds a call takes on a core."""
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    return max(2e-11 * rows * p.heads * p.kv_len * (p.head_dim + p.value_dim), 1e-10 * bytes_read(p))


def depends_on_values(mods: Mods, t: Tensors) -> bool:
    """Whether what is set for a call depends on values in its tensors."""
    return may_hide(mods) or any(not x.numel() for x in t.captured)


def with_addresses(table: Any, captured: tuple[torch.Tensor, ...]) -> Any:
    """A copy of a table of captured tensors with the addresses of these, whose sizes and strides are the same."""
    words, at = type(table).from_buffer_copy(table), 0
    for x in captured:
        words[at] = x.data_ptr()
        at += 1 + 2 * x.ndim
    return words
