"""From torch's functions and methods, by name, to nodes. What is not in the tables has no expression."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .arrays import Array, Untraceable, elementwise, kind_of_dtype
from .build import Value, cast, const, make
from .node import Node
from .rows import ROWS
from .views import VIEWS

FLOAT = torch.float32


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
        return _trunc(_operation("div")(x, y))

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
        raise Untraceable("2 to the power of an int tensor", "2.0 ** x.float()")
    if isinstance(x, (int, float)) and x > 0:  # decays: 0.9 ** (q_idx - kv_idx)
        return elementwise(lambda a: make("exp2", make("mul", cast(a, "float"), math.log2(x))), FLOAT, y)
    dtype = result_dtype(x, y) if isinstance(x, Array) else FLOAT
    if y == 0.5 or y == -0.5:
        return _operation("sqrt" if y > 0 else "rsqrt", floats=True)(x)
    if isinstance(y, Array) or not isinstance(y, int) or abs(y) > 8 or (y < 0 and not dtype.is_floating_point):
        raise Untraceable("a power other than an int of -8 to 8, 0.5 or -0.5", "torch.exp(y * torch.log(x)) if x > 0")

    def power(a: Value) -> Node:
        result = const(1.0 if dtype.is_floating_point else 1)
        for _ in range(abs(y)):
            result = make("mul", result, a)
        return make("div", 1.0, result) if y < 0 else result

    return elementwise(power, dtype, x)


def _shift(left: bool) -> Callable[..., Array]:
    def lower(x: Any, y: Any) -> Array:
        if not isinstance(x, Array) or not isinstance(y, int) or not 0 <= y < 31 or x.dtype.is_floating_point:
            raise Untraceable("a shift by anything but a constant from 0 to 30", "* and // by a number")
        return elementwise(lambda a: make("mul" if left else "floordiv", a, 2**y), x.dtype, x)

    return lower


def _trunc(x: Array) -> Array:
    if not x.dtype.is_floating_point:
        return x
    return elementwise(lambda a: make("where", make("lt", a, 0.0), make("ceil", a), make("floor", a)), x.dtype, x)


def _fmod(x: Any, y: Any) -> Array:
    """The remainder with the sign of x."""
    whole = _divide(x, y, rounding_mode="trunc")
    return _operation("sub")(x, _operation("mul")(whole, y))


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
    "lshift": _shift(True),
    "rshift": _shift(False),
    "bitwise_left_shift": _shift(True),
    "bitwise_right_shift": _shift(False),
    "trunc": _trunc,
    "fix": _trunc,
    "fmod": _fmod,
    "log1p": lambda x: _operation("log", floats=True)(_operation("add")(x, 1)),
    "hypot": lambda x, y: _operation("sqrt", floats=True)(_operation("add")(_pow(x, 2), _pow(y, 2))),
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
    **dict.fromkeys(("clone", "contiguous", "positive", "pos", "cpu", "cuda"), lambda x, *_, **__: x),
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _full_like,
    "new_full": lambda x, size, fill_value, dtype=None, **_: _new(x, size, fill_value, dtype),
    "new_zeros": lambda x, *size, dtype=None, **given: _new(x, given.get("size", size), 0, dtype),
    "new_ones": lambda x, *size, dtype=None, **given: _new(x, given.get("size", size), 1, dtype),
    "detach": lambda x: x,  # of what has no gradient: others are the trace's
    **ROWS,
    **VIEWS,
}  # fmt: skip
