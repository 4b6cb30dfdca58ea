"""The two consumers: a warpgroup with 256 columns of the output each, and every second block of keys to score.

For each pair of blocks, with m the running max, which the consumers pass to each other:

    consumer 0                                      consumer 1
    wait for S; P0 = softmax S with m; send P0, m   wait until S of consumer 0 is done, start S = Q K1'
    O = alpha O; start O += P0 V0                  wait for P0 and m; O = alpha O; start O += P0 V0
    wait for P1 and m, wait for O                   wait for S; P1 = softmax S with m
    O = alpha O; start O += P1 V1                  wait for O; send P1, m
    wait for O; start S = Q K0' of the next pair    O = alpha O; start O += P1 V1
                                                    wait for O

Values are released as soon as they have been added. Exponentials of consumer 0 overlap the products S of consumer 1,
those of consumer 1 overlap both P0 V0. Blocks are added to both halves of the output in the order of their keys.

m is the max of some earlier keys: it is replaced only by one that is larger by many powers of 2. So alpha is usually 1,
and O is not rescaled.

float8 rows (`S.fp8`) are in shared memory without their scales: the accumulator of the scores is multiplied by ratios
of scales between scale groups, and weights by the scales of the values. There the producer is the bottleneck. So each
block is scored, added to both halves and released before the next one is needed (`own_block`, `other_block`): the
producer fills one while the other is in use.
"""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .epilogue import store, store_fragments, times
from .inside import combine_inside
from .narrow import COLUMN, new_narrow_output, own_parts, step_narrow
from .scores import SCORE, end_scores, scales_of, start_scores, visible
from .softmax import alpha_of, clear_hidden, to_weights
from .tile_scheduler import fragment

HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
QUARTER = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # columns that share scales
ROW = gl.constexpr(gl.SliceLayout(1, SCORE))
FLAGS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def changed_by(sh, b: gl.constexpr):
    """Whether any warp of consumer b has changed a running max."""
    return gl.max(sh.changed[b].load(FLAGS), 0)


@gluon.jit
def received(sh, b: gl.constexpr):
    """The running max that consumer b has sent, and whether it has changed it."""
    return sh.maximum(b).load(ROW), changed_by(sh, b)


@gluon.jit
def rescaled_if(changed, o, alpha):
    if changed != 0:
        o = rescaled(o, alpha)
    return o


@gluon.jit
def rescaled(o, alpha):
    """The output, a tuple of its columns, times `alpha` [64]."""
    found = ()
    for i in gl.static_range(len(o)):
        found = found + (times(o[i], alpha),)
    return found


@gluon.jit
def add_values(a, sh, o, p, u, b: gl.constexpr, C: gl.constexpr):
    """Starts O += P V with block b of pair u, for half C of the columns. P is a tensor, or None: in shared memory."""
    if a.S.fp8:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, QUARTER, 2)
        none = u >> 31  # as in start_scores
        if p is None:
            own = sh.weights(b).load(OPERAND)
        else:
            own = gl.convert_layout(p, OPERAND)
        # Weights with scales are rounded once more, and so are scales: as much as values are, which are exact here.
        p0 = own * scales_of(sh, u, b, 2 * C, OPERAND, 1)[None, :]
        o0 = warpgroup_mma(p0, sh.piece(4 * b + 2 * C + none), o[0], is_async=True)
        p1 = own * scales_of(sh, u, b, 2 * C + 1, OPERAND, 1)[None, :]
        o1 = warpgroup_mma(p1, sh.piece(4 * b + 2 * C + 1 + none), o[1], is_async=True)
        found = (o0, o1)
    elif p is None:
        found = (warpgroup_mma(sh.p.index(0), sh.k.index(2 * b + C), o[0], is_async=True),)
    else:
        operand = gl.convert_layout(p, gl.DotOperandLayout(0, HALF, 2))
        found = (warpgroup_mma(operand, sh.k.index(2 * b + C), o[0], is_async=True),)
    return found


@gluon.jit
def finished(o):
    """The output, after a wait for all products in flight."""
    if len(o) == 1:
        found = (warpgroup_mma_wait(0, deps=(o[0],)),)
    else:
        found = warpgroup_mma_wait(0, deps=(o[0], o[1]))
    return found


