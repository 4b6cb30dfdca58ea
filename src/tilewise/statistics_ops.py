"""The statistics of the entry points as torch operators: `attention_statistics`, `varlen_attention_statistics` and
`paged_attention_statistics`. They take the arguments of the entry point's operator and its `lse`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import differentiation
from .differentiation import CallOptions
from .ops import (
    OPTIONAL_TENSORS,
    OPTIONS,
    SIZES,
    TABLES,
    as_arguments,
    as_operator_options,
    define,
    differentiate,
    no_gradients,
    restored,
    stored_parts,
)

ASKED = "str statistics='', SymInt? key_mass_queries=None"
# What an operator takes before the star, in order.
NAMES = {
    name: ("q", "k", "v", *TABLES[name], "lse", *OPTIONAL_TENSORS[name], "weight_indices") for name in OPTIONAL_TENSORS
}


def traced(name: str, args: tuple[Any, ...], lse: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The statistics `options["return_aux"]` of a call, by the operator."""
    options = dict(options)
    wanted = [x for x in options.pop("return_aux") if x != "lse"]
    q, k, v, *tables = args
    k, v, stored = stored_parts(k, v)
    operator = getattr(torch.ops.tilewise, f"{name}_statistics").default
    options = as_operator_options(**options) | stored | {"statistics": ",".join(wanted)}
    return tuple(operator(q, k, v, *tables, lse, **options))


def _arguments(name: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    arguments = as_arguments(NAMES[name], tensors, options)
    arguments["return_aux"] = tuple(arguments.pop("statistics").split(","))
    return arguments


def _shapes(name: str, *tensors: Any, statistics: str = "", layout: str = "bhld", **_: Any) -> list[torch.Tensor]:
    """Empty results, for tracers."""
    given = dict(zip(NAMES[name], tensors, strict=False))
    q, k, lse = given["q"], given["k"], given["lse"]
    packed, seq_major = q.ndim == 3, layout == "blhd"
    heads = q.shape[1 if packed or not seq_major else 2]
    batch, keys = q.shape[0], k.shape[1 if seq_major else 2]
    if name == "paged_attention":
        batch, pages = given["block_table"].shape
        keys = pages * k.shape[1]
    mass = (batch, keys, heads) if seq_major else (batch, heads, keys)
    shapes = {
        "max_logits": lse.shape,
        "entropy": lse.shape,
        "key_mass": (k.shape[0], heads) if name == "varlen_attention" else mass,
        "weights": (*lse.shape, 0 if given.get("weight_indices") is None else given["weight_indices"].shape[-1]),
    }
    return [lse.new_empty(shapes[x]) for x in statistics.split(",")]


def _define(name: str) -> None:
    required = ", ".join(f"Tensor {x}" for x in ("q", "k", "v", *TABLES[name], "lse"))
    optional = ", ".join(f"Tensor? {x}=None" for x in (*OPTIONAL_TENSORS[name], "weight_indices"))

    def run(*tensors: Any, **options: Any) -> list[torch.Tensor]:
        from . import statistics as eager  # few processes need it

        arguments = _arguments(name, tensors, options)
        k, v = restored(arguments)
        args = (arguments.pop("q"), k, v, *(arguments.pop(table) for table in TABLES[name]))
        return list(eager.run(name, args, arguments.pop("lse"), arguments))

    def describe(tensors: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
        arguments = _arguments(name, tensors, options)
        if name == "paged_attention" or "k_stored" in arguments or "v_stored" in arguments:
            raise no_gradients("paged" if name == "paged_attention" else "quantised")
        given = [arguments.pop(which) for which in ("q", "k", "v", "lse")]
        others, own = differentiation.split(arguments)
        return "statistics", (CallOptions(others, tuple(own)), *given, *own.values())

    operator = f"{name}_statistics"
    schema = f"({required}, {optional}, *, {SIZES[name]}, {OPTIONS}, {ASKED}) -> Tensor[]"
    define(operator, schema, run, partial(_shapes, name))
    differentiate(operator, NAMES[name], run, describe, list)


for _name in NAMES:
    _define(_name)
