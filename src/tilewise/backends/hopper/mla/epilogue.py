"""From O in registers to the output, or to what is combined later."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def row_offsets(a, seq, query, head, row, stride_b, stride_h, stride_l):
    """Where rows of a tile lie in a tensor [B, H, Lq, ...], and which there are."""
    l = query + row // a.S.head_rows
    h = head + row % a.S.head_rows
    at = seq.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h + l.to(gl.int64) * stride_l
    return at, (l < a.q_len) & (h < a.heads)


@gluon.jit
def add_sink(a, m, l, head):
    """Maximum and sum of rows with their sinks, and what outputs so far are multiplied by."""
    there = head < a.heads
    sink = gl.load(a.SINKS + gl.where(there, head, 0), mask=there, other=float("-inf")) * LOG2E
    m_new = gl.maximum(m, sink)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - base)
    l = l * alpha + gl.where(sink == float("inf"), 1.0, gl.exp2(sink - base))  # inf - inf would be NaN
    return m_new, l, alpha


@gluon.jit
def store(a, w, o, m, l, partial, tile, query, head, C: gl.constexpr):
    """Half C of a fragment's output, and with the first half the logarithms of sums."""
    ROW: gl.constexpr = m.type.layout
    HALF: gl.constexpr = o.type.layout
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, HALF)
    row = gl.arange(0, 64, ROW)
    m = m * a.factor  # in base 2, as all from here on
    alpha = gl.full_like(m, 1.0)
    if a.S.sinks:  # noqa: SIM102
        if w.alone():  # else a sink counts where fragments are combined
            m, l, alpha = add_sink(a, m, l, head + row % a.S.head_rows)
    empty = l == 0
    lse = gl.where(empty, float("-inf"), m + gl.log2(gl.where(empty, 1.0, l)))
    share = gl.where(empty, 0.0, alpha / gl.where(empty, 1.0, l))
    o = o * gl.convert_layout(share, OUT_ROW, assert_trivial=True)[:, None]
    out_row = gl.arange(0, 64, OUT_ROW)
    column = C * 256 + gl.arange(0, 256, gl.SliceLayout(0, HALF))
    if w.alone():
        rows, ok = row_offsets(a, w.seq, query, head, out_row, a.o_b, a.o_h, a.o_l)
        gl.store(a.OUT + rows[:, None] + column[None, :], o.to(a.k.dtype), mask=ok[:, None])
        if a.S.lse and C == 0:
            at, there = row_offsets(a, w.seq, query, head, row, a.lse_b, a.lse_h, a.lse_l)
            gl.store(a.LSE + at, lse * LN2, mask=there)
    else:
        base = (partial * a.tiles + tile) * 64
        begin = (base + out_row).to(gl.int64) * 512
        _, ok = row_offsets(a, w.seq, query, head, out_row, a.o_b, a.o_h, a.o_l)
        gl.store(a.PARTIAL + begin[:, None] + column[None, :], o, mask=ok[:, None])
        if C == 0:
            gl.store(a.PARTIAL_LSE + base + row, lse)


@gluon.jit
def store_fragments(a, w, partial, size, tile):
    """Where the fragments of a sequence will be, from the program that has its first pair."""
    if w.first == 0:
        fragments = 1 + gl.cdiv(w.pairs - w.last, size)
        gl.store(a.FRAGMENTS + w.seq, partial + (fragments << 16), mask=tile == 0)
