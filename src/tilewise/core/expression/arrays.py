"""Tensors that a traced function works on: for each, how an element is computed from its indices.

A 0-d array is one node. Larger ones are captured tensors, their views and functions of their elements
(`gate.sigmoid()[h]`): nothing is computed until an element is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .build import Value, const, make
from .node import Kind, Node

Shape = tuple[int, ...]


class Untraceable(Exception):
    """What an expression cannot hold, in words; with a remedy."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


@dataclass(frozen=True)
class Array:
    """A traced tensor: its shape, torch dtype, and the node of the element at some indices."""

    shape: Shape
    dtype: torch.dtype
    at: Callable[[tuple[Node, ...]], Node]

    @property
    def kind(self) -> Kind:
        return kind_of_dtype(self.dtype)

    def node(self) -> Node:
        """The node of a tensor of one element."""
        if any(n != 1 for n in self.shape):
            raise Untraceable(f"a tensor of shape {self.shape} where one number is expected", "index it")
        return self.at((const(0),) * len(self.shape))


def kind_of_dtype(dtype: torch.dtype) -> Kind:
    if dtype.is_complex:
        raise Untraceable(f"{dtype}")
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def broadcast(*shapes: Shape) -> Shape:
    """The shape that these broadcast to. (torch's own imports its compiler.)"""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise Untraceable(f"tensors of shapes {', '.join(map(str, shapes))}, which do not broadcast") from None


def scalar(node: Node, dtype: torch.dtype) -> Array:
    return Array((), dtype, lambda _: node)


def elementwise(build: Callable[..., Node], dtype: torch.dtype, *args: Array | Value) -> Array:
    """`build` on the elements of arrays that broadcast; numbers and nodes are the same for all."""
    arrays = [x for x in args if isinstance(x, Array)]
    if all(not x.shape for x in arrays):  # at once, or a chain of them would be evaluated again at each use
        node = build(*(x.node() if isinstance(x, Array) else x for x in args))
        return scalar(node, dtype)
    shape = broadcast(*(x.shape for x in arrays))

    def at(indices: tuple[Node, ...]) -> Node:
        def element(x: Array) -> Node:
            own = indices[len(indices) - len(x.shape) :]
            return x.at(tuple(const(0) if n == 1 else i for i, n in zip(own, x.shape, strict=True)))

        return build(*(element(x) if isinstance(x, Array) else x for x in args))

    return Array(shape, dtype, at)


def index(x: Array, items: tuple[Array | int | slice | None, ...]) -> Array:
    """`x[items]`: ints, cells, index tensors, slices with step 1 or more, None; `...` was written out before.

    Index tensors broadcast together; their dims stand where the first of them was (in torch too, unless a slice is
    between them).
    """
    picks: list[Callable[[tuple[Node, ...], tuple[Node, ...]], Node] | None] = []  # one for each dim of x
    shape: list[int] = []
    arrays = [i for i in items if isinstance(i, Array)]
    common = broadcast(*(i.shape for i in arrays))
    used = [n for n, i in enumerate(items) if isinstance(i, (Array, int))]
    if common and any(isinstance(items[n], slice) or items[n] is None for n in range(used[0], used[-1])):
        raise Untraceable("index tensors with a slice between them", "index with one number for each dim")
    first = -1  # where the dims of the index tensors begin
    dim = 0
    for item in items:
        if item is None:
            shape.append(1)
            continue
        size = x.shape[dim]
        if isinstance(item, Array):
            if item.kind != "int":
                raise Untraceable(f"an index of {item.dtype}", "indices are ints: .to(torch.int32)")
            if first < 0:
                first = len(shape)
                shape.extend(common)
            picks.append(lambda own, by, item=item: _broadcast(item, by))  # type: ignore[misc]
        elif isinstance(item, int):
            if not -size <= item < size:
                raise Untraceable(f"index {item} of a dim of {size}")
            picks.append(lambda own, by, item=item % size: const(item))  # type: ignore[misc]
        else:
            start, stop, step = item.indices(size)
            if step < 1:
                raise Untraceable("a slice with a negative step", "flip has no expression: index from the end")
            place = len(shape)
            shape.append(max(0, -(-(stop - start) // step)))

            def pick(own: tuple[Node, ...], by: object, place: int = place, a: int = start, n: int = step) -> Node:
                return make("add", make("mul", own[place], n), a)

            picks.append(pick)
        dim += 1

    def at(indices: tuple[Node, ...]) -> Node:
        by = indices[first : first + len(common)] if first >= 0 else ()
        return x.at(tuple(pick(indices, by) for pick in picks if pick is not None))

    made = Array(tuple(shape), x.dtype, at)
    return scalar(made.node(), x.dtype) if not shape else made


def _broadcast(x: Array, indices: tuple[Node, ...]) -> Node:
    own = indices[len(indices) - len(x.shape) :]
    return x.at(tuple(const(0) if n == 1 else i for i, n in zip(own, x.shape, strict=True)))


def permuted(x: Array, dims: tuple[int, ...]) -> Array:
    back = [dims.index(d) for d in range(len(dims))]
    return Array(tuple(x.shape[d] for d in dims), x.dtype, lambda i: x.at(tuple(i[d] for d in back)))


def expanded(x: Array, shape: Shape) -> Array:
    return elementwise(lambda a, _: a, x.dtype, x, Array(shape, x.dtype, lambda _: const(0)))
