"""Evaluates expressions in torch, on tensors of cells that broadcast. It defines what each operation means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from .build import LEAST, MOST
from .node import Node, in_order

Tensor = torch.Tensor


def evaluate(
    roots: Sequence[Node], inputs: Mapping[str, Tensor], captured: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The results for these inputs by name, indices in int32 and floats in `dtype`. Differentiable in floats."""
    device = next(iter(inputs.values())).device
    results: dict[Node, Tensor] = {}
    for node in in_order(*roots):
        args = [results[x] for x in node.children]
        if node.op == "in":
            x = inputs[str(node.args[0])]
            results[node] = x.to(dtype if node.kind == "float" else torch.int32)
        elif node.op == "const":
            kind = {"float": dtype, "int": torch.int32, "bool": torch.bool}[node.kind]
            results[node] = torch.tensor(node.value, dtype=kind, device=device)
        elif node.op == "load":
            results[node] = gather(captured[int(node.args[0])], args, dtype)  # type: ignore[arg-type]
        elif node.op == "float":
            results[node] = args[0].to(dtype)
        else:
            results[node] = FUNCTIONS[node.op](*args)
    return [results[root] for root in roots]


def gather(x: Tensor, indices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Elements of a captured tensor, as floats in `dtype`, int32 or bools; indices from `clamped`."""
    if x.numel() == 0:  # nothing is inside: there are no cells either, or they are hidden
        x = x.new_zeros([1] * x.ndim)
    places = tuple(clamped(i, n).long() for i, n in zip(indices, x.shape, strict=True))
    element = x[places] if places else x
    if x.dtype == torch.bool:
        return element
    if x.is_floating_point():
        return element.to(dtype)
    return element.clamp(max(LEAST, torch.iinfo(x.dtype).min), min(MOST, torch.iinfo(x.dtype).max)).to(torch.int32)


def clamped(index: Tensor, size: int) -> Tensor:
    """An index into a dim of `size`: from the end if it is negative, then clamped."""
    return torch.where(index < 0, index + size, index).clamp(0, max(0, size - 1))


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    safe = torch.where((b == 0) | (b == -1), 1, b)  # the least int by -1 does not fit
    quotient = torch.div(a, safe, rounding_mode="floor")
    return torch.where(b == 0, 0, torch.where(b == -1, -a, quotient)).to(torch.int32)


def _mod(a: Tensor, b: Tensor) -> Tensor:
    safe = torch.where((b == 0) | (b == -1), 1, b)
    return torch.where((b == 0) | (b == -1), 0, torch.remainder(a, safe)).to(torch.int32)


def _to_int(a: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a.to(torch.int32)
    least, most = float(LEAST), math.nextafter(2.0**31, 0) if a.dtype == torch.float64 else 2.0**31 - 128
    clamped = torch.where(a.isnan(), 0.0, a).clamp(least, most).to(torch.int32)
    return torch.where(a >= 2.0**31, MOST, clamped).to(torch.int32)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": _floordiv,
    "mod": _mod,
    "max": torch.maximum,
    "min": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "where": torch.where,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "int": _to_int,
}
