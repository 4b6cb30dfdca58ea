"""Sums over the elements of a row that a function takes from a captured tensor: written out, term by term."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from .arrays import Array, Untraceable, elementwise, kind_of_dtype, scalar
from .build import Value, cast, const, make
from .node import Node

MOST = 256  # terms
NAMES = {"add": "a sum", "and": "torch.all", "or": "torch.any"}


def _reduced(op: str, least: torch.dtype | None = None, empty: Value = 0) -> Callable[..., Array]:
    """An operation of two numbers, over dims. The result is `least` at least, as torch promotes sums of bools."""

    def lower(x: Array, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Array:
        rank = len(x.shape)
        given = range(rank) if dim is None or dim == () else dim if isinstance(dim, (tuple, list)) else (dim,)
        dims = sorted({d % max(1, rank) for d in given})
        sizes = [x.shape[d] for d in dims if d < rank]
        if math.prod(sizes) > MOST:
            raise Untraceable(f"{NAMES[op]} over {math.prod(sizes)} elements", f"at most {MOST} are written out")
        whole = least is not None and not x.dtype.is_floating_point
        to = dtype or (least if whole and least is not None else x.dtype)
        kind = kind_of_dtype(to)
        shape = tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims)

        def at(indices: tuple[Node, ...]) -> Node:
            kept = iter(indices)
            own = [const(0) if d in dims and not keepdim else next(kept) for d in range(rank)]
            terms = []
            for places in itertools.product(*(range(n) for n in sizes)):
                for d, place in zip(dims, places, strict=False):
                    own[d] = const(place)
                terms.append(cast(x.at(tuple(own)), kind))
            return reduce(lambda a, b: make(op, a, b), terms) if terms else cast(empty, kind)

        made = Array(shape, to, at)
        return scalar(made.node(), to) if not shape else made

    return lower


_sum = _reduced("add", torch.int64)
_all, _any = _reduced("and", torch.bool, True), _reduced("or", torch.bool, False)


def _mean(x: Array, *dims: Any, **options: Any) -> Array:
    total = _sum(x, *dims, **options)
    count = math.prod(x.shape) // max(1, math.prod(total.shape))
    return elementwise(lambda a: make("div", a, float(count)), total.dtype, total)


def _dot(x: Array, y: Array) -> Array:
    if len(x.shape) != 1 or len(y.shape) != 1:
        raise Untraceable("a matrix product", "sums of products of single rows: torch.dot")
    return _sum(elementwise(lambda a, b: make("mul", a, b), x.dtype, x, y))


def _flags(lower: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, *dims, **options: lower(elementwise(lambda a: cast(a, "bool"), torch.bool, x), *dims, **options)


ROWS: dict[str, Callable[..., Array]] = {
    "sum": _sum,
    "mean": _mean,
    "all": _flags(_all),
    "any": _flags(_any),
    "dot": _dot,
    "vdot": _dot,
    "inner": _dot,
    "matmul": _dot,
}
