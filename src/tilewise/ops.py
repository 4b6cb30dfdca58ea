"""The entry points as torch operators, for `torch.compile`, `torch.export` and all other tracing and transforms.

`torch.ops.tilewise` has `attention`, `varlen_attention` and `paged_attention`, each also with `_lse`, which returns
`(out, lse)`, since an operator has a fixed number of outputs. `write_pages` stores new rows of a paged cache. The entry
points of `api.py` call these while torch traces (`tracing.py`), and for tensors without memory. Operators are opaque to
a compiler, which knows the shapes of their outputs only.

If a gradient is needed, the `_lse` operator runs; its backward pass is the operator `attention_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.compiler import is_compiling

from . import autograd
from .core import storage
from .core.arrays import returner, to_tensor
from .core.expression.mods import Bound, mods_of
from .core.kv_store import RowFormat, Store, WriteSlots
from .core.options import PLACES, as_chunk, as_flag, as_split_size, as_window, to_int
from .core.private.torch import DispatchKey, DispatchKeySet, after_autograd, any_requires_grad, transforms_active
from .core.problem import CAPTURED, GRADS
from .core.tracing import is_wrapper
from .dispatch import planner
from .errors import InvalidArgument, no_double_backward
from .quantised import Quantised
from .state import AttentionState

# The window is `left` and `right`. Quantised K and V are three arguments: data, scales and "dtype/group". Tensors are
# positional, since torch differentiates by no others. Inductor's graphs on disk call by position and outlive an update:
# after the first release, new arguments come last.
BY_ROW = ("q_offset", *PLACES)  # each an int, or a tensor by the name `q_offsets` and so on
FLAGS = ("causal", "allow_tf32", "deterministic")
ONLY_TENSORS = "mask tree_mask positions alibi_slopes q_bias k_bias sinks key_indices block_indices".split()
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
    float? softcap=None, str? mods=None, bool allow_tf32=False, bool? validate=None, str? backend=None"""
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
# What the backward operator takes after q, k and v, in order.
BACKWARD_REQUIRED = ("out", "lse", "dout")
BACKWARD_OPTIONS = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", *FLOAT_OPTIONS)
BACKWARD = (*BACKWARD_REQUIRED, "dlse", *BACKWARD_OPTIONS)
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
    if transforms_active() and torch.is_grad_enabled():
        for which, x in {**dict(zip("qkv", args, strict=False)), **options}.items():
            if isinstance(x, torch.Tensor) and x.requires_grad:
                remedy = "take torch.autograd.grad or .backward(), without torch.func around the call"
                raise InvalidArgument(which, "a tensor that requires grad in torch.func", "one that does not", remedy)
    back = returner(args[0])
    names = ("q", "k", "v", *TABLES[name])
    args = tuple(x if isinstance(x, Quantised) else to_tensor(n, x) for n, x in zip(names, args, strict=True))
    for option in BY_ROW:
        options[option] = to_int(options.get(option))
    for option in TENSORS:
        if options.get(option) is not None and not isinstance(options[option], int):
            options[option] = to_tensor(option, options[option])
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
    options = _rules(**options)
    options["split_size"] = as_split_size(split_size)
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


