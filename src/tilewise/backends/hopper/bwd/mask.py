"""Cells of an additive mask, in the register layout of the scores that they are added to."""

from ...gpu.gluon import gl, gluon, mbarrier
from .arguments import score_layout
from .sync import MASK_EMPTY, named_barrier

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def cells_of(a, X, strides, b, head, row, key, u):
    """Pointers [64, BM] to the cells of keys `key ..` and queries `row ..`, as in S^T, and which of them exist."""
    BM: gl.constexpr = a.S.BM
    LAYOUT: gl.constexpr = score_layout(a.S)
    b_stride, h_stride, q_stride, k_stride = strides
    q_stride = q_stride + (u >> 30)  # 0, unknown to the compiler, which would else keep offsets in registers
    j = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    i = gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))[None, :]
    there = (key + j < a.kv_len) & (row + i < a.q_len)
    if not a.S.near:
        j = j.to(gl.int64)
        i = i.to(gl.int64)
    X = X + b.to(gl.int64) * b_stride + head.to(gl.int64) * h_stride
    X = X + row.to(gl.int64) * q_stride + key.to(gl.int64) * k_stride
    return X + (i * q_stride + j * k_stride), there


@gluon.jit
def own_cells(a, X, strides, w, u, i, g, C: gl.constexpr):
    """The same for query block i and this consumer's keys."""
    head = w.kv_head * a.group + g
    return cells_of(a, X, strides, w.b, head, i * a.S.BM, w.n * 128 + C * 64, u)


@gluon.jit
def put_huge(places, s, huge):
    """Producer: publishes whether a query block has a huge lse, before it arrives at the mbarrier of its tiles."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    places.index(s).store(gl.full([1], huge, gl.int32, EACH))


@gluon.jit
def get_huge(places, s):
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(places.index(s).load(EACH), 0) != 0


@gluon.jit
def load_mask(a, buf, w, u, i, g, C: gl.constexpr):
    """The mask's cells [64, BM] in float32."""
    if a.S.mask_tiles:
        mbarrier.wait(buf.mask_full.index(0), u & 1)
        x = buf.mask.index(C + (u >> 30)).reshape([a.S.BM, 64]).permute((1, 0)).load(score_layout(a.S))
    else:
        at, there = own_cells(a, a.MASK, (a.mask_b, a.mask_h, a.mask_q, a.mask_k), w, u, i, g, C)
        x = gl.load(at, mask=there, other=0.0)
    return wide(a, x)


@gluon.jit
def wide(a, x):
    """Converts the mask's cells to float32; bfloat16 in pairs, one instruction per cell."""
    if gl.bfloat16 == a.MASK.dtype.element_ty:
        TEXT: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
        return gl.inline_asm_elementwise(TEXT, "=f,=f,r", [x], gl.float32, is_pure=True, pack=2)
    return x.to(gl.float32)


@gluon.jit
def release_mask(a):
    """Consumer: has read its part of the mask's tile."""
    if a.S.mask_tiles:
        named_barrier("bar.arrive", MASK_EMPTY, 288)


@gluon.jit
def masked(x, factor, bias, minus_lse):
    """x factor + bias - lse, in base 2, for exp2. A bias may be huge, and lse then is too: lse is subtracted last, in
    natural units, in which the lowest finite bias stays finite.
    """
    return (gl.fma(x, factor, bias) + minus_lse) * LOG2E
