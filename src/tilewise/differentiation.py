"""What torch differentiates: the entry points, their gradients and their derivatives in a direction, each as a
`torch.autograd.Function`. Eager calls and operators (`ops.py`, `derivative_ops.py`)
share them.

With F the call, x its inputs, g the gradients of its outputs and x' a direction, four computations refer to each other:

    attention       F(x)             backward: gradients(g)        forward mode: tangent(x')
    gradients       J(x)^T g         backward in a direction w of its results, or forward mode in x':
                                     tangent(w) by g, second_order(g, w) by x
    tangent         J(x) x'          backward: gradients by x', second_order by x
    second_order    d <g, J(x) x'> / dx

`out` and `lse` are given to the last three beside x, so that nothing is computed twice. They count as functions of x,
and get no gradients of their own. Each is run by `autograd.py`, or while torch traces or transforms as an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from . import autograd
from .core.arrays import to_tensor
from .core.expression.mods import Bound
from .core.private.torch import (
    forward_enabled_again,
    in_forward_mode,
    is_legacy_batched,
    single_level,
    transforms_active,
)
from .core.problem import CAPTURED, GRADS, SMOOTH_STATISTICS, captured_number
from .core.tracing import is_traced, is_wrapper
from .errors import InvalidArgument, Unsupported
from .quantised import Quantised
from .state import AttentionState

PRIMALS = ("q", "k", "v")
Results = tuple[torch.Tensor, ...]


class CallOptions(NamedTuple):
    """A call without its tensors, and what is asked of it."""

    options: dict[str, Any]  # those that are no tensors, and perhaps some that are
    tensor_names: tuple[str, ...]  # of the options that are passed as tensors
    grads: tuple[str, ...] = ()  # the gradients to compute
    moved: tuple[str, ...] = ()  # the inputs that have tangents, which come last
    below: Callable[[], Any] | None = None  # runs the operator that torch differentiates

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*PRIMALS, *self.tensor_names)

    def with_tensors(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The options with those that are tensors, and with the tensors that functions capture."""
        if not tensors and "score_mod" not in self.options:
            return dict(self.options)
        by_name = [(name, _plain(x)) for name, x in zip(self.tensor_names, tensors, strict=True)]
        merged = self.options | {name: x for name, x in by_name if captured_number(name) is None}
        if self.options.get("score_mod") is not None:
            captured = tuple(x for name, x in by_name if captured_number(name) is not None)
            merged["score_mod"] = Bound(self.options["score_mod"], captured)
        return merged


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A parameter as a plain tensor: the call cache takes no other type."""
    return x.detach() if type(x) is torch.nn.Parameter else x


def has_tangent(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x, level=0).tangent is not None


def any_tangent(tensors: Sequence[Any]) -> bool:
    """Whether one of them has a tangent of forward mode."""
    if not in_forward_mode():
        return False
    return any(any(map(has_tangent, x.tensors)) if type(x) is Bound else has_tangent(x) for x in tensors)


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls an entry point by name so that torch can differentiate it. `options` are those that were given."""
    q, k, v, *tables = args
    return_lse = options.pop("return_lse", False)
    if options.pop("out", None) is not None:
        remedy = "leave out out= , or call under torch.no_grad()"
        raise InvalidArgument("out", "a tensor to write to in a call that needs gradients", "None", remedy)
    for which, x in (("k", k), ("v", v)):
        if isinstance(x, Quantised):
            remedy = f"call under torch.no_grad(), or hand in {which}.dequantise()"
            raise InvalidArgument(which, "Quantised in a call that needs gradients", "a float tensor", remedy)
    options |= dict(zip(autograd.TABLES[name], tables, strict=True))
    options, tensors = split(options)
    moving = in_forward_mode()  # `to_tensor` refuses tangents
    q, k, v = (x if moving and has_tangent(x) else to_tensor(which, x) for which, x in (("q", q), ("k", k), ("v", v)))
    out, lse = _Attention.apply(CallOptions(options, tuple(tensors)), q, k, v, *tensors.values())
    return AttentionState(out, lse) if return_lse else out


