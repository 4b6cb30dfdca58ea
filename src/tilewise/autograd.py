"""Gradients: `attention_backward`, and the entry points for inputs that require them.

A call whose inputs require grad is a `torch.autograd.Function` that calls the same entry point with `return_lse`. It
saves the inputs, `out` and `lse`, and nothing of size Lq * Lk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .core import keywords
from .core.arrays import returner, to_tensor
from .core.expression.mods import Bound, bind
from .core.options import Options
from .core.plan import Plan
from .core.private.torch import is_batched, is_legacy_batched
from .core.problem import CAPTURED, GRADS, Problem, captured_number
from .core.tensors import BackwardTensors
from .core.tracing import is_traced
from .dispatch import activity, backward_cache, call_cache, planner
from .errors import InvalidArgument, Unsupported, no_double_backward
from .quantised import Quantised
from .state import AttentionState
from .validation import calls, memory, meta
from .validation.backward import BackwardCall, backward, check_grads, is_deterministic

# The entry points that have gradients, and the tables that they take after q, k and v
TABLES: dict[str, tuple[str, ...]] = {"attention": (), "varlen_attention": ("cu_seqlens_q", "cu_seqlens_k")}
ARGUMENTS = ("q", "k", "v", "out", "lse", "dout", "dlse", "backend")  # of a backward pass, beside its options
FORWARD_ONLY = ("return_lse", "out", "split_size", "k_shared")  # options that a backward pass does not have


class AttentionGradients(NamedTuple):
    """Gradients of a call's inputs, each in the shape, layout and dtype of its input; None if it was not requested."""

    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dmask: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    dalibi_slopes: torch.Tensor | None = None
    dq_bias: torch.Tensor | None = None
    dk_bias: torch.Tensor | None = None
    dscore_mod: tuple[torch.Tensor | None, ...] | None = None


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any = None,
    *,
    grads: Sequence[str] = ("q", "k", "v"),
    deterministic: bool = True,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_q: int | None = None,
    max_k: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> AttentionGradients:
    """The gradients of `attention`, or with `cu_seqlens_q` and `cu_seqlens_k` of `varlen_attention`.

    Args:
        q: as in the forward call, and so are `k`, `v` and all options that are not named here, except `split_size` and
            `return_lse`, which only the forward pass has.
        out: what the forward call gave.
        lse: what it gave with `return_lse=True`.
        dout: the gradient of the loss by `out`, in its shape and dtype, with any strides.
        dlse: the gradient by `lse`, float32; None if `lse` was not used.
        grads: which gradients to compute: some of `"q"`, `"k"`, `"v"`, `"mask"` (a float one), `"sinks"`,
            `"alibi_slopes"`, `"q_bias"`, `"k_bias"`, `"score_mod"` (of the float tensors that it captures).
        deterministic: the same bits each time. False allows faster reductions in an order that varies;
            `torch.use_deterministic_algorithms(True)` forbids them all the same.
        cu_seqlens_q: as in `varlen_attention`, and so are `cu_seqlens_k`, `max_q` and `max_k`.
        backend: run on this backend or raise `Unsupported`; None takes the best that supports the call.

    Returns:
        `AttentionGradients`: `dq`, `dk`, `dv`, `dmask`, `dsinks`, `dalibi_slopes`, `dq_bias`, `dk_bias`, each in the
        shape and dtype of its input, None if it was not requested. Gradients of masks and biases are summed over their
        broadcast dims. `dscore_mod` has one for each tensor that `score_mod` captures, in the order in which it reads
        them; None for those that it is no smooth function of.

    >>> import tilewise
    >>> q, k, v = (torch.randn(1, heads, 100, 64) for heads in (8, 2, 2))
    >>> out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    >>> tilewise.attention_backward(q, k, v, out, lse, torch.ones_like(out), causal=True).dk.shape
    torch.Size([1, 2, 100, 64])
    """
    for name in ("block_table", "context_lens"):
        if name in options:
            raise InvalidArgument(name, "pages", "dense or packed keys", "paged keys and values have no gradients")
    if unknown := [name for name in options if name not in Options.__dataclass_fields__ or name in FORWARD_ONLY]:
        known = dict.fromkeys([*keywords.of(attention_backward), *Options.__dataclass_fields__])
        keywords.refuse(unknown, known, "tilewise.attention_backward")
    planner.check_name(backend)
    functions = options.pop("score_mod", None), options.pop("mask_mod", None)
    bound = None if functions == (None, None) else bind(*functions, calls.device_of(q))
    options |= {} if bound is None else {"score_mod": bound}
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_q": max_q, "max_k": max_k}
    options["deterministic"] = deterministic
    from . import ops  # it imports this module

    tensors = (q, k, v, out, lse, dout, dlse)
    if is_traced() or ops.needs_operator(tensors):
        longest = () if cu_seqlens_q is None else ("max_q", "max_k")
        if not is_traced() and meta.is_meta(q) and (checkable := meta.checkable(options, longest)) is not None:
            with torch.no_grad():
                _checked(*tensors, grads, checkable)
        return _traced(tensors, grads, backend, options)
    back = returner(q)
    with torch.no_grad():
        call = _checked(q, k, v, out, lse, dout, dlse, grads, options)
        _run(call, backend)
    results = _results(call, {"q": q, "k": k, "v": v, **options})
    return _as_gradients({name: back(x) for name, x in results.items()}, bound)


