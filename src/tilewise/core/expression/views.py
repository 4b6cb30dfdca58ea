"""Views and indices of traced tensors: `LOWER` has these too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .arrays import Array, Untraceable, expanded, index, permuted, scalar
from .build import Value, make
from .node import Node


def _dim(x: Array, dim: int, extra: int = 0) -> int:
    n = len(x.shape) + extra
    if not -n <= dim < n:
        raise Untraceable(f"dim {dim} of a tensor of rank {len(x.shape)}")
    return dim % n


def _transpose(x: Array, a: int = 0, b: int = 1) -> Array:
    a, b = _dim(x, a), _dim(x, b)
    dims = list(range(len(x.shape)))
    dims[a], dims[b] = dims[b], dims[a]
    return permuted(x, tuple(dims))


def _unsqueeze(x: Array, dim: int) -> Array:
    dim = _dim(x, dim, 1)
    return (
        index(x, (*(slice(None),) * dim, None))
        if dim == len(x.shape)
        else index(x, (*(slice(None),) * dim, None, *(slice(None),) * (len(x.shape) - dim)))
    )


def _squeeze(x: Array, dim: int | None = None) -> Array:
    gone = [d for d, n in enumerate(x.shape) if n == 1 and (dim is None or d == _dim(x, dim))]
    return index(x, tuple(0 if d in gone else slice(None) for d in range(len(x.shape))))


def _select(x: Array, dim: int, at: Any) -> Array:
    dim = _dim(x, dim)
    return index(x, (*(slice(None),) * dim, at, *(slice(None),) * (len(x.shape) - dim - 1)))


def _expand(x: Array, *shape: Any) -> Array:
    wanted = tuple(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    own = (1,) * (len(wanted) - len(x.shape)) + x.shape
    return expanded(x, tuple(n if m == -1 else m for m, n in zip(wanted, own, strict=True)))


def _permute(x: Array, *dims: Any) -> Array:
    wanted = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    return permuted(x, tuple(_dim(x, d) for d in wanted))


def getitem(x: Array, key: Any) -> Array:
    items = list(key) if isinstance(key, tuple) else [key]
    if sum(i is Ellipsis for i in items) > 1 or any(isinstance(i, (list, bool)) for i in items):
        raise Untraceable("an index of this form", "ints, cells, slices and one `...`")
    rank = sum(i is not None and i is not Ellipsis for i in items)
    if rank > len(x.shape):
        raise Untraceable(f"{rank} indices of a tensor of rank {len(x.shape)}")
    rest = [slice(None)] * (len(x.shape) - rank)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), None)
    items = [*items, *rest] if at is None else [*items[:at], *rest, *items[at + 1 :]]
    return index(x, tuple(items))


def _reshape(x: Array, *shape: Any) -> Array:
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    if sizes and not all(isinstance(n, int) for n in sizes):
        raise Untraceable("a view as another dtype, or whose sizes are not constants")
    count = math.prod(x.shape)
    if -1 in sizes and sizes.count(-1) == 1 and math.prod(sizes):
        sizes[sizes.index(-1)] = count // -math.prod(sizes)
    if math.prod(sizes) != count or count >= 2**31:
        raise Untraceable(f"a view of {tuple(x.shape)} as {tuple(sizes)}")

    def at(indices: tuple[Node, ...]) -> Node:
        place: Value = 0
        for i, n in zip(indices, sizes, strict=True):
            place = make("add", make("mul", place, n), _inside(i, n))
        own = []
        for n in reversed(x.shape):
            own.append(make("mod", place, n))
            place = make("floordiv", place, n)
        return x.at(tuple(reversed(own)))

    return scalar(x.node(), x.dtype) if not sizes and not x.shape else Array(tuple(sizes), x.dtype, at)


def _inside(index: Node, size: int) -> Node:
    """An index as a load takes it: from the end if it is negative, then clamped."""
    counted = make("where", make("lt", index, 0), make("add", index, size), index)
    return make("max", make("min", counted, size - 1), 0)


def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    first, last = _dim(x, start_dim), _dim(x, end_dim)
    return _reshape(x, *x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])


def _embedding(at: Array, weight: Array, *_: Any, **__: Any) -> Array:
    return index(weight, (at, slice(None)))


VIEWS: dict[str, Callable[..., Array]] = {
    "getitem": getitem,
    "select": _select,
    "index_select": _select,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "embedding": _embedding,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda x: _transpose(x) if len(x.shape) == 2 else x,
    "T": lambda x: permuted(x, tuple(reversed(range(len(x.shape))))),
    "mT": lambda x: _transpose(x, -2, -1),
}
