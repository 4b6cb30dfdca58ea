"""Epilogue: gradients of 64 outer rows from a consumer's registers to global memory."""

from ....gpu.gluon import fence_async_shared, gl, gluon, tma_store, tma_store_wait
from .arguments import grad_layout


@gluon.jit
def store(a, w, x, desc, POINTER, head_stride, row_stride, buffer, top, column, COLUMNS: gl.constexpr):
    """Stores a gradient [64, COLUMNS] of outer rows `top ..`, through a buffer that is this consumer's."""
    if a.S.guarded:
        nothing = x * 0.0  # NaN where a gradient is not finite
        gl.store(a.FLAG + gl.zeros([64, COLUMNS], gl.int32, grad_layout(COLUMNS)), 1, mask=nothing != 0.0)
    x = x.to(a.x.dtype)
    if a.S.packed and top + 64 > w.end:
        LAYOUT: gl.constexpr = grad_layout(COLUMNS)
        rows = top + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        at = POINTER + w.head.to(gl.int64) * head_stride + (w.start + rows).to(gl.int64) * row_stride + columns
        gl.store(at, x, mask=(rows < w.end) & (columns < desc.shape[3]))
    else:
        buffer.reshape([64, COLUMNS]).store(x)
        fence_async_shared()
        tma_store(desc, [w.b, w.head, w.start + top, column], buffer)


@gluon.jit
def in_use(a, w, x, top, COLUMNS: gl.constexpr):
    """A gradient with 0 for keys past the length; query rows past the end are not stored."""
    row = top + gl.arange(0, 64, gl.SliceLayout(1, grad_layout(COLUMNS)))
    n = w.end if a.S.of_queries else w.kv_len
    return gl.where((row < n)[:, None], x, 0.0)


@gluon.jit
def store_all(a, buf, w, grads, top, C: gl.constexpr):
    D: gl.constexpr = a.S.D
    DV: gl.constexpr = a.S.DV
    TAIL: gl.constexpr = a.S.tail
    if a.S.roles:  # the first consumer alone reads K, the second V
        if C == 0:
            store(a, w, in_use(a, w, grads[0], top, DV), a.dy, a.DY, a.dy_h, a.dy_l, buf.x.index(0), top, 0, DV)
        else:
            dk = in_use(a, w, grads[0], top, D) * a.scale
            store(a, w, dk, a.dx, a.DX, a.dx_h, a.dx_l, buf.y.index(0), top, 0, D)
    else:
        dx = in_use(a, w, grads[0], top, D) * a.scale
        store(a, w, dx, a.dx, a.DX, a.dx_h, a.dx_l, buf.x.index(C), top, 0, D)
        if TAIL > 0:
            dx1 = in_use(a, w, grads[1], top, TAIL) * a.scale
            store(a, w, dx1, a.dx1, a.DX, a.dx_h, a.dx_l, buf.x1.index(C), top, D, TAIL)
        if not a.S.of_queries:
            dv = in_use(a, w, grads[1 + (TAIL > 0)], top, DV)
            store(a, w, dv, a.dy, a.DY, a.dy_h, a.dy_l, buf.y.index(C), top, 0, DV)
    tma_store_wait(0)
