"""Derivatives of a call that has run: `attention_backward`, and what `differentiation.py` makes torch call.

All are computed from the inputs, `out` and `lse`, and nothing of size Lq * Lk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .core import keywords
from .core.arrays import converter_back, to_tensor
from .core.dropout import with_seed
from .core.expression.mods import Bound, bind
from .core.options import STATISTICS, Options
from .core.plan import Plan
from .core.problem import CAPTURED, GRADS, Problem, captured_number
from .core.tensors import TangentTensors, Tensors
from .core.tracing import is_traced
from .dispatch import activity, backward_cache, call_cache, planner
from .errors import InvalidArgument, Unsupported
from .validation import calls, memory, meta
from .validation.backward import BackwardCall, backward, check_grads, in_layout, is_deterministic
from .validation.calls import Call

if TYPE_CHECKING:
    from .differentiation import CallOptions, Results

# The entry points that have gradients, and the tables that they take after q, k and v
TABLES: dict[str, tuple[str, ...]] = {"attention": (), "varlen_attention": ("cu_seqlens_q", "cu_seqlens_k")}
ARGUMENTS = ("q", "k", "v", "out", "lse", "dout", "dlse", "backend")  # of a backward pass, beside its options
# Options that a backward pass does not have
FORWARD_ONLY = ("return_lse", "return_aux", "out", "split_size", "k_shared")


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
    taken = [name for name in Options.__dataclass_fields__ if name not in (*FORWARD_ONLY, *STATISTICS)]
    if unknown := [name for name in options if name not in taken]:
        known = dict.fromkeys([*keywords.of(attention_backward), *taken])
        keywords.refuse(unknown, known, "tilewise.attention_backward")
    planner.check_name(backend)
    functions = options.pop("score_mod", None), options.pop("mask_mod", None)
    bound = None if functions == (None, None) else bind(*functions, calls.device_of(q))
    options |= {} if bound is None else {"score_mod": bound}
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise InvalidArgument("dropout_seed", "None", "the seed of the forward call", "give it to both")
    options = with_seed(options, calls.device_of(q))
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
    back = converter_back(q)
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
    from . import derivative_ops

    if backend is not None:
        raise InvalidArgument("backend", f"{backend!r} in traced code", "None: the planner chooses when the graph runs")
    check_grads(grads)
    by_name = derivative_ops.traced_backward(tensors, grads, **options)
    return _as_gradients(by_name, options.get("score_mod"))


def _checked(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, grads: Any, options: dict[str, Any]
) -> BackwardCall:
    call, o = _checked_forward(q, k, v, out, options)
    return backward(call, o, lse, dout, dlse, grads)


def _checked_forward(q: Any, k: Any, v: Any, out: Any, options: dict[str, Any]) -> tuple[Call, Options]:
    """The forward call whose derivative is computed. Without an `out` that it gave, new memory for `out` and `lse`."""
    options = dict(options)
    cu_q, cu_k = options.pop("cu_seqlens_q", None), options.pop("cu_seqlens_k", None)
    o = Options(**options, out=None if out is None else _as_read(out, q, k, v, options), return_lse=out is None)
    if (cu_q is None) is not (cu_k is None):
        name = "cu_seqlens_q" if cu_k is None else "cu_seqlens_k"
        raise InvalidArgument(name, "given alone", "cu_seqlens_q with cu_seqlens_k")
    if cu_q is not None:
        return calls.varlen(q, k, v, cu_q, cu_k, o), o
    if o.max_q is not None or o.max_k is not None:
        raise InvalidArgument(
            "max_q or max_k", "a length", "None", "it goes with cu_seqlens_q and cu_seqlens_k, which are not given"
        )
    return calls.dense(q, k, v, o), o


def _as_read(out: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> torch.Tensor:
    """`out` as the checks of a tensor to write to take it. It is only read: it may lie among the inputs."""
    out = to_tensor("out", out).detach()
    out = out.contiguous() if out.ndim and out.stride(-1) != 1 else out
    captured = options["score_mod"].tensors if options.get("score_mod") is not None else ()
    tensors = [x for x in (q, k, v, *options.values(), *captured) if isinstance(x, torch.Tensor)]
    strided = [x for x in tensors if x.layout is torch.strided and not x.is_nested]
    if memory.overlaps_itself(out) or any(memory.overlap(out, x) for x in strided):
        out = out.clone(memory_format=torch.contiguous_format)
    return out


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
        call.write_empty()
    else:
        planner.load_backward(chosen.backend).run_backward(chosen, call.tensors)
        activity.ran(chosen)
    return chosen


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


def gradients(
    o: CallOptions, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, *tensors: Any
) -> Results:
    """The backward pass of a call that has run: by the call's backend if that has one, else by the best. The gradients
    are in the order of `o.grads`.
    """
    arguments = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    arguments |= o.with_tensors(tensors)
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


def tangent(o: CallOptions, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> Results:
    """The derivatives of `out` and `lse` where the inputs `o.moved` move by the last of `more`; before those come the
    call's tensors.
    """
    tensors, tangents = _split(o, more)
    with torch.no_grad():
        options = {name: x for name, x in o.with_tensors(tensors).items() if name not in ARGUMENTS}
        call, _ = _checked_forward(q, k, v, out, options)
        call.tensors.lse = in_layout(lse, call.problem.packed_q, options.get("layout", "bhld"), common=True)
        moved, found = _tangents(o, (q, k, v), options, tangents)
        assert found.lse is not None
        assert found.tensors.lse is not None
        plan, run = planner.derivatives(call.problem, "run_tangent")
        run(plan, call.tensors, TangentTensors(moved, found.tensors.out, found.tensors.lse))
        activity.ran(plan)
        return found.out, found.lse


def second_order(
    o: CallOptions, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, moved_out: Any, moved_lse: Any,
    *more: Any,
) -> Results:  # fmt: skip
    """The gradients `o.grads` of <dout, moved_out> + <dlse, moved_lse>, what `tangent` gave for the same direction."""
    tensors, tangents = _split(o, more)
    arguments = {"q": q, "k": k, "v": v} | o.with_tensors(tensors)
    with torch.no_grad():
        options = {name: x for name, x in arguments.items() if name not in ARGUMENTS}
        call = _checked(q, k, v, out, lse, dout, dlse, o.grads, options)
        moved, _ = _tangents(o, (q, k, v), options, tangents)
        plan, run = planner.derivatives(call.problem, "run_second_order")
        layout = call.problem.packed_q, call.layout
        run(
            plan,
            call.tensors,
            TangentTensors(moved, *(in_layout(x, *layout, common=True) for x in (moved_out, moved_lse))),
        )
        activity.ran(plan)
        by_name = _results(call, arguments)
        return tuple(by_name[name] for name in o.grads)


def _split(o: CallOptions, more: Sequence[Any]) -> tuple[Sequence[Any], dict[str, torch.Tensor]]:
    """The call's tensors, and the tangents by name."""
    count = len(o.tensor_names)
    return more[:count], dict(zip(o.moved, more[count:], strict=True))


def _tangents(
    o: CallOptions, inputs: tuple[Any, Any, Any], options: dict[str, Any], tangents: dict[str, torch.Tensor]
) -> tuple[Tensors, Call]:
    """Tangents in the common form, and a checked call of them. They have the shapes and dtypes of the inputs, so they
    are brought into that form as those are.
    """
    q, k, v = (tangents.get(name, x) for name, x in zip("qkv", inputs, strict=True))
    others = options | {name: x for name, x in tangents.items() if name in options} | {"tile_map": None}
    call, _ = _checked_forward(q, k, v, None, others)
    names = [name for name in tangents if captured_number(name) is None]
    fields: dict[str, Any] = dict.fromkeys(("q", "k", "v", "out")) | {
        name: getattr(call.tensors, name) for name in names
    }
    captured: tuple[Any, ...] = ()
    if (bound := options.get("score_mod")) is not None:
        captured = tuple(tangents.get(f"{CAPTURED}{number}") for number in range(len(bound.tensors)))
    return Tensors(**fields, captured=captured), call
