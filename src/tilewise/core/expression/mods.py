"""The functions of a call: `Mods`, what they compute, and `Bound`, that with the tensors they capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from ...errors import InvalidArgument
from ..eager import eager_function
from .build import const, make
from .captures import Captures
from .derivative import derivatives
from .node import Node, in_order, load, source
from .text import from_text, rebuilt, renumbered, to_text

NARROW = 2**31  # bytes of a tensor whose offsets fit in 32 bits
MOST = 4096  # traces; they are forgotten when there are more
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool")
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Mods:
    """What the functions of a call compute; equal ones are one object. It has no tensors, only their declarations."""

    def __init__(self, text: str) -> None:
        (self.score, self.mask), self.tensors = from_text(text)
        self.text = text  # parses back: the key of kernels, and the form in other processes

    def __reduce__(self) -> tuple[Any, ...]:
        return (mods_of, (self.text,))

    def __copy__(self) -> Mods:
        return self

    def __deepcopy__(self, memo: Any) -> Mods:
        return self

    def __repr__(self) -> str:
        return f"Mods({self.text!r})"

    @property
    def described(self) -> str:
        return " and ".join(["score_mod"] * (self.score is not None) + ["mask_mod"] * (self.mask is not None))

    @cached_property
    def by_score(self) -> Node | None:
        """The derivative of the score by the score it was given; None if it is 1, or there is no score_mod."""
        if self.score is None or self.score is source("s"):
            return None
        slope = derivatives(self.score).get(source("s"), const(0.0))
        return None if slope is const(1.0) else slope

    @cached_property
    def by_loads(self) -> dict[Node, Node]:
        """The derivatives of the score by the elements that it loads: `{load: derivative}`."""
        if self.score is None:
            return {}
        return {x: d for x, d in derivatives(self.score).items() if x.op == "load"}

    @property
    def of_score(self) -> int:
        """How many of the tensors, the first ones, score_mod captures; the rest is mask_mod's."""
        loads = () if self.mask is None else (x for x in in_order(self.mask) if x.op == "load")
        return min((int(x.args[0]) for x in loads), default=len(self.tensors))  # type: ignore[arg-type]

    @cached_property
    def mask_alone(self) -> Mods | None:
        """The mask_mod without the score_mod beside it; None if there is none."""
        if self.mask is None or self.score is None:
            return None if self.mask is None else self
        first = self.of_score
        numbers = {n: n - first for n in range(first, len(self.tensors))}
        return mods_of(to_text((None, renumbered(self.mask, numbers)), self.tensors[first:]))

    @cached_property
    def without_mask(self) -> Mods:
        """The score_mod without the mask_mod beside it, over the same tensors."""
        return mods_of(to_text((self.score, None), self.tensors))

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the captured tensors that the score depends on smoothly."""
        return tuple(sorted({int(x.args[0]) for x in self.by_loads}))  # type: ignore[arg-type]


@lru_cache(maxsize=MOST)
def mods_of(text: str) -> Mods:
    return Mods(text)


@lru_cache(maxsize=MOST)
def placed(mods: Mods, first_head: int, rows: bool) -> Mods:
    """The functions for a part of a call: heads from `first_head` on, and with `rows` for some of its sequences, whose
    numbers are one more captured tensor, int32 `[B]`, if the functions depend on them.
    """
    roots = mods.score, mods.mask
    used = frozenset().union(*(root.inputs for root in roots if root is not None))
    tensors, new = list(mods.tensors), {source("h"): make("add", source("h"), first_head)}
    if rows and "b" in used:
        new[source("b")] = load(len(tensors), [source("b")], "int")
        tensors.append(("int32", 1))
    return mods_of(to_text((None if root is None else rebuilt(root, new) for root in roots), tensors))


@lru_cache(maxsize=MOST)
def with_rows(mods: Mods) -> Mods:
    """The functions with an element added to the scores of each row: of three more captured tensors, float32
    `[B, H, Lq]`, the position of the first query of each sequence and the stride of queries, int32 `[B]`.
    """
    number, b = len(mods.tensors), source("b")
    start, stride = (load(number + n, [b], "int") for n in (1, 2))
    row = load(number, [b, source("h"), make("floordiv", make("sub", source("q"), start), stride)], "float")
    score = make("add", source("s") if mods.score is None else mods.score, row)
    return mods_of(to_text((score, mods.mask), [*mods.tensors, ("float32", 3), ("int32", 1), ("int32", 1)]))


def is_wide(captured: Sequence[torch.Tensor]) -> bool:
    """Whether an offset in one of these tensors takes more than 32 bits."""
    return any(
        x.element_size() * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))) > NARROW
        or x.numel() > NARROW  # of one that is expanded
        for x in captured
    )


class Bound(NamedTuple):
    """The functions of a call as its options hold them once they are traced: what `score_mod=` becomes."""

    mods: Mods
    tensors: tuple[torch.Tensor, ...]

    def needing_grad(self) -> tuple[int, ...]:
        """The numbers of the tensors whose gradients are needed."""
        return tuple(n for n in self.mods.differentiable if self.tensors[n].requires_grad)


@dataclass(frozen=True, eq=False)
class _Known:
    """A trace, and where its tensors come from: the number among the function's captures, `~number` if the function
    detaches it, or the tensor itself.
    """

    root: Node
    sources: tuple[int | torch.Tensor, ...]
    kept: bool = False  # in `_known`

    def tensors(self, captured: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
        return tuple([_on(x, device) if isinstance(x, torch.Tensor) else captured[x] if x >= 0
                      else captured[~x].detach() for x in self.sources])  # fmt: skip


def _on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x if x.device == device else x.to(device)


_known: dict[tuple[Any, ...], _Known] = {}
_pairs: dict[tuple[_Known | None, _Known | None], Mods] = {}


def bind(score_mod: Any, mask_mod: Any, device: torch.device) -> Bound | None:
    """The functions of a call, traced or found by what they capture; None if there are none.

    A score_mod that returns the score, or a mask_mod that hides nothing, is none.
    """
    if type(score_mod) is Bound:
        if mask_mod is None:
            return score_mod
        raise InvalidArgument("mask_mod", "a function beside traced ones", "None")
    if score_mod is None and mask_mod is None:
        return None
    tensors: tuple[torch.Tensor, ...] = ()
    score = mask = None
    if score_mod is not None:
        score, captured = _find(score_mod, "score_mod")
        tensors = score.tensors(captured, device)
        score = None if score.root is source("s") else score
    if mask_mod is not None:
        mask, captured = _find(mask_mod, "mask_mod")
        tensors += mask.tensors(captured, device)
        mask = None if mask.root is const(True) else mask
    if score is None and mask is None:
        return None
    mods = _pairs.get((score, mask))
    if mods is None:
        mods = _combined(score, mask, tensors)
        if all(x is None or x.kept for x in (score, mask)):  # others hold tensors of the caller
            if len(_pairs) >= MOST:
                _pairs.clear()
            _pairs[score, mask] = mods
    if any(x.requires_grad for x in tensors):  # only what the score depends on smoothly has a gradient
        smooth = mods.differentiable
        tensors = tuple([x if n in smooth else x.detach() for n, x in enumerate(tensors)])
    return Bound(mods, tensors)


TRACED_ITSELF = (
    "tilewise traces score_mod and mask_mod itself: torch.compile breaks the graph there, and fails with fullgraph=True"
)
eager_function(bind, TRACED_ITSELF)


def _find(function: Callable[..., Any], name: str) -> tuple[_Known, list[torch.Tensor]]:
    captures = Captures(function, name)
    known = None if captures.key is None else _known.get(captures.key)
    if known is None:
        from .trace import WORDS, trace  # for the first function, not for every `import tilewise`

        if not callable(function):
            raise InvalidArgument(name, f"a {type(function).__name__}", f"a function {WORDS[name]}")
        traced = trace(function, name)
        for x in traced.tensors:
            if x.dtype not in NAMES:
                raise InvalidArgument(name, f"a captured tensor of {x.dtype}", f"one of {', '.join(DTYPES)}")
        places = {id(x): n for n, x in enumerate(captures.tensors)}
        sources: list[int | torch.Tensor] = []
        for x, own, detached in zip(traced.tensors, traced.made, traced.detached, strict=True):
            at = None if own else places.get(id(x))
            sources.append((x.detach() if detached else x) if at is None else ~at if detached else at)
        keeps = captures.key is not None and all(
            own or id(x) in places for x, own in zip(traced.tensors, traced.made, strict=True)
        )
        known = _Known(traced.root, tuple(sources), keeps)
        if captures.key is not None and keeps:
            if len(_known) >= MOST:
                _known.clear()
            _known[captures.key] = known
    return known, captures.tensors


def _combined(score: _Known | None, mask: _Known | None, tensors: Sequence[torch.Tensor]) -> Mods:
    root = None if score is None else score.root
    first = 0 if score is None else len(score.sources)
    hides = None if mask is None else renumbered(mask.root, {n: first + n for n in range(len(mask.sources))})
    return mods_of(to_text((root, hides), [(NAMES[x.dtype], x.ndim) for x in tensors]))
