"""Cascade: keys that sequences share and keys of their own, two calls in one launch, combined.

Threads take the work items of the first call, the long ones, then those of the second, so that nobody waits between the
two. All items leave partials; when they are done, rows are combined by whoever is there.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import carray

from ...core.plan import Plan
from ...core.tensors import Shared, Tensors
from . import compiler
from .codegen.load_store import check_finite, clear, fetch_add, get_f32, get_i64, load_acquire, put_i64, row_add
from .codegen.numba_ops import INF, F, call_kernel, item_at, jit, params_at, pointer, up
from .codegen.vector import W
from .kv_access import sequence
from .launch import make_params, schedule_items, zero_spare_rows
from .mainloop.epilogue import finalize_row
from .mainloop.nonfinite import DOWNSCALE
from .mainloop.scores import unit
from .params import COUNT, COUNTER, DONE, INDEX, PER_CALL, UNDONE, WORK_ITEM
from .threads import pool

WORK_ITEM_BYTES = WORK_ITEM.itemsize


@jit
def all_done(p):
    return load_acquire(p.counter + 24) >= get_i64(p.counter + 8)


@jit
def max_of_partials(p, index, parts, R, r, Dv, m):
    """The largest of m and the maxima of an item's partials, and whether one of them is downscaled."""
    downscaled = False
    for part in range(parts):
        slot = p.partials + (index + part * p.kv_heads) * p.partial_bytes
        m = max(m, get_f32(slot + 4 * (R * Dv + 2 * r)))
        downscaled |= get_f32(slot + 4 * (R * Dv + 2 * r + 1)) < F(0)
    return m, downscaled


@jit
def add_partials(p, index, parts, R, r, Dv, m, to, downscaled):
    """Adds row r of an item's partials, rescaled by their maxima; returns their share of the row sum.

    `downscaled`: all of them times DOWNSCALE.
    """
    l = F(0)
    for part in range(parts):
        slot = p.partials + (index + part * p.kv_heads) * p.partial_bytes
        top = get_f32(slot + 4 * (R * Dv + 2 * r))
        if top != -INF:
            weight, own = F(math.exp((top - m) * unit(p))), get_f32(slot + 4 * (R * Dv + 2 * r + 1))
            l += weight * abs(own)
            if downscaled and not own < F(0):
                weight *= DOWNSCALE
            row_add(to, slot + 4 * r * Dv, Dv, weight)
    return l


def cascade(task, scratch):
    """What a thread runs. `task`: both parameter structs, the places of rows in the first, the next item to merge."""
    shared, own, places = get_i64(task), get_i64(task + 8), get_i64(task + 16)
    a, b = params_at(shared), params_at(own)
    call_kernel(a.worker, shared, scratch)
    call_kernel(b.worker, own, scratch)
    while not (all_done(a) and all_done(b)):  # whoever has the last item is at it
        continue
    Dv, group = up(b.value_dim, W), b.heads // b.kv_heads
    count = get_i64(b.counter + 8)
    index = fetch_add(task + 24)
    while index < count:
        item = item_at(b.work_items + index * WORK_ITEM_BYTES)
        if item.split == 0:
            q_start = sequence(b, item.b)[0]
            R = group * item.rows
            for i in range(item.rows):
                place = places + 16 * (q_start + item.row + i)
                first = get_i64(place)
                other = item_at(a.work_items + first * WORK_ITEM_BYTES)
                first += item.head
                for g in range(group):
                    r, its = g * item.rows + i, g * other.rows + get_i64(place + 8)
                    m, some = max_of_partials(b, index, item.splits, R, r, Dv, -INF)
                    m, more = max_of_partials(a, first, other.splits, group * other.rows, its, Dv, m)
                    downscaled = some or more
                    for _ in range(2):
                        clear(scratch, Dv)
                        l = add_partials(b, index, item.splits, R, r, Dv, m, scratch, downscaled)
                        l += add_partials(a, first, other.splits, group * other.rows, its, Dv, m, scratch, downscaled)
                        if downscaled or check_finite(scratch, Dv) == F(0):
                            break
                        downscaled = True
                    finalize_row(b, item, g, i, q_start, scratch, m, -l if downscaled else l)
        index = fetch_add(task + 24)


