"""The tile scheduler: which work tiles a program computes, in what order, and which keys belong to them.

A work tile is BM query rows of one head (and, of wide values, one tile of their columns). Each program is persistent.
Where work tiles are alike, their schedule is static; where some are longer, it is dynamic, and the longest come first.

Rows and keys of a work tile: `top` and `q_len` count from the sequence's first row, key tiles from its first key. Key
tiles `first .. last` hold what any row of the work tile sees; there is at least one, which may be fully hidden.
"""

from ...gpu.gluon import gl, gluon, mbarrier
from ...gpu.mask_rules import key_span, query_position, sequence_numbers
from ..signature import struct


@struct
class WorkTile:
    row_b: gl.tensor  # batch row of q, out and lse
    kv_b: gl.tensor  # batch row of k and v
    b: gl.tensor  # batch row of lengths, slopes, mask
    head: gl.tensor
    value_tile: gl.tensor
    top: gl.tensor  # the tile's first query row
    q_start: gl.tensor
    q_len: gl.tensor
    kv_start: gl.tensor
    n_keys: gl.tensor
    offset: gl.tensor  # the position of query row 0
    numbers: object  # RULE_NUMBERS, where each sequence has its own
    owned: gl.tensor  # whether the rows belong to a sequence, or are past the last one
    first: gl.tensor
    last: gl.tensor


@gluon.jit
def numbers_of(a, w):
    """RULE_NUMBERS of a work tile."""
    numbers = a.rules
    if a.S.rules.affine == "rows":
        numbers = w.numbers
    return numbers


