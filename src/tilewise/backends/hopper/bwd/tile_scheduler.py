"""Which key block a program takes, and which query blocks see it.

A program has 128 keys of one KV head (a plane). dQ of a query block is added up in the order of key blocks; a program
may wait only for programs that have started before it, so tile indices are drawn in that order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..signature import struct


@struct
class Work:
    b: gl.tensor
    kv_head: gl.tensor
    n: gl.tensor
    first: gl.tensor  # query blocks first .. last - 1
    last: gl.tensor
    inner: gl.tensor  # of those, inner .. last - 1 are seen whole


@gluon.jit
def work_of(a, tile_index):
    """Key blocks ascending, of a causal call the longest first, interleaved over `swizzle` planes (heads of a batch
    row): programs add to dQ of a plane one after the other, so those of one plane must not all start together.
    """
    BM: gl.constexpr = a.S.BM
    width = a.swizzle * a.k_blocks
    begin = tile_index // width * a.swizzle
    count = gl.minimum(a.swizzle, gl.num_programs(0) // a.k_blocks - begin)
    rest = tile_index % width
    n = rest // count
    plane = begin + rest % count
    kv_heads = a.heads // a.group
    b = plane // kv_heads
    kv_head = plane % kv_heads
    first = n * 0
    last = n * 0 + a.q_blocks
    inner = n * 0
    if a.S.causal:
        # Key j is seen by rows from j - q_offset on.
        # Keys that no row sees take the last block, hidden as a whole.
        first = gl.minimum(gl.maximum(n * 128 - a.q_offset, 0) // BM, last - 1)
        inner = gl.minimum(gl.maximum(gl.cdiv(n * 128 + 127 - a.q_offset, BM), 0), last)
    if n * 128 + 128 > a.kv_len:
        inner = last
    inner = gl.maximum(inner, first)
    return Work(b, kv_head, n, first, last, inner)


@gluon.jit
def next_block(a, i, g):
    """The order of query blocks: from the last one back, and of each all heads of the group.

    So programs with fewer blocks keep pace with those of more, which they wait for.
    """
    g += 1
    wraps = g == a.group
    return i - wraps.to(gl.int32), gl.where(wraps, 0, g)
