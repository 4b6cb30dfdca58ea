"""Shared memory and its mbarriers, between the producer and the two consumers.

There is room for one pair of blocks. Pair number u (counted over all fragments of a program) goes through it:

    part of a block          scored by     read as values by     released by
    block b, left half       consumer b    consumer 0            consumer 0
    block b, right half      consumer b    consumer 1            consumer 1
    block 0, rope columns    consumer 0    nobody                consumer 0, when it has scored the block
    block 1, rope columns    consumer 1    nobody                with the right half of block 0, which is later

    of float8, block b       its rope columns are released with both halves: weights reuse their memory
    of few rows, block b     read by consumer b alone, and released as a whole
    queries                  read by both consumers; when both have scored a fragment, its output is stored from there
    flags, scales            of keys by index: buffers for two pairs, written with the rope columns
    weights of block b       written by consumer b, read by the other one; no barrier guards their reuse, since each
                             consumer writes after it has had the other's answer

Every barrier completes one phase for each pair, so its parity is that of u.
tests/helpers/mla_machine.py simulates this.
"""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, reinterpret
from ..signature import struct


@struct
class Shared:
    q: gl.shared_memory_descriptor  # [pieces, rows, width]
    q_rope: gl.shared_memory_descriptor  # [rows, 64]
    k: gl.shared_memory_descriptor  # [4, 64, 256]: halves of blocks
    k_rope: gl.shared_memory_descriptor  # [2, 64, 64]
    p: gl.shared_memory_descriptor  # [1, 64, 64]; of float8 the memory of the rope columns, which have been multiplied;
    # of few rows [2, 64, rows], transposed
    m0: gl.shared_memory_descriptor  # [1, rows]: running max, by its writer
    m1: gl.shared_memory_descriptor
    l: gl.shared_memory_descriptor  # [2, rows]: sums at the end of a fragment
    changed: gl.tuple  # of 2, [4]: whether a running max has changed, by warp
    q_full: gl.shared_memory_descriptor  # [1, 1]
    q_free: gl.shared_memory_descriptor  # [1, 1]
    # Each barrier is a separate allocation, or the compiler would synchronise between one wait and the next.
    full: gl.tuple  # of 2 pieces; of float8 of 2 blocks
    free: gl.tuple  # of 4; of few rows of 2
    rope_full: gl.tuple  # of 2
    scored: gl.tuple  # of 1: block 0; of few rows and of float8 there is none
    ready: gl.tuple  # of 2: weights and running max; of few rows there are none
    done: gl.shared_memory_descriptor  # [1, 1]: both sums of a fragment
    ok: gl.tuple  # with indices, float32 [4, 64]: 1 for keys that count, of two pairs
    scales: gl.tuple  # of 8, [4, 64], as `ok`: for each scale group the factors of scores, in float32, and then, in 16
    # bits, the scales of values
    by_warp: gl.tuple  # of few rows, of 2, float32 [4, rows]: max or sum of each warp of a consumer
    parts: gl.tuple  # of few rows, float32 [2, 256, rows]: half of a consumer's output, which the other one completes
    S: object

    @gluon.jit
    def piece(self, i):
        """Piece i of the pair's latent columns, [64, width]: those of block 0, then those of block 1."""
        WIDTH: gl.constexpr = self.S.width
        LAYOUT: gl.constexpr = self.q.layout
        return reinterpret(self.k, self.k.dtype, [1024 // WIDTH, 64, WIDTH], LAYOUT).index(i)

    @gluon.jit
    def wait(self, full, u):
        """Waits for a barrier of pair u; gathered rows, which TMA did not write, need a fence before products."""
        mbarrier.wait(full, u & 1)
        if self.S.gather:
            fence_async_shared()

    @gluon.jit
    def wait_half(self, u, b: gl.constexpr, half: gl.constexpr):
        """Waits for half a block of pair u."""
        EACH: gl.constexpr = self.S.pieces // 2
        for i in gl.static_range(EACH):
            self.wait(self.full[(2 * b + half) * EACH + i], u)

    @gluon.jit
    def weights(self, b: gl.constexpr):
        """The buffer for weights of block b."""
        return self.p.index(b if self.S.fp8 else 0)

    @gluon.jit
    def maximum(self, b: gl.constexpr):
        """The buffer for the running max that consumer b sends."""
        line = self.m0.index(0)
        if b == 1:
            line = self.m1.index(0)
        return line


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def apart(N: gl.constexpr, COUNT: gl.constexpr = 1):
    """Barriers for COUNT arrivals, as a tuple."""
    made = ()
    for _ in gl.static_range(N):
        made = made + (barriers(1, COUNT).index(0),)
    return made


@gluon.jit
def lines(DTYPE: gl.constexpr):
    """[4, 64] for each scale group; separate allocations, or the compiler would synchronise between stores."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    made = ()
    for _ in gl.static_range(4):
        made = made + (gl.allocate_shared_memory(DTYPE, [4, 64], LINE),)
    return made


@gluon.jit
def new_shared(a):
    DTYPE: gl.constexpr = a.q.dtype
    WIDTH: gl.constexpr = a.S.width
    PIECE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], DTYPE)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], DTYPE)
    SMALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    ROWS: gl.constexpr = a.S.rows
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(DTYPE, [a.S.pieces, ROWS, WIDTH], PIECE)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, ROWS, 64], SMALL).index(0)
    k = gl.allocate_shared_memory(DTYPE, [4, 64, 256], HALF)
    k_rope = gl.allocate_shared_memory(DTYPE, [2, 64, 64], SMALL)
    p = k_rope
    parts = ()
    by_warp = ()
    if a.S.narrow:
        for _ in gl.static_range(2):
            made = gl.allocate_shared_memory(gl.float32, [1, 4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
            by_warp = by_warp + (made.index(0),)
        TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROWS], DTYPE)
        p = gl.allocate_shared_memory(DTYPE, [2, 64, ROWS], TURNED)
        parts = (gl.allocate_shared_memory(gl.float32, [2, 256, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),)
    elif not a.S.fp8:
        p = gl.allocate_shared_memory(DTYPE, [1, 64, 64], SMALL)
    m0 = gl.allocate_shared_memory(gl.float32, [1, ROWS], LINE)
    m1 = gl.allocate_shared_memory(gl.float32, [1, ROWS], LINE)
    l = gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE)
    changed = (
        gl.allocate_shared_memory(gl.int32, [1, 4], LINE).index(0),
        gl.allocate_shared_memory(gl.int32, [1, 4], LINE).index(0),
    )
    ok = ()
    if a.S.gather:
        ok = (gl.allocate_shared_memory(gl.float32, [4, 64], LINE),)
    scales = ()
    if a.S.fp8:
        scales = lines(gl.float32) + lines(DTYPE)
    # Gathered copies arrive once for each thread of the producer; flags come with the rope columns. Stores arrive once:
    # flags, and all latent columns of a block in float8.
    if a.S.fp8:
        full = apart(2)
    else:
        full = apart(2 * a.S.pieces, 128 if a.S.gather else 1)
    # Allocate no barrier that nobody waits at: the compiler would place it over memory that is in use.
    return Shared(
        q, q_rope, k, k_rope, p, m0, m1, l, changed, barriers(1, 1), barriers(1, 2), full,
        apart(2 if a.S.narrow else 4), apart(2, 129 if a.S.gather else 1), apart(0 if a.S.narrow or a.S.fp8 else 1),
        apart(0 if a.S.narrow else 2), barriers(1, 2), ok, scales, by_warp, parts, a.S,
    )  # fmt: skip
