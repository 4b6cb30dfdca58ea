"""Steps of a consumer's mainloop: one key tile each, with products and softmax overlapped."""

from ...gpu.gluon import PAIRED_WEIGHTS, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .layouts import halves, out_layout, score_layout
from .pipeline import key_use, piece_of, value_use
from .softmax import LATE, logits, no_sums, select_visible, weights


@gluon.jit
def start_scores(a, queries, keys, i_work, n, C: gl.constexpr, FIRST: gl.constexpr):
    """Starts S = Q K' [64, BN] of key tile n; of several chunks, all but the last are waited for and released.

    Chunks of q whose memory the output reuses come last: in a work tile's FIRST step they may still be in flight.
    """
    CHUNKS: gl.constexpr = a.S.chunks
    BN: gl.constexpr = a.S.BN
    s = gl.zeros([64, BN], gl.float32, score_layout(a.S))
    for i in gl.static_range(CHUNKS):
        if FIRST and a.S.out_aliases_q_chunks > 0 and i == CHUNKS - a.S.out_aliases_q_chunks:
            queries.wait_full(i_work, C, 1)
        if i > 0:
            keys.wait_full(key_use(a, n, i))
        k = keys.tile(key_use(a, n, i)).permute((1, 0))  # [columns, BN]
        at = (i + a.S.out_aliases_q_chunks) % CHUNKS
        if a.S.out_aliases_q_chunks > 0:
            at += n >> 31  # 0, unknown to the compiler, which would keep two registers for each product
        s = warpgroup_mma(queries.chunk(i_work, C, at), k, s, use_acc=i > 0, is_async=True)
        if i > 0:
            s = warpgroup_mma_wait(1, deps=(s,))
            keys.release(key_use(a, n, i - 1))
    return s


@gluon.jit
def release_scores(a, keys, n):
    keys.release(key_use(a, n, a.S.chunks - 1))


@gluon.jit
def to_weights(a, s, m, l, rows, tile, MASKED: gl.constexpr, KEEPS: gl.constexpr):
    """P of a tile, the new m and l, and alpha for O; KEEPS: m is not updated."""
    BN: gl.constexpr = a.S.BN
    LATER: gl.constexpr = None if KEEPS else LATE
    columns = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, score_layout(a.S)))
    if not a.S.linear:
        s = logits(a, s, rows, columns)
    if MASKED:
        s, _ = select_visible(a, s, rows, tile)
    p, m, l, alpha = weights(a, s, m, l, LATER, MASKED)
    return p, m, l, gl.convert_layout(alpha, gl.SliceLayout(1, out_layout(a.S)))


@gluon.jit
def as_operand(a, p, alpha):
    """P as the left operand of P V, in the same pieces of keys as V; and last the alpha by which O is rescaled."""
    p = p.to(a.q.dtype)
    if a.S.pieces == 1:
        found = (left_operand(a, p), alpha)
    else:
        low, high = halves(p)
        if a.S.pieces == 2:
            found = (left_operand(a, low), left_operand(a, high), alpha)
        else:
            gl.static_assert(a.S.pieces == 4)
            p0, p1 = halves(low)
            p2, p3 = halves(high)
            found = (left_operand(a, p0), left_operand(a, p1), left_operand(a, p2), left_operand(a, p3), alpha)
    return found


@gluon.jit
def left_operand(a, p):
    return gl.convert_layout(p, gl.DotOperandLayout(0, out_layout(a.S), 2))


@gluon.jit
def carried(a, p):
    """P as the loop carries it to the next step: with PAIRED_WEIGHTS, two elements in each 32-bit register."""
    if PAIRED_WEIGHTS:
        if a.S.pieces == 1:
            p = (pairs(p[0]), p[1])
        elif a.S.pieces == 2:
            p = (pairs(p[0]), pairs(p[1]), p[2])
        else:
            p = (pairs(p[0]), pairs(p[1]), pairs(p[2]), pairs(p[3]), p[4])
    return p


