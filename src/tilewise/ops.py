"""The entry points as torch operators, for `torch.compile`, `torch.export` and all other tracing and transforms.

`torch.ops.tilewise` has `attention`, `varlen_attention` and `paged_attention`, each also with `_lse`, which returns
`(out, lse)`, since an operator has a fixed number of outputs. `write_pages` stores new rows of a paged cache. The entry
points of `api.py` call these while torch traces (`tracing.py`), and for tensors without memory. Operators are opaque to
a compiler, which knows the shapes of their outputs only.

If a derivative is needed, the `_lse` operator runs. Derivatives are operators too: `derivative_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.compiler import is_compiling

from . import autograd, differentiation
from .core import storage
from .core.arrays import converter_back, to_tensor
from .core.expression.mods import Bound, mods_of
from .core.kv_store import RowFormat, Store, WriteSlots
from .core.options import PLACES, as_chunk, as_flag, as_split_size, as_window, to_int
from .core.private.torch import (
    DispatchKey,
    DispatchKeySet,
    after_autograd,
    any_requires_grad,
    forward_enabled_again,
    in_forward_mode,
)
from .core.problem import CAPTURED
from .core.tracing import is_wrapper
from .differentiation import CallOptions
from .dispatch import planner
from .errors import InvalidArgument
from .quantised import Quantised
from .state import AttentionState
from .vmap import batched

# The window is `left` and `right`. Quantised K and V are three arguments: data, scales and "dtype/group". Tensors are
# positional, since torch differentiates by no others. Inductor's graphs on disk call by position and outlive an update:
# after the first release, new arguments come last.
BY_ROW = ("q_offset", *PLACES)  # each an int, or a tensor by the name `q_offsets` and so on
FLAGS = ("causal", "allow_tf32", "deterministic")
ONLY_TENSORS = (
    "mask tree_mask positions alibi_slopes q_bias k_bias sinks key_indices block_indices dropout_seed".split()
)
MOST_CAPTURED = 8  # tensors that functions of the user may capture: an operator names each argument
CAPTURES = tuple(f"{CAPTURED}{number}" for number in range(MOST_CAPTURED))
FLOAT_OPTIONS = (
    *(f"{name}s" for name in BY_ROW),
    *ONLY_TENSORS,
    *CAPTURES,
)  # of calls over keys that are not quantised
TENSOR_OPTIONS = (*FLOAT_OPTIONS, "k_scales", "v_scales")
TENSORS = (*ONLY_TENSORS, "kv_lengths", "cu_seqlens_q", *BY_ROW, "out")  # options that may be tensors
RULES = """float? scale=None, bool causal=False, SymInt? q_offset=None, SymInt? k_start=None, SymInt? k_stride=None,
    SymInt? q_stride=None, SymInt? left=None, SymInt? right=None, SymInt? chunk=None, SymInt? block_size=None,
    float? softcap=None, str? mods=None, float? dropout_p=None, bool allow_tf32=False,
    bool? validate=None, str? backend=None"""
OPTIONS = f"{RULES}, SymInt? split_size=None, str? k_stored=None, str? v_stored=None"
TABLES = {**autograd.TABLES, "paged_attention": ("block_table", "context_lens")}
OPTIONAL_TENSORS = {
    "attention": ("kv_lengths", *TENSOR_OPTIONS),
    "varlen_attention": ("kv_lengths", *TENSOR_OPTIONS),
    "paged_attention": ("cu_seqlens_q", *TENSOR_OPTIONS),
}
SIZES = {
    "attention": "str layout='bhld', bool deterministic=True",
    "varlen_attention": "SymInt? max_q=None, SymInt? max_k=None, bool deterministic=True",
    "paged_attention": "SymInt? max_q=None, str layout='bhld'",
}
# What an operator takes before the star, in order.
NAMES = {name: ("q", "k", "v", *TABLES[name], *OPTIONAL_TENSORS[name]) for name in TABLES}
DEVICES = ("CPU", "CUDA", "XPU", "MPS")  # where a backend may run; `dispatch/planner.py` says what it can do there
PLAIN = {DispatchKeySet(getattr(DispatchKey, device)).raw_repr() for device in DEVICES}

_library = torch.library.Library("tilewise", "DEF")  # lives as long as the operators


def needs_operator(arguments: Iterable[Any]) -> bool:
    """Whether a call has to be an operator: a tensor is a wrapper (as FakeTensor), or all tensors are on meta."""
    parts = [p for x in arguments for p in _parts(x)]
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    return any(map(is_wrapper, tensors)) or (bool(tensors) and all(x.is_meta for x in tensors))


def _parts(x: Any) -> tuple[Any, ...]:
    return (x.data, x.scales) if type(x) is Quantised else x.tensors if type(x) is Bound else (x,)


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls an entry point as an operator. `options` are those that were given; the dict is changed."""
    if is_compiling():
        return traced(name, *args, **options)
    back = converter_back(args[0])
    names = ("q", "k", "v", *TABLES[name])
    moving = name in autograd.TABLES and in_forward_mode()  # `to_tensor` refuses tangents

    def tensor(n: str, x: Any) -> Any:
        return x if isinstance(x, Quantised) or (moving and isinstance(x, torch.Tensor)) else to_tensor(n, x)

    args = tuple(tensor(n, x) for n, x in zip(names, args, strict=True))
    for option in BY_ROW:
        options[option] = to_int(options.get(option))
    for option in TENSORS:
        if options.get(option) is not None and not isinstance(options[option], int):
            options[option] = tensor(option, options[option])
    result = traced(name, *args, **options)
    return AttentionState(*map(back, result)) if isinstance(result, AttentionState) else back(result)


