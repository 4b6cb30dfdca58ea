"""Scores of a block of keys: products, scales of float8, and what is hidden."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def start_scores(a, sh, w, u, b: gl.constexpr):
    """Starts S of block b of pair u, a commit for each piece: what is under way, to be finished by `end_scores`."""
    PIECES: gl.constexpr = a.S.pieces
    none = u >> 31  # 0, which the compiler does not know: it would keep registers for the place of each operand
    s = gl.zeros([64, 64], gl.float32, SCORE)
    if a.S.fp8:
        q_rope = load_rope(a, w, none)
    else:
        q_rope = sh.q_rope[0]
    sh.wait(sh.rope_full[b], u)
    if not a.S.chained:
        s = warpgroup_mma(q_rope, sh.k_rope.index(b).permute((1, 0)), s, use_acc=False, is_async=True)
    if a.S.chained:
        # ((k0 r0 + k1) r1 + k2) r2 + ..: r are ratios of the scales of neighbouring groups, the last one is a scale.
        for i in gl.static_range(PIECES):
            sh.wait(sh.full[b * PIECES + i], u)
            k = sh.piece(b * PIECES + i + none).permute((1, 0))
            s = warpgroup_mma(sh.q.index(i + none), k, s, use_acc=i > 0, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,)) * scales_of(sh, u, b, i, SCORE)[None, :]
        fence_async_shared()  # rope columns were copied by no thread that could say so
        started = (warpgroup_mma(q_rope, sh.k_rope.index(b).permute((1, 0)), s, is_async=True),)
    elif a.S.fp8:
        # What shares scales is added up apart. All but the last such sum are complete.
        x = gl.zeros([64, 64], gl.float32, SCORE)
        for i in gl.static_range(PIECES):
            sh.wait(sh.full[b * PIECES + i], u)
            k = sh.piece(b * PIECES + i + none).permute((1, 0))
            x = warpgroup_mma(sh.q.index(i + none), k, x, use_acc=False, is_async=True)
            if i + 1 < PIECES:
                s, x = warpgroup_mma_wait(0, deps=(s, x))
                s = gl.fma(x, scales_of(sh, u, b, i, SCORE)[None, :] + gl.zeros_like(x), s)
        started = (s, x)
    else:
        for i in gl.static_range(PIECES):
            sh.wait(sh.full[b * PIECES + i], u)
            k = sh.piece(b * PIECES + i + none).permute((1, 0))
            s = warpgroup_mma(sh.q.index(i + none), k, s, is_async=True)
        started = (s,)
    return started


@gluon.jit
def end_scores(a, sh, started, u, b: gl.constexpr, UNDER_WAY: gl.constexpr):
    """S, when no more than UNDER_WAY later products are under way."""
    if a.S.fp8 and not a.S.chained:
        s, x = warpgroup_mma_wait(UNDER_WAY, deps=(started[0], started[1]))
        s = gl.fma(x, scales_of(sh, u, b, a.S.pieces - 1, SCORE)[None, :] + gl.zeros_like(x), s)
    else:
        s = warpgroup_mma_wait(UNDER_WAY, deps=(started[0],))
    return s


@gluon.jit
def scales_of(sh, u, b: gl.constexpr, group: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales [64] of a group of columns in block b of pair u, for tensors with keys as columns."""
    return sh.scales[0].index((u & 1) * 8 + b * 4 + group).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def value_scales(a, sh, u, b: gl.constexpr, group: gl.constexpr, LAYOUT: gl.constexpr):
    """The same for values, in the type of the weights."""
    if a.S.chained:
        found = sh.scales[1].index((u & 1) * 8 + b * 4 + group).load(gl.SliceLayout(0, LAYOUT))
    else:
        found = scales_of(sh, u, b, group, LAYOUT).to(a.q.dtype)
    return found


@gluon.jit
def load_rope(a, w, none):
    """Rope columns of the queries, which have no place in shared memory beside scales."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    row = gl.arange(0, 64, gl.SliceLayout(1, OPERAND))
    column = gl.arange(0, 64, gl.SliceLayout(0, OPERAND))
    at = w.b.to(gl.int64) * a.q_b + w.query.to(gl.int64) * a.q_l + (w.head + none + row).to(gl.int64) * a.q_h
    return gl.load(a.Q + (at * 8)[:, None] + 512 + column[None, :], mask=(w.head + row < a.heads)[:, None], other=0.0)


@gluon.jit
def hide(s, base, hi):
    """-inf where a key of the block that begins at `base` is not below `hi` [64]; comparisons are with constants."""
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORE))
    i8 = column & -8
    j = column & 7
    return gl.where(i8[None, :] < (hi - base)[:, None] - j[None, :], s, float("-inf"))


@gluon.jit
def visible(a, sh, s, u, base, hi, masked, b: gl.constexpr):
    """S with -inf for keys of block b of pair u that are hidden."""
    if a.S.gather:
        ok = sh.ok[0].index((u & 1) * 2 + b).load(gl.SliceLayout(0, SCORE))
        s = gl.where(ok[None, :] > 0, s, float("-inf"))
    elif masked:
        s = hide(s, base, hi)
    return s
