"""Cascade attention: a call over the shared prefix and one over each sequence's own keys, in one launch, combined.

Threads first take the work items of the shared keys, which are long, then the others, without a barrier in between. All
items write partials; when all are done, the threads combine rows.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False, disallow-untyped-calls=False
from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import torch

from ...core.plan import Plan
from ...core.tensors import SharedPrefix, Tensors
from . import compiler
from .codegen.calls import call_kernel
from .codegen.load_store import fetch_add, get_i64, load_acquire, put_i64
from .codegen.numba_ops import item_at, jit, params_at, up
from .codegen.vector import W
from .kv_access import sequence
from .launch import launcher, make_params, zero_spare_rows
from .mainloop.epilogue import Partials, combine_row, finalize_row
from .params import WORK_ITEM_BYTES, Params, offset

NEXT_MERGE, DONE, UNDONE = (offset(Params, name) for name in ("next_merge", "done", "undone"))


@jit
def all_done(params, items):
    return load_acquire(params + DONE) >= items


def cascade(params, scratch):
    """A thread's main function instead of `worker`: the items of both calls, then combining rows of both."""
    b = params_at(params)
    a = params_at(b.shared)
    call_kernel(a.worker, b.shared, scratch)
    call_kernel(a.worker, params, scratch)
    while not (all_done(b.shared, a.items) and all_done(params, b.items)):  # others still run the last items
        continue
    if a.undone:
        put_i64(params + UNDONE, 1)
    Dv, group = up(b.value_dim, W), b.heads // b.kv_heads
    index = fetch_add(params + NEXT_MERGE)
    while index < b.items:
        item = item_at(b.work_items + index * WORK_ITEM_BYTES)
        if item.split == 0:
            q_start = sequence(b, item.b)[0]
            for i in range(item.rows):
                place = b.places + 16 * (q_start + item.row + i)
                first, row = get_i64(place), get_i64(place + 8)
                other = item_at(a.work_items + first * WORK_ITEM_BYTES)
                for g in range(group):
                    own = Partials(index, item.splits, group * item.rows, g * item.rows + i)
                    its = Partials(first + item.head, other.splits, group * other.rows, g * other.rows + row)
                    m, l = combine_row(b, own, a, its, Dv, scratch, True)
                    finalize_row(b, item, g, i, q_start, scratch, m, l)
        index = fetch_add(params + NEXT_MERGE)


def map_rows(params, rows, back):
    """For each query row of the call, in its order: the shared call's item of its first head and part, and the row's
    number in it. `back` says where a row is in the shared call, if not in the same place."""
    b = params_at(params)
    a = params_at(b.shared)
    spots = b.places + 16 * rows  # [rows, 2]
    for index in range(a.items):
        item = item_at(a.work_items + index * WORK_ITEM_BYTES)
        if item.head == 0 and item.split == 0:
            start = sequence(a, item.b)[0] + item.row
            for i in range(item.rows):
                put_i64(spots + 16 * (start + i), index)
                put_i64(spots + 16 * (start + i) + 8, i)
    for row in range(rows):
        at = spots + 16 * (get_i64(back + 8 * row) if back else row)
        put_i64(b.places + 16 * row, get_i64(at))
        put_i64(b.places + 16 * row + 8, get_i64(at + 8))


def run(shared_plan: Plan, plan: Plan, t: Tensors, shared: SharedPrefix) -> None:
    """Runs `plan`'s call with attention over the shared keys merged in."""
    table, lengths, cu = shared.tables
    q = shared.q.contiguous().transpose(0, 1)[None]  # [1, H, T, D]
    its = replace(t, q=q, block_table=table, kv_lengths=lengths, cu_seqlens_q=cu, sinks=None)
    first, first_kept = make_params(shared_plan, its)
    own, kept = make_params(plan, t)
    for params, p in ((first, shared_plan.problem), (own, plan.problem)):
        params.keep_partials = 1
        params.partial_bytes = 4 * p.group * min(params.tile_rows, p.q_len) * (-(-p.value_dim // W) * W + 2)
    partials = torch.empty(first.items * first.partial_bytes, dtype=torch.uint8, device="cpu")
    rows = zero_spare_rows(t)
    places = np.empty((2 * rows, 2), dtype=np.int64)
    first.partials, own.places, own.shared = partials.data_ptr(), places.ctypes.data, ctypes.addressof(first)
    own.worker, own.combine = compiler.function("cascade"), 0
    own.threads = min(max(first.threads, own.threads), first.items + own.items)
    compiler.entry("map_rows")(ctypes.addressof(own), rows, 0 if shared.back is None else shared.back.data_ptr())
    scratch = max(shared_plan.detail.scratch, plan.detail.scratch)
    go = launcher((own, first), scratch, (kept, first_kept, partials, places))
    go(t.q, t.k, t.v, t.out, t.lse, t.k_scales, t.v_scales)
