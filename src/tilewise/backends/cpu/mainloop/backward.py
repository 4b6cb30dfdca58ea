"""The backward mainloop: a block of keys of one KV head over all query rows that see any of it.

A tile is a block of BK keys and BQ rows of each head of the group. Its cells are kept by keys, as in prefill:

    s  [BK, R] = K Q^T        P = exp(s - lse)            dV [BK, Dv] += P dO
    dP [BK, R] = V dO^T       dS = P (dP - delta)         dK [BK, D]  += dS Q         dQ [R, D] += dS^T K

dK and dV of the block stay in scratch memory until its last tile. dQ is summed in float32 in the order of key blocks: a
block waits for its turn at each tile of rows, so the bits do not depend on threads. Threads take blocks in that order,
interleaved with those of other heads, so a thread seldom waits. The last block of a tile writes its dq.

With key indices a tile computes only the keys that its rows select (`backward_selected.py`).

`ld` is the leading dimension of s and dP: R, padded to whole panels.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import types

from ....core.large_lse import LARGE
from ..codegen.load_store import clear, fetch_add, get_f32, load_acquire, put_f32, put_i64, store_release
from ..codegen.numba_ops import (
    INF,
    ONE,
    ZERO,
    F,
    back_off,
    gradients_at,
    item_at,
    jit,
    params_at,
    policy_jit,
    row_to_f32,
    store_row,
    up,
)
from ..codegen.vector import W
from ..gemm.fp32 import KEYS, PANEL, ROWS
from ..kv_access import affine, kv_location, query_span, sequence
from ..params import WORK_ITEM_BYTES, Gradients, Params, offset
from ..scratch import partition_backward
from .backward_bf16 import BF16
from .backward_cells import dot_minus
from .backward_fp32 import FP32
from .backward_mods import add_sums, begin_item, begin_sums, end_item
from .backward_selected import add_to_block, list_tile_keys
from .backward_tile import Tile, differentiate, init_tile_rows, list_blocks
from .mask import MIXED, SKIP, read_states
from .mods import has_mods, mod_state

NEXT_ITEM, NEXT_ROWS = offset(Params, "next_item"), offset(Gradients, "next_rows")
NEXT_OWN = offset(Gradients, "next_own")


def schedule_backward(params, order):
    """Lists the work items: for each block of keys all sequences and KV heads, or one item if they share sums."""
    p = params_at(params)
    g = gradients_at(p.gradients)
    longest, count = types.int64(0), 0
    for b in range(p.batch):
        longest = max(longest, sequence(p, b)[3])
    for block in range((longest + p.tile_keys - 1) // p.tile_keys):
        for b in range(1 if g.every_row else p.batch):
            if not g.every_row and sequence(p, b)[3] <= block * p.tile_keys:
                continue
            for head in range(1 if g.every_head else p.kv_heads):
                item = item_at(p.work_items + count * WORK_ITEM_BYTES)
                item.b, item.head, item.split = b, head, block
                count += 1
    p.next_item, p.items, p.done, p.undone = 0, count, 0, 0


@jit
def rows_seeing(p, block, kv_len, positions, q_len):
    """The first and last row that may see a key of a block.

    With strides there may be none: both are then the row after which the block's keys are.
    """
    if positions.tree:  # spans of keys need not move right from row to row
        return ZERO, q_len
    start = block * p.tile_keys
    end = min(start + p.tile_keys, kv_len)
    return query_span(p, positions, start, q_len)[0], query_span(p, positions, end - 1, q_len)[1]


@jit
def visits(p, tile, block):
    """Whether a block of keys visits a tile's rows: it is within the span of keys that they see, so such blocks are
    consecutive.
    """
    _, q_len, _, kv_len, offset = sequence(p, tile.b)
    if block < 0 or block * p.tile_keys >= kv_len:
        return False
    first, last = rows_seeing(p, block, kv_len, affine(p, tile.b, offset), q_len)
    return first < tile.row + tile.rows and last > tile.row


@jit
def wait_turn(p, semaphore, block):
    """Waits for this block's turn. No deadlock: earlier blocks were taken first, and do not wait for later ones."""
    spins = 0
    while load_acquire(semaphore) != block:
        spins = back_off(spins, p.yield_thread)