def map_rows(task, back):
    """For each query row of the second call, in its order: the first call's item of its first head and part, and the
    row's number in it. `back` says where a row is in the first call, if not in the same place."""
    places = get_i64(task + 16)
    a, rows = params_at(get_i64(task)), get_i64(task + 32)
    spots = carray(pointer(places + 16 * rows), (rows, 2), dtype=np.int64)
    for index in range(get_i64(a.counter + 8)):
        item = item_at(a.work_items + index * WORK_ITEM_BYTES)
        if item.head == 0 and item.split == 0:
            start = sequence(a, item.b)[0] + item.row
            for i in range(item.rows):
                spots[start + i, 0], spots[start + i, 1] = index, i
    for row in range(rows):
        at = get_i64(back + 8 * row) if back else row
        put_i64(places + 16 * row, spots[at, 0])
        put_i64(places + 16 * row + 8, spots[at, 1])


def run(shared_plan: Plan, plan: Plan, t: Tensors, shared: Shared) -> None:
    """Writes the output of `plan`'s call with the shared keys merged in."""
    own, kept = make_params(plan, t)
    first = shared_plan.detail.params.copy()
    first[: len(PER_CALL)] = own[: len(PER_CALL)]  # the tensors are the same but for these
    q, table, lengths, cu = (x.contiguous() for x in (shared.q, *shared.tables))
    for name, value in (
        ("q", q.data_ptr()),
        ("q_h", q.stride(1) * q.element_size()),
        ("q_l", q.stride(0) * q.element_size()),
        ("table", table.data_ptr()),
        ("table_b", 4 * table.stride(0)),
        ("kv_lengths", lengths.data_ptr()),
        ("cu_q", cu.data_ptr()),
        ("sinks", 0),
    ):
        first[INDEX[name]] = value
    kept += [_prepare(first, shared_plan), _prepare(own, plan)]
    rows = zero_spare_rows(t)
    places = np.empty((2 * rows, 2), dtype=np.int64)
    task = np.array([first.ctypes.data, own.ctypes.data, places.ctypes.data, 0, rows], dtype=np.int64)
    compiler.entry("map_rows")(task.ctypes.data, 0 if shared.back is None else shared.back.data_ptr())
    launches = shared_plan.detail, plan.detail
    threads = min(max(x.threads for x in launches), int(first[COUNT] + own[COUNT]))
    scratch = max(x.scratch for x in launches)
    while True:
        if threads < 2:
            compiler.entry("cascade")(task.ctypes.data, pool.scratch(scratch))
        else:
            pool.run_kernel("cascade", task.ctypes.data, threads, scratch)
        if not (first[UNDONE] or own[UNDONE]):
            return
        for block in (first, own):  # an infinity, as in `launch.run_items`
            block[INDEX["prefill"]] = compiler.function("prefill")
            block[[COUNTER, UNDONE, DONE]] = 0
        task[3] = 0


def _prepare(block: Any, plan: Plan) -> Any:
    """Lists the items of a call, each of which leaves its partial. Returns what must live as long as the struct."""
    p, launch = plan.problem, plan.detail
    work_items = schedule_items(block, launch)
    Dv = -(-p.value_dim // W) * W
    size = 4 * p.group * min(int(block[INDEX["tile_rows"]]), p.q_len) * (Dv + 2)
    parts = torch.empty(int(block[COUNT]) * size, dtype=torch.uint8, device="cpu")
    block[INDEX["partials"]], block[INDEX["partial_bytes"]] = parts.data_ptr(), size
    block[INDEX["worker"]], block[INDEX["keep_partials"]] = compiler.function("worker"), 1
    return work_items, parts
