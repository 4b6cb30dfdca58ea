"""Partial results of attention, and merging them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch

from .core.arrays import converter_back, to_tensor
from .core.storage import wide_dtype
from .dispatch import planner
from .errors import InvalidArgument


class AttentionState(NamedTuple):
    """The result of attention over some of the keys, which `merge` can combine with results over other keys.

    Args:
        out: `[..., Dv]`, normalised over these keys.
        lse: `[...]`, float32 (of a float64 call float64): natural log of the sum of the exponentials of the scores;
            `-inf` where no key is visible.
    """

    out: torch.Tensor
    lse: torch.Tensor


class Aux(NamedTuple):
    """What `return_aux` requests of a call, float32; None where it was not requested. See docs/statistics.md.

    Args:
        lse: `[B, H, Lq]` (in the layout of `out`, without its last dim): log-sum-exp of each row's scores.
        max_logits: likewise: the largest visible score after all options; `-inf` where no key is visible.
        entropy: likewise: `-sum p log p` of each row's weights over keys. A sink takes its share and adds no term.
        key_mass: `[B, H, Lk]`: the sum of each key's weights over queries; of packed keys `[T, H]`.
        weights: `[B, H, Lq, n]`: the weights at `weight_indices`; 0 for keys that the query does not see.
    """

    lse: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    key_mass: torch.Tensor | None = None
    weights: torch.Tensor | None = None


def same(x: Any) -> Any:
    return x


def map_result(
    result: Any, out: Callable[[Any], Any], rows: Callable[[Any], Any], keys: Callable[[Any], Any] | None = None
) -> Any:
    """What an entry point returned, with functions applied to `out`, to what there is for each row, and to `key_mass`
    (without one as for rows).
    """
    if isinstance(result, AttentionState):
        return AttentionState(out(result.out), rows(result.lse))
    if not isinstance(result, tuple):
        return out(result)
    found = {name: x for name, x in result[1]._asdict().items() if x is not None}
    mapped = {name: (keys or rows)(x) if name == "key_mass" else rows(x) for name, x in found.items()}
    return out(result[0]), Aux(**mapped)


@overload
def merge(states: Sequence[AttentionState], *, sinks: Any = None) -> AttentionState: ...
@overload
def merge(states: Sequence[tuple[torch.Tensor, Aux]], *, sinks: Any = None) -> tuple[torch.Tensor, Aux]: ...
def merge(states: Any, *, sinks: Any = None) -> Any:
    """Merges attention over disjoint sets of keys into attention over their union.

    The result is exact up to float32 rounding (of float64 states float64). An empty state (`lse = -inf`) is ignored,
    whatever its `out` holds; where all states but one are empty, the result is that one, bit for bit. It has the dtype
    of the first state.

    Args:
        states: `AttentionState`s, or pairs `(out, Aux)` with `lse`, and with `max_logits` and `entropy` in all or none
            of them; the result is such a pair. `key_mass` and `weights` are refused: sums over queries have no `lse`.
        sinks: logits that no state has counted yet, in a shape that broadcasts to `lse`, as `sinks[:, None]` of `[H]`.
            The right way beside `entropy`: of a state that has counted them, the share of its keys is not known.

    >>> import tilewise
    >>> q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    >>> halves = [tilewise.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 4), slice(4, 8))]
    >>> torch.allclose(tilewise.merge(halves).out, tilewise.attention(q, k, v), atol=1e-6)
    True
    """
    states, auxes = _split(states)
    states, back = _checked(states)
    given, out = states, states[0].out
    if sinks is not None:
        logits = to_tensor("sinks", sinks).to(states[0].lse.dtype).expand(states[0].lse.shape)
        states = [*states, AttentionState(torch.zeros_like(out), logits)]
    merged = AttentionState(out.new_empty(out.shape), out.new_empty(out.shape[:-1], dtype=wide_dtype(out.dtype)))
    merge_into(states, merged)
    if auxes is None:
        return AttentionState(back(merged.out), back(merged.lse))
    found = _merged_statistics([lse for _, lse in given], auxes, merged.lse)
    return back(merged.out), Aux(**{name: back(x) for name, x in found.items()})


MERGED = ("lse", "max_logits", "entropy")


def _merged_statistics(lses: list[torch.Tensor], auxes: list[Aux], merged: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"lse": merged}
    if auxes[0].max_logits is not None:
        found["max_logits"] = torch.stack([to_tensor("max_logits", x.max_logits) for x in auxes]).amax(0)
    if auxes[0].entropy is not None:
        found["entropy"] = torch.zeros_like(merged)
        for lse, aux in zip(lses, auxes, strict=True):  # of its keys -sum w p log(w p), where w is the state's share
            share = (lse - merged).exp()
            own = share * (to_tensor("entropy", aux.entropy) + merged - lse)
            found["entropy"] = found["entropy"] + torch.where((lse == -torch.inf) | (share == 0), 0.0, own)
    return found


def _split(states: Any) -> tuple[Any, list[Aux] | None]:
    """The states as pairs `(out, lse)`, and the statistics that they have beside `lse`; None without any."""
    pairs = [x for x in states if isinstance(x, tuple) and len(x) == 2] if isinstance(states, (list, tuple)) else []
    if not any(isinstance(x[1], Aux) for x in pairs):
        return states, None
    named = None
    for i, x in enumerate(states):
        aux = x[1] if isinstance(x, tuple) and len(x) == 2 else None
        if not isinstance(aux, Aux) or aux.lse is None:
            remedy = "return_aux=('lse', ...) of every call"
            raise InvalidArgument(f"states[{i}]", "a state without Aux.lse", "(out, Aux) as the others", remedy)
        names = {name for name, y in zip(Aux._fields, aux, strict=True) if y is not None}
        if names - set(MERGED):
            remedy = "sums over queries have no lse: request them of a call over all keys"
            given = ", ".join(sorted(names - set(MERGED)))
            raise InvalidArgument(f"states[{i}]", given, f"{', '.join(MERGED)} alone", remedy)
        named = names if named is None else named
        if names != named:
            want = f"{', '.join(sorted(named))}, as the first state"
            raise InvalidArgument(f"states[{i}]", ", ".join(sorted(names)), want)
    return [(x[0], x[1].lse) for x in states], [x[1] for x in states]


def merge_into(states: Sequence[AttentionState], merged: AttentionState) -> None:
    """Writes what `merge` returns; `merged` may be the first state."""
    if planner.merge_into([out for out, _ in states], [lse for _, lse in states], *merged):
        return
    wide = wide_dtype(merged.out.dtype)
    top = states[0].lse.to(wide)
    for _, lse in states[1:]:
        top = torch.maximum(top, lse.to(wide))
    base = torch.where(top == -torch.inf, 0.0, top)  # where every state is empty, -inf - -inf would be NaN
    taken = base == torch.inf  # a sink of +inf has taken all weight
    # [...], 1 for the largest
    weights = [torch.where(taken & (lse == torch.inf), 1.0, (lse.to(wide) - base).exp()) for _, lse in states]
    total = torch.stack(weights).sum(0)
    total = torch.where(total == 0, 1.0, total)
    mixed = torch.zeros_like(merged.out, dtype=wide)
    for (out, _), weight in zip(states, weights, strict=True):  # shares that add up to 1: no sum of large values
        share = (weight / total)[..., None]
        mixed += torch.where(share == 0, 0.0, out.to(wide) * share)
    merged.out.copy_(mixed)
    merged.lse.copy_(top + total.log())


def add_into(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Writes the sum of tensors of one shape, added in order and in float32, or float64 if they are; `total` may be the
    first.
    """
    if len(parts) == 1:
        total.copy_(parts[0])
        return
    if planner.merge_into(parts, (), total, None):
        return
    exact = parts[0].to(wide_dtype(parts[0].dtype), copy=True)
    for part in parts[1:]:
        exact += part
    total.copy_(exact)