def delta(params, scratch):
    """The kernel before the mainloop: delta = rowsum(dout * out) - dlse, head by head; 0 in rows that see nothing."""
    p = params_at(params)
    g, Dv = gradients_at(p.gradients), up(p.value_dim, W)
    index = fetch_add(p.gradients + NEXT_ROWS)
    while index < (p.heads if p.cu_q else p.batch * p.heads):
        b, head = index // p.heads, index % p.heads
        for i in range(g.rows):
            lse, dlse, value = get_f32(p.lse + b * p.lse_b + head * p.lse_h + i * p.lse_l), F(0), F(0)
            if abs(lse) != INF:
                if abs(lse) > LARGE:
                    g.large = 1
                at = g.dout + b * g.dout_b + head * g.dout_h + i * g.dout_l
                row_to_f32(scratch, at, p.q_dtype, p.value_dim, Dv, ZERO, ZERO, ONE)
                at = p.out + b * p.out_b + head * p.out_h + i * p.out_l
                row_to_f32(scratch + 4 * Dv, at, p.q_dtype, p.value_dim, Dv, ZERO, ZERO, ONE)
                if g.dlse:
                    dlse = get_f32(g.dlse + b * g.dlse_b + head * g.dlse_h + i * g.dlse_l)
                value = dot_minus(scratch, scratch + 4 * Dv, Dv, F(1), dlse)
            put_f32(g.delta + b * g.delta_b + head * g.delta_h + i * g.delta_l, value)
        index = fetch_add(p.gradients + NEXT_ROWS)


