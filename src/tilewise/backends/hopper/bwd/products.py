"""The first products of a consumer's step: S^T and dP^T, minus the row statistics."""

from ...gpu.gluon import gl, gluon, mbarrier, opaque, warpgroup_mma, warpgroup_mma_wait
from .arguments import score_layout, tile
from .mask import get_huge, load_mask, release_mask
from .sync import SCORES_STARTED, named_barrier


@gluon.constexpr_function
def part_factors():
    """Factors of the parts of a float16 statistic, since float16 lacks the range of float32."""
    return (2.0**10, 1.0, 2.0**-10, 2.0**-20)


@gluon.jit
def stat_factors(DTYPE: gl.constexpr, SCORES: gl.constexpr):
    """A left operand [64, 16], the same for each key, whose product with a statistic's parts is their sum."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    if gl.bfloat16 == DTYPE:
        return gl.full([64, 16], 1.0, DTYPE, LAYOUT)
    PARTS: gl.constexpr = part_factors()
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    x = gl.zeros([64, 16], gl.float32, LAYOUT)
    for n in gl.static_range(4):
        x = gl.where(column == n, PARTS[n], x)
    return x.to(DTYPE)


@gluon.jit
def start_scores(a, buf, u, q, s, adds, factors, C: gl.constexpr):
    """Starts S^T = K Q^T, without a softcap minus lse / scale; `adds`: accumulated into `s`."""
    D: gl.constexpr = a.S.D
    k = buf.k.index(C + (opaque(u) >> 30)).reshape([64, D])
    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=adds, is_async=True)
    if not a.S.softcap:
        lse = buf.stats.index(u % a.S.q_stages).slice(0, 16, 1)  # [BM, 16]
        s = warpgroup_mma(factors, lse.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_dp(a, buf, u, zeros, factors, C: gl.constexpr):
    """Starts dP^T = V dO^T - delta."""
    BM: gl.constexpr = a.S.BM
    D: gl.constexpr = a.S.D
    do = tile(buf.do, u, a.S.do_stages, BM, D)
    mbarrier.wait(buf.do_full.index(u % a.S.do_stages), (u // a.S.do_stages) & 1)
    v = buf.v.index(C + (opaque(u) >> 30)).reshape([64, D])
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    delta = buf.stats.index(u % a.S.q_stages).slice(16, 16, 1)  # [BM, 16]
    return warpgroup_mma(factors, delta.permute((1, 0)), dp, is_async=True)


@gluon.jit
def take_turn(a, C: gl.constexpr):
    """With a mask the second consumer starts its scores after the first, whose exponentials then come earlier: started
    together, they would wait for one another's. The first arrives once it has started, the second waits for it.
    """
    if a.S.mask_first:
        if C == 0:
            named_barrier("bar.arrive", SCORES_STARTED, 256)
        else:
            named_barrier("bar.sync", SCORES_STARTED, 256)


@gluon.jit
def wait_for_dq(a, buf, u):
    """Waits until the reducer has read the previous dQ in the buffer of use u."""
    mbarrier.wait(buf.dq_empty.index(u % a.S.dq_stages), ((u // a.S.dq_stages) & 1) ^ 1)


@gluon.jit
def start_products(a, buf, w, u, i, g, factors, C: gl.constexpr):
    """S^T, waited for, and dP^T, possibly in flight; and whether the block's lse is huge.

    The scores are q k - lse / scale, with a softcap q k. With a mask they are accumulated onto its cells / scale, which
    are loaded while dP is computed; in a block with a huge lse they are q k.
    """
    BM: gl.constexpr = a.S.BM
    zeros = gl.zeros([64, BM], gl.float32, score_layout(a.S))
    q = tile(buf.q, u, a.S.q_stages, BM, a.S.D)
    mbarrier.wait(buf.q_full.index(u % a.S.q_stages), (u // a.S.q_stages) & 1)
    if a.S.mask_first:
        huge = get_huge(buf.huge, u % a.S.q_stages)
        dp = start_dp(a, buf, u, zeros, factors, C)
        s = load_mask(a, buf, w, u, i, g, C) * (1.0 / a.scale)
        if not huge:
            release_mask(a)
        if C == 1:
            take_turn(a, C)
        s = start_scores(a, buf, u, q, s, not huge, factors, C)
        if C == 0:
            take_turn(a, C)
        wait_for_dq(a, buf, u)  # for dS. A wait between exponentials and dS would keep these from interleaving
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    else:
        huge = False
        s = start_scores(a, buf, u, q, zeros, False, factors, C)
        dp = start_dp(a, buf, u, zeros, factors, C)
        if a.S.mask:
            wait_for_dq(a, buf, u)
        s = warpgroup_mma_wait(2, deps=(s,))
    return s, dp, huge