@gluon.jit
def new_output(a):
    """The output, a tuple of its columns, and sums of weights."""
    l = gl.zeros([64], gl.float32, ROW)
    if a.S.narrow:
        o, l = new_narrow_output(a)
    elif a.S.fp8:
        o = (gl.zeros([64, 128], gl.float32, QUARTER), gl.zeros([64, 128], gl.float32, QUARTER))
    else:
        o = (gl.zeros([64, 256], gl.float32, HALF),)
    return o, l


@gluon.jit
def send(a, sh, p, m, higher, b: gl.constexpr):
    """Sends weights, running max and whether it has changed (by warp, without a barrier) to the other consumer."""
    sh.weights(b).store(p)
    sh.maximum(b).store(m)
    sh.changed[b].store(gl.max(higher.to(gl.int32).reshape([4, 16]), 1))
    if not a.S.fp8:  # there weights are loaded to registers, to be multiplied by scales
        fence_async_shared()
    mbarrier.arrive(sh.ready[b], count=1)


@gluon.jit
def scheduling_fence(sh, u, half: gl.constexpr):
    """A wait that always succeeds; its branch stops ptxas from moving instructions across it."""
    EACH: gl.constexpr = sh.S.pieces // 2
    mbarrier.wait(sh.full[half * EACH], u & 1)


@gluon.jit
def step0(a, sh, w, u, i, o, m, l, hi, masked):
    """Pair number u, pair i of its sequence."""
    s = end_scores(start_scores(a, sh, w, u, 0), 0)
    mbarrier.arrive(sh.scored[0], count=1)
    s = visible(a, sh, s, u, i * 128, hi, masked, 0)
    p, m_new, higher = to_weights(a, s, gl.max(s, 1), m, 1)
    alpha = alpha_of(a, m, m_new)
    l = l * alpha + gl.sum(p, 1)
    p = p.to(a.q.dtype)
    send(a, sh, p, m_new, higher, 0)

    o = rescaled_if(changed_by(sh, 0), o, alpha)
    clear_hidden(a, sh, masked, w.n, i * 128, 0, 0)
    o = add_values(a, sh, o, p, u, 0, 0)
    mbarrier.wait(sh.ready[1], u & 1)
    m, changed = received(sh, 1)
    alpha = alpha_of(a, m_new, m)
    sh.wait_half(u, 1, 0)
    o = finished(o)
    mbarrier.arrive(sh.free[0], count=1)
    l = l * alpha
    o = rescaled_if(changed, o, alpha)
    clear_hidden(a, sh, masked, w.n, i * 128 + 64, 1, 0)
    o = finished(add_values(a, sh, o, None, u, 1, 0))
    mbarrier.arrive(sh.free[2], count=1)
    return o, m, l


@gluon.jit
def step1(a, sh, w, u, i, o, m, l, hi, masked):
    mbarrier.wait(sh.scored[0], u & 1)  # exponentials of one consumer overlap products of the other
    s = start_scores(a, sh, w, u, 1)
    mbarrier.wait(sh.ready[0], u & 1)
    m_new, changed = received(sh, 0)
    alpha = alpha_of(a, m, m_new)
    l = l * alpha
    o = rescaled_if(changed, o, alpha)
    sh.wait_half(u, 0, 1)
    clear_hidden(a, sh, masked, w.n, i * 128, 0, 1)
    o = add_values(a, sh, o, None, u, 0, 1)
    s = end_scores(s, len(o))

    s = visible(a, sh, s, u, i * 128 + 64, hi, masked, 1)
    p, m, higher = to_weights(a, s, gl.max(s, 1), m_new, 1)
    alpha = alpha_of(a, m_new, m)
    l = l * alpha + gl.sum(p, 1)
    p = p.to(a.q.dtype)
    scheduling_fence(sh, u, 3)  # the wait for P0 V0 is not moved above it
    o0, p = warpgroup_mma_wait(0, deps=(o[0], p))
    o = (o0,)
    send(a, sh, p, m, higher, 1)
    mbarrier.arrive(sh.free[1], count=1)
    o = rescaled_if(changed_by(sh, 1), o, alpha)
    clear_hidden(a, sh, masked, w.n, i * 128 + 64, 1, 1)
    o = finished(add_values(a, sh, o, p, u, 1, 1))
    mbarrier.arrive(sh.free[3], count=1)
    return o, m, l


