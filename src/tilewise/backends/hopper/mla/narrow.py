"""The consumers of tiles with few query rows: products are transposed, with keys or values as rows, queries as columns.

S' = K Q' is [64, rows] and O' = V' P' is [512, rows], so that tensor cores multiply no padding rows, and a warpgroup
has registers for all columns of the output. Each consumer processes every second block by itself, with its own max, sum
and output; they exchange nothing until the end of a fragment, where each completes half of the output's columns. One
block is loaded while the other is in use.
"""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from .softmax import alpha_of, clear_hidden, to_weights

TURNED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # of S' and O'
COLUMN = gl.constexpr(gl.SliceLayout(0, TURNED))  # of query rows


@gluon.jit
def new_narrow_output(a):
    """Both halves of O', and sums of weights [64, rows], which are reduced over keys at the end."""
    ROWS: gl.constexpr = a.S.rows
    o = (gl.zeros([256, ROWS], gl.float32, TURNED), gl.zeros([256, ROWS], gl.float32, TURNED))
    return o, gl.zeros([64, ROWS], gl.float32, TURNED)


@gluon.jit
def narrow_scores(a, sh, u, C: gl.constexpr):
    """S' of block C of pair u."""
    PIECES: gl.constexpr = a.S.pieces
    ROWS: gl.constexpr = a.S.rows
    none = u >> 31  # 0, unknown to the compiler, which would keep registers for the address of each operand
    s = gl.zeros([64, ROWS], gl.float32, TURNED)
    sh.wait(sh.rope_full[C], u)
    s = warpgroup_mma(sh.k_rope.index(C + none), sh.q_rope.permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(PIECES):
        sh.wait(sh.full[C * PIECES + i], u)
        s = warpgroup_mma(sh.piece(C * PIECES + i + none), sh.q.index(i + none).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def over_warps(sh, x, ADDED: gl.constexpr, C: gl.constexpr):
    """Max or sum over the warps of consumer C, each of which has a line of `x` [4, rows].

    Through memory of its own: reductions by the compiler's would share theirs with what the program starts from.
    """
    ROWS: gl.constexpr = sh.S.rows
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sh.by_warp[C].store(x)
    lines = reinterpret(sh.by_warp[C], gl.float32, [4, ROWS], LINE)
    found = lines.index(0).load(COLUMN)
    for i in gl.static_range(1, 4):
        other = lines.index(i).load(COLUMN)
        if ADDED:
            found = found + other
        else:
            found = gl.maximum(found, other)
    return found


@gluon.jit
def step_narrow(a, sh, w, u, i, o, m, l, hi, masked, C: gl.constexpr):
    """Block C of pair number u, pair i of its sequence."""
    base = i * 128 + C * 64
    s = narrow_scores(a, sh, u, C)
    if masked:
        key = base + gl.arange(0, 64, gl.SliceLayout(1, TURNED))
        s = gl.where(key[:, None] < hi[None, :], s, float("-inf"))
    top = over_warps(sh, gl.max(s.reshape([4, 16, a.S.rows]), 1), False, C)
    p, m_new, higher = to_weights(a, s, top, m, 0)
    o0 = o[0]
    o1 = o[1]
    if gl.max(higher.to(gl.int32), 0) != 0:
        alpha = alpha_of(a, m, m_new)[None, :]
        l = l * alpha
        o0 = o0 * alpha
        o1 = o1 * alpha
    l = l + p
    sh.p.index(C).store(p.to(a.q.dtype))
    for half in gl.static_range(2):
        clear_hidden(a, sh, masked, w.n, base, C, half)
    fence_async_shared()
    none = u >> 31
    o0 = warpgroup_mma(sh.k.index(2 * C + none).permute((1, 0)), sh.p.index(C + none), o0, is_async=True)
    o1 = warpgroup_mma(sh.k.index(2 * C + 1 + none).permute((1, 0)), sh.p.index(C + none), o1, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o0, o1))
    mbarrier.arrive(sh.free[C], count=1)
    return o, m_new, l


@gluon.jit
def own_parts(a, sh, f, o, m, l, C: gl.constexpr):
    """Half C of a fragment's output [rows, 256], max and sum, combined from those of both consumers."""
    l = over_warps(sh, gl.sum(l.reshape([4, 16, a.S.rows]), 1), True, C)
    sh.l.index(C).store(l)
    sh.maximum(C).store(m)
    sh.parts[0].index(C).store(o[1 - C])
    mbarrier.arrive(sh.done.index(0), count=1)
    mbarrier.wait(sh.done.index(0), f & 1)
    other = sh.maximum(1 - C).load(COLUMN)
    m_new = gl.maximum(m, other)
    own = alpha_of(a, m, m_new)
    its = alpha_of(a, other, m_new)
    l = l * own + sh.l.index(1 - C).load(COLUMN) * its
    x = o[C] * own[None, :] + sh.parts[0].index(1 - C).load(TURNED) * its[None, :]
    return (x.permute((1, 0)),), m_new, l
