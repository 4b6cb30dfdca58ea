"""The call cache: a call that was made before is launched without checks or a plan.

Checking and planning take tens of microseconds, a small decode call less than that. A call is remembered by everything
that a check or a plan could depend on (`key_of`): the options that were given, with their types, and the properties of
all tensors. The values inside lengths and tables are not in it: they are checked each time, where `validate` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, get_num_threads, is_grad_enabled
from torch.autograd import forward_ad

from ..core.plan import Plan
from ..core.tensors import Tensors
from ..quantised import Quantised
from ..signatures import UNSET
from ..state import AttentionState
from ..validation import values
from ..validation.calls import Call
from ..validation.memory import extent
from . import activity, planner

MOST = 4096  # remembered calls
Key = tuple[Any, ...]
Launcher = Callable[..., Any]  # of the tensors in the order of FIELDS, None for those that a call does not have

FIELDS = tuple(f.name for f in fields(Tensors) if f.name != "tile_map")
INPUTS = tuple(name for name in FIELDS if name not in ("out", "lse"))
ARGUMENTS = {  # what the tensors that are no options are in `Tensors`
    "attention": ("q", "k", "v"),
    "varlen_attention": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "paged_attention": ("q", "k", "v", "block_table", "kv_lengths"),
    "pair": ("q", "k", "v", "block_table", "kv_lengths", "cu_seqlens_q"),  # and what is shared: `pairs.py`
}
SCALARS = frozenset({type(None), bool, int, float, str})

_known: dict[Key | None, Any] = {}  # a CachedCall, or what else is kept by such a key
find = _known.get


def key_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Key | None:
    """What a call of an entry point is remembered by; None if it has to be checked each time.

    Strides follow from the shape of a contiguous tensor (but those of dims of size 1, which nobody steps along), and
    that it is one is asked for and hashed in half the time. The backends for GPUs care whether all is aligned.
    """
    if forward_ad._current_level >= 0:
        return None
    key = [name, get_num_threads()]
    given = [*args]
    for option, x in options.items():
        if type(x) in SCALARS or isinstance(x, float):
            if x is not None or option not in UNSET.get(name, ()):
                key += option, type(x), x  # 1, 1.0 and True are equal, but not one option
        elif type(x) is tuple and SCALARS.issuperset(map(type, x)):
            key += option, (*map(type, x), *x)
        else:
            key.append(option)
            given.append(x)
    grad, first, addresses = is_grad_enabled(), len(key), 0
    try:
        for x in given:
            if type(x) is Tensor:
                if grad and x.requires_grad:
                    return None
                if x.is_cpu:
                    key += x.shape, x.is_contiguous() or x.stride(), x.dtype, True
                else:
                    key += x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device
                    addresses |= x.data_ptr()
            elif type(x) is Quantised:
                key += x.dtype, x.group
                given += (x.data,) if x.scales is None else (x.data, x.scales)
            else:
                return None
        # Nine further is whether V is contiguous, if nothing is quantised. If not, it may lie in K: `is_v_in_k`.
        if key[first + 9] is not True:
            k, v = args[1:3]
            if type(k) is type(v) is Tensor:
                key.append(k.data_ptr() == v.data_ptr())
            elif type(k) is type(v) is Quantised:
                key.append(_addresses(k) == _addresses(v))
    except RuntimeError:  # a nested or sparse tensor has no shape, strides or address: the checks will say so
        return None
    key.append(addresses & 15)
    return tuple(key)


def _addresses(x: Quantised) -> list[int]:
    return [part.data_ptr() for part in (x.data, x.scales) if part is not None]


class CachedCall:
    """One remembered call."""

    __slots__ = (
        "checks_tables", "count", "launch", "like_q", "lse_shape", "places", "problem", "shape", "sizes", "stored",
        "validate",
    )  # fmt: skip

    def __init__(
        self, call: Call, plan: Plan, launch: Launcher, places: list[Any], stored: bool, validate: bool | None
    ) -> None:
        self.launch, self.problem, self.count = launch, call.problem, activity.counter(plan)
        self.shape = tuple(call.out.shape)
        self.lse_shape = None if call.lse is None else tuple(call.lse.shape)
        self.like_q = False
        self.places: list[Any] | None = places  # where each of INPUTS is given; None if q, k and v are all there is
        self.sizes: list[int] | None = None  # of a given out, and of the inputs, in bytes
        self.stored = stored  # whether keys or values are quantised
        self.validate = validate
        self.checks_tables = getattr(launch, "checks_tables", False)

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any], *more: Any) -> torch.Tensor | AttentionState:
        q = args[0]
        if self.sizes is not None:
            out = options["out"]
        else:
            out = torch.empty_like(q) if self.like_q else q.new_empty(self.shape)  # 0.9 and 1.5 us
        lse = None if self.lse_shape is None else q.new_empty(self.lse_shape, dtype=torch.float32)
        if self.places is None:
            self.launch(*args, out, lse)
        else:
            flat = _split(args) if self.stored else args
            given: list[Any] = [
                None if at is None else flat[at] if type(at) is int else options[at] for at in self.places
            ]
            if self.validate is not False and not self.checks_tables:
                values.check_tables(self.problem, given[1].shape[0], self.validate, *given[-5:])
                values.check_indices(self.problem, given[-6], self.validate)
            if self.sizes is not None:
                self.check_apart(out, given)
            done = self.launch(*given[:3], out, lse, *given[3:], *more)
            if self.checks_tables and not done:  # in words
                values.check_tables(self.problem, given[1].shape[0], True, *given[-5:])
        self.count()
        return out if lse is None else AttentionState(out, lse)

    def bound(self, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None] | None:
        """This call for other `q, k, v, out` of the same kind, its options and tables bound; None if that is not all
        that may differ. That `out` lies apart is then the caller's to know."""
        if self.sizes is None or self.lse_shape is not None or self.stored or self.places is None:
            return None
        if not (self.checks_tables or self.validate is False):
            return None
        rest = [None if at is None else args[at] if type(at) is int else options[at] for at in self.places[3:]]
        launch, count, checks = self.launch, self.count, self.checks_tables

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            if not launch(q, k, v, out, None, *rest) and checks:
                values.check_tables(self.problem, k.shape[0], True, *rest[-5:])
            count()

        return call

    def check_apart(self, out: torch.Tensor, inputs: list[Any]) -> None:
        """What is written is nothing that is read; the checks of a call say it in words."""
        assert self.sizes is not None
        start, (size, *sizes) = out.data_ptr(), self.sizes
        for x, its in zip(inputs, sizes, strict=True):
            if x is not None and x.data_ptr() < start + size and start < x.data_ptr() + its:
                raise RuntimeError("out shares memory with an input")