@gluon.jit
def pairs(p):
    """Pairs of neighbouring 16-bit elements of P, as [64, K / 2] of int32."""
    low, high = gl.split(gl.reshape(p, [64, p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def elements(a, p):
    """P [64, K] of its pairs. Not by PTX: LLVM sees that the pairs are what a product takes."""
    low = p.to(gl.int16).to(a.q.dtype, bitcast=True)
    high = (p >> 16).to(gl.int16).to(a.q.dtype, bitcast=True)
    return left_operand(a, gl.reshape(gl.join(low, high), [64, p.shape[1] * 2]))


@gluon.jit
def start_output(a, values, n, p, o):
    """Starts O += P V of tile n; of several pieces, all but the last are waited for and released."""
    PIECES: gl.constexpr = a.S.pieces
    for j in gl.static_range(PIECES):
        values.wait_full(value_use(a, n, j))
        left = p[j]
        if PAIRED_WEIGHTS:
            left = elements(a, left)
        o = warpgroup_mma(left, piece_of(a, values, value_use(a, n, j)), o, is_async=True)
        if j > 0:
            o = warpgroup_mma_wait(1, deps=(o,))
            values.release(value_use(a, n, j - 1))
    return o


@gluon.constexpr_function
def rescale_text(cells):
    """PTX that multiplies a thread's cells by their rows' alpha, skipped if alpha is 1 in the whole warp.

    Cells 0 and 2 are in the thread's two rows.
    """
    one, alpha = "0f3F800000", 2 * cells
    lines = [f"{{ .reg .pred p; setp.neu.f32 p, ${alpha}, {one}; setp.neu.or.f32 p, ${alpha + 2}, {one}, p;"]
    lines.append("vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni KEPT;")
    lines += [f"mul.f32 ${n}, ${n}, ${alpha + n};" for n in range(cells)]
    return " ".join([*lines, "KEPT: }"])


@gluon.constexpr_function
def rescale_operands(cells):
    """The cells in place, and an alpha for each."""
    return ",".join(["=f"] * cells + [str(n) for n in range(cells)] + ["f"] * cells)


@gluon.jit
def rescaled(a, o, p):
    """O [64, DV] times the alpha [64] that comes with P, which is usually 1."""
    CELLS: gl.constexpr = a.S.DV // 2
    TEXT: gl.constexpr = rescale_text(CELLS)
    OPERANDS: gl.constexpr = rescale_operands(CELLS)
    alpha = p[a.S.pieces]
    return gl.inline_asm_elementwise(TEXT, OPERANDS, [o, alpha[:, None]], gl.float32, is_pure=True, pack=CELLS)


@gluon.jit
def release_output(a, values, n):
    values.release(value_use(a, n, a.S.pieces - 1))


@gluon.jit
def keep_maxima(a, o, p):
    """O and P before max-free tiles, which keep m: O is rescaled now, and not again."""
    gl.static_assert(a.S.pieces == 1)
    return rescaled(a, o, p), (p[0], gl.full_like(p[1], 1.0))


@gluon.jit
def first_tile(a, queries, keys, i, n, tile, rows, C: gl.constexpr):
    """The first key tile of work tile i, without a P V to overlap."""
    MASKED: gl.constexpr = a.S.masked
    queries.wait_full(i, C, 0)
    keys.wait_full(key_use(a, n, 0))
    s = start_scores(a, queries, keys, i, n, C, True)
    s = warpgroup_mma_wait(0, deps=(s,))
    release_scores(a, keys, n)
    m, l = no_sums(a)
    p, m, l, alpha = to_weights(a, s, m, l, rows, tile, MASKED, False)
    return carried(a, as_operand(a, p, alpha)), m, l


@gluon.jit
def last_output(a, values, n, p, o):
    """P V of a work tile's last keys, not overlapped."""
    o = start_output(a, values, n, p, rescaled(a, o, p))
    o = warpgroup_mma_wait(0, deps=(o,))
    release_output(a, values, n)
    return o


@gluon.jit
def step(
    a, queries, keys, values, i, n, last, tile, p, o, m, l, rows,
    C: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """S and softmax of key tile n (number `tile` of work tile i), and P V of tile `last`, the one before it.

    Without overlap, P is consumed before S is computed, which leaves registers for the rules of a masked tile.
    """
    OVERLAPS: gl.constexpr = a.S.overlaps and not MASKED
    KEEPS: gl.constexpr = a.S.max_free and not MASKED and not FIRST
    gl.static_assert(not OVERLAPS or a.S.v_stages > 0)  # V of a tile comes before the next one's keys in their ring
    if OVERLAPS:
        keys.wait_full(key_use(a, n, 0))
        s = start_scores(a, queries, keys, i, n, C, False)
    if not KEEPS:
        o = rescaled(a, o, p)
    o = start_output(a, values, last, p, o)
    if OVERLAPS:
        s = warpgroup_mma_wait(1, deps=(s,))
    else:
        keys.wait_full(key_use(a, n, 0))
        o = warpgroup_mma_wait(0, deps=(o,))
        release_output(a, values, last)
        s = start_scores(a, queries, keys, i, n, C, False)
        s = warpgroup_mma_wait(0, deps=(s,))
    release_scores(a, keys, n)
    x, m, l, alpha = to_weights(a, s, m, l, rows, tile, MASKED, KEEPS)
    if KEEPS:
        alpha = p[1]
    p = as_operand(a, x, alpha)
    if OVERLAPS:
        if a.S.late_wait:
            values.wait_full(last)  # already full: a branch, above which the compiler moves no wait
        o, whole = warpgroup_mma_wait(0, deps=(o, p[0]))  # P goes through the wait: else it is moved to other registers
        p = (whole, alpha)
        release_output(a, values, last)
    return carried(a, p), o, m, l