@gluon.jit
def key_tiles(a, offset, top, rows, n_keys, numbers):
    """Key tiles for query rows `top .. top + rows`: first and last that any row sees, and the range that all see."""
    BN: gl.constexpr = a.S.BN
    lo, full_hi = key_span(query_position(offset, top, numbers, a.S), n_keys, numbers, a.S)
    full_lo, hi = key_span(query_position(offset, top + rows - 1, numbers, a.S), n_keys, numbers, a.S)
    end = gl.maximum(gl.cdiv(n_keys, BN), 1)
    first = gl.minimum(lo // BN, end - 1)
    last = gl.maximum(gl.cdiv(hi, BN), first + 1)
    inner = gl.minimum(gl.maximum(gl.cdiv(full_lo, BN), first), last)
    if a.S.max_free:
        full_hi -= 1  # each row's last key is in an earlier tile, so that it has a running max
    outer = gl.maximum(gl.minimum(full_hi // BN, last), inner)
    return first, last, inner, outer


@struct
class TileCoord:
    """A work tile's index, looked up: the tile of query rows of one head of one sequence."""

    index: gl.tensor
    seq: gl.tensor  # past `batch` where there is no such work tile
    head: gl.tensor
    tile: gl.tensor


@struct
class TileScheduler:
    """Which work tile is number n of this program.

    Without COUNTER the schedule is static: rounds over the programs, alternately forwards and backwards. With it, the
    schedule is dynamic: the producer fetches the next index, looks up its coordinates and passes those to the consumers
    by a ring of two. The look-up (divisions, or a search in packed sequences) then costs the consumers nothing.
    """

    counter: object
    numbers: object  # [8, 1] in shared memory: two coordinates; this and the barriers exist only with a counter
    full: object
    released: object

    @gluon.jit
    def next_index(self, n):
        """Producer: the index of its work tile n."""
        if self.counter is None:
            index = static_tile(n)
        else:
            index = gl.program_id(0)
            if n > 0:
                index = gl.num_programs(0) + gl.atomic_add(self.counter, 1, sem="relaxed")
        return index

    @gluon.jit
    def put(self, i, number):
        EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.numbers.index(i).store(gl.full([1], number, gl.int32, EACH))

    @gluon.jit
    def get(self, i):
        EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.numbers.index(i).load(EACH), 0)

    @gluon.jit
    def fetch(self, a, n):
        """Producer: the coordinates of work tile n, passed to the consumers too."""
        coord = locate(a, self.next_index(n))
        if self.counter is not None:
            mbarrier.wait(self.released.index(n & 1), ((n >> 1) & 1) ^ 1)
            at = (n & 1) * 4
            self.put(at, coord.index)
            self.put(at + 1, coord.seq)
            self.put(at + 2, coord.head)
            self.put(at + 3, coord.tile)
            mbarrier.arrive(self.full.index(n & 1), count=1)
        return coord

    @gluon.jit
    def receive(self, a, n):
        """Consumer: the coordinates of work tile n; past the last index there is none."""
        if self.counter is None:
            coord = locate(a, static_tile(n))
        else:
            mbarrier.wait(self.full.index(n & 1), (n >> 1) & 1)
            at = (n & 1) * 4
            coord = TileCoord(self.get(at), self.get(at + 1), self.get(at + 2), self.get(at + 3))
            mbarrier.arrive(self.released.index(n & 1), count=1)
        return coord


@gluon.jit
def new_scheduler(counter, CONSUMERS: gl.constexpr):
    """Barriers that nobody waits at must not be allocated: the compiler reuses their memory for tiles, and what TMA
    writes over an mbarrier may be lost (seen: a wrong row of q in one of a thousand launches).
    """
    if counter is None:
        scheduler = TileScheduler(None, None, None, None)
    else:
        numbers = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        released = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(released.index(i), count=CONSUMERS)
        scheduler = TileScheduler(counter, numbers, full, released)
    return scheduler


@gluon.jit
def static_tile(round):
    count = gl.num_programs(0)
    me = gl.program_id(0)
    return round * count + gl.where(round % 2 == 0, me, count - 1 - me)


@gluon.jit
def tile_count(a):
    """The number of work tiles; for packed sequences it is known only on the device (gpu/varlen_order.py)."""
    if a.S.packed_q:
        count = gl.load(a.START + a.batch + 1) * a.heads * a.S.value_tiles
    else:
        count = a.work_tiles
    return count


@gluon.jit
def locate(a, index):
    """The coordinates of a work tile; past the last one, those of a tile without rows."""
    BM: gl.constexpr = a.S.BM
    unit = index // a.S.value_tiles
    if a.S.packed_q:
        # Longest sequences first; of one sequence the last tiles first, all heads of a tile together.
        head = unit % a.heads
        entry = unit // a.heads
        RUN: gl.constexpr = 128
        each: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        rank = entry * 0
        for i in range(0, a.batch + 1, RUN):
            at = i + gl.arange(0, RUN, each)
            starts = gl.load(a.START + at, mask=at <= a.batch, other=0x7FFFFFFF)
            rank += gl.sum((starts <= entry).to(gl.int32), 0)
        rank -= 1
        seq = gl.load(a.ORDER + rank)
        q_end = gl.where(seq < a.batch, gl.load(a.CU_Q + gl.minimum(seq + 1, a.batch)), a.total_q)
        tile = gl.cdiv(q_end - gl.load(a.CU_Q + seq), BM) - 1 - (entry - gl.load(a.START + rank))
        beyond = entry >= gl.load(a.START + a.batch + 1)
        seq = gl.where(beyond, a.batch + 1, seq)
        tile = gl.where(beyond, 0, tile)
    else:
        # L2 swizzle groups of planes whose keys fit L2; within a group, the last tiles of all its planes come first.
        unit = gl.minimum(unit, a.work_tiles // a.S.value_tiles - 1)
        tiles = gl.cdiv(a.q_len, BM)
        begin = unit // (a.swizzle * tiles) * a.swizzle
        width = gl.minimum(a.swizzle, a.batch * a.heads - begin)
        rank = unit % (a.swizzle * tiles)
        plane = begin + rank % width
        tile = tiles - 1 - rank // width
        seq = plane // a.heads
        head = plane % a.heads
    return TileCoord(index, seq, head, tile)


@gluon.jit
def work_tile_at(a, coord):
    """The work tile at these coordinates."""
    BM: gl.constexpr = a.S.BM
    tile = coord.tile
    if a.S.packed_q:
        owned = coord.seq < a.batch
        seq = gl.minimum(coord.seq, a.batch)
        q_start = gl.load(a.CU_Q + seq)
        q_end = gl.where(owned, gl.load(a.CU_Q + gl.minimum(seq + 1, a.batch)), a.total_q)
        q_len = gl.where(coord.seq > a.batch, 0, q_end - q_start)
        b = gl.minimum(seq, a.batch - 1)
        row_b = b * 0
        kv_b = b * 0
        kv_start = gl.load(a.CU_K + b)
        n_keys = gl.load(a.CU_K + b + 1) - kv_start
    else:
        b = coord.seq
        q_start = b * 0
        q_len = b * 0 + a.q_len
        row_b = b
        kv_b = b
        kv_start = b * 0
        n_keys = b * 0 + a.kv_len
        owned = b < a.batch
    if a.S.rules.lengths:
        n_keys = gl.load(a.KV_LENGTHS + b)
    offset = b * 0 + a.q_offset
    if a.S.rules.offset == "rows":
        offset = gl.load(a.Q_OFFSET + b)
    if a.S.rules.offset == "end":
        offset = n_keys - q_len
    if a.S.packed_q:
        n_keys = gl.where(owned, n_keys, 0)
    top = tile * BM
    value_tile = coord.index % a.S.value_tiles
    numbers = sequence_numbers(a.rules, a.PLACES, b, a.S)
    first, last, _, _ = key_tiles(a, offset, top, gl.minimum(BM, q_len - top), n_keys, numbers)
    if a.S.rules.affine != "rows":
        numbers = None  # no registers for numbers that all share
    return WorkTile(
        row_b, kv_b, b, coord.head, value_tile, top, q_start, q_len, kv_start, n_keys, offset, numbers, owned,
        first, last,
    )  # fmt: skip