def mainloop(gemm, selected):
    """`fn(params, scratch)`, a thread's main function, for a policy of `backward_products.py`.

    `selected`: for calls with key indices.
    """
    name, load_keys, load_rows, cells, dots, pack_cells, add_values, add_keys, add_queries = gemm
    suffix = f"{name}_selected" if selected else name

    @policy_jit(suffix)
    def add_to_queries(p, g, t, tile, finite_keys, R, ld, skipped):
        """Adds to dQ of a tile, in the order of key blocks; the last block writes it."""
        D = up(p.head_dim, W)
        q_start, q_len, _, _, _ = sequence(p, tile.b)
        before = q_start // p.tile_rows + tile.b if p.cu_q else tile.b * ((q_len + p.tile_rows - 1) // p.tile_rows)
        slot = tile.head * g.slots + before + tile.row // p.tile_rows
        group = p.heads // p.kv_heads
        sums, semaphore = g.dq_sums + 4 * slot * up(group * p.tile_rows, ROWS) * D, g.dq_semaphores + 8 * slot
        if visits(p, tile, tile.block - 1):
            wait_turn(p, semaphore, tile.block)
        else:
            clear(sums, up(R, ROWS) * D)
        if not skipped:
            add_queries(p, t, tile, ld, finite_keys, sums, R)
        if visits(p, tile, tile.block + 1):
            store_release(semaphore, tile.block + 1)
            return
        n, b = tile.rows, ZERO if p.cu_q else tile.b
        for r in range(R):
            head, row = tile.head * group + r // n, q_start + tile.row + r % n
            to = g.dq + b * g.dq_b + head * g.dq_h + row * g.dq_l
            store_row(to, p.q_dtype, sums + 4 * r * D, p.head_dim, F(p.scale))

    @policy_jit(suffix)
    def add_tile(p, g, t, tile, R, ld):
        """Adds a tile to dK and dV, and computes dS for dQ. Its keys are loaded."""
        count = tile.end - tile.start
        init_tile_rows(p, g, t, tile, R)
        load_rows(p, g, t, tile, R)
        list_blocks(t, tile, R, count)
        if not cells(p, t, tile, R, ld, count):
            factor = dots(p, t, tile, R, ld, count)
            differentiate(p, g, t, tile, R, ld, count, factor)
            pack_cells(t, ld, count)
        if g.dv:
            add_values(p, t, ld, count)
        if g.dk:
            add_keys(p, t, ld, count)

    @policy_jit(suffix)
    def row_tile(p, g, t, tile, finite_keys):
        """A tile of rows: adds to dK and dV, and in turn to dQ."""
        R = p.heads // p.kv_heads * tile.rows
        ld = up(R, PANEL)
        _, skipped = read_states(p, tile, t.states, tile.start, tile.end)
        if has_mods(p):
            state = mod_state(p, tile, tile.start, tile.end)
            put_i64(t.mod_state, state)
            skipped |= state == SKIP
        if not skipped:
            add_tile(p, g, t, tile, R, ld)
        if g.dq:
            add_to_queries(p, g, t, tile, finite_keys, R, ld, skipped)

    @policy_jit(suffix)
    def selected_row_tile(p, g, t, tile, finite_keys):
        """The same over the keys that the rows select."""
        D, Dv, R = up(p.head_dim, W), up(p.value_dim, W), p.heads // p.kv_heads * tile.rows
        ld = up(R, PANEL)
        count = list_tile_keys(p, t, tile)
        own = Tile(tile.b, tile.head, tile.row, tile.rows, ZERO, count, tile.block)
        if count:
            read_states(p, tile, t.states, tile.start, tile.end)  # with indices no tile is skipped
            put_i64(t.mod_state, MIXED)
            at = kv_location(p, tile, sequence(p, tile.b)[2], t.selected)
            finite_keys = load_keys(p, t, at, ZERO, count)
            clear(t.dk, up(count, KEYS) * D)
            clear(t.dv, up(count, KEYS) * Dv)
            add_tile(p, g, t, own, R, ld)
            if g.dv:
                add_to_block(t, own, tile.start, t.dv, t.block_dv, Dv)
            if g.dk:
                add_to_block(t, own, tile.start, t.dk, t.block_dk, D)
        if g.dq:
            add_to_queries(p, g, t, own, finite_keys, R, ld, count == 0)

    visit = selected_row_tile if selected else row_tile

    @policy_jit(suffix)
    def begin_block(p, t, whole, kv_start):
        """Loads K and V of a block and clears its sums; returns K without non-finite values, and the sums of dK and dV.
        With key indices each tile of rows loads its own keys.
        """
        dk, dv, finite_keys, count = t.dk, t.dv, t.keys, whole.end - whole.start
        if selected:
            dk, dv = t.block_dk, t.block_dv
        else:
            finite_keys = load_keys(p, t, kv_location(p, whole, kv_start, ZERO), whole.start, count)
        clear(dk, up(count, KEYS) * up(p.head_dim, W))
        clear(dv, up(count, KEYS) * up(p.value_dim, W))
        return finite_keys, dk, dv

    @policy_jit(suffix)
    def key_block(p, g, t, b, head, block):
        """A block of keys of one KV head: its dK and dV, and its share of dQ and of the other gradients."""
        _, q_len, kv_start, kv_len, offset = sequence(p, b)
        start = block * p.tile_keys
        end = min(start + p.tile_keys, kv_len)
        if start >= end:
            return
        D, Dv, group = up(p.head_dim, W), up(p.value_dim, W), p.heads // p.kv_heads
        whole = Tile(b, head, ZERO, q_len, start, end, block)
        finite_keys, dk, dv = begin_block(p, t, whole, kv_start)
        if g.load_count:
            begin_sums(g, t)
        for h in range(group):
            put_f32(t.slope_sums + 4 * h, F(0))
        first, last = rows_seeing(p, block, kv_len, affine(p, b, offset), q_len)
        for row in range(first // p.tile_rows * p.tile_rows, last, p.tile_rows):
            tile = Tile(b, head, row, min(p.tile_rows, q_len - row), start, end, block)
            if first < row + tile.rows:  # else no row is that far
                visit(p, g, t, tile, finite_keys)
        if g.load_count:
            add_sums(p, g, t, whole)
        kv_row = kv_location(p, whole, kv_start, ZERO).b
        for j in range(end - start):
            token = kv_start + start + j
            if g.dk:
                to = g.dk + kv_row * g.dk_b + head * g.dk_h + token * g.dk_l
                store_row(to, p.k_dtype, dk + 4 * j * D, p.head_dim, F(p.scale))
            if g.dv:
                to = g.dv + kv_row * g.dv_b + head * g.dv_h + token * g.dv_l
                store_row(to, p.v_dtype, dv + 4 * j * Dv, p.value_dim, F(1))
        if g.dslopes:
            for h in range(group):
                to = g.dslopes + block * g.dslopes_j + b * g.dslopes_b + (head * group + h) * g.dslopes_h
                put_f32(to, get_f32(t.slope_sums + 4 * h))

    def backward(params, scratch):
        """A thread's main function: takes work items until there are none."""
        p = params_at(params)
        g, t = gradients_at(p.gradients), partition_backward(p, scratch)
        own = g.own
        if g.load_count:
            own += fetch_add(p.gradients + NEXT_OWN) * g.own_bytes
        index = fetch_add(params + NEXT_ITEM)
        while index < p.items:
            item = item_at(p.work_items + index * WORK_ITEM_BYTES)
            begin_item(p, t, own, index)
            for b in range(item.b, p.batch if g.every_row else item.b + 1):
                for head in range(item.head, p.kv_heads if g.every_head else item.head + 1):
                    key_block(p, g, t, b, head, item.split)
            if g.load_count:
                end_item(p, t)
            index = fetch_add(params + NEXT_ITEM)

    return backward


backward = mainloop(FP32, selected=False)
KINDS = {"bf16": (BF16, False), "selected": (FP32, True), "selected bf16": (BF16, True)}


def backward_function(kind):
    return mainloop(*KINDS[kind])
