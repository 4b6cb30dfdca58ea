"""Where the cells are that gradients of captured tensors are summed over first: rows, keys or distances of a call."""

from __future__ import annotations

from functools import cache

import torch

from .expression.cells import add_at, element_number
from .expression.evaluate import evaluate
from .expression.sums import Axis, LoadGradient, load_gradients
from .mod_tiles import sequence_places
from .problem import Problem, captured_number
from .tensors import Tensors


def loads_of(p: Problem) -> tuple[LoadGradient, ...]:
    """What the gradients of captured tensors of a backward pass consist of."""
    places = p.rules.places
    numbers = tuple(n for n in map(captured_number, p.grads) if n is not None)
    return () if p.mods is None else _loads(p.mods, numbers, places != "rows" and places[1] == places[2])


_loads = cache(load_gradients)


def axis_positions(p: Problem, t: Tensors, axis: Axis, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch row and positions of queries and keys, int32 `[count]`, of all rows, keys or distances of all sequences.

    Distance x of a sequence is that of row i and key j with x = i - j + keys - 1.
    """
    at = sequence_places(p, t)
    b, x = sequences_of(p, t, axis, count)

    def of(number: torch.Tensor | int) -> torch.Tensor | int:
        return number[b] if isinstance(number, torch.Tensor) else number

    q = k = torch.zeros_like(x)
    if axis == "rows":
        q = of(at.q_start) + of(at.q_stride) * x
    elif axis == "keys":
        k = of(at.k_start) + of(at.k_stride) * x
    else:
        q = of(at.q_start) - of(at.k_start) + of(at.q_stride) * (x - of(at.kv_len) + 1)
    return b.int(), q.int(), k.int()


def sequences_of(p: Problem, t: Tensors, axis: Axis, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all rows, keys or distances of all sequences: the sequence of each, and its number in it."""
    device = p.device
    packed = [cu for cu, name in ((t.cu_seqlens_q, "keys"), (t.cu_seqlens_k, "rows")) if name != axis]
    if packed[0] is None:
        number = torch.arange(count, device=device)
        return number // (count // p.batch), number % (count // p.batch)
    ends = torch.stack([cu.long() for cu in packed if cu is not None]).sum(0)
    number = torch.arange(count, device=device)
    batch = (torch.searchsorted(ends, number, right=True) - 1).clamp_max(p.batch - 1)  # spare rows: their sums are 0
    return batch, number - ends[batch]


def add_axis_sums(p: Problem, t: Tensors, load: LoadGradient, sums: torch.Tensor, total: torch.Tensor) -> None:
    """Adds sums `[H, count]` over the axis of a load to the gradient of its tensor, in float64 and in a fixed order."""
    x = t.captured[load.number]
    if not x.numel():
        return
    b, q, k = axis_positions(p, t, load.axis, sums.shape[1])
    heads = torch.arange(p.heads, device=p.device)[:, None]
    indices = list(load.load.children)
    places = evaluate(indices, {"b": b, "h": heads, "q": q, "k": k}, t.captured, torch.float32)
    elements = element_number(places, x).expand(sums.shape)
    add_at(total.view(-1), elements.reshape(-1), sums.reshape(-1).double())
