"""From torch's functions and methods, by name, to nodes. What is not in the tables has no expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arrays import Array, Untraceable, elementwise, expanded, index, kind_of_dtype, permuted
from .build import Value, cast, const, make
from .node import Node

FLOAT = torch.float32
# Names that differ from those in `LOWER`
SAME_AS = {
    "absolute": "abs",
    "clip": "clamp",
    "div": "true_divide",
    "divide": "true_divide",
    "expit": "sigmoid",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "matrix_transpose": "mT",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "type_as": "to",
}
DUNDER = {
    "__and__": "bitwise_and",
    "__floordiv__": "floor_divide",
    "__invert__": "bitwise_not",
    "__mod__": "remainder",
    "__or__": "bitwise_or",
    "__radd__": "add",
    "__rand__": "bitwise_and",
    "__rmul__": "mul",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__truediv__": "true_divide",
    "__xor__": "bitwise_xor",
}


def result_dtype(*args: Array | Value) -> torch.dtype:
    """The dtype that torch gives the result of arithmetic on these."""
    like: list[Any] = []
    for x in args:
        if isinstance(x, Array):
            like.append(torch.empty(x.shape and (0,), dtype=x.dtype, device="cpu"))
        elif not isinstance(x, Node):
            like.append(x)
    if len(like) == 1:
        return like[0].dtype
    dtype = torch.result_type(like[0], like[1])
    for other in like[2:]:
        dtype = torch.result_type(torch.empty((), dtype=dtype, device="cpu"), other)
    return dtype


def _operation(op: str, floats: bool = False, bools: bool = False) -> Callable[..., Array]:
    """An operation with the arguments of its node. `floats`: on floats only; `bools`: the result is one."""

    def lower(*args: Array | Value) -> Array:
        dtype = result_dtype(*args)
        if floats and not dtype.is_floating_point:
            dtype = FLOAT

        def build(*nodes: Value) -> Node:
            made = make(op, *nodes)
            return made if bools else cast(made, kind_of_dtype(dtype))

        return elementwise(build, torch.bool if bools else dtype, *args)

    return lower


def _swapped(op: str) -> Callable[..., Array]:
    lower = _operation(op, bools=op in ("lt", "le"))
    return lambda x, y: lower(y, x)


def _scaled(op: str) -> Callable[..., Array]:
    def lower(x: Any, y: Any, *, alpha: float = 1) -> Array:
        return _operation(op)(x, y if alpha == 1 else _operation("mul")(y, alpha))

    return lower


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return _operation("div", floats=True)(x, y)
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    whole = result_dtype(x, y)
    if whole.is_floating_point:
        quotient = _operation("div")(x, y)
        return elementwise(lambda a: make("where", make("lt", a, 0.0), make("ceil", a), make("floor", a)),
                           whole, quotient)  # fmt: skip

    def trunc(a: Value, b: Value) -> Node:
        size = make("floordiv", make("abs", a), make("abs", b))
        return make("where", make("lt", make("xor", a, b), 0), make("neg", size), size)

    return elementwise(trunc, whole, x, y)


def _floor_divide(x: Any, y: Any) -> Array:
    dtype = result_dtype(x, y)
    if dtype.is_floating_point:
        return elementwise(lambda a, b: make("floor", make("div", a, b)), dtype, x, y)
    return elementwise(lambda a, b: make("floordiv", a, b), dtype, x, y)


def _remainder(x: Any, y: Any) -> Array:
    dtype = result_dtype(x, y)
    if dtype.is_floating_point:
        return elementwise(lambda a, b: make("sub", a, make("mul", make("floor", make("div", a, b)), b)), dtype, x, y)
    return elementwise(lambda a, b: make("mod", a, b), dtype, x, y)


def _pow(x: Any, y: Any) -> Array:
    if isinstance(y, float) and y.is_integer() and isinstance(x, Array) and x.dtype.is_floating_point:
        y = int(y)
    if x in (2, 2.0) and not isinstance(x, Array):
        if result_dtype(y).is_floating_point:
            return _operation("exp2")(y)
        raise Untraceable("a power of two of an int", "2.0 ** x.float()")
    dtype = result_dtype(x, y) if isinstance(x, Array) else FLOAT
    if y == 0.5 or y == -0.5:
        return _operation("sqrt" if y > 0 else "rsqrt", floats=True)(x)
    if isinstance(y, Array) or not isinstance(y, int) or abs(y) > 8 or (y < 0 and not dtype.is_floating_point):
        raise Untraceable("a power that is no int of -8 to 8, 0.5 or -0.5", "torch.exp(y * torch.log(x)) if x > 0")

    def power(a: Value) -> Node:
        result = const(1.0 if dtype.is_floating_point else 1)
        for _ in range(abs(y)):
            result = make("mul", result, a)
        return make("div", 1.0, result) if y < 0 else result

    return elementwise(power, dtype, x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Array:
    made = x if min is None else _operation("max")(x, min)
    return made if max is None else _operation("min")(made, max)


def _where(c: Any, x: Any, y: Any) -> Array:
    dtype = result_dtype(x, y) if isinstance(x, Array) or isinstance(y, Array) else _of_number(x, y)
    kind = kind_of_dtype(dtype)
    return elementwise(lambda a, b, d: make("where", a, cast(b, kind), cast(d, kind)), dtype, c, x, y)


def _of_number(*numbers: Any) -> torch.dtype:
    if any(isinstance(x, float) for x in numbers):
        return FLOAT
    return torch.bool if all(isinstance(x, bool) for x in numbers) else torch.int64


def _logical(op: str) -> Callable[..., Array]:
    return lambda *args: elementwise(lambda *nodes: make(op, *(cast(x, "bool") for x in nodes)), torch.bool, *args)


def _bits(op: str) -> Callable[..., Array]:
    def lower(*args: Any) -> Array:
        dtype = result_dtype(*args)
        if dtype.is_floating_point:
            raise Untraceable(f"bitwise {op} of floats")
        return _operation(op)(*args)

    return lower


def _extreme(op: str) -> Callable[..., Array]:
    def lower(x: Any, y: Any = None, *more: Any) -> Array:
        if not isinstance(y, Array):
            raise Untraceable(f"torch.{op} over elements", f"torch.{op}imum of two tensors is an expression")
        return _operation(op)(x, y, *more)

    return lower


PYTHONS: dict[Any, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}  # torch takes these too


def as_dtype(x: Array, dtype: torch.dtype) -> Array:
    dtype = PYTHONS.get(dtype, dtype)
    kind = kind_of_dtype(dtype)
    return elementwise(lambda a: cast(a, kind), dtype, x)


def _to(x: Array, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    for arg in args:
        if isinstance(arg, torch.dtype) or arg in (bool, int, float):
            dtype = arg
        elif isinstance(arg, Array):
            dtype = arg.dtype
        elif isinstance(arg, str) and "Tensor" in arg:
            raise Untraceable(f"type {arg!r}", "a dtype")
    return x if dtype is None else as_dtype(x, dtype)


def _sign(x: Array) -> Array:
    one = 1.0 if x.dtype.is_floating_point else 1
    below = elementwise(lambda a: make("where", make("lt", a, 0), -one, 0 * one), x.dtype, x)
    return elementwise(lambda a, b: make("where", make("lt", 0, a), one, b), x.dtype, x, below)


def _filled(value: float) -> Callable[..., Array]:
    return lambda x, dtype=None, **_: _full_like(x, value, dtype)


def _full_like(x: Array, value: Any, dtype: torch.dtype | None = None, **_: Any) -> Array:
    dtype = x.dtype if dtype is None else PYTHONS.get(dtype, dtype)
    node = value.node() if isinstance(value, Array) else value
    made = cast(node, kind_of_dtype(dtype))
    return Array(x.shape, dtype, lambda _: made)


def _new(x: Array, size: Any, value: Any, dtype: torch.dtype | None) -> Array:
    """A tensor of one value in all elements; its shape is `(n, m)` or, as torch takes it too, `((n, m),)`."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return _full_like(Array(tuple(shape), x.dtype, x.at), value, dtype)


