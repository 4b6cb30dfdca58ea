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
from .codegen.numba_ops import back_off, item_at, jit, params_at, up
from .codegen.vector import W
from .config import padded_width
from .kv_access import sequence
from .launch import make_params, zero_spare_rows
from .mainloop.epilogue import Partials, combine_row, finalize_row
from .params import WORK_ITEM_BYTES, Params, offset
from .replay import launcher
from .threads import yield_thread

NEXT_MERGE, DONE, UNDONE = (offset(Params, name) for name in ("next_merge", "done", "undone"))


@jit
def all_done(params, items):
    return load_acquire(params + DONE) >= items


def cascade(params, scratch):
    """A thread's main function instead of `worker`: the items of both calls, then combining rows of both."""
    p = params_at(params)
    prefix = params_at(p.prefix_params)
    call_kernel(prefix.worker, p.prefix_params, scratch)
    call_kernel(prefix.worker, params, scratch)
    # Other threads may still run the last items.
    spins = 0
    while not (all_done(p.prefix_params, prefix.items) and all_done(params, p.items)):
        spins = back_off(spins, p.yield_thread)
    if prefix.undone:
        put_i64(params + UNDONE, 1)
    Dv, group = up(p.value_dim, W), p.heads // p.kv_heads
    index = fetch_add(params + NEXT_MERGE)
    while index < p.items:
        item = item_at(p.work_items + index * WORK_ITEM_BYTES)
        if item.split == 0:
            q_start = sequence(p, item.b)[0]
            for i in range(item.rows):
                at = p.prefix_rows + 16 * (q_start + item.row + i)
                first, row = get_i64(at), get_i64(at + 8)
                other = item_at(prefix.work_items + first * WORK_ITEM_BYTES)
                for g in range(group):
                    own = Partials(index, item.splits, group * item.rows, g * item.rows + i)
                    its = Partials(first + item.head, other.splits, group * other.rows, g * other.rows + row)
                    m, l = combine_row(p, own, prefix, its, Dv, scratch, True)
                    finalize_row(p, item, g, i, q_start, scratch, m, l)
        index = fetch_add(params + NEXT_MERGE)


def map_rows(params, rows, back):
    """Writes `prefix_rows` [rows, 2]: for each query row of the call the prefix call's first work item with it (head 0,
    split 0), and its row in that item. `back` [rows] is where a row is in the prefix call; 0 if the order is the same.

    As many more rows of `prefix_rows` are scratch memory: the same in the prefix call's order.
    """
    p = params_at(params)
    prefix = params_at(p.prefix_params)
    in_order = p.prefix_rows + 16 * rows  # [rows, 2]
    for index in range(prefix.items):
        item = item_at(prefix.work_items + index * WORK_ITEM_BYTES)
        if item.head == 0 and item.split == 0:
            start = sequence(prefix, item.b)[0] + item.row
            for i in range(item.rows):
                put_i64(in_order + 16 * (start + i), index)
                put_i64(in_order + 16 * (start + i) + 8, i)
    for row in range(rows):
        at = in_order + 16 * (get_i64(back + 8 * row) if back else row)
        put_i64(p.prefix_rows + 16 * row, get_i64(at))
        put_i64(p.prefix_rows + 16 * row + 8, get_i64(at + 8))


def run(shared_plan: Plan, plan: Plan, t: Tensors, shared: SharedPrefix) -> None:
    """Runs `plan`'s call with attention over the shared keys merged in."""
    table, lengths, cu = shared.tables
    q = shared.q.contiguous().transpose(0, 1)[None]  # [1, H, T, D]
    prefix_tensors = replace(t, q=q, block_table=table, kv_lengths=lengths, cu_seqlens_q=cu, sinks=None)
    prefix, prefix_kept = make_params(shared_plan, prefix_tensors)
    own, kept = make_params(plan, t)
    for params, p in ((prefix, shared_plan.problem), (own, plan.problem)):
        params.keep_partials = 1
        params.partial_bytes = 4 * p.group * min(params.tile_rows, p.q_len) * (padded_width(p) + 2)
    partials = torch.empty(prefix.items * prefix.partial_bytes, dtype=torch.uint8, device="cpu")
    rows = zero_spare_rows(t)
    prefix_rows = np.empty((2 * rows, 2), dtype=np.int64)
    prefix.partials, own.prefix_rows = partials.data_ptr(), prefix_rows.ctypes.data
    own.prefix_params = ctypes.addressof(prefix)
    own.worker, own.combine, own.yield_thread = compiler.function("cascade"), 0, yield_thread()
    own.threads = min(max(prefix.threads, own.threads), prefix.items + own.items)
    compiler.entry("map_rows")(ctypes.addressof(own), rows, 0 if shared.back is None else shared.back.data_ptr())
    scratch = max(shared_plan.detail.scratch, plan.detail.scratch)
    go = launcher((own, prefix), scratch, (kept, prefix_kept, partials, prefix_rows))
    go(t.q, t.k, t.v, t.out, t.lse, t.k_scales, t.v_scales)