def _as_gradients(by_name: dict[str, Any], bound: Bound | None) -> AttentionGradients:
    captured = None
    if bound is not None and any(name.startswith(CAPTURED) for name in by_name):
        captured = tuple(by_name.get(f"{CAPTURED}{n}") for n in range(bound.mods.of_score))
    return AttentionGradients(*(by_name.get(name) for name in GRADS))._replace(dscore_mod=captured)


def _traced(tensors: tuple[Any, ...], grads: Sequence[str], backend: Any, options: dict[str, Any]) -> Any:
    from . import ops

    if backend is not None:
        raise InvalidArgument("backend", f"{backend!r} in traced code", "None: the planner chooses when the graph runs")
    check_grads(grads)
    by_name = ops.traced_backward(tensors, grads, **options)
    return _as_gradients(by_name, options.get("score_mod"))


def _checked(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, grads: Any, options: dict[str, Any]
) -> BackwardCall:
    options = dict(options)
    cu_q, cu_k = options.pop("cu_seqlens_q", None), options.pop("cu_seqlens_k", None)
    out = to_tensor("out", out).detach()
    out = out.contiguous() if out.ndim and out.stride(-1) != 1 else out
    captured = options["score_mod"].tensors if options.get("score_mod") is not None else ()
    tensors = [x for x in (q, k, v, *options.values(), *captured) if isinstance(x, torch.Tensor)]
    strided = [x for x in tensors if x.layout is torch.strided and not x.is_nested]
    if memory.overlaps_itself(out) or any(memory.overlap(out, x) for x in strided):
        out = out.clone(memory_format=torch.contiguous_format)  # it is only read: it may lie among the inputs
    o = Options(**options, out=out)
    if (cu_q is None) is not (cu_k is None):
        name = "cu_seqlens_q" if cu_k is None else "cu_seqlens_k"
        raise InvalidArgument(name, "given alone", "cu_seqlens_q with cu_seqlens_k")
    if cu_q is not None:
        call = calls.varlen(q, k, v, cu_q, cu_k, o)
    elif o.max_q is not None or o.max_k is not None:
        raise InvalidArgument(
            "max_q or max_k", "a length", "None", "it goes with cu_seqlens_q and cu_seqlens_k, which are not given"
        )
    else:
        call = calls.dense(q, k, v, o)
    return backward(call, o, lse, dout, dlse, grads)