def _function(build: Callable[[Value], Node]) -> Callable[..., Array]:
    """A function of one float."""

    def lower(x: Array, inplace: bool = False) -> Array:
        return elementwise(build, x.dtype if x.dtype.is_floating_point else FLOAT, x)

    return lower


def _softplus(x: Value) -> Node:
    rest = make("log", make("add", 1.0, make("exp", make("neg", make("abs", x)))))
    return make("add", make("max", x, 0.0), rest)


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


def _embedding(at: Array, weight: Array, *_: Any, **__: Any) -> Array:
    return index(weight, (at, slice(None)))


LOWER: dict[str, Callable[..., Array]] = {
    **{op: _operation(op, floats=True) for op in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt",
                                                  "sin", "cos")},
    **{op: _operation(op) for op in ("mul", "neg", "abs", "floor", "ceil")},
    **{op: _operation(op, bools=True) for op in ("eq", "ne", "lt", "le")},
    **{op: _logical(op.removeprefix("logical_")) for op in ("logical_and", "logical_or", "logical_xor", "logical_not")},
    **{op: _bits(op.removeprefix("bitwise_")) for op in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")},
    "gt": _swapped("lt"),
    "ge": _swapped("le"),
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "rsub": lambda x, y: _operation("sub")(y, x),
    "true_divide": _divide,
    "rdiv": lambda x, y: _divide(y, x),
    "rtruediv": lambda x, y: _divide(y, x),
    "floor_divide": _floor_divide,
    "rfloordiv": lambda x, y: _floor_divide(y, x),
    "remainder": _remainder,
    "rmod": lambda x, y: _remainder(y, x),
    "pow": _pow,
    "rpow": lambda x, y: _pow(y, x),
    "square": lambda x: _pow(x, 2),
    "reciprocal": lambda x: _divide(1.0, x),
    "maximum": _operation("max"),
    "minimum": _operation("min"),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "where": _where,
    "masked_fill": lambda x, c, value: as_dtype(_where(c, value, x), x.dtype),
    "sign": _sign,
    "sgn": _sign,
    "relu": lambda x, inplace=False: _operation("max")(x, 0),
    "silu": _function(lambda x: make("mul", x, make("sigmoid", x))),
    "logsigmoid": _function(lambda x: make("neg", _softplus(make("neg", x)))),
    "softplus": _function(_softplus),
    "isnan": lambda x: elementwise(lambda a: make("ne", a, a), torch.bool, x),
    "isinf": lambda x: elementwise(lambda a: make("eq", make("abs", cast(a, "float")), float("inf")), torch.bool, x),
    "to": _to,
    "type": _to,
    "float": lambda x, **_: as_dtype(x, torch.float32),
    "double": lambda x, **_: as_dtype(x, torch.float64),
    "half": lambda x, **_: as_dtype(x, torch.float16),
    "bfloat16": lambda x, **_: as_dtype(x, torch.bfloat16),
    "int": lambda x, **_: as_dtype(x, torch.int32),
    "long": lambda x, **_: as_dtype(x, torch.int64),
    "bool": lambda x, **_: as_dtype(x, torch.bool),
    **dict.fromkeys(("detach", "clone", "contiguous", "positive", "pos", "cpu", "cuda"), lambda x, *_, **__: x),
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _full_like,
    "new_full": lambda x, size, fill_value, dtype=None, **_: _new(x, size, fill_value, dtype),
    "new_zeros": lambda x, *size, dtype=None, **given: _new(x, given.get("size", size), 0, dtype),
    "new_ones": lambda x, *size, dtype=None, **given: _new(x, given.get("size", size), 1, dtype),
    "getitem": getitem,
    "select": _select,
    "embedding": _embedding,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "t": lambda x: _transpose(x) if len(x.shape) == 2 else x,
    "T": lambda x: permuted(x, tuple(reversed(range(len(x.shape))))),
    "mT": lambda x: _transpose(x, -2, -1),
}  # fmt: skip
