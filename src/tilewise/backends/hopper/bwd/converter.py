"""The converter: a warp that converts dQ to q's dtype after its last reduce-add, while it is in L2."""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, thread_barrier, tma_load, tma_store, tma_store_wait
from .sync import fence_async_global, wait_for
from .tile_scheduler import get_index, next_block, work_of

PIECES = gl.constexpr(16)  # pieces of a query block: 16 rows x 32 columns each


@gluon.jit
def start_piece(a, buf, block, m, piece):
    """Starts to load piece number `piece` of a query block, as use m of the ring."""
    full = buf.piece_full.index(m % a.S.pieces)
    mbarrier.expect(full, a.piece.block_type.nbytes)
    tma_load(a.piece, [(block * PIECES + piece) * 16, 0], full, buf.piece.index(m % a.S.pieces))


@gluon.jit
def unpack(x):
    """Unpacks [16, 32] as packed by `consumer.pack_dq`: column // 8, lane // 8; lane % 8, row half, column % 2."""
    return x.reshape([4, 4, 2, 4, 2, 2]).permute([4, 1, 2, 0, 3, 5]).reshape([16, 32])


@gluon.jit
def store_piece(a, buf, w, m, head, row, column):
    """Stores a piece in q's dtype, to rows `row ..` of its sequence."""
    out = buf.piece16.index(m % 2)
    if a.S.packed and row + 16 > w.q_len:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
        rows = row + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
        columns = column + gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
        plane = a.DQ + head.to(gl.int64) * a.dq_h
        at = plane + (w.q_start + rows).to(gl.int64) * a.dq_l + columns
        there = (rows < w.q_len) & (columns // 8 < a.dq16.shape[3] // 8)
        gl.store(at, out.reshape([16, 32]).load(LAYOUT), mask=there)
        tma_store_wait(0)  # the next wait assumes one copy per piece, and here is none
    else:
        fence_async_shared()
        tma_store(a.dq16, [w.b, head, w.q_start + row, column], out)


@gluon.jit
def convert(a, buf, w, block, head, i, m):
    """Converts query block i of a head, whose pieces are ring uses `m ..`."""
    BM: gl.constexpr = a.S.BM
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    packed_row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    packed_column = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    own_row = (packed_column & 2) * 4 + (packed_row & 3) * 2 + packed_column // 16
    AHEAD: gl.constexpr = a.S.pieces
    for piece in gl.static_range(AHEAD):
        start_piece(a, buf, block, m + piece, piece)
    for piece in range(PIECES):
        if BM == 64:  # consumer, its warp, half of the columns
            row = i * BM + (piece >> 1 & 3) * 16
            column = (piece >> 3) * 64 + (piece & 1) * 32
        else:
            row = i * BM + (piece >> 1) * 16
            column = (piece & 1) * 32
        n = m + piece
        mbarrier.wait(buf.piece_full.index(n % a.S.pieces), (n // a.S.pieces) & 1)
        x = buf.piece.index(n % a.S.pieces).load(LAYOUT)
        if a.S.guarded:  # NaN where a gradient is not finite
            found = gl.where(own_row < w.q_len - row, x * 0.0, 0.0)
            wrong = gl.sum(gl.sum(found.reshape([4, 4, 8, 4]), 3), 0) != 0.0  # per thread
            gl.store(a.FLAG + wrong.to(gl.int32) * 0, 1, mask=wrong)
        tma_store_wait(1)
        thread_barrier()  # the piece is in registers, and its buffer in `piece16` is free
        if piece + a.S.pieces < PIECES:
            start_piece(a, buf, block, n + a.S.pieces, piece + a.S.pieces)
        buf.piece16.index(n % 2).reshape([16, 32]).store(unpack((x * a.scale).to(a.q.dtype)))
        store_piece(a, buf, w, n, head, row, column)
    return m + PIECES


@gluon.jit
def convert_block(a, buf, index, m):
    """Converts the query blocks to which this key block adds last."""
    w = work_of(a, index)
    i = w.top(a)
    g = w.n * 0
    for _ in range(w.steps(a)):
        if w.n + 1 == w.end(a, i):
            head = w.kv_head * a.group + g
            block = w.block(a, head, i)
            wait_for(a.SEMAPHORES + block, w.turn(a, i) + 1, True)
            fence_async_global()
            m = convert(a, buf, w, block, head, i, m)
        i, g = next_block(a, i, g)
    return m


@gluon.jit
def convert_all(a, buf):
    gl.static_assert(a.S.persistent)
    n = gl.to_tensor(0)
    m = gl.to_tensor(0)
    index = get_index(a, buf, n)
    while index < a.planes * a.blocks:
        m = convert_block(a, buf, index, m)
        n += 1
        index = get_index(a, buf, n)
    tma_store_wait(0)
