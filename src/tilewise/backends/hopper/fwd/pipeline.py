"""The rings of shared memory between the producer and the consumers.

A ring holds STAGES tiles. Use n of a ring is in stage n % STAGES; counts continue from one work tile to the next.

    producer                                 each consumer
    wait until use n - STAGES is released    wait until use n is full
    expect the bytes, start the copy         multiply
    (the copy arrives at `full`)             release use n

Where K and V share a ring (head dims over 256), its uses are the chunks of a tile of keys, then the pieces of that tile
of values, then the next tile's: the order in which they are multiplied.

`full` is an mbarrier that counts the bytes of TMA copies, `released` one that every consumer arrives at; the phases of
an mbarrier are told apart by parity. Every use is released by every consumer, used or not.
tests/backends/hopper/test_hopper_protocol.py simulates this in random order.
"""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, opaque, reinterpret, tma_load
from ..signature import struct


@struct
class Ring:
    tiles: gl.shared_memory_descriptor  # [STAGES, 1, 1, ROWS, COLUMNS]
    full: gl.shared_memory_descriptor
    released: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    ROWS: gl.constexpr
    COLUMNS: gl.constexpr

    @gluon.jit
    def tile(self, n):
        """Use n, as a matrix [ROWS, COLUMNS] in shared memory."""
        return self.tiles.index(n % self.STAGES).reshape([self.ROWS, self.COLUMNS])

    @gluon.jit
    def fill(self, n, desc, at):
        """Producer: loads the tile of `desc` at coordinates `at` as use n."""
        mbarrier.wait(self.released.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)
        full = self.full.index(n % self.STAGES)
        mbarrier.expect(full, desc.block_type.nbytes)
        tile = reinterpret(self.tiles.index(n % self.STAGES), desc.dtype, desc.block_type.shape, desc.layout)
        tma_load(desc, at, full, tile)

    @gluon.jit
    def wait_full(self, n):
        """Consumer: waits for use n."""
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1)

    @gluon.jit
    def release(self, n):
        """Consumer: is done with use n."""
        mbarrier.arrive(self.released.index(n % self.STAGES), count=1)


@gluon.jit
def key_use(a, n, i):
    """The ring use of chunk i of key tile n; pieces of values may come between tiles."""
    each = a.S.chunks
    if a.S.v_stages == 0:
        each += a.S.pieces
        n = opaque(n)
    return n * each + i


@gluon.jit
def value_use(a, n, j):
    """The same for piece j of a tile of values."""
    use = n
    if a.S.v_stages == 0:
        use = key_use(a, n, a.S.chunks + j)
    return use


@gluon.jit
def piece_of(a, values, use):
    """Values [BN / pieces, DV] in shared memory."""
    ROWS: gl.constexpr = a.S.BN // a.S.pieces
    DV: gl.constexpr = a.S.DV
    tile = values.tiles.index(use % values.STAGES)
    return reinterpret(tile, a.v.dtype, [1, 1, ROWS, DV], a.v.layout).reshape([ROWS, DV])


@gluon.jit
def new_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring for tiles of `desc`, whose block is [1, 1, ROWS, COLUMNS]."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, ROWS, COLUMNS], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(released.index(i), count=CONSUMERS)
    return Ring(tiles, full, released, STAGES, ROWS, COLUMNS)


@struct
class Queries:
    """The query rows of STAGES work tiles: for each consumer its own tile in CHUNKS chunks, and its own mbarriers.

    Where the output reuses the memory of the first LENT chunks, there are two parts with their own mbarriers: part 0
    are the other chunks, which are released before the last P V of a work tile, part 1 those lent.
    """

    tiles: gl.shared_memory_descriptor  # [STAGES * CONSUMERS * CHUNKS, 1, 1, 64, COLUMNS]
    full: gl.shared_memory_descriptor  # [STAGES * CONSUMERS * PARTS]
    released: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    CHUNKS: gl.constexpr
    COLUMNS: gl.constexpr
    LENT: gl.constexpr

    @gluon.jit
    def stage(self, n, c: gl.constexpr):
        return n % self.STAGES * self.CONSUMERS + c

    @gluon.jit
    def barrier(self, n, c: gl.constexpr, part: gl.constexpr):
        return self.stage(n, c) * (2 if self.LENT > 0 else 1) + part

    @gluon.jit
    def fill_part(self, n, c: gl.constexpr, part: gl.constexpr, desc, b, head, row):
        """Producer: loads a part of consumer c's rows in work tile n, which begin at `row`."""
        BEGIN: gl.constexpr = self.LENT if part == 0 else 0
        END: gl.constexpr = self.CHUNKS if part == 0 else self.LENT
        full = self.full.index(self.barrier(n, c, part))
        mbarrier.wait(self.released.index(self.barrier(n, c, part)), ((n // self.STAGES) & 1) ^ 1)
        mbarrier.expect(full, desc.block_type.nbytes * (END - BEGIN))
        for i in gl.static_range(BEGIN, END):
            tile = self.tiles.index(self.stage(n, c) * self.CHUNKS + i)
            tma_load(desc, [b, head, row, i * self.COLUMNS], full, tile)

    @gluon.jit
    def wait_full(self, n, c: gl.constexpr, part: gl.constexpr):
        mbarrier.wait(self.full.index(self.barrier(n, c, part)), (n // self.STAGES) & 1)

    @gluon.jit
    def release(self, n, c: gl.constexpr, part: gl.constexpr):
        mbarrier.arrive(self.released.index(self.barrier(n, c, part)), count=1)

    @gluon.jit
    def chunk(self, n, c: gl.constexpr, i):
        return self.tiles.index(self.stage(n, c) * self.CHUNKS + i).reshape([64, self.COLUMNS])


@gluon.jit
def new_queries(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CHUNKS: gl.constexpr, LENT: gl.constexpr):
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    BARRIERS: gl.constexpr = STAGES * CONSUMERS * (2 if LENT > 0 else 1)
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES * CONSUMERS * CHUNKS, 1, 1, 64, COLUMNS], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(released.index(i), count=1)
    return Queries(tiles, full, released, STAGES, CONSUMERS, CHUNKS, COLUMNS, LENT)


@gluon.jit
def consumer(CONSUME: gl.constexpr, C: gl.constexpr, shared):
    a, scheduler, queries, keys, values, outs = shared
    CONSUME(a, scheduler, queries, keys, values, outs, C)


@gluon.jit
def producer(PRODUCE: gl.constexpr, shared):
    a, scheduler, queries, keys, values, _ = shared
    PRODUCE(a, scheduler, queries, keys, values)


@gluon.jit
def partition(a, CONSUME: gl.constexpr, PRODUCE: gl.constexpr, scheduler, queries, keys, values, outs):
    """A program: two or three consumers, and the producer."""
    fence_async_shared()
    shared = (a, scheduler, queries, keys, values, outs)
    if a.S.consumers == 2:
        gl.warp_specialize(
            [(consumer, (CONSUME, 0, shared)), (consumer, (CONSUME, 1, shared)), (producer, (PRODUCE, shared))],
            [4, 1],
            [a.S.consumer_regs, a.S.producer_regs],
        )
    else:
        gl.warp_specialize(
            [(consumer, (CONSUME, 0, shared)), (consumer, (CONSUME, 1, shared)), (consumer, (CONSUME, 2, shared)),
             (producer, (PRODUCE, shared))],
            [4, 4, 1],
            [a.S.consumer_regs, a.S.consumer_regs, a.S.producer_regs],
        )  # fmt: skip
