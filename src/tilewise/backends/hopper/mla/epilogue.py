"""Epilogue: from O in registers to the output, or to partials that are combined later."""

from ...gpu.gluon import fence_async_shared, gl, gluon, reinterpret, tma_store, tma_store_wait

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def lse_offsets(a, w, row):
    """Offsets of the lse of a tile's rows, and which rows exist."""
    l = w.query + row // a.S.head_rows
    h = w.head + row % a.S.head_rows
    at = w.b.to(gl.int64) * a.lse_b + h.to(gl.int64) * a.lse_h + l.to(gl.int64) * a.lse_l
    return at, (l < a.q_len) & (h < a.heads)


@gluon.jit
def add_sink(a, m, l, head):
    """Max and sum of rows with their sinks, and alpha for the output so far."""
    there = head < a.heads
    sink = gl.load(a.SINKS + gl.where(there, head, 0), mask=there, other=float("-inf")) * LOG2E
    m_new = gl.maximum(m, sink)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - base)
    l = l * alpha + gl.where(sink == float("inf"), 1.0, gl.exp2(sink - base))  # inf - inf would be NaN
    return m_new, l, alpha


@gluon.jit
def times(x, rows):
    """Rows of `x` times `rows`, one factor for each."""
    ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(rows, ROWS, assert_trivial=True)[:, None]


@gluon.jit
def store_out(a, sh, w, o, COLUMN: gl.constexpr):
    """Stores columns of complete rows through the shared memory of the queries, which are no longer needed."""
    N: gl.constexpr = o.shape[1]
    ROWS: gl.constexpr = a.S.rows
    WIDTH: gl.constexpr = a.S.width
    x = o.to(a.q.dtype)
    LAYOUT: gl.constexpr = sh.k.layout if N == 256 else sh.q.layout
    reinterpret(sh.q, a.q.dtype, [512 // N, ROWS, N], LAYOUT).index(COLUMN // N).store(x)
    fence_async_shared()
    for i in gl.static_range(N // WIDTH):
        piece = reinterpret(sh.q.index(COLUMN // WIDTH + i), a.q.dtype, a.out.block_type.shape, a.out.layout)
        tma_store(a.out, [w.b, w.query, w.head, COLUMN + i * WIDTH], piece)


@gluon.jit
def store_partial(a, w, o, base, COLUMN: gl.constexpr):
    """Stores columns of a partial."""
    N: gl.constexpr = o.shape[1]
    ROWS: gl.constexpr = a.S.rows
    row = gl.arange(0, ROWS, gl.SliceLayout(1, o.type.layout))
    column = COLUMN + gl.arange(0, N, gl.SliceLayout(0, o.type.layout))
    begin = (base + row).to(gl.int64) * 512
    _, ok = lse_offsets(a, w, row)
    gl.store(a.PARTIAL + begin[:, None] + column[None, :], o, mask=ok[:, None])


@gluon.jit
def store(a, sh, w, o, m, l, partial, tile, C: gl.constexpr):
    """Stores half C of a fragment's output, a tuple of its columns, and with the first half the lse."""
    ROWS: gl.constexpr = a.S.rows
    row = gl.arange(0, ROWS, m.type.layout)
    m = m * a.factor  # in base 2, as all from here on
    alpha = gl.full_like(m, 1.0)
    if a.S.sinks:  # noqa: SIM102
        if w.alone():  # else a sink is added where fragments are combined
            m, l, alpha = add_sink(a, m, l, w.head + row % a.S.head_rows)
    empty = l == 0
    lse = gl.where(empty, float("-inf"), m + gl.log2(gl.where(empty, 1.0, l)))
    share = gl.where(empty, 0.0, alpha / gl.where(empty, 1.0, l))
    base = (partial * a.tiles + tile) * 64
    for i in gl.static_range(len(o)):
        x = times(o[i], share)
        if w.alone():
            store_out(a, sh, w, x, C * 256 + i * x.shape[1])
        else:
            store_partial(a, w, x, base, C * 256 + i * x.shape[1])
    if C == 0:
        if w.alone():
            if a.S.lse:
                at, there = lse_offsets(a, w, row)
                gl.store(a.LSE + at, lse * LN2, mask=there)
        else:
            gl.store(a.PARTIAL_LSE + base + row, lse)
    tma_store_wait(0)


@gluon.jit
def store_fragments(a, w, partial, size, tile):
    """Stores where the fragments of a sequence will be, by the program that has its first pair."""
    if w.first == 0:
        fragments = 1 + gl.cdiv(w.pairs - w.last, size)
        gl.store(a.FRAGMENTS + w.seq, partial + (fragments << 16), mask=tile == 0)