def traced(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    *tables: Any,
    return_lse: bool = False,
    out: Any = None,
    split_size: Any = None,
    **options: Any,
) -> Any:
    """Calls the operator of an entry point over torch tensors."""
    k, v, stored = stored_parts(k, v)
    options = as_operator_options(**options) | stored
    options["split_size"] = as_split_size(split_size)
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


def stored_parts(k: Any, v: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The data of K and V, and the options of an operator that say how they are stored."""
    options: dict[str, Any] = {}
    if isinstance(k, Quantised):
        options["k_scales"], options["k_stored"], k = k.scales, f"{k.dtype}/{k.group}", k.data
    if isinstance(v, Quantised):
        options["v_scales"], options["v_stored"], v = v.scales, f"{v.dtype}/{v.group}", v.data
    return k, v, options


def restored(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The other way; takes them out of the arguments."""
    k = _stored(arguments.pop("k"), arguments.pop("k_scales", None), arguments.pop("k_stored", None))
    return k, _stored(arguments.pop("v"), arguments.pop("v_scales", None), arguments.pop("v_stored", None))


def as_operator_options(
    tile_map: Any = None, window: Any = None, chunk: Any = None, score_mod: Bound | None = None, **options: Any
) -> dict[str, Any]:
    """The options of an entry point as those of its operator."""
    if score_mod is not None:
        if len(score_mod.tensors) > MOST_CAPTURED:
            given = f"functions that capture {len(score_mod.tensors)} tensors, in traced code"
            raise InvalidArgument("score_mod or mask_mod", given, f"at most {MOST_CAPTURED}", "stack some of them")
        options |= {"mods": score_mod.mods.text, **dict(zip(CAPTURES, score_mod.tensors, strict=False))}
    if tile_map is not None:
        raise InvalidArgument("tile_map", "a TileMap in traced code", "None: the result is the same without")
    left, right = as_window(window)
    for name in FLAGS:  # an operator would take any number
        if name in options:
            as_flag(name, options[name])
    for name in BY_ROW:
        x = options.pop(name, None)
        if isinstance(x, torch.Tensor) and x.ndim == 0:  # torch.jit.trace makes tensors of sizes
            x = int(x)
        if x is not None:
            options[f"{name}s" if isinstance(x, torch.Tensor) else name] = x
    return options | {"left": left, "right": right, "chunk": as_chunk(chunk) or None}


def _run(name: str, *tensors: Any, **options: Any) -> Any:
    """The kernel of an operator: calls the entry point with its arguments restored, without grad mode."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _run(name, *tensors, **options)
    if len(tensors) == 3 + len(TABLES[name]) and not options:  # torch drops arguments with default values
        return _entry(name)(*tensors)
    arguments = as_arguments(NAMES[name], tensors, options)
    k, v = restored(arguments)
    return _entry(name)(arguments.pop("q"), k, v, *(arguments.pop(table) for table in TABLES[name]), **arguments)


def as_arguments(names: Sequence[str], tensors: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by the names that the entry points have, without those that are None."""
    arguments = dict(zip(names, tensors, strict=False)) | options
    window = arguments.pop("left", None), arguments.pop("right", None)
    arguments["window"] = None if window == (None, None) else window
    for name in BY_ROW:
        rows = arguments.pop(f"{name}s", None)
        arguments[name] = rows if arguments.get(name) is None else arguments[name]
    if (text := arguments.pop("mods", None)) is not None:
        mods = mods_of(text)
        captured = tuple(arguments.pop(name, None) for name in CAPTURES)
        arguments["score_mod"] = Bound(mods, captured[: len(mods.tensors)])
    return {name: x for name, x in arguments.items() if x is not None}


@cache
def _entry(name: str) -> Any:
    from . import api  # it imports this module

    return getattr(api, name)


def _stored(data: torch.Tensor, scales: torch.Tensor | None, stored: str | None) -> Any:
    if stored is None:
        return data
    fmt = storage.parse(stored)
    return Quantised(data, scales, fmt.name, fmt.group)  # type: ignore[arg-type]


def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, v_stored: str | None = None, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty `out` and `lse` of a call, for tracers."""
    width = v.shape[-1] if v_stored is None else storage.parse(v_stored).width(v.shape[-1])
    return q.new_empty((*q.shape[:-1], width)), q.new_empty(q.shape[:-1], dtype=storage.wide_dtype(q.dtype))


def _define(name: str) -> None:
    """Defines the two operators of an entry point."""

    def run(*tensors: Any, **options: Any) -> torch.Tensor:
        return _run(name, *tensors, **options)

    def run_lse(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _run(name, *tensors, return_lse=True, **options)
        return out, lse

    def shapes(*tensors: Any, **options: Any) -> torch.Tensor:
        return _shapes(*tensors, **options)[0]

    required = ", ".join(f"Tensor {x}" for x in ("q", "k", "v", *TABLES[name]))
    optional = ", ".join(f"Tensor? {x}=None" for x in OPTIONAL_TENSORS[name])
    schema = f"({required}, {optional}, *, {SIZES[name]}, {OPTIONS})"
    define(name, f"{schema} -> Tensor", run, shapes)
    define(f"{name}_lse", f"{schema} -> (Tensor, Tensor)", run_lse, _shapes)
    describe = partial(_describe_call, name)
    differentiate(name, NAMES[name], run, describe, lambda results: results[0])
    differentiate(f"{name}_lse", NAMES[name], run_lse, describe, tuple)


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}{' '.join(schema.split())}")
    for device in DEVICES:
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"tilewise::{name}", fake, lib=_library)


# Derivatives


def differentiate(
    name: str,
    names: Sequence[str],
    kernel: Callable[..., Any],
    describe: Callable[..., tuple[str, tuple[Any, ...]]],
    form: Callable[..., Any],
) -> None:
    """Makes torch differentiate and map an operator, in any mode or transform.

    Args:
        name: of the operator.
        names: of its positional arguments.
        kernel: what it runs.
        describe: gives the function of `differentiation.py` and its arguments.
        form: makes the operator's result of the function's.
    """
    operator = getattr(torch.ops.tilewise, name).default
    with_lse = getattr(torch.ops.tilewise, f"{name}_lse").default if name in NAMES else operator

    def dispatch(keys: Any, *args: Any, **options: Any) -> Any:
        tensors = [x for arg in args for x in (arg if isinstance(arg, list) else (arg,)) if isinstance(x, torch.Tensor)]
        below = keys & after_autograd
        if (torch.is_grad_enabled() and any_requires_grad(*tensors)) or differentiation.any_tangent(tensors):
            which, given = describe(args, options)
            forward = partial(with_lse.redispatch, below, *args, **options)
            return form(differentiation.apply_below(which, forward, *given))
        if below.raw_repr() in PLAIN:  # no mode or transform below: call the kernel without dispatching
            return kernel(*args, **options)
        if not in_forward_mode(enabled=False):
            return operator.redispatch(below, *args, **options)
        with forward_enabled_again(True):  # off in a function's jvp, but not for transforms around it
            return operator.redispatch(below, *args, **options)

    _library.impl(name, dispatch, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"tilewise::{name}", partial(batched, operator, names), lib=_library)


def _describe_call(name: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """An entry point that torch differentiates, by the arguments of its operator."""
    if name == "paged_attention":
        raise no_gradients("paged")
    arguments = as_arguments(NAMES[name], tensors, options)
    if arguments.pop("k_stored", None) is not None or arguments.pop("v_stored", None) is not None:
        raise no_gradients("quantised")
    args = [arguments.pop(which) for which in "qkv"]
    others, own = differentiation.split(arguments)
    return name, (CallOptions(others, tuple(own)), *args, *own.values())


def no_gradients(what: str) -> InvalidArgument:
    remedy = "call under torch.no_grad(), or detach"
    return InvalidArgument("q, k or v", "a tensor that requires grad", f"none: {what} keys have no gradients", remedy)


# New rows of caches


def write_pages(
    k: torch.Tensor, v: torch.Tensor | None, keys: Store, values: Store, layer: int, packed: bool, *tables: torch.Tensor
) -> None:
    """Calls the operator that stores rows. `keys` and `values` hold all layers."""
    inside = values.inside
    torch.ops.tilewise.write_pages.default(
        k, None if inside else v, keys.data, keys.scales, None if inside else values.data,
        None if inside else values.scales, *tables, layer=layer, packed=packed, k_stored=str(keys.format.storage),
        v_stored=str(values.format.storage), latent=values.format.width if inside else None,
    )  # fmt: skip


def _run_write(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, k_scales: Any, v_pages: Any, v_scales: Any, *tables: Any,
    layer: int, packed: bool, k_stored: str, v_stored: str, latent: int | None = None,
) -> None:  # fmt: skip
    def store(stored: str, width: int, data: torch.Tensor, scales: Any) -> Store:
        fmt = storage.parse(stored)
        return Store(RowFormat(fmt.name, width, fmt.group), data, scales).map(lambda x: x[layer].transpose(1, 2))

    keys = store(k_stored, k.shape[-1], k_pages, k_scales)
    if latent is None:
        values = store(v_stored, v.shape[-1], v_pages, v_scales)
    else:
        values, v = keys.first(RowFormat(keys.format.name, latent, keys.format.group)), k[..., :latent]
    starts, cu, table = tables
    slots = WriteSlots(starts, cu, k.shape[0] * k.shape[2], packed, table, padded=True)
    planner.writer(keys, values, keys.data.shape[2])(k, v, slots)


def _define_write() -> None:
    pages = "Tensor(a!) k_pages, Tensor(b!)? k_scales, Tensor(c!)? v_pages, Tensor(d!)? v_scales"
    tables = "Tensor starts, Tensor cu_seqlens, Tensor block_table"
    options = "int layer, bool packed, str k_stored, str v_stored, int? latent=None"
    schema = f"(Tensor k, Tensor? v, {pages}, {tables}, *, {options}) -> ()"
    define("write_pages", schema, _run_write, lambda *tensors, **options: None)


for _name in TABLES:
    _define(_name)
_define_write()
