"""The two consumers: a warpgroup with 256 columns of the output each, and every second block of keys to score.

For each pair of blocks, with m the running maximum, which travels from one to the other:

    consumer 0                                      consumer 1
    wait for S; P0 = softmax S with m; send P0, m   wait until S of consumer 0 is done, start S = Q K1'
    O = alpha O; start O += P0 V0                  wait for P0 and m; O = alpha O; start O += P0 V0
    wait for P1 and m, wait for O                   wait for S; P1 = softmax S with m
    O = alpha O; start O += P1 V1                  wait for O; send P1, m
    wait for O; start S = Q K0' of the next pair    O = alpha O; start O += P1 V1
                                                    wait for O

Values are released as soon as they have been added. Exponentials of consumer 0 stand beside products S of consumer 1,
those of consumer 1 beside both P0 V0. Blocks are added to both halves of the output in the order of their keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .epilogue import store, store_fragments
from .producer import tile_at
from .tile_scheduler import fragment

SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SCORE))
OUT_ROW = gl.constexpr(gl.SliceLayout(1, HALF))


@gluon.jit
def start_rope(a, sh, u, b: gl.constexpr):
    s = gl.zeros([64, 64], gl.float32, SCORE)
    mbarrier.wait(sh.rope_full[b], u & 1)
    return warpgroup_mma(sh.q_rope.index(0), sh.k_rope.index(b).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def start_half(a, sh, s, u, b: gl.constexpr, half: gl.constexpr):
    """Starts the products of half the latent columns; a commit for each piece."""
    EACH: gl.constexpr = a.S.pieces // 2
    none = u >> 31  # 0, which the compiler does not know: it would keep registers for the place of each operand
    for i in gl.static_range(EACH):
        mbarrier.wait(sh.full[(2 * b + half) * EACH + i], u & 1)
        k = sh.piece((2 * b + half) * EACH + i + none).permute((1, 0))
        s = warpgroup_mma(sh.q.index(half * EACH + i + none), k, s, is_async=True)
    return s


@gluon.jit
def hide(s, base, hi):
    """-inf where a key of the block that begins at `base` is not below `hi` [64]; comparisons are with constants."""
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORE))
    i8 = column & -8
    j = column & 7
    return gl.where(i8[None, :] < (hi - base)[:, None] - j[None, :], s, float("-inf"))


@gluon.jit
def finite(m):
    """What is subtracted for a maximum: nothing seen yet must not give -inf - -inf."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def alpha_of(a, m, m_new):
    """What sums so far are multiplied by when the maximum becomes `m_new`."""
    return gl.exp2((m - finite(m_new)) * a.factor)


@gluon.jit
def to_weights(a, s, m):
    """P [64, 64] in float32 and the new maximum."""
    m_new = gl.maximum(m, gl.max(s, 1))
    shift = finite(m_new) * a.factor
    p = gl.exp2(gl.fma(s, gl.full_like(s, a.factor), gl.zeros_like(s) - shift[:, None]))
    return p, m_new


@gluon.jit
def rescaled(o, alpha):
    return o * gl.convert_layout(alpha, OUT_ROW, assert_trivial=True)[:, None]


@gluon.jit
def as_operand(p):
    return gl.convert_layout(p, gl.DotOperandLayout(0, HALF, 2))


