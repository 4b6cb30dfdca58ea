"""Steps of a consumer: one tile of keys each, products and softmax side by side."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .layouts import out_layout, score_layout
from .softmax import hide, logits, weights


@gluon.jit
def start_scores(a, queries, keys, i_work, n, C: gl.constexpr):
    """Starts S = Q K' with tile n of the keys [64, BN]; of several chunks, all but the last are done and released."""
    CHUNKS: gl.constexpr = a.S.chunks
    BN: gl.constexpr = a.S.BN
    s = gl.zeros([64, BN], gl.float32, score_layout(a.S))
    for i in gl.static_range(CHUNKS):
        if i > 0:
            keys.wait_full(n * a.S.chunks + i)
        k = keys.tile(n * a.S.chunks + i).permute((1, 0))  # [columns, BN]
        s = warpgroup_mma(queries.chunk(i_work, C, i), k, s, use_acc=i > 0, is_async=True)
        if i > 0:
            s = warpgroup_mma_wait(1, deps=(s,))
            keys.release(n * a.S.chunks + i - 1)
    return s


@gluon.jit
def release_scores(a, keys, n):
    keys.release(n * a.S.chunks + a.S.chunks - 1)


@gluon.jit
def to_weights(a, s, m, l, rows, tile, n_keys, mixed, MASKED: gl.constexpr):
    """P of a tile with the new m and l and what O is multiplied by."""
    BN: gl.constexpr = a.S.BN
    columns = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, score_layout(a.S)))
    if not a.S.linear:
        s = logits(a, s, rows, columns)
    if MASKED == 1:
        s, _ = hide(a, s, rows, tile, columns, n_keys)
    if MASKED == 2:
        if mixed:
            s, _ = hide(a, s, rows, tile, columns, n_keys)
    p, m, l, shrink = weights(a, s, m, l, MASKED > 0)
    return p, m, l, gl.convert_layout(shrink, gl.SliceLayout(1, out_layout(a.S)))


@gluon.jit
def as_operand(a, p):
    """P as the left operand of P V."""
    return gl.convert_layout(p.to(a.q.dtype), gl.DotOperandLayout(0, out_layout(a.S), 2))


@gluon.jit
def step(
    a, queries, keys, values, i, n, last, tile, tile_keys, mixed, p, o, m, l, rows,
    C: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tile n of the keys (number `tile` of work i) into the sums, and P V of tile `last`, the one before it."""
    s = start_scores(a, queries, keys, i, n, C)
    values.wait_full(last)
    o = warpgroup_mma(p, values.tile(last), o, is_async=True)
    if a.S.overlaps:
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        s, o = warpgroup_mma_wait(0, deps=(s, o))
        values.release(last)
    release_scores(a, keys, n)
    p, m, l, shrink = to_weights(a, s, m, l, rows, tile, tile_keys, mixed, MASKED)
    p = as_operand(a, p)
    if a.S.overlaps:
        if a.S.late_wait:
            values.wait_full(last)  # it is full: this is a branch, and the compiler moves no wait above it
        o, p = warpgroup_mma_wait(0, deps=(o, p))  # P goes through the wait: else it is moved to other registers
        values.release(last)
    return p, o, m, l, shrink


@gluon.jit
def next_tile(
    a, queries, keys, values, i, n, tile, tile_keys, mixed, p, o, m, l, rows,
    C: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """`step` inside a work."""
    keys.wait_full(n * a.S.chunks)
    p, o, m, l, shrink = step(
        a, queries, keys, values, i, n, n - 1, tile, tile_keys, mixed, p, o, m, l, rows, C, MASKED
    )
    return p, o * shrink[:, None], m, l
