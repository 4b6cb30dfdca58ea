"""The call cache: a repeated call is launched without validation and planning.

Those two take longer than a small decode call. The key (`key_of`) holds all that they may depend on: the options given,
with their types, and shape, strides, dtype and device of every tensor. Values inside lengths and tables are not part of
it: they are checked on every call, as far as `validate` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, get_num_threads, is_grad_enabled

from ..core.expression.mods import Bound
from ..core.plan import Plan
from ..core.private.torch import forward_enabled, forward_level
from ..core.signatures import UNSET
from ..core.tensors import FIELDS, INPUTS, TABLES, Tensors
from ..quantised import Quantised
from ..state import AttentionState
from ..validation import values
from ..validation.calls import Call
from ..validation.memory import extent
from . import activity, planner, proofs

MOST = 4096  # entries; the cache is cleared when it is full
Key = tuple[Any, ...]
Launcher = Callable[..., Any]  # takes the tensors in the order of FIELDS, None for those that a call does not have
View = tuple[torch.Size, tuple[int, ...]]  # shape and strides

ARGUMENTS = {  # the fields of `Tensors` that an entry point's positional arguments become
    "attention": ("q", "k", "v"),
    "varlen_attention": ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    "paged_attention": ("q", "k", "v", "block_table", "kv_lengths"),
    "cascade": ("q", "k", "v", "block_table", "kv_lengths", "cu_seqlens_q"),  # then the shared prefix: `cascade.py`
}
KEY_INDICES = INPUTS.index("key_indices")
LAST_TABLES = slice(-len(TABLES), None)  # where TABLES are in a list of inputs
TENSOR_ENTRIES = 4  # of a tensor in a key: shape, whether it is contiguous or its strides, dtype, device
V_CONTIGUOUS = 2 * TENSOR_ENTRIES + 1  # where V, after q and K, has the second of these
SCALARS = frozenset({type(None), bool, int, float, str})

_known: dict[Key | None, Any] = {}  # to a CachedCall or a CachedBackward; nothing is kept under None
find = _known.get


def key_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Key | None:
    """The cache key of a call of an entry point; None if the call must be validated each time.

    A contiguous tensor has no strides in the key, since they follow from its shape: `is_contiguous` is faster to ask
    for and to hash. (Strides of dims of size 1 do not follow, but nothing uses them.) For GPUs the key says whether all
    addresses are multiples of 16.
    """
    if forward_level() >= 0 and forward_enabled():
        return None
    key = [name, get_num_threads()]
    tensors = [*args]
    for option, x in options.items():
        if type(x) in SCALARS or isinstance(x, float):
            if x is not None or option not in UNSET.get(name, ()):
                key += option, type(x), x  # 1, 1.0 and True are equal, but not the same option
        elif type(x) is tuple and SCALARS.issuperset(map(type, x)):
            key += option, (*map(type, x), *x)
        elif type(x) is Bound:
            if is_grad_enabled() and x.needing_grad():
                return None
            key += option, x.mods
            tensors += [y.detach() for y in x.tensors] if any(y.requires_grad for y in x.tensors) else x.tensors
        else:
            key.append(option)
            tensors.append(x)
    grad, first, addresses = is_grad_enabled(), len(key), 0
    try:
        for x in tensors:
            if type(x) is Tensor:
                if (grad and x.requires_grad) or x.is_neg():  # torch negates such a view when it is read
                    return None
                if x.is_cpu:
                    key += x.shape, x.is_contiguous() or x.stride(), x.dtype, True
                else:
                    key += x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device
                    addresses |= x.data_ptr()
            elif type(x) is Quantised:
                key += x.dtype, x.group
                tensors += (x.data,) if x.scales is None else (x.data, x.scales)
            else:
                return None
        # Whether V is a view of K (`is_v_in_k`), which it cannot be if it is contiguous.
        k, v = args[1], args[2]
        if type(v) is Quantised:
            key.append(type(k) is Quantised and not v.data.is_contiguous() and _addresses(k) == _addresses(v))
        elif key[first + V_CONTIGUOUS] is not True and type(k) is Tensor:
            key.append(k.data_ptr() == v.data_ptr())
    except RuntimeError:  # a nested or sparse tensor has no shape, strides or address: the checks will say so
        return None
    key.append(addresses & 15)
    return tuple(key)


def _addresses(x: Quantised) -> list[int]:
    return [part.data_ptr() for part in (x.data, x.scales) if part is not None]


class CachedCall:
    """One repeated call: launches its plan on other tensors of the same key."""

    __slots__ = (
        "captures", "checks_tables", "count", "extents", "launch", "lse_dtype", "lse_shape", "out_like_q", "out_shape",
        "problem", "quantised", "sources", "validate",
    )  # fmt: skip

    def __init__(
        self, call: Call, plan: Plan, launch: Launcher, sources: list[Any], quantised: bool, validate: bool | None
    ) -> None:
        self.launch, self.problem, self.count = launch, call.problem, activity.counter(plan)
        self.out_shape = tuple(call.out.shape)
        self.lse_shape = None if call.lse is None else tuple(call.lse.shape)
        self.lse_dtype = None if call.lse is None else call.lse.dtype
        self.out_like_q = False
        # Where each of INPUTS comes from: an index into the arguments, the name of an option, or None if the call has
        # none. None for all: the inputs are q, k and v alone.
        self.sources: list[Any] | None = sources
        self.extents: list[int] | None = None  # bytes spanned by the caller's `out` and each input, if `out` is given
        self.quantised = quantised  # K or V
        self.validate = validate
        self.captures = call.problem.mods is not None
        self.checks_tables = getattr(launch, "checks_tables", False)

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any], *more: Any) -> torch.Tensor | AttentionState:
        q = args[0]
        if self.extents is not None:
            out = options["out"]
        else:
            out = torch.empty_like(q) if self.out_like_q else q.new_empty(self.out_shape)  # the first is faster
        lse = None if self.lse_shape is None else q.new_empty(self.lse_shape, dtype=self.lse_dtype)
        if self.sources is None:
            self.launch(*args, out, lse)
        else:
            flat = _split(args) if self.quantised else args
            inputs: list[Any] = [
                None if at is None else flat[at] if type(at) is int else options[at] for at in self.sources
            ]
            if self.validate is not False:
                if not self.checks_tables:
                    values.check_tables(self.problem, inputs[1].shape[0], self.validate, *inputs[LAST_TABLES])
                if inputs[KEY_INDICES] is not None:
                    values.check_indices(self.problem, inputs[KEY_INDICES], self.validate)
            if self.extents is not None:
                self.check_apart(out, inputs)
            if self.captures:
                more = (options["score_mod"].tensors, *more)
            done = self.launch(*inputs[:3], out, lse, *inputs[3:], *more)
            if self.checks_tables and not done:
                self.refuse_tables(inputs[1].shape[0], inputs[LAST_TABLES])
        self.count()
        return out if lse is None else AttentionState(out, lse)

    def bound(self, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None] | None:
        """A function of `q, k, v, out` that makes this call with its options and tables fixed; None if it needs more.

        The caller makes sure that `out` shares no memory with the inputs.
        """
        if (
            self.extents is None
            or self.lse_shape is not None
            or self.quantised
            or self.sources is None
            or self.captures
        ):
            return None
        if not (self.checks_tables or self.validate is False):
            return None
        others = [None if at is None else args[at] if type(at) is int else options[at] for at in self.sources[3:]]
        launch, count, checks = self.launch, self.count, self.checks_tables

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            if not launch(q, k, v, out, None, *others) and checks:
                self.refuse_tables(k.shape[0], others[LAST_TABLES])
            count()

        return call

    def refuse_tables(self, pages: int, tables: list[Any]) -> None:
        """Raises the error of a table in which the kernel found a wrong entry."""
        values.check_tables(self.problem, pages, True, *tables)
        raise RuntimeError("a kernel refused lengths, offsets or a block table that pass the checks")

    def check_apart(self, out: torch.Tensor, inputs: list[Any]) -> None:
        """Raises if `out` shares memory with an input; `api._call` then validates the call, which names the input."""
        assert self.extents is not None
        start, (size, *sizes) = out.data_ptr(), self.extents
        for x, its_size in zip(inputs, sizes, strict=True):
            if x is not None and x.data_ptr() < start + size and start < x.data_ptr() + its_size:
                raise RuntimeError("out shares memory with an input")


def bound(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None] | None:
    """`CachedCall.bound` of a call that is in the cache; None if it is not."""
    cached = find(key_of(name, args, options))
    return None if cached is None else cached.bound(args, options)


def _split(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with quantised K and V replaced by their data, and their scales (or None) appended."""
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
    """Puts a call that has just run into the cache, unless validation copied, converted or read something for it.

    `run` replaces that of the plan's backend (`cascade.py`).
    """
    t, validate = call.tensors, options.get("validate")
    if key is None or call.problem.is_empty or _depends_on_values(call, options):
        return
    if call.problem.mods is not None and options.get("out") is not None:  # it may overlap what is captured
        return
    sources, given = _sources(key[0], args, options)
    if not all(same_memory(getattr(t, name), x, name) for name, x in given.items()):
        return
    launch = None
    if run is None:
        run, bind = planner.load(plan.backend).run, planner.optional(plan.backend, "bind")
        launch = None if bind is None else bind(plan, t)
    if launch is None:
        launch = _through_run(run, plan, t, {**given, "out": call.out, "lse": call.lse})
    if not any(x is not None and values.readable(x, validate) for x in (t.key_indices, *t.tables())):
        validate = False
    places = [sources.get(name) for name in INPUTS]
    # A launch needs no trailing inputs that the call does not have, unless captured tensors follow.
    while (
        validate is False
        and places[-1] is None
        and call.problem.mods is None
        and not getattr(launch, "checks_tables", False)
    ):
        places.pop()
    quantised = Quantised in map(type, args[1:3])
    cached = CachedCall(call, plan, launch, places, quantised, validate)
    if "out" in given:
        spanned = [given.get(name) for name in ("out", *INPUTS[: len(places)])]
        cached.extents = [0 if x is None else extent(x)[1] - x.data_ptr() for x in spanned]
    elif len(places) == 3 and not quantised:  # never with captured tensors
        cached.sources = None
    cached.out_like_q = args[0].shape == call.out.shape and args[0].is_contiguous()
    keep(key, cached)


