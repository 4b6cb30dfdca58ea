"""The tile scheduler: which outer block a program processes, and over which inner blocks it loops."""

from ....gpu.gluon import gl, gluon
from ...signature import struct
from ..tile_scheduler import keys_of, plane_of, sequence_of


@struct
class Work:
    b: gl.tensor  # batch row of all tensors; packed: 0
    head: gl.tensor  # of the outer rows
    top: gl.tensor  # the first outer row of the program, in its sequence
    start: gl.tensor  # of the outer rows' sequence
    end: gl.tensor  # number of outer rows
    inner_start: gl.tensor
    kv_len: gl.tensor  # keys in use
    shift: gl.tensor  # row i sees keys i + shift - left .. i + shift + right
    stats: gl.tensor  # index of the sequence's first block of statistics, of head 0
    first: gl.tensor  # inner blocks first .. last - 1 are visited, perhaps none
    last: gl.tensor
    inner: gl.tensor  # of those, inner .. outer - 1 need no masking
    outer: gl.tensor

    @gluon.jit
    def steps(self, a):
        return (self.last - self.first) * heads_of_step(a)


@gluon.jit
def heads_of_step(a):
    """How many inner heads a program loops over: dK and dV sum over the query heads of their group."""
    return 1 if a.S.of_queries else a.group


@gluon.jit
def inner_head(a, w, g):
    return w.head // a.group if a.S.of_queries else w.head * a.group + g


@gluon.jit
def next_block(a, i, g):
    """The next inner block: in descending order, for each all heads of the group."""
    if a.S.of_queries:
        i -= 1
    else:
        g += 1
        wraps = g == a.group
        i -= wraps.to(gl.int32)
        g = gl.where(wraps, 0, g)
    return i, g


@gluon.jit
def work_of(a, tile_index):
    """The work tile of an index: in L2 swizzle groups of `swizzle` planes (heads of a batch row), longest first."""
    BO: gl.constexpr = a.S.BO
    BI: gl.constexpr = a.S.BI
    n, plane = plane_of(a, tile_index)
    if a.S.packed:  # planes are heads: the blocks of all sequences are in one list
        seq = gl.load(a.TABLE + 2 * n)
        n = gl.load(a.TABLE + 2 * n + 1)
        head = plane
        b = n * 0
    else:
        outer_heads = a.heads
        if not a.S.of_queries:
            outer_heads = a.heads // a.group
        seq = plane // outer_heads
        head = plane % outer_heads
        if a.S.of_queries and a.S.hides_right:
            n = a.blocks - 1 - n
        b = seq
    q_start, kv_start, q_len, kv_end = sequence_of(a, seq)
    if a.S.packed:
        stats = q_start // a.S.stats_block + seq
    else:
        stats = seq * a.heads * a.q_blocks
    kv_len, shift = keys_of(a, seq, q_len, kv_end)
    top = n * BO
    first = n * 0
    inner = first
    if a.S.of_queries:  # row i sees keys lo .. hi - 1, which go up with i
        start = q_start
        end = q_len
        inner_start = kv_start
        some = top < q_len
        last = gl.cdiv(kv_len, BI)
        outer = kv_len // BI
        lo = top + shift - a.left
        hi = top + shift + a.right + 1
        HIDES_LOW: gl.constexpr = a.S.hides_left
        HIDES_HIGH: gl.constexpr = a.S.hides_right
    else:  # and key j is seen by rows lo .. hi - 1
        start = kv_start
        end = kv_end
        inner_start = q_start
        some = top < kv_len
        last = gl.cdiv(q_len, BI)
        outer = last
        lo = top - shift - a.right
        hi = top - shift + a.left + 1
        HIDES_LOW: gl.constexpr = a.S.hides_right
        HIDES_HIGH: gl.constexpr = a.S.hides_left
    if HIDES_HIGH:
        outer = gl.minimum(gl.maximum(hi, 0) // BI, outer)
        last = gl.minimum(gl.cdiv(gl.maximum(hi + (BO - 1), 0), BI), last)
    if HIDES_LOW:
        first = gl.minimum(gl.maximum(lo, 0) // BI, last)
        inner = gl.cdiv(gl.maximum(lo + (BO - 1), 0), BI)
    last = gl.where(some, gl.maximum(last, first), first)
    inner = gl.minimum(gl.maximum(inner, first), last)
    outer = gl.minimum(gl.maximum(outer, inner), last)
    return Work(b, head, top, start, end, inner_start, kv_len, shift, stats, first, last, inner, outer)


@gluon.jit
def spans(a, w, row):
    """The inner rows lo .. hi - 1 that each outer row sees, as far as edge flags need them."""
    if a.S.of_queries:
        lo = row + w.shift - a.left
        hi = row * 0 + w.kv_len
        if a.S.hides_right:
            hi = gl.minimum(row + w.shift + a.right + 1, hi)
    else:
        lo = row - w.shift - a.right
        hi = row - w.shift + a.left + 1
    return lo, hi