def traced_backward(
    tensors: tuple[Any, ...],
    grads: Sequence[str],
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Calls the backward operator. `tensors` are q, k, v, out, lse, dout and dlse."""
    options = _rules(**options)
    names = _in_order(grads, options.get("score_mod"))
    tensor_options = [options.pop(name, None) for name in BACKWARD_OPTIONS]
    gradients = torch.ops.tilewise.attention_backward.default(*tensors, *tensor_options, ",".join(names), **options)
    return dict(zip(names, gradients, strict=True))


def _in_order(grads: Sequence[str], bound: Bound | None) -> list[str]:
    """The gradients that were asked for by their names in `Problem.grads`."""
    names = [name for name in GRADS if name in grads]
    if "score_mod" in grads and bound is not None:
        names += [f"{CAPTURED}{number}" for number in bound.mods.differentiable]
    return names


def _rules(
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
    arguments = _arguments(NAMES[name], tensors, options)
    k = _stored(arguments.pop("k"), arguments.pop("k_scales", None), arguments.pop("k_stored", None))
    v = _stored(arguments.pop("v"), arguments.pop("v_scales", None), arguments.pop("v_stored", None))
    return _entry(name)(arguments.pop("q"), k, v, *(arguments.pop(table) for table in TABLES[name]), **arguments)


def _arguments(names: Sequence[str], tensors: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
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
    return q.new_empty((*q.shape[:-1], width)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _define(name: str) -> None:
    """Defines the two operators of an entry point."""

    def run(*tensors: Any, **options: Any) -> torch.Tensor:
        return _run(name, *tensors, **options)

    def run_lse(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _run(name, *tensors, return_lse=True, **options)
        return out, lse

    def shapes(*tensors: Any, **options: Any) -> torch.Tensor:
        return _shapes(*tensors, **options)[0]

    def with_gradients(keys: Any, *tensors: Any, **options: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return with_lse(*tensors, **options)[0]
        below = keys & after_autograd
        if below.raw_repr() in PLAIN:  # no mode or transform below: call the kernel without dispatching
            return run(*tensors, **options)
        return plain.redispatch(below, *tensors, **options)

    required = ", ".join(f"Tensor {x}" for x in ("q", "k", "v", *TABLES[name]))
    optional = ", ".join(f"Tensor? {x}=None" for x in OPTIONAL_TENSORS[name])
    schema = f"({required}, {optional}, *, {SIZES[name]}, {OPTIONS})"
    _add(name, f"{schema} -> Tensor", run, shapes)
    _add(f"{name}_lse", f"{schema} -> (Tensor, Tensor)", run_lse, _shapes)
    plain, with_lse = (getattr(torch.ops.tilewise, x).default for x in (name, f"{name}_lse"))
    _library.impl(name, with_gradients, "Autograd", with_keyset=True)
    setup, backward = partial(_keep, name), partial(_backward, NAMES[name])
    torch.library.register_autograd(f"tilewise::{name}_lse", backward, setup_context=setup, lib=_library)


def _add(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}{' '.join(schema.split())}")
    for device in DEVICES:
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"tilewise::{name}", fake, lib=_library)


# Gradients


def _keep(name: str, ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    """Saves what the backward pass of an operator needs: its tensors, `out` and `lse`."""
    if name == "paged_attention":
        raise _no_gradients("paged")
    options = dict(keyword_only_inputs)
    stored = options.pop("k_stored"), options.pop("v_stored")
    if stored != (None, None):
        raise _no_gradients("quantised")
    options.pop("split_size")
    ctx.options = options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _no_gradients(what: str) -> InvalidArgument:
    remedy = "call under torch.no_grad(), or detach"
    return InvalidArgument("q, k or v", "a tensor that requires grad", f"none: {what} keys have no gradients", remedy)


def _backward(names: tuple[str, ...], ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    # torch has no entries for trailing arguments that were left out.
    needed = dict(zip(names, ctx.needs_input_grad, strict=False))
    if dout is None and dlse is None:
        return (None,) * len(needed)
    *inputs, out, lse = ctx.saved_tensors
    grads = [name for name in (*GRADS, *CAPTURES) if needed.get(name)]
    tensors = dict(zip(names, inputs, strict=True)) | {"out": out, "lse": lse, "dlse": dlse}
    tensors["dout"] = torch.zeros_like(out) if dout is None else dout
    gradients = torch.ops.tilewise.attention_backward.default(
        *(tensors.get(name) for name in ("q", "k", "v", *BACKWARD)), ",".join(grads), **ctx.options
    )
    by_name = dict(zip(grads, gradients, strict=True))
    return tuple(by_name.get(name) for name in needed)


def _run_backward(*tensors: Any, **options: Any) -> list[torch.Tensor]:
    arguments = _arguments(("q", "k", "v", *BACKWARD, "grads"), tensors, options)
    grads = tuple(arguments.pop("grads").split(","))
    inputs = [arguments.pop(name, None) for name in ("q", "k", "v", *BACKWARD_REQUIRED, "dlse")]
    names: tuple[str, ...] = ()
    captured: tuple[torch.Tensor, ...] = ()
    if (bound := arguments.get("score_mod")) is not None:
        names, captured, arguments["score_mod"] = CAPTURES[: len(bound.tensors)], bound.tensors, bound.mods
    return list(autograd.gradients(autograd.BackwardOptions(arguments, names, grads), *inputs, *captured))


def _backward_shapes(q: Any, k: Any, v: Any, *tensors: Any, **_: Any) -> list[torch.Tensor]:
    arguments = {"q": q, "k": k, "v": v} | dict(zip((*BACKWARD, "grads"), tensors, strict=True))
    inputs = [arguments[name] for name in arguments["grads"].split(",")]
    return [torch.empty(x.shape, dtype=x.dtype, device=q.device) for x in inputs]


def _no_double_backward(ctx: Any, *_: Any) -> None:
    raise no_double_backward()


def _define_backward() -> None:
    required = ", ".join(f"Tensor {x}" for x in ("q", "k", "v", *BACKWARD_REQUIRED))
    optional = ", ".join(f"Tensor? {x}" for x in ("dlse", *BACKWARD_OPTIONS))
    sizes = "str layout='bhld', SymInt? max_q=None, SymInt? max_k=None, bool deterministic=True"
    schema = f"({required}, {optional}, str grads, *, {sizes}, {RULES}) -> Tensor[]"
    _add("attention_backward", schema, _run_backward, _backward_shapes)
    torch.library.register_autograd("tilewise::attention_backward", _no_double_backward, lib=_library)


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
    _add("write_pages", schema, _run_write, lambda *tensors, **options: None)


for _name in TABLES:
    _define(_name)
_define_backward()
_define_write()