def statistics_of(name: str, args: tuple[Any, ...], lse: torch.Tensor, options: dict[str, Any]) -> Results:
    """The statistics of a call so that torch can differentiate them: arguments as those of `statistics.run`."""
    q, k, v, *tables = args
    options = options | dict(zip(autograd.TABLES[name], tables, strict=True))
    options, tensors = split(options)
    q, k, v = (to_tensor(which, x) for which, x in (("q", q), ("k", k), ("v", v)))
    found: Results = _Statistics.apply(CallOptions(options, tuple(tensors)), q, k, v, lse, *tensors.values())
    return found


def split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The options that are no tensors, and those that are, what functions capture among them."""
    tensors = {which: x for which, x in options.items() if isinstance(x, torch.Tensor)}
    others = {which: x for which, x in options.items() if which not in tensors}
    if (bound := options.get("score_mod")) is not None:
        others["score_mod"] = bound.mods
        tensors |= {f"{CAPTURED}{number}": x for number, x in enumerate(bound.tensors)}
    return others, tensors


def apply_below(which: str, forward: Callable[[], Any], o: CallOptions, *tensors: Any) -> Results:
    """Applies a function of `FUNCTIONS` for an operator, whose result below autograd is that of `forward`."""
    found: Results
    if not transforms_active():
        found = FUNCTIONS[which].apply(o._replace(below=forward), *tensors)
        return found

    def below() -> Any:
        with torch.enable_grad(), forward_enabled_again(True):  # for transforms around this one
            return forward()

    # At the level of the innermost transform, as a function of its tensors: torch's `apply` would begin a new dispatch.
    with single_level():
        plain: Any = super(torch.autograd.Function, FUNCTIONS[which])
        found = plain.apply(o._replace(below=below), *tensors)
        return found


def _entry(o: CallOptions, q: Any, k: Any, v: Any, *tensors: Any) -> Results:
    """`(out, lse)` by the entry point."""
    from . import api  # it imports this module

    options = o.with_tensors(tensors)
    name = "varlen_attention" if "cu_seqlens_q" in o.tensor_names else "attention"
    tables = [options.pop(table) for table in autograd.TABLES[name]]
    out, lse = getattr(api, name)(q, k, v, *tables, return_lse=True, **options)
    return out, lse


def _save(ctx: Any, o: CallOptions, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> None:
    ctx.o = o if o.below is None else o._replace(below=None)
    ctx.save_for_backward(q, k, v, out, lse, *more)
    if in_forward_mode(enabled=False):
        # Detached: an output that the function holds would hold the function, and neither would be freed.
        ctx.save_for_forward(q, k, v, out.detach(), lse.detach(), *more)
    ctx.set_materialize_grads(False)


class _Attention(torch.autograd.Function):
    """`(out, lse)` of `q, k, v` and the tensors among the options. `varlen_attention` has its tables among those."""

    @staticmethod
    def forward(ctx: Any, o: CallOptions, q: Any, k: Any, v: Any, *tensors: Any) -> Results:
        out, lse = _entry(o, q, k, v, *tensors) if o.below is None else o.below()
        _save(ctx, o, q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needed))
        _refuse_batches(dout, dlse)
        o, (q, k, v, out, lse, *tensors) = _derived(ctx.o, needed), ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        found = gradients(o, q, k, v, out, lse, dout, dlse, *tensors)
        return (None, *_in_places(o, found))

    @staticmethod
    def jvp(ctx: Any, _o: None, *moved: torch.Tensor | None) -> Results:
        o, tangents = _moving(_derived(ctx.o, ()), moved)
        return tangent(o, *_primals(ctx), *tangents)


def _primals(ctx: Any) -> list[Any]:
    """What was saved, without tangents: those of the result are no function of them at this level."""
    return [x if x is None else forward_ad.unpack_dual(x, level=0).primal for x in ctx.saved_tensors]


def _derived(o: CallOptions, needed: Sequence[bool]) -> CallOptions:
    """The options of a derivative of a call, with the gradients by the inputs that need one."""
    options = {name: x for name, x in o.options.items() if name not in autograd.FORWARD_ONLY}
    grads = tuple([name for name, needs in zip(o.inputs, needed, strict=False) if needs])
    return CallOptions(options, o.tensor_names, grads)


def _moving(o: CallOptions, moved: Sequence[torch.Tensor | None]) -> tuple[CallOptions, list[torch.Tensor]]:
    """The options with the inputs that move, and their tangents. Tangents of tensors that a call is no smooth function
    of have no effect.
    """
    by_name = {
        name: x
        for name, x in zip(o.inputs, moved, strict=True)
        if x is not None and x.is_floating_point() and (name in GRADS or captured_number(name) is not None)
    }
    return o._replace(moved=tuple(by_name)), list(by_name.values())


def _in_places(o: CallOptions, found: Sequence[Any]) -> tuple[Any, ...]:
    by_name = dict(zip(o.grads, found, strict=True))
    return tuple(by_name.get(name) for name in o.inputs)


def _refuse_batches(*incoming: torch.Tensor | None) -> None:
    """Refuses the batches of `is_grads_batched`, which torch passes as one tensor without memory."""
    for x in incoming:
        if x is not None and is_legacy_batched(x):
            remedy = "use torch.func.vmap or torch.func.jacrev instead of is_grads_batched=True or vectorize=True"
            raise InvalidArgument("gradient of out or lse", "a batch of gradients", "one gradient", remedy)


class _Gradients(torch.autograd.Function):
    """`o.grads` of a call, of `q, k, v, out, lse, dout, dlse` and its tensors."""

    @staticmethod
    def forward(ctx: Any, o: CallOptions, *tensors: Any) -> Results:
        _save(ctx, o, *tensors)
        return _run("gradients", o, *tensors)

    @staticmethod
    def backward(ctx: Any, *moved: torch.Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        q, k, v, out, lse, dout, dlse, *tensors = ctx.saved_tensors
        by_name = dict(zip(ctx.o.grads, moved, strict=True))
        o = _derived(ctx.o, (*needed[:3], *needed[7:]))
        o, tangents = _moving(o, [by_name.get(name) for name in o.inputs])
        if not tangents:
            return (None,) * (1 + len(needed))
        by_dout, by_dlse = tangent(o, q, k, v, out, lse, *tensors, *tangents)
        found: Results = ()
        if o.grads:
            found = second_order(o, q, k, v, out, lse, dout, dlse, by_dout, by_dlse, *tensors, *tangents)
        dq, dk, dv, *others = _in_places(o, found)
        return (None, dq, dk, dv, None, None, by_dout, by_dlse if needed[6] else None, *others)

    @staticmethod
    def jvp(ctx: Any, _o: None, *moved: torch.Tensor | None) -> Results:
        q, k, v, out, lse, dout, dlse, *tensors = _primals(ctx)
        found: list[Any] = [None] * len(ctx.o.grads)
        moved_dout, moved_dlse = moved[5:7]
        if moved_dout is not None or moved_dlse is not None:
            moved_dout = torch.zeros_like(dout) if moved_dout is None else moved_dout
            found = list(gradients(ctx.o, q, k, v, out, lse, moved_dout, moved_dlse, *tensors))
        o, tangents = _moving(ctx.o, (*moved[:3], *moved[7:]))
        if tangents:
            state = tangent(o, q, k, v, out, lse, *tensors, *tangents)
            more = second_order(o, q, k, v, out, lse, dout, dlse, *state, *tensors, *tangents)
            found = [x if y is None else y + x for x, y in zip(more, found, strict=True)]
        return tuple(found)


class _Tangent(torch.autograd.Function):
    """The derivative of `(out, lse)` in a direction, of `q, k, v, out, lse`, the call's tensors and the tangents."""

    @staticmethod
    def forward(ctx: Any, o: CallOptions, *tensors: Any) -> Results:
        moved_out, moved_lse = _run("tangent", o, *tensors)
        _save(ctx, o, *tensors, moved_out, moved_lse)
        return moved_out, moved_lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needed))
        q, k, v, out, lse, *more, moved_out, moved_lse = ctx.saved_tensors
        count = len(ctx.o.tensor_names)
        tensors, tangents = more[:count], more[count:]
        dout = torch.zeros_like(out) if dout is None else dout
        o = _derived(ctx.o, (*needed[:3], *needed[5 : 5 + count]))._replace(moved=ctx.o.moved)
        of_moved = tuple(name for name, needs in zip(o.moved, needed[5 + count :], strict=True) if needs)
        by_moved: dict[str, Any] = {}
        if of_moved:
            found = gradients(o._replace(grads=of_moved, moved=()), q, k, v, out, lse, dout, dlse, *tensors)
            by_moved = dict(zip(of_moved, found, strict=True))
        found = ()
        if o.grads:
            found = second_order(o, q, k, v, out, lse, dout, dlse, moved_out, moved_lse, *tensors, *tangents)
        dq, dk, dv, *others = _in_places(o, found)
        return (None, dq, dk, dv, None, None, *others, *(by_moved.get(name) for name in o.moved))

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> None:
        raise not_served("forward mode of forward mode", "torch.func.hessian or jacfwd(jacrev(f))")