def _checked(states: Any) -> tuple[list[AttentionState], Callable[[torch.Tensor], Any]]:
    """The states as tensors of one shape on one device, and the function that converts results back to arrays."""
    want = "a sequence of AttentionState"
    if isinstance(states, AttentionState) or not isinstance(states, Iterable) or isinstance(states, torch.Tensor):
        raise InvalidArgument("states", f"one {type(states).__name__}", want, "give a list: merge([a, b])")
    found = []
    for i, state in enumerate(states):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise InvalidArgument(f"states[{i}]", f"a {type(state).__name__}", "an AttentionState (out, lse)")
        found.append(state)
    if not found:
        raise InvalidArgument("states", "an empty sequence", "at least one AttentionState")
    tensors = [AttentionState(*(to_tensor(f"states[{i}]", x) for x in state)) for i, state in enumerate(found)]
    back = converter_back(found[0][0])
    shape, device = tensors[0].out.shape, tensors[0].out.device
    for i, (out, lse) in enumerate(tensors):
        if out.ndim == 0 or out.shape != shape or lse.shape != shape[:-1]:
            given = f"out {tuple(out.shape)} with lse {tuple(lse.shape)}"
            want = f"out {tuple(shape)} with lse {tuple(shape[:-1])}" if shape else "out [..., Dv] with lse [...]"
            raise InvalidArgument(f"states[{i}]", given, want)
        if not (out.is_floating_point() and lse.is_floating_point()):
            raise InvalidArgument(f"states[{i}]", f"out {out.dtype} and lse {lse.dtype}", "floating point tensors")
        if out.device != device or lse.device != device:
            raise InvalidArgument(f"states[{i}]", f"device {out.device} and {lse.device}", f"{device}")
    return tensors, back