def _results(call: BackwardCall, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients in `call.problem.grads`, each in the form of its argument."""

    def argument(name: str) -> torch.Tensor:
        number = captured_number(name)
        return to_tensor(name, arguments[name]) if number is None else arguments["score_mod"].tensors[number]

    return {name: call.result(name, argument(name)) for name in call.problem.grads}


def _run(call: BackwardCall, backend: str | None) -> Plan:
    """Computes the gradients of a checked call."""
    chosen = planner.choose(call.problem, backend, torch.get_num_threads())
    if call.problem.is_empty:
        _write_empty(call.tensors)
    else:
        planner.load_backward(chosen.backend).run_backward(chosen, call.tensors)
        activity.ran(chosen)
    return chosen


def _write_empty(b: BackwardTensors) -> None:
    """Writes the gradients of a call in which no row sees a key: 0, except that of a sink through `lse`."""
    for gradient in b.gradients().values():
        gradient.zero_()
    if b.dsinks is not None and b.dlse is not None:
        assert b.forward.lse is not None
        b.dsinks += torch.where(b.forward.lse.isfinite(), b.dlse, 0.0).sum((0, 2))


# Calls whose inputs require grad


def needed(arguments: dict[str, Any]) -> tuple[str, ...]:
    """The names of the arguments that require grad. Arrays other than torch tensors never do."""
    if not torch.is_grad_enabled() or not isinstance(arguments["q"], torch.Tensor):
        return ()
    names = tuple(x for x in GRADS if isinstance(arguments.get(x), torch.Tensor) and arguments[x].requires_grad)
    if type(bound := arguments.get("score_mod")) is Bound:
        names += tuple(f"{CAPTURED}{number}" for number in bound.needing_grad())
    shared = arguments.get("k_shared")  # part of k
    return names or (("k",) if isinstance(shared, torch.Tensor) and shared.requires_grad else ())


def plan(
    problem: Problem, names: tuple[str, ...], backend: str | None, options: dict[str, Any], machine: str | None = None
) -> Plan:
    """The plan of a call's backward pass: by the call's backend if that has one, else by the best."""
    problem = replace(problem, grads=names, deterministic=is_deterministic(options.get("deterministic", True)))
    if machine is None:
        return planner.choose(problem, _preferred(problem, backend), torch.get_num_threads())
    try:
        return planner.choose_on(machine, problem, backend, torch.get_num_threads())
    except Unsupported:
        return planner.choose_on(machine, problem, None, torch.get_num_threads())


def _preferred(problem: Problem, backend: str | None) -> str | None:
    return backend if backend is not None and planner.supports(backend, problem) is None else None


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls an entry point by name as a `torch.autograd.Function`. `options` are those that were given."""
    q, k, v, *tables = args
    return_lse = options.pop("return_lse", False)
    if options.pop("out", None) is not None:
        remedy = "leave out= out, or call under torch.no_grad()"
        raise InvalidArgument("out", "a tensor to write to in a call that needs gradients", "None", remedy)
    for which, x in (("k", k), ("v", v)):
        if isinstance(x, Quantised):
            remedy = f"call under torch.no_grad(), or hand in {which}.dequantise()"
            raise InvalidArgument(which, "Quantised in a call that needs gradients", "a float tensor", remedy)
    options |= dict(zip(TABLES[name], tables, strict=True))
    tensor_options = {which: x for which, x in options.items() if isinstance(x, torch.Tensor)}
    scalar_options = {which: x for which, x in options.items() if which not in tensor_options}
    if (bound := options.get("score_mod")) is not None:
        scalar_options["score_mod"] = bound.mods
        tensor_options |= {f"{CAPTURED}{number}": x for number, x in enumerate(bound.tensors)}
    q, k, v = (to_tensor(which, x) for which, x in (("q", q), ("k", k), ("v", v)))
    out, lse = _Attention.apply(name, scalar_options, tuple(tensor_options), q, k, v, *tensor_options.values())
    return AttentionState(out, lse) if return_lse else out


class BackwardOptions(NamedTuple):
    """What a backward pass takes beside q, k, v, `out`, `lse`, their gradients and the tensors among its options."""

    options: dict[str, Any]  # those that are no tensors, and perhaps some that are
    tensor_names: tuple[str, ...]  # of the options that are passed as tensors
    grads: tuple[str, ...]


class _Attention(torch.autograd.Function):
    """An entry point and its backward pass; `tensor_names` are the names of the options that are tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        options: dict[str, Any],
        tensor_names: tuple[str, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from . import api  # it imports this module

        all_options = _with_tensors(options, tensor_names, tensors)
        tables = [all_options.pop(table) for table in TABLES[name]]
        out, lse = getattr(api, name)(q, k, v, *tables, return_lse=True, **all_options)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.options, ctx.tensor_names = options, tensor_names
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        names = ("q", "k", "v", *ctx.tensor_names)
        requested = tuple(name for name, needed in zip(names, ctx.needs_input_grad[3:], strict=True) if needed)
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        _refuse_batches(dout, dlse)
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        options = {name: x for name, x in ctx.options.items() if name not in FORWARD_ONLY}
        o = BackwardOptions(options, ctx.tensor_names, requested)
        compute = _Gradients.apply if torch.is_grad_enabled() else gradients  # grad mode: create_graph=True
        by_name = dict(zip(requested, compute(o, q, k, v, out, lse, dout, dlse, *tensors), strict=True))
        return (None, None, None, *(by_name.get(name) for name in names))


def _refuse_batches(*incoming: torch.Tensor | None) -> None:
    """Refuses batched gradients (`is_grads_batched`), which torch passes as one tensor without memory."""
    for x in incoming:
        if x is not None and (is_batched(x) or is_legacy_batched(x)):
            remedy = "leave out is_grads_batched=True or vectorize=True: one backward pass for each gradient"
            raise InvalidArgument("gradient of out or lse", "a batch of gradients", "one gradient", remedy)


class _Gradients(torch.autograd.Function):
    """A backward pass under `create_graph=True`: its own backward raises, since there is no double backward."""

    @staticmethod
    def forward(ctx: Any, o: BackwardOptions, *tensors: Any) -> tuple[torch.Tensor, ...]:
        return gradients(o, *tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise no_double_backward()


def gradients(
    o: BackwardOptions, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, *tensors: Any
) -> tuple[torch.Tensor, ...]:
    """The backward pass of a call that has run: by the call's backend if that has one, else by the best. The gradients
    are in the order of `o.grads`.
    """
    arguments = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    arguments |= _with_tensors(o.options, o.tensor_names, tensors)
    with torch.no_grad():
        key = backward_cache.key_of(arguments, o.grads)
        if (cached := call_cache.find(key)) is not None:
            by_name = _results(cached(arguments), arguments)
            return tuple(by_name[name] for name in o.grads)
        options = {name: x for name, x in arguments.items() if name not in ARGUMENTS}
        call = _checked(q, k, v, out, lse, dout, dlse, o.grads, options)
        chosen = _run(call, _preferred(call.problem, o.options.get("backend")))
        backward_cache.remember(key, call, chosen, arguments)
        by_name = _results(call, arguments)
        return tuple(by_name[name] for name in o.grads)


def _with_tensors(options: dict[str, Any], names: tuple[str, ...], tensors: Sequence[Any]) -> dict[str, Any]:
    """The options with those that are tensors, and with the tensors that functions capture."""
    merged = options | {
        name: _plain(x) for name, x in zip(names, tensors, strict=True) if captured_number(name) is None
    }
    if options.get("score_mod") is not None:
        captured = [_plain(x) for name, x in zip(names, tensors, strict=True) if captured_number(name) is not None]
        merged["score_mod"] = Bound(options["score_mod"], tuple(captured))
    return merged


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A parameter as a plain tensor: the call cache takes no other type."""
    return x.detach() if type(x) is torch.nn.Parameter else x
