"""The tile scheduler: which key block a program processes, and which query blocks see it.

A key block is 128 keys of one KV head of one sequence (a plane). Several programs may share it (splits): each then
takes every `splits`-th query block. dQ of a query block is accumulated in the order of key blocks; a program may wait
only for programs that started before it, so tile indices are drawn in that order.
"""

from ...gpu.gluon import gl, gluon, mbarrier
from ..signature import struct


@struct
class Work:
    b: gl.tensor  # batch row of q, k, v; packed: 0
    seq: gl.tensor
    kv_head: gl.tensor
    n: gl.tensor  # the key block
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    kv_len: gl.tensor  # keys in use
    kv_end: gl.tensor  # rows of k, used or not
    shift: gl.tensor  # key j is seen by rows j - shift - right .. j - shift + left
    first: gl.tensor  # query blocks first .. last - 1 see the block, perhaps none
    last: gl.tensor
    inner: gl.tensor  # of those, inner .. outer - 1 see all of it
    outer: gl.tensor
    split: gl.tensor  # split: query blocks i * splits + split, and first .. outer count these i

    @gluon.jit
    def steps(self, a):
        return (self.last - self.first) * a.group

    @gluon.jit
    def top(self, a):
        """The last query block, which is processed first."""
        i = self.last - 1
        if a.S.split:
            i = i * a.splits + self.split
        return i

    @gluon.jit
    def block(self, a, head, i):
        """The index of query block i of a head in `stats`, `dq` and the semaphores."""
        if a.S.packed:
            at = head * a.q_blocks + self.q_start // a.S.BM + self.seq + i
        else:
            at = (self.seq * a.heads + head) * a.q_blocks + i
        return at

    @gluon.jit
    def any_visible(self, a, i, C: gl.constexpr):
        """Whether a row of query block i sees one of the 64 keys of consumer C."""
        key = self.n * 128 + C * 64
        seen = key < self.kv_len
        if a.S.hides_right:
            seen &= (i + 1) * a.S.BM > key - self.shift - a.right
        if a.S.hides_left:
            seen &= i * a.S.BM <= key + 63 - self.shift + a.left
        return seen

    @gluon.jit
    def turn(self, a, i):
        """How many key blocks add to query block i before this one."""
        turn = self.n
        if a.S.hides_left:
            turn -= gl.maximum((i * a.S.BM + self.shift - a.left) >> 7, 0)
        return turn

    @gluon.jit
    def end(self, a, i):
        """One past the last key block that adds to query block i."""
        end = gl.cdiv(self.kv_len, 128)
        if a.S.hides_right:
            end = gl.minimum(end, (((i + 1) * a.S.BM - 1 + self.shift + a.right) >> 7) + 1)
        return end


@gluon.jit
def put_index(a, buf, n, index):
    """Producer of a persistent program: publishes the index of its key block number n."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(buf.index_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    buf.indices.index(n & 1).store(gl.full([1], index, gl.int32, EACH))
    mbarrier.arrive(buf.index_full.index(n & 1), count=1)


@gluon.jit
def get_index(a, buf, n):
    """Other partitions: the index of key block number n; past the last index, none is left."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(buf.index_full.index(n & 1), (n >> 1) & 1)
    index = gl.max(buf.indices.index(n & 1).load(EACH), 0)
    mbarrier.arrive(buf.index_empty.index(n & 1), count=1)
    return index


@gluon.jit
def plane_of(a, tile_index):
    """The block and the plane of a tile index: blocks of `swizzle` planes are interleaved."""
    width = a.swizzle * a.blocks
    begin = tile_index // width * a.swizzle
    count = gl.minimum(a.swizzle, a.planes - begin)
    rest = tile_index % width
    return rest // count, begin + rest % count


@gluon.jit
def sequence_of(a, seq):
    """First rows of q and k of a sequence, and its numbers of rows."""
    q_start = seq * 0
    kv_start = seq * 0
    q_len = q_start + a.q_len
    kv_end = q_start + a.kv_len
    if a.S.packed:
        q_start = gl.load(a.CU_Q + seq)
        kv_start = gl.load(a.CU_K + seq)
        q_len = gl.load(a.CU_Q + seq + 1) - q_start
        kv_end = gl.load(a.CU_K + seq + 1) - kv_start
    return q_start, kv_start, q_len, kv_end


@gluon.jit
def keys_of(a, seq, q_len, kv_end):
    """Keys in use, and the position of the first query row among them."""
    kv_len = kv_end
    if a.S.lengths:
        kv_len = gl.load(a.KV_LENGTHS + seq)
    if a.S.offset == "int":
        shift = seq * 0 + a.q_offset
    elif a.S.offset == "rows":
        shift = gl.load(a.Q_OFFSET + seq)
    else:
        shift = kv_len - q_len
    return kv_len, shift


@gluon.jit
def work_of(a, tile_index):
    """The work tile of an index. Key blocks ascend (the longest first in causal calls), interleaved over `swizzle`
    planes (heads of a batch row): programs add to dQ of a plane in turn, so those of one plane must not all start
    together.
    """
    BM: gl.constexpr = a.S.BM
    kv_heads = a.heads // a.group
    n, plane = plane_of(a, tile_index)
    split = n * 0
    if a.S.split:
        split = plane % a.splits
        plane = plane // a.splits
    if a.S.packed:  # planes are heads: the blocks of all sequences are in one list
        seq = gl.load(a.TABLE + 2 * n)
        n = gl.load(a.TABLE + 2 * n + 1)
        kv_head = plane
        b = n * 0
    else:
        seq = plane // kv_heads
        kv_head = plane % kv_heads
        b = seq
    q_start, kv_start, q_len, kv_end = sequence_of(a, seq)
    kv_len, shift = keys_of(a, seq, q_len, kv_end)
    key = n * 128
    first = n * 0
    last = gl.cdiv(q_len, BM)
    inner = first
    outer = last
    if a.S.hides_right:
        first = gl.minimum(gl.maximum(key - shift - a.right, 0) // BM, last)
        inner = gl.minimum(gl.cdiv(gl.maximum(key + 127 - shift - a.right, 0), BM), last)
    if a.S.hides_left:
        outer = gl.minimum(gl.maximum(key - shift + a.left + 1, 0) // BM, last)
        last = gl.minimum(gl.cdiv(gl.maximum(key + 128 - shift + a.left, 0), BM), last)
    if key >= kv_len:
        last = first
    if key + 128 > kv_len:
        inner = last
    last = gl.maximum(last, first)
    inner = gl.minimum(gl.maximum(inner, first), last)
    outer = gl.minimum(gl.maximum(outer, inner), last)
    if a.S.split:
        first = gl.cdiv(first - split, a.splits)
        last = gl.cdiv(last - split, a.splits)
        inner = gl.cdiv(inner - split, a.splits)
        outer = gl.cdiv(outer - split, a.splits)
    return Work(b, seq, kv_head, n, q_start, q_len, kv_start, kv_len, kv_end, shift, first, last, inner, outer, split)


@gluon.jit
def next_block(a, i, g):
    """The next query block: in descending order, for each all heads of the group.

    So programs with fewer blocks keep pace with those with more, which they wait for.
    """
    g += 1
    wraps = g == a.group
    down = wraps.to(gl.int32)
    if a.S.split:
        down *= a.splits
    return i - down, gl.where(wraps, 0, g)
