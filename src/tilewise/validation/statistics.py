"""Checks what `return_aux` requests, and allocates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.options import LIMIT, Options, is_int, to_int
from ..core.problem import Form
from ..core.tensors import Statistics, Tensors
from ..errors import InvalidArgument
from .arguments import Checker

NAMES = ("lse", "max_logits", "entropy", "key_mass", "weights")
NEEDS = {"key_mass_queries": "key_mass", "weight_indices": "weights"}  # options, and the statistic that they are for


@dataclass(slots=True)
class Requested:
    """The statistics of a call: in the common form, and by name in the caller's layout."""

    statistics: Statistics
    results: dict[str, torch.Tensor]


def as_names(o: Options) -> tuple[str, ...]:
    """The statistics that a call requests, in the order of `NAMES`; empty without `return_aux`."""
    given = o.return_aux
    if given is not None and (isinstance(given, str) or not isinstance(given, Sequence)):
        raise InvalidArgument("return_aux", repr(given), f"None or a tuple of names out of {', '.join(NAMES)}")
    names = () if given is None else tuple(given)
    if unknown := [name for name in names if name not in NAMES]:
        raise InvalidArgument("return_aux", repr(unknown[0]), f"names out of {', '.join(NAMES)}")
    for option, name in NEEDS.items():
        if getattr(o, option) is not None and name not in names:
            raise InvalidArgument(option, f"given without {name!r}", f"return_aux=({name!r},) beside it")
    if "weights" in names and o.weight_indices is None:
        remedy = "weight_indices= says at which keys, int [B, Lq, n] or [B, H, Lq, n]; all weights are never computed"
        raise InvalidArgument("return_aux", "'weights' without weight_indices", "both", remedy)
    return tuple(name for name in NAMES if name in names)


def requested(c: Checker, form: Form, t: Tensors, o: Options, out: torch.Tensor, keys: int) -> Requested | None:
    """What the call requests beside `lse`, in new memory; None if nothing. `keys` is Lk of `key_mass`."""
    names = as_names(o)
    if not set(names) - {"lse"}:
        return None
    found = Statistics()
    results: dict[str, torch.Tensor] = {}
    for name in ("max_logits", "entropy"):
        if name in names:
            results[name] = _empty(c, out.shape[:-1])
            setattr(found, name, c.common(results[name][..., None])[..., 0])
    batch, heads = len(c.q) if t.kv_lengths is None else len(t.kv_lengths), c.q.shape[1]
    if "key_mass" in names:
        packed = form == "varlen"
        shape = (keys, heads) if packed else (batch, keys, heads) if c.seq_major else (batch, heads, keys)
        results["key_mass"] = _empty(c, shape)
        words = "[T, H, 1]" if packed else "[B, L, H, 1]" if c.seq_major else "[B, H, L, 1]"
        found.key_mass = c.common(results["key_mass"][..., None], words)[..., 0]
        found.queries = _queries(o.key_mass_queries)
    if "weights" in names:
        rows = c.q.shape[2]
        found.indices, _ = c.indices("weight_indices", o.weight_indices, len(c.q), heads, rows)
        results["weights"] = _empty(c, (*out.shape[:-1], found.indices.shape[-1]))
        found.weights = c.common(results["weights"])
    return Requested(found, results)


def _empty(c: Checker, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=c.wide, device=c.device)


def _queries(given: Any) -> int:
    number = to_int(given)
    if number is not None and (not is_int(number) or number < 1):
        raise InvalidArgument("key_mass_queries", repr(given), "None, for all queries, or how many of the last ones")
    return 0 if number is None else min(int(number), LIMIT)
