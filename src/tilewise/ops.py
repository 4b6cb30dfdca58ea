"""The entry points as torch operators, for `torch.compile`, `torch.export` and every other way to trace or transform.

`torch.ops.tilewise` has `attention`, `varlen_attention` and `paged_attention`, and each again with `_lse`, which gives
`(out, lse)`: an operator's number of outputs is fixed. While torch traces (`tracing.py`), and for tensors without
memory, the entry points of `api.py` call these; any other call never comes here. To a compiler an operator is opaque:
it knows the output's shape, and nothing inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.compiler import is_compiling

from .core import storage
from .core.options import as_chunk, as_split_size, as_window, to_int
from .core.tracing import is_wrapper
from .errors import InvalidArgument
from .quantised import Quantised
from .state import AttentionState
from .validation.arrays import returner, to_tensor

# `left` and `right` are the window. Quantised K and V are their data, with their scales and format beside it.
OPTIONS = """float? scale=None, bool causal=False, SymInt? q_offset=None, Tensor? q_offsets=None, SymInt? left=None,
    SymInt? right=None, SymInt? chunk=None, Tensor? mask=None, float? softcap=None, Tensor? alibi_slopes=None,
    Tensor? sinks=None, SymInt? split_size=None, bool allow_tf32=False, bool? validate=None, str? backend=None,
    Tensor? k_scales=None, Tensor? v_scales=None, str? k_stored=None, str? v_stored=None"""
SCHEMAS = {
    "attention": f"(Tensor q, Tensor k, Tensor v, *, Tensor? kv_lengths=None, str layout='bhld', {OPTIONS})",
    "varlen_attention": f"""(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *,
        SymInt? max_q=None, SymInt? max_k=None, Tensor? kv_lengths=None, {OPTIONS})""",
    "paged_attention": f"""(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor context_lens, *,
        Tensor? cu_seqlens_q=None, SymInt? max_q=None, str layout='bhld', {OPTIONS})""",
}
DEVICES = ("CPU", "CUDA", "XPU", "MPS")  # where a backend may run; `dispatch/planner.py` says what it can do there

_library = torch.library.Library("tilewise", "DEF")  # lives as long as the operators


TABLES = {
    "attention": (),
    "varlen_attention": ("cu_seqlens_q", "cu_seqlens_k"),
    "paged_attention": ("block_table", "context_lens"),
}
TENSORS = ("mask", "alibi_slopes", "sinks", "kv_lengths", "cu_seqlens_q", "q_offset", "out")  # options that may be one


def needs_operator(arguments: Iterable[Any]) -> bool:
    """Whether a tensor among them has no memory: one is a FakeTensor or another wrapper, or all are on meta."""
    parts = [p for x in arguments for p in ((x.data, x.scales) if type(x) is Quantised else (x,))]
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    return any(map(is_wrapper, tensors)) or (bool(tensors) and all(x.is_meta for x in tensors))


def call(name: str, q: Any, k: Any, v: Any, tables: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A call of an entry point as an operator."""
    if is_compiling():
        return traced(name, q, k, v, tables, options)
    back = returner(q)
    q, k, v = (x if isinstance(x, Quantised) else _input(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    tables = tuple(_input(n, x) for n, x in zip(TABLES[name], tables, strict=True))
    options["q_offset"] = to_int(options["q_offset"])
    for option in TENSORS:
        if options.get(option) is not None and not isinstance(options[option], int):
            options[option] = _input(option, options[option])
    result = traced(name, q, k, v, tables, options)
    return AttentionState(*map(back, result)) if isinstance(result, AttentionState) else back(result)


def _input(name: str, x: Any) -> torch.Tensor:
    x = to_tensor(name, x)
    if x.requires_grad and torch.is_grad_enabled():
        raise _forward_only(name)
    return x


def _forward_only(name: str) -> InvalidArgument:
    remedy = "tilewise is forward only: call it under torch.no_grad(), or detach"
    return InvalidArgument(name, "a tensor that requires grad", "one that does not", remedy)


def traced(name: str, q: Any, k: Any, v: Any, tables: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A call over torch tensors, as an operator in the graph."""
    return_lse, out = options.pop("return_lse"), options.pop("out")
    if options.pop("tile_map") is not None:
        raise InvalidArgument("tile_map", "a TileMap in traced code", "None: the result is the same without")
    window, offset = options.pop("window"), options.pop("q_offset")
    options["left"], options["right"] = as_window(window)
    options["chunk"], options["split_size"] = as_chunk(options["chunk"]) or None, as_split_size(options["split_size"])
    if isinstance(offset, torch.Tensor) and offset.ndim == 0:  # torch.jit.trace makes tensors of sizes
        offset = int(offset)
    options["q_offsets" if isinstance(offset, torch.Tensor) else "q_offset"] = offset
    if isinstance(k, Quantised):
        options["k_scales"], options["k_stored"], k = k.scales, f"{k.dtype}/{k.group}", k.data
    if isinstance(v, Quantised):
        options["v_scales"], options["v_stored"], v = v.scales, f"{v.dtype}/{v.group}", v.data
    operators = torch.ops.tilewise
    if return_lse:
        result, lse = getattr(operators, f"{name}_lse").default(q, k, v, *tables, **options)
    else:
        result, lse = getattr(operators, name).default(q, k, v, *tables, **options), None
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype:
            given, want = (f"{tuple(x.shape)} {x.dtype}" for x in (out, result))
            raise InvalidArgument("out", given, want)
        result = out.copy_(result)
    return result if lse is None else AttentionState(result, lse)


def _run(name: str, q: torch.Tensor, k: Any, v: Any, *tables: torch.Tensor, **options: Any) -> Any:
    """An operator at work: the entry point, with its arguments put together again."""
    if not options:  # torch leaves out what has its default value
        return _entry(name)(q, k, v, *tables)
    left, right = options.pop("left", None), options.pop("right", None)
    if left is not None or right is not None:
        options["window"] = (left, right)
    offsets = options.pop("q_offsets", None)
    if offsets is not None:
        options["q_offset"] = offsets
    k = _stored(k, options.pop("k_scales", None), options.pop("k_stored", None))
    v = _stored(v, options.pop("v_scales", None), options.pop("v_stored", None))
    return _entry(name)(q, k, v, *tables, **options)


@cache
def _entry(name: str) -> Any:
    from . import api  # which needs this module

    return getattr(api, name)


def _stored(data: torch.Tensor, scales: torch.Tensor | None, stored: str | None) -> Any:
    if scales is None or stored is None:
        return data
    fmt = storage.parse(stored)
    return Quantised(data, scales, fmt.name, fmt.group)  # type: ignore[arg-type]


def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor, v_stored: str | None = None, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` of a call, with nothing in them; a tracer asks for this."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise _forward_only("q, k or v")
    width = v.shape[-1] if v_stored is None else storage.parse(v_stored).width(v.shape[-1])
    return q.new_empty((*q.shape[:-1], width)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _define(name: str, schema: str) -> None:
    """The two operators of an entry point."""

    def run(*tensors: Any, **options: Any) -> torch.Tensor:
        return _run(name, *tensors, **options)

    def run_lse(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _run(name, *tensors, return_lse=True, **options)
        return out, lse

    def shapes(*tensors: Any, **options: Any) -> torch.Tensor:
        return _shapes(*tensors, **options)[0]

    for full_name, returns, kernel, fake in (
        (name, "Tensor", run, shapes),
        (f"{name}_lse", "(Tensor, Tensor)", run_lse, _shapes),
    ):
        _library.define(f"{full_name}{schema} -> {returns}")
        for device in DEVICES:
            _library.impl(full_name, kernel, device)
        torch.library.register_fake(f"tilewise::{full_name}", fake, lib=_library)


for _name, _schema in SCHEMAS.items():
    _define(_name, " ".join(_schema.split()))
