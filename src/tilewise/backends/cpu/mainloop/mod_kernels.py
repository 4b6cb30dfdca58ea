"""The kernels of an expression (`core/expression`): C functions of int64 that mainloops call for each tile of scores.

`columns`: W query rows of one vector, `count` keys `step` floats apart. `rows`: one query row, `count` vectors of keys.
Arguments that they share: the batch row, the query head or heads, positions of queries as their distance from the first
key, the first key, `k_start` and `k_stride`, the table of captured tensors (`mods.py`), the factor of scores as bits of
a float32, and whether a score of -inf is hidden already; then, for `gradients` only, where it stores derivatives.

`gradients`: as `columns`, and for each key vectors of what a backward pass needs (`mod_gradients.py`), one behind the
other. `places`: the element that a load reads, int64, for vectors of `b`, `q` and `k`, int32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ....core.expression.mods import Mods
from ....core.expression.node import Node, in_order, source
from ....core.expression.sums import LoadGradient
from ..codegen.expression import Printer, exact_nodes
from ..codegen.vector import F32, I1, I32, I64, Emit, Value, W

ARGUMENTS = {
    "columns": "s step count b heads positions key k_start k_stride table factor keep derivatives",
    "rows": "s count b head position key k_start k_stride table factor keep",
    "gradients": "s step count b heads positions key k_start k_stride table factor keep derivatives",
    "places": "count b head q k table to",
}


def early(node: Node) -> bool:
    """Whether a value is the same for all keys of a row."""
    return not node.inputs & {"k", "s"}


def floats_of_bits(e: Emit, bits: Value) -> Value:
    return e.splat(e.builder.bitcast(e.builder.trunc(bits, I32), F32))


def hidden_score(e: Emit, keep: Value) -> Value:
    """The score of cells that are hidden already: -inf, or with keep 0 a NaN, which no score equals."""
    b = e.builder
    return e.splat(b.select(b.trunc(keep, I1), ir.Constant(F32, -math.inf), ir.Constant(F32, math.nan)))


def _results(e: Emit, mods: Mods, printer: Printer, score: Value, hidden: Value) -> Value:
    """What the functions make of scores of the bound indices."""
    b = e.builder
    printer.bind(source("s"), score)
    printer.print([x for x in (mods.score, mods.mask) if x is not None])
    result = score if mods.score is None else printer.vector(mods.score)
    if mods.score is not None:
        result = b.select(b.fcmp_ordered("==", score, hidden), score, result)
    return result if mods.mask is None else b.select(printer.vector(mods.mask), result, e.f32s(-math.inf))


def columns(e: Emit, mods: Mods, wide: bool, s: Value, step: Value, count: Value, batch: Value, heads: Value,
            positions: Value, key: Value, k_start: Value, k_stride: Value, table: Value, factor: Value,
            keep: Value, derivatives: Value, parts: Sequence[LoadGradient | Node] = ()) -> None:  # fmt: skip
    b, lanes = e.builder, e.load_i32(heads)
    start, stride, first = (b.trunc(x, I32) for x in (k_start, k_stride, key))
    needed = [y for x in parts for y in ([x] if isinstance(x, Node) else x.load.children)]
    roots = [x for x in (mods.score, mods.mask, *needed) if x is not None]

    exact = exact_nodes(roots)

    def loop(head: Value) -> None:
        printer = Printer(e, table, mods.tensors, "q", wide, exact)
        printer.bind(source("b"), b.trunc(batch, I32))
        printer.bind(source("h"), head)
        printer.bind(source("q"), b.add(e.load_i32(positions), e.splat_i32(start)))
        printer.print(roots, early)
        scale, hidden = floats_of_bits(e, factor), hidden_score(e, keep)
        with e.loop(count) as j:
            at = b.mul(j, step)
            printer.bind(source("k"), b.add(start, b.mul(stride, b.add(first, b.trunc(j, I32)))))
            e.store(_results(e, mods, printer, b.fmul(e.load(s, at), scale), hidden), s, at)
            printer.print(needed)
            store_parts(printer, b.mul(j, e.i64(W * vectors_of(parts))))

    def store_parts(printer: Printer, to: Value) -> None:
        for part in parts:
            if isinstance(part, Node):
                e.store(printer.vector(part), derivatives, to)
            else:
                b.store(printer.element_of(part.load), e.pointer(derivatives, to, F32, e.vector(I64))).align = 4
            to = b.add(to, e.i64(W * vectors_of([part])))

    if not any(x.op == "load" and x.inputs >= {"h", "k"} and not x.inputs & {"q", "s"} for x in in_order(*roots)):
        loop(lanes)
        return
    # Rows of one head read one element of these for a key, not W.
    head = b.extract_element(lanes, ir.Constant(I32, 0))
    alike = b.bitcast(b.icmp_signed("==", lanes, e.splat_i32(head)), ir.IntType(W))
    with b.if_else(b.icmp_unsigned("==", alike, ir.Constant(ir.IntType(W), 2**W - 1)), likely=True) as (one, several):
        with one:
            loop(head)
        with several:
            loop(lanes)


def vectors_of(parts: Sequence[LoadGradient | Node]) -> int:
    """Vectors of float32 that `gradients` stores for a key: one of a derivative, two of the elements of a load."""
    return sum(1 if isinstance(x, Node) else 2 for x in parts)


def places(e: Emit, mods: Mods, wide: bool, count: Value, batch: Value, head: Value, q: Value, k: Value, table: Value,
           to: Value, parts: Sequence[LoadGradient | Node]) -> None:  # fmt: skip
    (part,) = parts
    assert isinstance(part, LoadGradient)
    b, printer = e.builder, Printer(e, table, mods.tensors, "", wide, exact_nodes([part.load]))
    printer.bind(source("h"), b.trunc(head, I32))
    with e.loop(count, W) as i:
        at = b.mul(i, e.i64(4))
        for name, x in (("b", batch), ("q", q), ("k", k)):
            printer.bind(source(name), e.load_i32(b.add(x, at)))
        printer.print(part.load.children)
        b.store(printer.element_of(part.load), e.pointer(to, i, I64, e.vector(I64))).align = 8


def rows(e: Emit, mods: Mods, wide: bool, s: Value, count: Value, batch: Value, head: Value, position: Value,
         key: Value, k_start: Value, k_stride: Value, table: Value, factor: Value, keep: Value) -> None:  # fmt: skip
    roots = [x for x in (mods.score, mods.mask) if x is not None]
    b, printer = e.builder, Printer(e, table, mods.tensors, "k", wide, exact_nodes(roots))
    start, stride, first = (b.trunc(x, I32) for x in (k_start, k_stride, key))
    printer.bind(source("b"), b.trunc(batch, I32))
    printer.bind(source("h"), b.trunc(head, I32))
    printer.bind(source("q"), b.add(b.trunc(position, I32), start))
    printer.print(roots, early)
    scale, hidden = floats_of_bits(e, factor), hidden_score(e, keep)
    lanes = b.mul(e.splat_i32(stride), ir.Constant(e.vector(I32), list(range(W))))
    with e.loop(count) as i:
        at = b.mul(i, e.i64(W))
        here = b.add(start, b.mul(stride, b.add(first, b.trunc(at, I32))))
        printer.bind(source("k"), b.add(e.splat_i32(here), lanes))
        e.store(_results(e, mods, printer, b.fmul(e.load(s, at), scale), hidden), s, at)


KERNELS: dict[str, Any] = {"columns": columns, "rows": rows, "gradients": columns, "places": places}
