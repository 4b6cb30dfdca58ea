"""The tile scheduler: lists the work items, the most work first; threads take them by an atomic counter.

`launch` runs one call, first or repeated: Python passes addresses; it starts the threads and combines partials.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False, disallow-untyped-calls=False
from __future__ import annotations

import ctypes

from .codegen.calls import call_kernel, call_mainloop, call_parallel
from .codegen.load_store import fetch_add, get_i32, get_i64, put_i64
from .codegen.numba_ops import F, item_at, jit, params_at, task_at, team_at, up
from .kv_access import affine, rows_span, sequence
from .mainloop.epilogue import epilogue_rows, replace_overflowed_rows
from .params import CACHE_LINE, LAUNCH_BYTES, TEAM_BYTES, WORK_ITEM_BYTES, LaunchBlock, Params, Task, offset
from .scratch import partition

NEXT_ITEM, DONE, UNDONE = (offset(Params, name) for name in ("next_item", "done", "undone"))
NEXT_THREAD, TASK_AT = offset(Task, "next_thread"), offset(LaunchBlock, "task")
PARAM_WORDS = ctypes.sizeof(Params) // 8
# Bits that `launch` returns: AMX left an item undone; tables are not valid; some packed rows are in no sequence
UNDONE_ITEM, WRONG_TABLES, SPARE_ROWS = 1, 2, 4


def worker(params, scratch):
    """A thread's main function: takes head batches of work items until there are none."""
    p = params_at(params)
    t, count = partition(p, scratch), p.items
    index = fetch_add(params + NEXT_ITEM) * p.head_batch
    while index < count:
        address = p.work_items + index * WORK_ITEM_BYTES
        item = item_at(address)
        group = p.heads // p.kv_heads
        R = group * item.rows
        q_start, q_len, _, _, _ = sequence(p, item.b)
        # By the sequence, not the item: a row's bits must not depend on how its sequence is cut.
        decodes = group * own_rows(p, q_len) <= p.decode_rows
        put_i64(t.done, 0)
        put_i64(t.downscaled, 0)
        if p.prefill_tiles and not decodes:
            call_mainloop(p.prefill_tiles, params, scratch, address)
        mainloop = p.decode if decodes else p.prefill
        if get_i64(t.done) == 0 and mainloop:
            call_mainloop(mainloop, params, scratch, address)
            put_i64(t.done, 1)
        bad = F(0)
        for n in range(p.head_batch):
            bad += epilogue_rows(p, t, index + n, n * R, R, q_start)
        if get_i64(t.done) == 0 or (bad != F(0) and not mainloop):
            put_i64(params + UNDONE, 1)  # `launch.py` compiles the fp32 kernel and runs it again
        elif bad != F(0):  # sums overflowed, if all values were finite
            put_i64(t.downscaled, 1)
            call_mainloop(mainloop, params, scratch, address)
            for n in range(p.head_batch):
                replace_overflowed_rows(p, t, index + n, n * R, R, q_start)
        for _ in range(p.head_batch):
            fetch_add(params + DONE)
        index = fetch_add(params + NEXT_ITEM) * p.head_batch


def launch(template, scratch, team, q, k, v, out, lse, k_scales, v_scales, kv_lengths, cu_q, cu_k, table):
    """Runs a call, with a parameter struct that is copied from `template` to `scratch`. Returns UNDONE_ITEM,
    WRONG_TABLES (nothing was done then) and SPARE_ROWS, as bits.

    It runs in the threads of `team`, or in this one if that is 0. After the struct come the threads' task, the work
    items if the call lists its own, the split-KV partials, and this thread's scratch memory.
    """
    for i in range(PARAM_WORDS):
        put_i64(scratch + 8 * i, get_i64(template + 8 * i))
    p = params_at(scratch)
    p.q, p.k, p.v, p.out, p.lse, p.k_scales, p.v_scales = q, k, v, out, lse, k_scales, v_scales
    p.partials, spare = scratch + LAUNCH_BYTES, 0
    if p.schedule:
        p.kv_lengths, p.cu_q, p.cu_k, p.table = kv_lengths, cu_q, cu_k, table
        if not tables_are_valid(p):
            return WRONG_TABLES
        p.work_items = p.partials
        order = p.work_items + p.max_items * WORK_ITEM_BYTES
        p.partials = up(order + 8 * p.batch, CACHE_LINE)
        call_kernel(p.schedule, scratch, order)
        p.threads = min(p.threads, p.items)
        if cu_q and get_i32(cu_q + 4 * p.batch) < p.q_rows:
            spare = SPARE_ROWS
    own_scratch = p.partials + up(p.items * p.partial_bytes, CACHE_LINE)
    if p.prefix_params:  # not copied: an earlier attempt may have used it
        prefix = params_at(p.prefix_params)
        prefix.next_item, prefix.done, prefix.undone = 0, 0, 0
    if team and p.threads > 1:
        task, threads = task_at(scratch + TASK_AT), team_at(team)
        task.next_thread, task.kernel, task.params, task.memories = 0, p.worker, scratch, team + TEAM_BYTES
        call_parallel(threads.parallel, threads.thread_main, scratch + TASK_AT, p.threads, 0)
    else:
        call_kernel(p.worker, scratch, own_scratch)
    if p.combine:
        call_kernel(p.combine, scratch, own_scratch)
    return spare + (UNDONE_ITEM if p.undone else 0)


