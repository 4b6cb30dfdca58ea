"""`return_aux`: what the softmax of a call knew. The call runs first, for `out` and `lse`; its statistics are a pass of
their own over queries and keys, which torch can differentiate and trace by itself: `differentiation.py` has it as a
function, `statistics_ops.py` as operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import autograd
from .core.arrays import converter_back, to_tensor
from .core.options import STATISTICS, Options
from .core.problem import SMOOTH_STATISTICS
from .core.tensors import Statistics
from .core.tracing import is_traced
from .dispatch import activity, planner
from .errors import InvalidArgument
from .state import Aux
from .validation import calls, meta
from .validation.backward import backward, in_layout
from .validation.calls import Call
from .validation.statistics import NEEDS, as_names

if TYPE_CHECKING:
    from .differentiation import CallOptions, Results

WITHOUT = ("out", "split_size", "dropout_p", "dropout_seed")  # statistics are those before dropout
CHECKS: dict[str, Callable[..., Call]] = {
    "attention": calls.dense,
    "varlen_attention": calls.varlen,
    "paged_attention": calls.paged,
}


def call(name: str, args: tuple[Any, ...], options: dict[str, Any], kind: str) -> tuple[Any, Aux]:
    """A call of an entry point with `return_aux`. `kind`: whether torch traces it ("operator"), differentiates it
    ("gradients") or neither ("").
    """
    from . import api, differentiation, statistics_ops  # they import this module

    names = as_names(Options(**options))
    if kind == "gradients" and set(names) - {"lse"} and differentiation.any_tangent((*args, *options.values())):
        raise differentiation.not_served("forward-mode derivatives of statistics", "their gradients")
    given = {option: options.pop(option) for option in STATISTICS if option in options}
    given["return_aux"] = names
    if options.pop("return_lse", False):
        raise InvalidArgument("return_lse", "True beside return_aux", "one of them", "return_aux=('lse',)")
    wanted = tuple(x for x in names if x != "lse")
    own = {option: x for option, x in options.items() if option not in WITHOUT} | given
    checked = _checked(name, args, own) if wanted and not kind else None  # before `out` is written
    if kind == "operator" and not is_traced() and meta.is_meta(args[0]):
        api.check_meta(name, CHECKS[name], args, own)
    state: Any = getattr(api, name)(*args, **options, return_lse=True)
    lse = (state.lse if isinstance(state.lse, torch.Tensor) else to_tensor("lse", state.lse)).detach()
    results: Results = ()
    if checked is not None:
        results = _finish(checked, lse, own)
    elif wanted and kind == "operator":
        results = statistics_ops.traced(name, args, lse, own)
    elif wanted:
        results = differentiation.statistics_of(name, args, lse, own)
    back = converter_back(args[0])
    by_name = dict(zip(wanted, map(back, results), strict=True))
    return state.out, Aux(**by_name, **({"lse": state.lse} if "lse" in names else {}))


def run(name: str, args: tuple[Any, ...], lse: torch.Tensor, options: dict[str, Any]) -> Results:
    """The statistics of a call whose `lse` is known, in the order of `NAMES`."""
    with torch.no_grad():
        return _finish(_checked(name, args, options), lse, options)


def _checked(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Call:
    return CHECKS[name](*args, Options(**options))


def _finish(call: Call, lse: torch.Tensor, options: dict[str, Any]) -> Results:
    """Computes the statistics of a checked call."""
    assert call.requested is not None
    p, found = call.problem, call.requested.statistics
    call.tensors.lse = in_layout(lse, p.packed_q, options.get("layout", "bhld"), common=True)
    if p.is_empty:
        found.clear()
    else:
        plan, run_statistics = planner.statistics(p, options.get("backend"))
        run_statistics(plan, call.tensors, found)
        activity.ran(plan)
    return tuple(call.requested.results.values())


def statistics(o: CallOptions, q: Any, k: Any, v: Any, lse: Any, *tensors: Any) -> Results:
    """`run`, as torch differentiates it."""
    options = o.with_tensors(tensors)
    name = "varlen_attention" if "cu_seqlens_q" in o.tensor_names else "attention"
    tables = [options.pop(table) for table in autograd.TABLES[name]]
    return run(name, (q, k, v, *tables), lse, options)


def statistics_gradients(o: CallOptions, q: Any, k: Any, v: Any, lse: Any, *more: Any) -> Results:
    """The gradients `o.grads` by those of SMOOTH_STATISTICS, which come first in `more`, None where there is none; then
    come the call's tensors.
    """
    count = len(SMOOTH_STATISTICS)
    given, tensors = dict(zip(SMOOTH_STATISTICS, more[:count], strict=True)), more[count:]
    arguments = {"q": q, "k": k, "v": v} | o.with_tensors(tensors)
    with torch.no_grad():
        options = {name: x for name, x in arguments.items() if name not in autograd.ARGUMENTS}
        options["return_aux"] = tuple(name for name, x in given.items() if x is not None)
        for option, name in NEEDS.items():
            if given[name] is None:
                options.pop(option, None)
        forward, checked_options = autograd._checked_forward(q, k, v, None, options)
        assert forward.requested is not None
        none = torch.zeros((), dtype=forward.out.dtype, device=forward.out.device).expand(forward.out.shape)
        checked = backward(forward, checked_options, lse, none, None, o.grads)
        if checked.problem.is_empty:
            checked.write_empty()
        else:
            incoming = forward.requested.statistics
            _copy_into(incoming, forward.requested.results, given)
            plan, run_gradients = planner.statistics(
                checked.problem, o.options.get("backend"), "run_statistics_gradients"
            )
            run_gradients(plan, checked.tensors, incoming)
            activity.ran(plan)
        by_name = autograd._results(checked, arguments)
        return tuple(by_name[name] for name in o.grads)


def _copy_into(incoming: Statistics, results: dict[str, torch.Tensor], given: dict[str, Any]) -> None:
    """The gradients by statistics, in the memory and the form of those."""
    for name, x in results.items():
        x.copy_(given[name])