class _SecondOrder(torch.autograd.Function):
    """`o.grads` of <dout, out'> + <dlse, lse'>: of `q, k, v, out, lse, dout, dlse, out', lse'`, the call's tensors and
    the tangents.
    """

    @staticmethod
    def forward(ctx: Any, o: CallOptions, *tensors: Any) -> Results:
        return _run("second_order", o, *tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise not_served("third derivatives", "two")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise not_served("third derivatives", "two")


class _Statistics(torch.autograd.Function):
    """The statistics of `q, k, v, lse` and the call's tensors; `lse` gets no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, o: CallOptions, *tensors: Any) -> Results:
        found = _run("statistics", o, *tensors)
        ctx.names = tuple(name for name in o.options["return_aux"] if name != "lse")
        for name, x in zip(ctx.names, found, strict=True):
            if name == "max_logits":
                ctx.mark_non_differentiable(x)
        ctx.o = o if o.below is None else o._replace(below=None)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[Any, ...]:
        needed = list(ctx.needs_input_grad[1:])
        q, k, v, lse, *tensors = ctx.saved_tensors
        by_name = dict(zip(ctx.names, incoming, strict=True))
        given = [by_name.get(name) for name in SMOOTH_STATISTICS]
        _refuse_batches(*given)
        o = _derived(ctx.o, (*needed[:2], False, *needed[4:]))
        if not o.grads or all(x is None for x in given):
            return (None,) * (1 + len(needed))
        found = _apply("statistics_gradients", o, q, k, v, lse, *given, *tensors)
        dq, dk, _, *others = _in_places(o, found)
        return (None, dq, dk, None, None, *others)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise not_served("forward-mode derivatives of statistics", "their gradients")


class _StatisticsGradients(torch.autograd.Function):
    """`o.grads` of `q, k, v, lse`, the gradients by statistics, and the call's tensors."""

    @staticmethod
    def forward(ctx: Any, o: CallOptions, *tensors: Any) -> Results:
        return _run("statistics_gradients", o, *tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise not_served("second derivatives of statistics", "their gradients")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise not_served("second derivatives of statistics", "their gradients")


def not_served(what: str, instead: str) -> Unsupported:
    return Unsupported("any", f"there are no {what}", f"take {instead}, or torch's own attention (its math backend)")


def _run(which: str, o: CallOptions, *tensors: Any) -> Results:
    """One of the three derivatives, without being differentiated again."""
    if o.below is not None:
        return tuple(o.below())
    if _is_operator(tensors[0]):
        from . import derivative_ops  # it imports this module

        return derivative_ops.derivative(which, o, *tensors)
    return eager(which)(o, *tensors)


def eager(which: str) -> Callable[..., Results]:
    """The function that computes one of FUNCTIONS without being traced."""
    if which.startswith("statistics"):
        from . import statistics  # few processes need it

        return getattr(statistics, which)
    return getattr(autograd, which)


def _is_operator(q: Any) -> bool:
    return is_traced() or is_wrapper(q) or q.is_meta


FUNCTIONS: dict[str, type[torch.autograd.Function]] = {
    "attention": _Attention,
    "varlen_attention": _Attention,
    "gradients": _Gradients,
    "tangent": _Tangent,
    "second_order": _SecondOrder,
    "statistics": _Statistics,
    "statistics_gradients": _StatisticsGradients,
}


def _apply(which: str, o: CallOptions, *tensors: Any) -> Results:
    if _is_operator(tensors[0]):  # which applies the function by itself
        return _run(which, o, *tensors)
    function = FUNCTIONS[which].apply if torch.is_grad_enabled() or in_forward_mode() else eager(which)
    found: Results = function(o, *tensors)
    return found


gradients = partial(_apply, "gradients")
tangent = partial(_apply, "tangent")
second_order = partial(_apply, "second_order")
