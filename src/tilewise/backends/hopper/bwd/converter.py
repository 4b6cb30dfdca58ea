"""The converter: a warp that turns dQ into q's dtype once nothing is added to it any more, while it lies in L2."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .sync import load_acquire
from .tile_scheduler import get_index, next_block, work_of


@gluon.jit
def convert(a, w, block, head, i):
    """Query block i of a head, in pieces of 16 rows x 32 columns, as `consumer.pack_dq` has laid them out."""
    BM: gl.constexpr = a.S.BM
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1, 2, 2], [1, 32, 1, 1], [1, 1, 1, 1], [3, 2, 1, 0])
    THREE: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    TWO: gl.constexpr = gl.SliceLayout(2, THREE)
    j = gl.arange(0, 4, gl.SliceLayout(1, TWO))[:, None][:, :, None][:, :, :, None]  # column // 8
    lane = gl.arange(0, 32, gl.SliceLayout(0, TWO))[None, :][:, :, None][:, :, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, THREE)))[None, :][None, :, :][:, :, :, None]  # of rows
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))))
    odd = odd[None, :][None, :, :][None, :, :, :]
    packed = j * 128 + lane * 4 + half * 2 + odd
    row = lane // 4 + half * 8
    column = j * 8 + lane % 4 * 2 + odd
    source = a.ACC + block.to(gl.int64) * (BM * a.S.D)
    top = i * BM
    to = a.DQ + w.b.to(gl.int64) * a.dq_b + head.to(gl.int64) * a.dq_h + (w.q_start + top).to(gl.int64) * a.dq_l
    for piece in range(16):  # consumer, its warp, half of the columns
        x = gl.load(source + piece * 512 + packed, cache_modifier=".cg")
        if BM == 64:
            row_at = (piece >> 1 & 3) * 16
            column_at = (piece >> 3) * 64 + (piece & 1) * 32
        else:
            row_at = (piece >> 1) * 16
            column_at = (piece & 1) * 32
        there = row < w.q_len - top - row_at
        if a.S.guarded:  # NaN where a gradient is not finite
            nothing = gl.sum(gl.sum(gl.where(there, x * 0.0, 0.0), 3), 0)  # [32, 2]
            gl.store(a.FLAG + gl.zeros([32, 2], gl.int32, gl.SliceLayout(0, THREE)), 1, mask=nothing != 0.0)
        at = to + (row_at + row).to(gl.int64) * a.dq_l + column_at + column
        gl.store(at, (x * a.scale).to(a.q.dtype), mask=there & (j * 8 < a.head_dim - column_at))


@gluon.jit
def convert_block(a, buf, index):
    """Those query blocks to which this key block adds last."""
    w = work_of(a, index)
    i = w.last - 1
    g = w.n * 0
    for _ in range(w.steps(a)):
        if w.n + 1 == w.end(a, i):
            head = w.kv_head * a.group + g
            block = w.block(a, head, i)
            while load_acquire(a.SEMAPHORES + block) <= w.turn(a, i):
                pass
            convert(a, w, block, head, i)
        i, g = next_block(a, i, g)


@gluon.jit
def convert_all(a, buf):
    gl.static_assert(a.S.persistent and a.S.deterministic)
    n = gl.to_tensor(0)
    index = get_index(a, buf, n)
    while index < a.planes * a.blocks:
        convert_block(a, buf, index)
        n += 1
        index = get_index(a, buf, n)