@jit
def tables_are_valid(p):
    """Whether offsets, lengths and pages are valid, as `validation/values.py` checks: no row out of range is read."""
    if p.cu_q and not offsets_are_valid(p.cu_q, p.batch, p.q_rows, p.q_len):
        return False
    if p.cu_k and not offsets_are_valid(p.cu_k, p.batch, p.kv_rows, p.kv_len):
        return False
    for b in range(p.batch):
        _, _, _, kv_len, _ = sequence(p, b)
        most = get_i32(p.cu_k + 4 * b + 4) - get_i32(p.cu_k + 4 * b) if p.cu_k else p.kv_len
        if not 0 <= kv_len <= most:
            return False
        if p.table:
            for n in range((kv_len + p.page - 1) // p.page):
                if not 0 <= get_i32(p.table + b * p.table_b + 4 * n) < p.kv_rows:
                    return False
    return True


@jit
def offsets_are_valid(cu, batch, rows, longest):
    """Whether offsets of packed rows begin at 0, never decrease, end by `rows`, and differ by at most `longest`."""
    for b in range(batch):
        if not 0 <= get_i32(cu + 4 * b + 4) - get_i32(cu + 4 * b) <= longest:
            return False
    return get_i32(cu) == 0 and get_i32(cu + 4 * batch) <= rows


def thread_main(task):
    """The main function of each thread of a team: runs a kernel with its own scratch memory."""
    t = task_at(task)
    slot = fetch_add(task + NEXT_THREAD)
    call_kernel(t.kernel, t.params, get_i64(t.memories + 8 * slot))


def schedule(params, order):
    """Lists the work items, longest first, and their number. `order` is scratch memory, an int64 for each batch row."""
    p = params_at(params)
    for b in range(p.batch):
        put_i64(order + 8 * b, b)
    gap = p.batch // 2 if p.cu_q or p.cu_k or p.kv_lengths else 0  # Shell sort: longest sequences first
    while gap:
        for i in range(gap, p.batch):
            b, j = get_i64(order + 8 * i), i
            size = cost(p, b)
            while j >= gap and cost(p, get_i64(order + 8 * (j - gap))) < size:
                put_i64(order + 8 * j, get_i64(order + 8 * (j - gap)))
                j -= gap
            put_i64(order + 8 * j, b)
        gap //= 2
    count, group = 0, p.heads // p.kv_heads
    for at in range(p.batch):
        b = get_i64(order + 8 * at)
        _, q_len, _, kv_len, offset = sequence(p, b)
        positions = affine(p, b, offset)
        block = max(1, own_rows(p, q_len))
        block_tiles = (block + p.tile_rows - 1) // p.tile_rows
        # Backwards: if causal, the last rows see the most.
        for tile in range((q_len + block - 1) // block * block_tiles - 1, -1, -1):
            row = tile // block_tiles * block + tile % block_tiles * p.tile_rows
            n = min(p.tile_rows, q_len - row, tile // block_tiles * block + block - row)
            if n <= 0:
                continue
            lo, hi = rows_span(p, positions, row, n, kv_len)
            last = kv_len
            if p.block:
                lo, hi, last = 0, p.max_selected, p.max_selected
            first, splits, size = 0, 1, p.split_size
            if p.split_few and group * own_rows(p, q_len) > p.decode_rows:
                size = 0
            if size and lo < hi:
                first = lo // size
                splits = (hi + size - 1) // size - first
            for split in range(splits):  # outer loop: heads of a page then share TLB entries
                for head in range(p.kv_heads):
                    item = item_at(p.work_items + count * WORK_ITEM_BYTES)
                    item.b, item.head, item.row, item.rows = b, head, row, n
                    item.start = (first + split) * size
                    item.end = min(last, item.start + size) if size else last
                    item.split, item.splits = split, splits
                    count += 1
    p.next_item, p.items, p.done, p.undone = 0, count, 0, 0


@jit
def cost(p, b):
    """Cells of a sequence's scores."""
    _, q_len, _, kv_len, _ = sequence(p, b)
    return q_len * (p.max_selected if p.block else kv_len)


@jit
def own_rows(p, q_len):
    """Query rows of a sequence that may share an item: those that share a list of indices."""
    return min(q_len, p.block) if p.block else q_len
