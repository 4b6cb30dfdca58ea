"""Gradients of functions of the user on the CPU: what kernels store for them, and where they sum them.

For each key and vector of rows the kernel `gradients` of an expression stores `parts`: the derivative of the score by
what it was, and of each load of a captured tensor its derivative and, if its index is made of anything, the element.
`mainloop/backward_mods.py` sums them for each load by its axis. A work item sums in the memory of its thread; in the
order of work items, one at a time, these sums are added to those of all, in float64. So the bits do not depend on
threads. Indices of rows, keys and distances are computed last, once for each (`add_to`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...core.expression.build import is_const
from ...core.expression.mods import Mods, is_wide
from ...core.expression.node import Node
from ...core.expression.sums import AXES, LoadGradient
from ...core.mod_gradients import axis_positions, loads_of
from ...core.problem import Problem
from ...core.tensors import BackwardTensors, Tensors
from . import mods as functions
from .codegen.vector import W
from .gemm.fp32 import KEYS
from .mainloop.mod_kernels import ARGUMENTS, vectors_of
from .params import LOAD_SUMS, Gradients, LoadSums, Params
from .scratch import round_up

Part = LoadGradient | Node
MOST_OWN = 1 << 15  # elements of a captured tensor of which each thread has a sum of its own, if its index is anything
LISTED = 1 << 21  # terms that a thread lists of one that has more


@dataclass(frozen=True)
class Derivatives:
    """What a backward pass needs of the functions of a call."""

    by_score: bool
    loads: tuple[LoadGradient, ...]
    parts: tuple[Part, ...]
    vectors: tuple[tuple[int, int], ...]  # of each load: where its derivative and its element are, -1 if nowhere


NONE = Derivatives(False, (), (), ())


def derivatives_of(p: Problem) -> Derivatives:
    return NONE if p.mods is None else _derivatives(p.mods, loads_of(p))


@cache
def _derivatives(mods: Mods, loads: tuple[LoadGradient, ...]) -> Derivatives:
    parts: list[Part] = [] if mods.by_score is None else [mods.by_score]
    at = []
    for load in loads:
        derivative = element = -1
        if not is_const(load.derivative, 1.0):
            derivative = vectors_of(parts)
            parts.append(load.derivative)
        if load.axis == "cells":
            element = vectors_of(parts)
            parts.append(load)
        at.append((derivative, element))
    return Derivatives(mods.by_score is not None, loads, tuple(parts), tuple(at))


class CapturedSums:
    """The sums of gradients of captured tensors in one backward pass."""

    def __init__(self, p: Problem, d: Derivatives, b: BackwardTensors, params: Params, g: Gradients) -> None:
        self.problem, self.loads, self.tensors, t = p, d.loads, b, b.forward
        packed_k = t.cu_seqlens_k is not None
        rows, keys = p.total_q if p.packed_q else p.batch * p.q_len, t.k.shape[2] if packed_k else p.batch * p.kv_len
        block, group = int(round_up(params.tile_keys, KEYS)), p.group
        made = {"dtype": torch.float64, "device": p.device}
        self.totals = {n: torch.zeros(max(1, x.numel()), **made) for n, x in b.dcaptured.items()}  # type: ignore[call-overload]
        self.table = (LoadSums * len(d.loads))()
        self.sums: list[torch.Tensor] = []
        own, lists = 0, []
        for x, load, (derivative, element) in zip(self.table, d.loads, d.vectors, strict=True):
            x.axis, x.derivative, x.element, x.own = AXES.index(load.axis), derivative, element, own
            if load.axis == "cells":
                sums = self.totals[load.number]
                x.sums_h = sums.numel()
                if sums.numel() <= MOST_OWN:
                    own += 8 * int(round_up(sums.numel(), W))
                else:
                    x.listed = LISTED
                    lists.append(x)
            else:
                x.own_h = {"rows": p.q_len, "keys": W * block, "distances": p.q_len + block + 4 * W}[load.axis]
                x.own_h = round_up(x.own_h, W)
                own += 4 * group * x.own_h
                x.sums_h = {"rows": rows, "keys": keys, "distances": rows + keys}[load.axis]
                sums = torch.zeros(p.heads, x.sums_h, **made)  # type: ignore[call-overload]
            x.sums = sums.data_ptr()
            self.sums.append(sums)
        g.own_cleared = own // 4
        for x in lists:  # the number of terms, elements, terms
            x.own, own = own, own + 8 + 12 * (LISTED + W)
        g.own_bytes = round_up(own, 64)
        self.own = torch.empty(int(g.own_bytes) * params.threads, dtype=torch.uint8, device=p.device)
        g.own, g.loads, g.load_count = self.own.data_ptr(), ctypes.addressof(self.table), len(d.loads)

    def write(self) -> None:
        """Computes the indices, and writes the gradients."""
        p, t = self.problem, self.tensors.forward
        table = functions.table_of(t.captured)
        for load, sums in zip(self.loads, self.sums, strict=True):
            if load.axis != "cells":
                elements = elements_of(p, t, load, sums.shape[1], table)
                self.totals[load.number].index_add_(0, elements.expand_as(sums).reshape(-1), sums.view(-1))
        for number, x in self.tensors.dcaptured.items():
            x.copy_(self.totals[number][: x.numel()].view_as(x))


def elements_of(p: Problem, t: Tensors, load: LoadGradient, count: int, table: Any) -> torch.Tensor:
    """The elements that a load reads in all rows, keys or distances, int64 [1 or H, count]."""
    assert p.mods is not None
    wide = is_wide(t.captured)
    kernel = functions.kernel("places", p.mods, wide, (load,))
    address = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(ARGUMENTS["places"].split()))(kernel)
    padded = int(round_up(count, W))
    b, q, k = (torch.nn.functional.pad(x, (0, padded - count)) for x in axis_positions(p, t, load.axis, count))
    heads = range(p.heads if any("h" in index.inputs for index in load.load.children) else 1)
    elements = torch.empty(len(heads), padded, dtype=torch.int64)
    for h in heads:
        address(padded, b.data_ptr(), h, q.data_ptr(), k.data_ptr(), ctypes.addressof(table), elements[h].data_ptr())
    return elements[:, :count]


assert LOAD_SUMS.itemsize == ctypes.sizeof(LoadSums)
