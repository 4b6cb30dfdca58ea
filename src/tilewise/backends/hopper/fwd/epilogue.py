"""Epilogue: from O in registers to the output in global memory."""

from ...gpu.gluon import fence_async_shared, gl, gluon, thread_barrier, tma_store, tma_store_wait
from .layouts import halves, wide_layout


@gluon.jit
def nonfinite_rows(o, rows):
    """Rows [64] with an element that is NaN or infinite: 0 * x is then NaN."""
    total = gl.convert_layout(gl.sum(o * 0.0, 1), rows.row.type.layout)
    return (total != total) & rows.ok


@gluon.jit
def flag_nonfinite(a, o, rows, index, C: gl.constexpr):
    """Flags the tile for the non-finite fix-up if an element is not finite, by a hidden value or by overflow.

    Any row with one sets the flag, which is zero before a call: no reduction over rows is needed.
    """
    gl.store(a.FLAGS + index * a.S.consumers + C + rows.row * 0, 1, mask=nonfinite_rows(o, rows))


@gluon.jit
def store(a, w, o, lse, rows, outs, C):
    """Stores O through shared memory, all columns or a half or a quarter of them at a time; and the lse."""
    DV: gl.constexpr = a.S.DV
    COLUMNS: gl.constexpr = a.S.out_columns
    if COLUMNS == DV:
        send(a, w, o, outs, C, 0)
    else:
        low, high = halves(o)
        if COLUMNS * 2 == DV:
            send(a, w, low, outs, C, 0)
            send(a, w, high, outs, C, 1)
        else:
            gl.static_assert(COLUMNS * 4 == DV)
            o0, o1 = halves(low)
            o2, o3 = halves(high)
            send(a, w, o0, outs, C, 0)
            send(a, w, o1, outs, C, 1)
            send(a, w, o2, outs, C, 2)
            send(a, w, o3, outs, C, 3)
    store_lse(a, w, lse, rows)


@gluon.jit
def store_lse(a, w, lse, rows):
    if a.S.lse:
        at = a.LSE + w.row_b.to(gl.int64) * a.lse_b + w.head.to(gl.int64) * a.lse_h
        gl.store(at + (w.q_start + rows.row).to(gl.int64) * a.lse_l, lse, mask=rows.ok & (w.value_tile == 0))


@gluon.jit
def send(a, w, o, outs, C, PART: gl.constexpr):
    """Stores the columns of O with number PART, through shared memory."""
    COLUMNS: gl.constexpr = a.S.out_columns
    column = w.value_tile * a.S.DV + PART * COLUMNS
    if a.S.out_aliases_q_chunks == 0:
        tile = outs.index(C)
        tma_store_wait(0)  # until the store before has read the buffer
        thread_barrier()
    else:
        tile = outs.index(C * a.S.chunks + PART)
    flat = tile.reshape([64, COLUMNS])
    flat.store(o.to(a.q.dtype))
    if a.S.packed_q:
        # A tile may reach into the rows of the next sequence, which TMA would overwrite.
        store_rows(a, w, flat.load(wide_layout(COLUMNS)), column, C, COLUMNS, wide_layout(COLUMNS))
    else:
        fence_async_shared()
        tma_store(a.o, [w.row_b, w.head, w.top + C * 64, column], tile)


@gluon.jit
def store_rows(a, w, o, column, C, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Stores the rows of O that exist, from registers."""
    row = w.top + C * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    at = w.row_b.to(gl.int64) * a.o_b + w.head.to(gl.int64) * a.o_h + (w.q_start + row).to(gl.int64) * a.o_l
    inside = (row < w.q_len)[:, None] & (columns < a.value_dim)[None, :]
    gl.store(a.OUT + at[:, None] + columns[None, :], o, mask=inside)