@gluon.jit
def own_block(a, sh, w, u, o, m, l, C: gl.constexpr):
    """Adds block C of pair u, of float8, to half C of the output; sends its weights and max to the other consumer."""
    s = visible(a, sh, end_scores(start_scores(a, sh, w, u, C), 0), u, 0, 0, False, C)
    weights, m_new, higher = to_weights(a, s, gl.max(s, 1), m, 1)
    p = weights.to(a.q.dtype)
    send(a, sh, p, m_new, higher, C)  # first, since the other consumer waits for it
    alpha = alpha_of(a, m, m_new)
    l = l * alpha + gl.sum(weights, 1)
    o = rescaled_if(changed_by(sh, C), o, alpha)
    o = finished(add_values(a, sh, o, p, u, C, C))
    mbarrier.arrive(sh.free[3 * C], count=1)
    return o, m_new, l


@gluon.jit
def other_block(a, sh, u, o, m, l, C: gl.constexpr):
    """Adds the other block, by the other consumer's weights. When these are ready, that one has waited for the block
    and fenced it.
    """
    B: gl.constexpr = 1 - C
    mbarrier.wait(sh.ready[B], u & 1)
    m_new, changed = received(sh, B)
    alpha = alpha_of(a, m, m_new)
    o = rescaled_if(changed, o, alpha)
    o = finished(add_values(a, sh, o, None, u, B, C))
    mbarrier.arrive(sh.free[2 * B + C], count=1)
    return o, m_new, l * alpha


@gluon.jit
def step(a, sh, w, u, i, o, m, l, hi, masked, C: gl.constexpr):
    if a.S.narrow:
        o, m, l = step_narrow(a, sh, w, u, i, o, m, l, hi, masked, C)
    elif a.S.fp8:
        if C == 1:
            o, m, l = other_block(a, sh, u, o, m, l, C)
        o, m, l = own_block(a, sh, w, u, o, m, l, C)
        if C == 0:
            o, m, l = other_block(a, sh, u, o, m, l, C)
    elif C == 0:
        o, m, l = step0(a, sh, w, u, i, o, m, l, hi, masked)
    else:
        o, m, l = step1(a, sh, w, u, i, o, m, l, hi, masked)
    return o, m, l


@gluon.jit
def whole_sums(a, sh, f, o, m, l, C: gl.constexpr):
    """Half C of the output of fragment number f, with max and sum over the keys of both consumers."""
    if a.S.narrow:
        o, m, l = own_parts(a, sh, f, o, m, l, C)
    else:
        sh.l.index(C).store(l)
        mbarrier.arrive(sh.done.index(0), count=1)
        mbarrier.wait(sh.done.index(0), f & 1)
        l = l + sh.l.index(1 - C).load(ROW)
    return o, m, l


@gluon.jit
def consume(a, run, sh, C: gl.constexpr):
    ROWS: gl.constexpr = a.S.rows
    LINE: gl.constexpr = COLUMN if a.S.narrow else ROW
    row = gl.arange(0, ROWS, LINE)
    u = 0
    f = 0
    partial = run.split * 2
    seq = run.seq
    first = run.first
    left = run.left
    while left > 0:
        w = fragment(a, seq, first, left, run.tile)
        hi = gl.zeros([ROWS], gl.int32, LINE) + w.n
        if a.S.causal:
            own_query = w.query + row // a.S.head_rows
            hi = w.n - gl.maximum(a.q_len - 1 - own_query, 0)
        o, l = new_output(a)
        m = gl.full([ROWS], float("-inf"), gl.float32, LINE)
        mbarrier.wait(sh.q_full.index(0), f & 1)
        for i in range(first, w.last):
            o, m, l = step(a, sh, w, u, i, o, m, l, hi, i >= w.whole, C)
            u += 1

        o, m, l = whole_sums(a, sh, f, o, m, l, C)
        store(a, sh, w, o, m, l, partial, run.tile, C)
        if a.S.inside:  # noqa: SIM102
            if not w.alone():
                combine_inside(a, sh, w, partial, run.split, run.size)
        mbarrier.arrive(sh.q_free.index(0), count=1)
        if C == 0 and not a.S.inside:
            store_fragments(a, w, partial, run.size, run.tile)
        left -= w.last - first
        seq += 1
        first = first * 0
        partial = run.split * 2 + 1
        f += 1
