"""One step of the online softmax, in registers.

    s  = logits of a tile of keys       [64, BN]
    m' = rowmax s, if its exp is 2^8 times that of m; else m
    p  = exp(s - m')                    in base 2
    l  = l exp(m - m') + rowsum p       running sum, of each thread's own cells until the end

With this threshold O is rarely rescaled, and p is at most 2^8. Max-free kernels go further: tiles without hidden cells
keep the m of the tiles before them and compute no row max. In bfloat16 p has the range of float32, so weights lose
nothing. Where the sum of a row is over 2^80 at the end, or its output is not finite, the tile is flagged and recomputed
with row maxima (nonfinite.py).

Linear kernels (no softcap and no ALiBi) keep m in units of the dot product, capped ones (a softcap, and no
more) in units of tanh: scale or softcap and log2(e) go into one multiply-add for each cell. The others keep logits in
natural units. Fused multiply-adds are written out and the compiler makes no
others, so a tile gives the same bits in every loop.
"""

from ...gpu.flags import TANH_3, TANH_5, TANH_7
from ...gpu.gluon import gl, gluon
from ...gpu.mask_rules import key_position
from ..signature import struct
from .layouts import score_layout

LOG2E = gl.constexpr(1.4426950408889634)
LATE = gl.constexpr(8.0)  # powers of 2 by which a row max must be larger than m to replace it
GROWTH = gl.constexpr(80.0)  # powers of 2 that weights of max-free tiles, and their sums, may reach
C3 = gl.constexpr(TANH_3)
C5 = gl.constexpr(TANH_5)
C7 = gl.constexpr(TANH_7)


@struct
class Rows:
    """The rows of a consumer: [64] each, in the row layout of the scores."""

    row: gl.tensor  # in the sequence
    ok: gl.tensor
    lo: gl.tensor  # the keys that each row sees
    hi: gl.tensor
    qpos: gl.tensor
    slope: object
    numbers: object  # as in `WorkTile`, if there is ALiBi


@gluon.jit
def tanh(x, EXACT: gl.constexpr):
    """`(1 - t) / (1 + t)` with `t = exp(-2 |x|)`: no overflow, absolute error of about 1e-7. EXACT: near 0, where
    `1 - t` cancels, a polynomial, with a relative error of 1e-7.
    """
    t = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - t) * reciprocal(1.0 + t)
    y = gl.inline_asm_elementwise("copysign.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, is_pure=True, pack=1)
    if EXACT:
        u = x * x
        y = gl.where(u < 0.0625, x + x * u * (C3 + u * (C5 + u * C7)), y)
    return y


@gluon.jit
def reciprocal(x):
    """1 / x for x far from 0: good to one ulp, in one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def unit(a):
    """The unit of s and of m, in logits."""
    found = 1.0
    if a.S.linear:
        found = a.scale
    if a.S.capped:
        found = a.softcap
    return found


@gluon.jit
def logits(a, s, rows, columns):
    """Dot products [64, BN] to logits: scale, softcap, ALiBi, in this order."""
    if a.S.capped:  # tanh(x) - 1, which is -2 / (1 + exp(2 x))
        e = gl.exp2(s * (2.0 * LOG2E * a.scale / a.softcap))
        s = reciprocal(gl.fma(e, gl.full_like(e, -0.5), gl.full_like(e, -0.5)))
    elif a.S.softcap:
        s = a.softcap * tanh(s * (a.scale / a.softcap), a.S.exact_tanh)
    else:
        s = s * a.scale
    if a.S.alibi:
        numbers = a.rules
        if a.S.rules.affine == "rows":
            numbers = rows.numbers
        distance = gl.abs(rows.qpos[:, None] - key_position(columns, numbers, a.S)[None, :]).to(gl.float32)
        s = s - rows.slope * distance
    return s


@gluon.jit
def select_visible(a, s, rows, tile):
    """Selects -inf where a cell is hidden (never adds it); also returns visible cells [64, BN].

    A thread's columns are 8 i + j: few j (from its index among four threads, unknown to the compiler) and many i
    (known). So 8 i is compared with a limit made of row and j, and each cell costs one comparison with a constant.
    """
    BN: gl.constexpr = a.S.BN
    column = gl.arange(0, BN, gl.SliceLayout(0, s.type.layout))
    i8 = column & -8
    j = column & 7
    visible = i8[None, :] < (rows.hi - tile * BN)[:, None] - j[None, :]
    if a.S.rules.hides_left:
        visible = visible & (i8[None, :] >= (rows.lo - tile * BN)[:, None] - j[None, :])
    return gl.where(visible, s, float("-inf")), visible


@gluon.jit
def weights(a, s, m, l, late, MASKED: gl.constexpr):
    """p [64, BN] in float32, the new m and l, and alpha [64].

    `late`: powers of 2 by which a row max must be larger than m to replace it; None: m stays.
    """
    m_new = m
    if late is not None:
        top = gl.max(s, 1)
        m_new = gl.where((top - m) * (unit(a) * LOG2E) > late, top, m)
    base = m_new
    if MASKED:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: -inf - -inf would be NaN
    c = unit(a) * LOG2E
    if a.S.linear or a.S.capped:
        p = gl.exp2(gl.fma(s, gl.full_like(s, c), gl.zeros_like(s) - (base * c)[:, None]))
    else:
        p = gl.exp2((s - base[:, None]) * c)
    alpha = gl.exp2((m - base) * c)
    each = own_sums(a, p)
    if late is not None:
        l = l * gl.convert_layout(alpha[:, None], each.type.layout, assert_trivial=True)
    return p, m_new, l + each, alpha


@gluon.jit
def no_sums(a):
    """m and l before the first tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, score_layout(a.S))
    BN: gl.constexpr = a.S.BN
    zeros = gl.zeros([64, BN], gl.float32, score_layout(a.S))
    return gl.full([64], float("-inf"), gl.float32, ROW), own_sums(a, zeros)


@gluon.jit
def own_sums(a, p):
    """Sums of each thread's own cells of a row [64, 4]; the four threads of a row are reduced in the epilogue."""
    BN: gl.constexpr = a.S.BN
    return gl.sum(gl.sum(gl.reshape(p, [64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def finalise(a, m, l, head, owned):
    """The lse and the final factor of O; sinks are added here. [64] each."""
    if a.S.linear or a.S.capped:
        m = gl.where(m == float("-inf"), m, m * unit(a))
    if a.S.capped:
        m += a.softcap
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    alpha = gl.full_like(m, 1.0)
    if a.S.max_free and not a.S.fixup:
        MOST: gl.constexpr = 2.0**GROWTH
        alpha = gl.where(l <= MOST, alpha, float("nan"))  # flags the tile
    if a.S.sinks:
        sink = gl.where(owned, gl.load(a.SINKS + head), float("-inf"))
        m_new = gl.maximum(m, sink)
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha *= gl.exp2((m - base) * LOG2E)
        l = l * alpha + gl.where(sink == float("inf"), 1.0, gl.exp2((sink - base) * LOG2E))  # inf - inf would be NaN
        m = m_new
    l = gl.where(l == 0, 1.0, l)
    return m + gl.log(l), alpha / l