@gluon.jit
def clear_hidden(a, sh, n, base, b: gl.constexpr, half: gl.constexpr):
    """Zeros for values that weights of 0 would not hide: those past the last key, and what is not finite in keys that
    some queries do not see. Those that see such a key have NaN in their scores, for values are columns of keys.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SMALL: gl.constexpr = sh.p.layout
    first = n  # key that is not seen by all
    if a.S.causal:
        first = n - (a.q_len - 1)
    if base + 64 > first:
        row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        for i in gl.static_range(4):
            tile = sh.k._reinterpret(sh.k.dtype, [16, 64, 64], SMALL).index((2 * b + half) * 4 + i)
            v = tile.load(WIDE)
            ok = (base + row < first)[:, None]
            if a.S.causal:
                ok = ok | ((base + row < n)[:, None] & (gl.abs(v.to(gl.float32)) < float("inf")))
            tile.store(gl.where(ok, v, gl.zeros_like(v)))
        fence_async_shared()


@gluon.jit
def send(a, sh, p, m, b: gl.constexpr):
    """Weights and the maximum to the other consumer."""
    sh.p.index(0).store(p)
    sh.maximum(b).store(m)
    fence_async_shared()
    mbarrier.arrive(sh.ready[b], count=1)


@gluon.jit
def stay(sh, u, half: gl.constexpr):
    """A wait for half a block that has been there for long: the assembler moves nothing across its branch."""
    EACH: gl.constexpr = sh.S.pieces // 2
    mbarrier.wait(sh.full[half * EACH], u & 1)


@gluon.jit
def scores0(a, sh, u):
    """S of block 0 of pair u, complete."""
    s = start_rope(a, sh, u, 0)
    s = start_half(a, sh, s, u, 0, 0)
    s = start_half(a, sh, s, u, 0, 1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(sh.scored.index(0), count=1)
    return s


@gluon.jit
def step0(a, sh, w, u, i, o, m, l, hi, MASKED: gl.constexpr):
    """Pair number u, pair i of its sequence."""
    s = scores0(a, sh, u)
    if MASKED:
        s = hide(s, i * 128, hi)
    p, m_new = to_weights(a, s, m)
    alpha = alpha_of(a, m, m_new)
    l = l * alpha + gl.sum(p, 1)
    p = p.to(a.k.dtype)
    send(a, sh, p, m_new, 0)

    o = rescaled(o, alpha)
    if MASKED:
        clear_hidden(a, sh, w.n, i * 128, 0, 0)
    o = warpgroup_mma(as_operand(p), sh.k.index(0), o, is_async=True)
    mbarrier.wait(sh.ready[1], u & 1)
    m = sh.maximum(1).load(ROW)
    alpha = alpha_of(a, m_new, m)
    sh.wait_half(u, 1, 0)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(sh.free[0], count=1)
    l = l * alpha
    o = rescaled(o, alpha)
    if MASKED:
        clear_hidden(a, sh, w.n, i * 128 + 64, 1, 0)
    o = warpgroup_mma(sh.p.index(0), sh.k.index(2), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(sh.free[2], count=1)
    return o, m, l


@gluon.jit
def step1(a, sh, w, u, i, o, m, l, hi, MASKED: gl.constexpr):
    mbarrier.wait(sh.scored.index(0), u & 1)
    s = start_rope(a, sh, u, 1)
    s = start_half(a, sh, s, u, 1, 0)
    s = start_half(a, sh, s, u, 1, 1)

    mbarrier.wait(sh.ready[0], u & 1)
    m_new = sh.maximum(0).load(ROW)
    alpha = alpha_of(a, m, m_new)
    l = l * alpha
    o = rescaled(o, alpha)
    sh.wait_half(u, 0, 1)
    if MASKED:
        clear_hidden(a, sh, w.n, i * 128, 0, 1)
    o = warpgroup_mma(sh.p.index(0), sh.k.index(1), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))

    if MASKED:
        s = hide(s, i * 128 + 64, hi)
    p, m = to_weights(a, s, m_new)
    alpha = alpha_of(a, m_new, m)
    l = l * alpha + gl.sum(p, 1)
    p = p.to(a.k.dtype)
    stay(sh, u, 3)  # the wait for P0 V0 is not moved above it
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    send(a, sh, p, m, 1)
    mbarrier.arrive(sh.free[1], count=1)
    o = rescaled(o, alpha)
    if MASKED:
        clear_hidden(a, sh, w.n, i * 128 + 64, 1, 1)
    o = warpgroup_mma(as_operand(p), sh.k.index(3), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(sh.free[3], count=1)
    # Times 1, while there is nothing to do: what is left by a product cannot be read while others are under way.
    o = o * (1 + (u >> 31)).to(gl.float32)
    return o, m, l


@gluon.jit
def step(a, sh, w, u, i, o, m, l, hi, C: gl.constexpr, MASKED: gl.constexpr):
    if C == 0:
        o, m, l = step0(a, sh, w, u, i, o, m, l, hi, MASKED)
    else:
        o, m, l = step1(a, sh, w, u, i, o, m, l, hi, MASKED)
    return o, m, l


@gluon.jit
def consume(a, run, sh, C: gl.constexpr):
    query, head = tile_at(a, run.tile)
    row = gl.arange(0, 64, ROW)
    own_query = query + row // a.S.head_rows
    u = 0
    f = 0
    partial = run.split * 2
    seq = run.seq
    first = run.first
    left = run.left
    while left > 0:
        w = fragment(a, seq, first, left)
        hi = gl.zeros([64], gl.int32, ROW) + w.n
        if a.S.causal:
            hi = w.n - gl.maximum(a.q_len - 1 - own_query, 0)
        o = gl.zeros([64, 256], gl.float32, HALF)
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        l = gl.zeros([64], gl.float32, ROW)
        mbarrier.wait(sh.q_full.index(0), f & 1)
        for i in range(first, w.whole):
            o, m, l = step(a, sh, w, u, i, o, m, l, hi, C, False)
            u += 1
        for i in range(w.whole, w.last):
            o, m, l = step(a, sh, w, u, i, o, m, l, hi, C, True)
            u += 1
        mbarrier.arrive(sh.q_free.index(0), count=1)

        sh.l.index(C).store(l)
        mbarrier.arrive(sh.done.index(0), count=1)
        mbarrier.wait(sh.done.index(0), f & 1)
        l = l + sh.l.index(1 - C).load(ROW)
        store(a, w, o, m, l, partial, run.tile, query, head, C)
        if C == 0:
            store_fragments(a, w, partial, run.size, run.tile)
        left -= w.last - first
        seq += 1
        first = first * 0
        partial = run.split * 2 + 1
        f += 1
