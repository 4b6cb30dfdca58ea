"""Sequences of few query rows (one tile) that are split over several programs: combined by the last-arriver.

A separate launch (combine.py) distributes the work better where a sequence has many fragments, but takes time even
where no sequence is split.
"""

from ...gpu.gluon import gl, gluon, thread_barrier, tma_store_wait
from .epilogue import LN2, add_sink, lse_offsets, store_out, times

EACH = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.SliceLayout(1, EACH))


@gluon.jit
def combine_inside(a, sh, w, partial, split, size):
    """Called after half of a fragment is stored. The last-arriver of a sequence combines it and resets the counter."""
    PIECES: gl.constexpr = a.S.pieces
    WIDTH: gl.constexpr = a.S.width
    ROWS: gl.constexpr = a.S.rows
    before = gl.cdiv(w.first, size)  # fragments
    fragments = before + 1 + gl.cdiv(w.pairs - w.last, size)
    thread_barrier()
    halves = gl.atomic_add(a.COUNTERS + w.seq, 1, sem="acq_rel")
    if halves == 2 * fragments - 1:
        gl.store(a.COUNTERS + w.seq, 0)
        # The sequence began at the start of a run if the pairs before fill whole runs.
        run = split - before
        start = gl.where(before == 0, partial, 2 * run + (w.first % size != 0).to(gl.int32))
        o, m, l = added(a, w, start, run, fragments)
        row = gl.arange(0, ROWS, LINE)
        alpha = gl.full_like(m, 1.0)
        if a.S.sinks:
            m, l, alpha = add_sink(a, m, l, w.head + row % a.S.head_rows)
        empty = l == 0
        one = gl.where(empty, 1.0, l)
        for i in gl.static_range(PIECES):
            store_out(a, sh, w, times(o[i], gl.where(empty, 0.0, alpha / one)), i * WIDTH)
        if a.S.lse:
            at, there = lse_offsets(a, w, row)
            gl.store(a.LSE + at, gl.where(empty, float("-inf"), (m + gl.log2(one)) * LN2), mask=there)
        tma_store_wait(0)


@gluon.jit
def added(a, w, start, run, fragments):
    """The combined output of all fragments, a tuple of its pieces, with max and sum: the first fragment is partial
    `start`, the others begin the runs that follow.
    """
    ROWS: gl.constexpr = a.S.rows
    WIDTH: gl.constexpr = a.S.width
    PIECES: gl.constexpr = a.S.pieces
    row = gl.arange(0, ROWS, LINE)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, EACH))
    _, there = lse_offsets(a, w, row)
    m = gl.full([ROWS], float("-inf"), gl.float32, LINE)
    l = gl.zeros([ROWS], gl.float32, LINE)
    o = ()
    for _ in gl.static_range(PIECES):
        o = o + (gl.zeros([ROWS, WIDTH], gl.float32, EACH),)
    for f in range(fragments):
        at = gl.where(f == 0, start, 2 * (run + f)) * 64 + row
        # They were written by other SMs, so the loads bypass L1 (`.cg`).
        lse = gl.load(a.PARTIAL_LSE + at, cache_modifier=".cg")
        m_new = gl.maximum(m, lse)
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m - base)
        weight = gl.exp2(lse - base)
        l = l * alpha + weight
        sums = ()
        for i in gl.static_range(PIECES):
            place = a.PARTIAL + at.to(gl.int64)[:, None] * 512 + (column + i * WIDTH)[None, :]
            x = gl.load(place, mask=there[:, None], other=0.0, cache_modifier=".cg")
            sums = sums + (times(o[i], alpha) + times(x, weight),)
        o = sums
        m = m_new
    return o, m, l