def _depends_on_values(call: Call, options: dict[str, Any]) -> bool:
    """Whether validation read values, or made a tensor of them, that another call with the same key may not have."""
    t, validate = call.tensors, options.get("validate")
    if call.problem.rules.affine == "rows":  # `t.places` was made for this call
        return True
    if t.positions is not None and values.readable(t.positions, validate):  # they are checked each time
        return True
    # Without max_q and max_k the plan is for the longest sequence that the offsets have.
    packed = (("max_q", t.cu_seqlens_q), ("max_k", t.cu_seqlens_k))
    return any(cu is not None and options.get(most) is None and values.readable(cu, validate) for most, cu in packed)


def _sources(
    name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[dict[str, int | str], dict[str, torch.Tensor]]:
    """Where the inputs of a call of the entry point `name` come from, as in `CachedCall.sources` but by name; and the
    caller's tensors themselves, with `out` if it is given.
    """
    flat = _split(args)
    at: dict[str, int | str] = {name: i for i, name in enumerate(ARGUMENTS[name])}
    at |= {name: len(args) + i for i, name in enumerate(("k_scales", "v_scales")) if flat[len(args) + i] is not None}
    at |= {name: name for name in INPUTS if isinstance(options.get(name), torch.Tensor)}
    if options.get("block_indices") is not None:
        at["key_indices"] = "block_indices"
    given = {name: flat[i] if isinstance(i, int) else options[i] for name, i in at.items()}
    if options.get("out") is not None:
        given["out"] = options["out"]
    return at, given


def same_memory(used: torch.Tensor, given: torch.Tensor, name: str) -> bool:
    """Whether validation made nothing but a view of an argument, so that it would do so for any other with its key."""
    return used.dtype == given.dtype and used.data_ptr() == given.data_ptr()


def view_of(used: torch.Tensor, given: torch.Tensor) -> View | None:
    """Shape and strides of the view that validation made of an argument; None if they are the argument's own."""
    return None if (used.shape, used.stride()) == (given.shape, given.stride()) else (used.shape, used.stride())


def keep(key: Key, cached: Any) -> None:
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = cached


def _through_run(run: Callable[..., None], plan: Plan, t: Tensors, given: dict[str, Any]) -> Launcher:
    """A launch by the backend's `run`, for calls that it cannot `bind`: other tensors get the views of those in `t`."""
    fields = {name: getattr(t, name) for name in FIELDS}
    views = [None if x is None else view_of(x, given[name]) for name, x in fields.items()]

    def launch(*tensors: Any) -> None:
        viewed = [x if view is None else x.as_strided(*view) for x, view in zip(tensors, views, strict=False)]
        more = tensors[len(views) :]
        if plan.problem.mods is not None:
            captured, *more = more  # type: ignore[assignment]
            viewed += None, captured  # without a tile map
        run(plan, Tensors(*viewed), *more)

    return launch


def forget() -> None:
    """Empties the call cache; the planner keeps its plans."""
    _known.clear()


proofs.forgetters.append(forget)
