"""Scores of a block of keys: products, scales of float8, and what is hidden."""

from ...gpu.gluon import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait

SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def start_scores(a, sh, w, u, b: gl.constexpr):
    """Starts S of block b of pair u, with a commit for each piece; `end_scores` waits for it."""
    PIECES: gl.constexpr = a.S.pieces
    none = u >> 31  # 0, unknown to the compiler, which would keep registers for the address of each operand
    s = gl.zeros([64, 64], gl.float32, SCORE)
    rope = sh.k_rope.index(b).permute((1, 0))
    if a.S.fp8:
        mbarrier.wait(sh.rope_full[b], u & 1)
        sh.wait(sh.full[b], u)
        # ((k0 r0 + k1) r1 + k2) r2 + ..: r are ratios of the scales of neighbouring groups, the last one is a scale.
        for i in gl.static_range(PIECES):
            k = sh.piece(b * PIECES + i + none).permute((1, 0))
            s = warpgroup_mma(sh.q.index(i + none), k, s, use_acc=i > 0, is_async=True)
            ratio = scales_of(sh, u, b, i, SCORE)  # loaded while the product runs
            s, ratio = warpgroup_mma_wait(0, deps=(s, ratio))
            s = s * ratio[None, :]
        s = warpgroup_mma(sh.q_rope, rope, s, is_async=True)
    else:
        sh.wait(sh.rope_full[b], u)
        s = warpgroup_mma(sh.q_rope, rope, s, use_acc=False, is_async=True)
        for i in gl.static_range(PIECES):
            sh.wait(sh.full[b * PIECES + i], u)
            k = sh.piece(b * PIECES + i + none).permute((1, 0))
            s = warpgroup_mma(sh.q.index(i + none), k, s, is_async=True)
    return s


@gluon.jit
def end_scores(s, UNDER_WAY: gl.constexpr):
    """S, after a wait that leaves up to UNDER_WAY later products in flight."""
    return warpgroup_mma_wait(UNDER_WAY, deps=(s,))


@gluon.jit
def scales_of(sh, u, b: gl.constexpr, group: gl.constexpr, LAYOUT: gl.constexpr, VALUES: gl.constexpr = 0):
    """What S of block b of pair u is multiplied by after a scale group, [64] with keys as columns; with VALUES, the
    scales of the values.
    """
    return sh.scales[4 * VALUES + group].index((u & 1) * 2 + b).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def select_visible(s, base, hi):
    """-inf where a key of the block that begins at `base` is not below `hi` [64]; comparisons are with constants."""
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORE))
    i8 = column & -8
    j = column & 7
    return gl.where(i8[None, :] < (hi - base)[:, None] - j[None, :], s, float("-inf"))


@gluon.jit
def visible(a, sh, s, u, base, hi, masked, b: gl.constexpr):
    """S with -inf for hidden keys of block b of pair u."""
    if a.S.gather:
        ok = sh.ok[0].index((u & 1) * 2 + b).load(gl.SliceLayout(0, SCORE))
        s = gl.where(ok[None, :] > 0, s, float("-inf"))
    elif masked:
        s = select_visible(s, base, hi)
    return s