def bound(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None] | None:
    """A call that has been made, if it is remembered: see `CachedCall.bound`."""
    cached = find(key_of(name, args, options))
    return None if cached is None else cached.bound(args, options)


def _split(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the data of quantised keys and values in their place, and the scales at the end."""
    q, k, v, *tables = args
    parts = [(x.data, x.scales) if type(x) is Quantised else (x, None) for x in (k, v)]
    return (q, parts[0][0], parts[1][0], *tables, parts[0][1], parts[1][1])


def remember(
    key: Key | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
    call: Call,
    plan: Plan,
    run: Callable[..., None] | None = None,
) -> None:
    """Keeps a call that has just run, if nothing in it was copied or converted. `run` is as a backend's."""
    if key is None or call.problem.is_empty or call.problem.rules.affine == "rows":  # `places` is made for the call
        return
    t, validate, flat = call.tensors, options.get("validate"), _split(args)
    if t.positions is not None and values.readable(t.positions, validate):
        return  # they are checked each time
    for longest, cu in (("max_q", t.cu_seqlens_q), ("max_k", t.cu_seqlens_k)):
        if cu is not None and options.get(longest) is None and values.readable(cu, validate):
            return  # the plan is for the longest sequence that was found
    at: dict[str, int | str] = {name: i for i, name in enumerate(ARGUMENTS[key[0]])}
    at |= {name: len(args) + i for i, name in enumerate(("k_scales", "v_scales")) if flat[len(args) + i] is not None}
    at |= {name: name for name in INPUTS if isinstance(options.get(name), torch.Tensor)}
    if options.get("block_indices") is not None:
        at["key_indices"] = "block_indices"
    given = {name: flat[i] if isinstance(i, int) else options[i] for name, i in at.items()}
    if options.get("out") is not None:
        given["out"] = options["out"]
    for name, x in given.items():
        used = getattr(t, name)
        if used.dtype != x.dtype or used.data_ptr() != x.data_ptr():
            return
        if not name.endswith("scales") and (x.shape[-1] == 1 or x.stride(-1) != 1) and x.is_floating_point():
            return  # it would have the key of a view that torch negates: `z.conj().imag`
    launch = None
    if run is None:
        backend = planner.load(plan.backend)
        run = backend.run
        launch = backend.bind(plan, t) if hasattr(backend, "bind") else None
    if launch is None:
        launch = _through_run(run, plan, t, {**given, "out": call.out, "lse": call.lse})
    tables = (t.key_indices, t.kv_lengths, t.q_offset, t.cu_seqlens_q, t.cu_seqlens_k, t.block_table)
    if not any(x is not None and values.readable(x, validate) for x in tables):
        validate = False
    places = [at.get(name) for name in INPUTS]
    while validate is False and places[-1] is None and not getattr(launch, "checks_tables", False):
        places.pop()  # a launch is not given what comes last and is not there
    stored = Quantised in map(type, args[1:3])
    cached = CachedCall(call, plan, launch, places, stored, validate)
    if "out" in given:
        there = [given.get(name) for name in ("out", *INPUTS[: len(places)])]
        cached.sizes = [0 if x is None else extent(x)[1] - x.data_ptr() for x in there]
    elif len(places) == 3 and not stored:
        cached.places = None
    cached.like_q = args[0].shape == call.out.shape and args[0].is_contiguous()
    keep(key, cached)


def keep(key: Key, cached: Any) -> None:
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = cached


def _through_run(run: Callable[..., None], plan: Plan, t: Tensors, given: dict[str, Any]) -> Launcher:
    """A launch by views of other tensors that are as those of `t`, for what a backend cannot launch by addresses."""
    views: list[Any] = []
    for name in FIELDS:
        x: Any = given.get(name)
        view = getattr(t, name)
        same = view is None or (x.shape, x.stride()) == (view.shape, view.stride())
        views.append(None if same else (view.shape, view.stride()))

    def launch(*tensors: Any) -> None:
        seen = [x if view is None else x.as_strided(*view) for x, view in zip(tensors, views, strict=False)]
        run(plan, Tensors(*seen), *tensors[len(views) :])

    return launch


def forget() -> None:
    """Forgets every call; plans are kept by the planner."""
    _known.clear()
