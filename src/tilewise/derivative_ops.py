"""Derivatives as torch operators: `attention_backward`, `attention_tangent` (forward mode) and `attention_second_order`
(the gradients of both). They run functions of `autograd.py`; `differentiation.py` says how they refer to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from . import differentiation
from .core.problem import CAPTURED, GRADS, SMOOTH_STATISTICS
from .differentiation import CallOptions
from .ops import CAPTURES, FLOAT_OPTIONS, RULES, as_arguments, as_operator_options, define, differentiate

MAYBE = ("dlse", *(f"d{name}" for name in SMOOTH_STATISTICS))  # of these tensors, any may be None
BACKWARD_OPTIONS = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", *FLOAT_OPTIONS)


class Derivative(NamedTuple):
    """The operator of a derivative: what it takes before the options that are tensors, and after them."""

    name: str
    given: tuple[str, ...]
    asked: tuple[str, ...]
    options: tuple[str, ...] = BACKWARD_OPTIONS  # those that are tensors
    sizes: str = ""  # arguments that only it has


# By the names of the functions in `autograd.py`.
DERIVATIVES = {
    "gradients": Derivative("attention_backward", ("out", "lse", "dout", "dlse"), ("grads",)),
    "tangent": Derivative("attention_tangent", ("out", "lse"), ("tangents", "moved")),
    "second_order": Derivative(
        "attention_second_order",
        ("out", "lse", "dout", "dlse", "moved_out", "moved_lse"),
        ("tangents", "moved", "grads"),
    ),
    "statistics_gradients": Derivative(
        "attention_statistics_backward",
        ("lse", *MAYBE[1:]),
        ("grads",),
        (*BACKWARD_OPTIONS, "weight_indices"),
        ", SymInt? key_mass_queries=None",
    ),
}
# What each of these operators takes before the star, in order.
ARGUMENTS = {x.name: ("q", "k", "v", *x.given, *x.options, *x.asked) for x in DERIVATIVES.values()}


def traced_backward(tensors: tuple[Any, ...], grads: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    """Calls the backward operator. `tensors` are q, k, v, out, lse, dout and dlse."""
    bound = options.get("score_mod")
    names = [name for name in GRADS if name in grads]
    if "score_mod" in grads and bound is not None:
        names += [f"{CAPTURED}{number}" for number in bound.mods.differentiable]
    options, own = differentiation.split(options)
    o = CallOptions(options, tuple(own), tuple(names))
    return dict(zip(names, derivative("gradients", o, *tensors, *own.values()), strict=True))


def derivative(which: str, o: CallOptions, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Calls the operator of a derivative; arguments and results as those of the function in `autograd.py`."""
    own = ("q", "k", "v", *DERIVATIVES[which].given)
    given, rest = tensors[: len(own)], tensors[len(own) :]
    count = len(o.tensor_names)
    options = as_operator_options(**o.with_tensors(rest[:count]) | {"tile_map": None})  # the result is the same without
    arguments = dict(zip(own, given, strict=True))
    arguments |= {name: options.pop(name, None) for name in DERIVATIVES[which].options}
    names = [name for name in (*GRADS, *CAPTURES) if name in o.grads]
    arguments |= {"tangents": list(rest[count:]), "moved": ",".join(o.moved), "grads": ",".join(names)}
    operator = getattr(torch.ops.tilewise, DERIVATIVES[which].name).default
    results = operator(*(arguments[name] for name in ARGUMENTS[DERIVATIVES[which].name]), **options)
    if which == "tangent":
        return tuple(results)
    by_name = dict(zip(names, results, strict=True))
    return tuple(by_name[name] for name in o.grads)


def _described(name: str, own: tuple[str, ...], args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """The other way: `CallOptions` and tensors by the arguments of the operator of a derivative."""
    arguments = as_arguments(ARGUMENTS[name], args, options)
    grads, moved = (tuple(x.split(",")) if (x := arguments.pop(y, "")) else () for y in ("grads", "moved"))
    tangents = arguments.pop("tangents", [])
    given = [arguments.pop(which, None) for which in ("q", "k", "v", *own)]
    options, tensors = differentiation.split(arguments)
    return CallOptions(options, tuple(tensors), grads, moved), *given, *tensors.values(), *tangents


def _gradient_shapes(name: str, *args: Any, **_: Any) -> list[torch.Tensor]:
    arguments = dict(zip(ARGUMENTS[name], args, strict=True))
    inputs = [arguments[which] for which in arguments["grads"].split(",")]
    return [torch.empty(x.shape, dtype=x.dtype, device=arguments["q"].device) for x in inputs]


def _tangent_shapes(
    q: Any, k: Any, v: Any, out: Any, lse: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(out), torch.empty_like(lse)


def _define(which: str) -> None:
    name, own, more, options, own_sizes = DERIVATIVES[which]
    required = ", ".join(f"Tensor{'?' * (x in MAYBE)} {x}" for x in ("q", "k", "v", *own))
    optional = ", ".join(f"Tensor? {x}" for x in options)
    asked = ", ".join(f"{'Tensor[]' if x == 'tangents' else 'str'} {x}" for x in more)
    sizes = "str layout='bhld', SymInt? max_q=None, SymInt? max_k=None, bool deterministic=True" + own_sizes
    result = "(Tensor, Tensor)" if which == "tangent" else "Tensor[]"
    schema = f"({required}, {optional}, {asked}, *, {sizes}, {RULES}) -> {result}"
    form = tuple if which == "tangent" else list

    def run(*args: Any, **options: Any) -> Any:
        return form(differentiation.eager(which)(*_described(name, own, args, options)))

    def describe(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
        return which, _described(name, own, args, options)

    define(name, schema, run, _tangent_shapes if which == "tangent" else partial(_gradient_shapes, name))
    differentiate(name, ARGUMENTS[name], run, describe, form)


for _which in DERIVATIVES:
    _define(_which)
