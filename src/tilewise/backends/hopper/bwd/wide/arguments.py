"""The arguments of the wide-head kernel as one value, its buffers in shared memory, and its register layouts."""

from ....gpu.gluon import gl, gluon
from ...signature import struct
from ..arguments import CallArguments, barriers


@struct
class WideArguments(CallArguments):
    """Descriptors of tiles [1, 1, rows, columns]: x, y, dx, dy of 64 outer rows, u, w of BI inner ones. Blocks and
    planes are of outer rows.
    """

    x: object  # D columns of q or k, the outer rows
    x1: object  # and their tail, or None
    y: object  # dO or v, outer rows
    u: object  # q or k, inner rows
    u1: object
    w: object  # dO or v, inner rows
    dx: object  # dq or dk
    dx1: object
    dy: object  # dv
    stats: object  # [BI, 32] of `STATS`: -lse / scale and -delta, 16 parts each; None for dQ
    lse: object  # with softcap, except for dQ: float32 [1, BI] of [blocks of statistics, 64], -lse * log2(e)
    STATS: object
    FLAG: object  # int32: a gradient is not finite
    DX: object  # pointers to dx and dy, for tiles in which a packed sequence ends: stored by rows
    DY: object
    dx_h: object
    dx_l: object
    dy_h: object
    dy_l: object


@struct
class Buffers:
    x: gl.shared_memory_descriptor  # [outer tiles, 1, 1, 64, D]
    x1: object  # [outer tiles, 1, 1, 64, tail]
    y: gl.shared_memory_descriptor  # [outer tiles, 1, 1, 64, DV]
    u: gl.shared_memory_descriptor  # [u_stages, 1, 1, BI, D]
    u1: object
    w: gl.shared_memory_descriptor  # [w_stages, 1, 1, BI, DV]
    stats: object  # [u_stages, BI, 32]
    lse: object  # [u_stages, 1, BI]
    p: object  # for dK and dV: [2, 64, BI], one per consumer; roles: two stages, from the consumer of dV to that of dK
    x_full: gl.shared_memory_descriptor
    y_full: gl.shared_memory_descriptor
    u_full: gl.shared_memory_descriptor
    w_full: gl.shared_memory_descriptor


@gluon.jit
def new_buffers(a):
    TILES: gl.constexpr = a.S.BO // 64
    BI: gl.constexpr = a.S.BI
    DTYPE: gl.constexpr = a.x.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BI], DTYPE)
    x = gl.allocate_shared_memory(DTYPE, [TILES, 1, 1, 64, a.S.D], a.x.layout)
    y = gl.allocate_shared_memory(DTYPE, [TILES, 1, 1, 64, a.S.DV], a.y.layout)
    u = gl.allocate_shared_memory(DTYPE, [a.S.u_stages, 1, 1, BI, a.S.D], a.u.layout)
    w = gl.allocate_shared_memory(DTYPE, [a.S.w_stages, 1, 1, BI, a.S.DV], a.w.layout)
    x1 = None
    u1 = None
    if a.S.tail > 0:
        x1 = gl.allocate_shared_memory(DTYPE, [TILES, 1, 1, 64, a.S.tail], a.x1.layout)
        u1 = gl.allocate_shared_memory(DTYPE, [a.S.u_stages, 1, 1, BI, a.S.tail], a.u1.layout)
    stats = None
    if not a.S.of_queries:
        stats = gl.allocate_shared_memory(DTYPE, [a.S.u_stages, BI, 32], a.stats.layout)
    lse = None
    if a.S.softcap and not a.S.of_queries:
        lse = gl.allocate_shared_memory(gl.float32, [a.S.u_stages, 1, BI], a.lse.layout)
    p = None
    if not a.S.of_queries:
        p = gl.allocate_shared_memory(DTYPE, [2, 64, BI], P_LAYOUT)
    return Buffers(
        x, x1, y, u, u1, w, stats, lse, p, barriers(1, 1), barriers(1, 1), barriers(a.S.u_stages, 1),
        barriers(a.S.w_stages, 1),
    )  # fmt: skip


@gluon.constexpr_function
def score_layout(S):
    """S and dP [64, BI] of a warpgroup, outer rows first."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BI, 16])


@gluon.constexpr_function
def grad_layout(columns):
    """A gradient [64, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
