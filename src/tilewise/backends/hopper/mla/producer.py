"""The producer: one warp that looks up pages and loads them by TMA."""

from ...gpu.gluon import gl, gluon, mbarrier, reinterpret, tma_load
from .tile_scheduler import fragment, keys_of


@gluon.jit
def pages_of(a, seq, block, n):
    """The pages that hold a block of 64 keys (several if pages are small), and the first row in the page."""
    block = gl.minimum(block, gl.maximum(n - 1, 0) // 64)  # a pair's second block may be past the end
    COPIES: gl.constexpr = 64 // a.S.page_rows
    row = block * 64
    pages = ()
    for i in gl.static_range(COPIES):
        if a.S.paged:
            # Pages past the last one are not in the table; what is read instead of them is hidden.
            at = gl.minimum(row + i * a.S.page_rows, gl.maximum(n - 1, 0)) // a.page_size
            page = gl.load(a.TABLE + seq.to(gl.int64) * a.table_b + at)
        else:
            page = seq
        pages = pages + (page,)
    if a.S.paged:
        row = row % a.page_size
    return pages, row


@gluon.jit
def copy(a, desc, tile, full, pages, row, column, WIDTH: gl.constexpr):
    """Copies 64 keys of WIDTH columns by TMA."""
    COPIES: gl.constexpr = 64 // a.S.page_rows
    ROWS: gl.constexpr = a.S.page_rows
    if COPIES == 1:
        there = reinterpret(tile, desc.dtype, desc.block_type.shape, desc.layout)
        tma_load(desc, [pages[0], row, column], full, there)
    else:
        gl.static_assert(WIDTH == 64)  # wider pieces do not keep the rows of a page together
        for i in gl.static_range(COPIES):
            rows = reinterpret(tile, desc.dtype, [COPIES, 1, ROWS, WIDTH], desc.layout).index(i)
            tma_load(desc, [pages[i], 0, column], full, rows)


@gluon.jit
def fill_piece(a, sh, pages, row, place: gl.constexpr, piece: gl.constexpr):
    """Loads a piece of the latent columns to one of the buffers of a pair."""
    WIDTH: gl.constexpr = a.S.width
    full = sh.full[place]
    mbarrier.expect(full, 64 * WIDTH * 2)
    copy(a, a.k, sh.piece(place), full, pages, row, piece * WIDTH, WIDTH)


@gluon.jit
def fill_block(a, sh, u, pages, row, b: gl.constexpr):
    """Loads block b of pair u. The rope columns of block 1 are free: the right half of block 0, filled by now, was
    released later.
    """
    EACH: gl.constexpr = a.S.pieces // 2
    if a.S.narrow:
        mbarrier.wait(sh.free[b], (u & 1) ^ 1)
    elif b == 0:  # rope columns of pair u - 1 have been multiplied
        mbarrier.wait(sh.scored[0], (u & 1) ^ 1)
    full = sh.rope_full[b]
    mbarrier.expect(full, 64 * 64 * 2)
    copy(a, a.k_rope, sh.k_rope.index(b), full, pages, row, 512, 64)
    for half in gl.static_range(2):
        if not a.S.narrow:
            mbarrier.wait(sh.free[2 * b + half], (u & 1) ^ 1)
        for i in gl.static_range(EACH):
            fill_piece(a, sh, pages, row, (2 * b + half) * EACH + i, half * EACH + i)


@gluon.constexpr_function
def prefetch_text(size):
    return (
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {size}; mov.b32 $0, 0; }}"
    )


@gluon.jit
def prefetch_bytes(pointer, SIZE: gl.constexpr):
    """Prefetches memory to L2, by one lane."""
    TEXT: gl.constexpr = prefetch_text(SIZE)
    gl.inline_asm_elementwise(TEXT, "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def prefetch(a, tile, pages, row, more, b: gl.constexpr):
    """Prefetches block b of the next pair to L2. Tiles with the same keys take turns: neighbours run concurrently."""
    if a.S.prefetch:
        COPIES: gl.constexpr = 64 // a.S.page_rows
        if more & ((a.tiles == 1) | (tile % 2 == b)) & (row + a.S.page_rows <= a.page_size):
            for i in gl.static_range(COPIES):
                prefetch_bytes(a.CACHE + pages[i].to(gl.int64) * a.page_b * 8 + row * 576, a.S.page_rows * 1152)


@gluon.jit
def fill_queries(a, sh, w, f):
    """Loads the query rows of fragment number f."""
    PIECES: gl.constexpr = a.S.pieces
    mbarrier.wait(sh.q_free.index(0), (f & 1) ^ 1)
    full = sh.q_full.index(0)
    mbarrier.expect(full, a.S.rows * 576 * 2)
    there = reinterpret(sh.q_rope, a.q_rope.dtype, a.q_rope.block_type.shape, a.q_rope.layout)
    tma_load(a.q_rope, [w.b, w.query, w.head, 512], full, there)
    for i in gl.static_range(PIECES):
        there = reinterpret(sh.q.index(i), a.q.dtype, a.q.block_type.shape, a.q.layout)
        tma_load(a.q, [w.b, w.query, w.head, i * a.S.width], full, there)


@gluon.jit
def produce(a, run, sh):
    u = 0  # pairs so far
    f = 0  # fragments so far
    seq = run.seq
    first = run.first
    left = run.left
    n = keys_of(a, gl.minimum(seq, a.batch - 1))
    pages0, row0 = pages_of(a, gl.minimum(seq, a.batch - 1), first * 2, n)
    pages1, row1 = pages_of(a, gl.minimum(seq, a.batch - 1), first * 2 + 1, n)
    while left > 0:
        w = fragment(a, seq, first, left, run.tile)
        after = gl.minimum(seq + 1, a.batch - 1)
        n_after = keys_of(a, after)
        fill_queries(a, sh, w, f)
        for i in range(first, w.last):
            # The next pair's page numbers are prefetched before this one's buffers are free.
            inside = i + 1 < w.last
            n = gl.where(inside, w.n, n_after)
            its = gl.where(inside, seq, after)
            pair = gl.where(inside, i + 1, 0)
            later0, next0 = pages_of(a, its, pair * 2, n)
            later1, next1 = pages_of(a, its, pair * 2 + 1, n)
            more = inside | (left > w.last - first)
            fill_block(a, sh, u, pages0, row0, 0)
            prefetch(a, run.tile, later0, next0, more, 0)
            fill_block(a, sh, u, pages1, row1, 1)
            prefetch(a, run.tile, later1, next1, more, 1)
            pages0 = later0
            row0 = next0
            pages1 = later1
            row1 = next1
            u += 1
        left -= w.last - first
        seq += 1
        first = first * 0
        f += 1
