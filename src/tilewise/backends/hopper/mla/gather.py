"""The producer of calls with key indices: four warps that look up rows and copy them, 16 bytes per thread at a time.

Copies arrive at the same mbarriers as those by TMA, once for each thread. Rows that a query must not see are not read
but filled with zeros, and flags tell the consumers which keys count.
"""

from ...gpu.gluon import cp_async, cp_async_arrive, gl, gluon, mbarrier, reinterpret
from .producer import fill_queries
from .tile_scheduler import fragment, keys_of_row, pairs_of

THREADS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of [64 keys, 64 columns]
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))  # of [64 keys, 16 words], for float8


@gluon.jit
def indices_of(a, seq, block):
    """Positions of a block's keys; -1 for none."""
    THREADS_OF: gl.constexpr = WORDS if a.S.fp8 else THREADS
    i = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, THREADS_OF))
    own = (seq // a.q_len).to(gl.int64) * a.i_b + (seq % a.q_len).to(gl.int64) * a.i_l
    return gl.load(a.INDICES + own + i, mask=i < a.chosen, other=-1)


@gluon.jit
def limit_of(a, seq):
    """The first position that a query does not see."""
    limit = keys_of_row(a, seq // a.q_len)
    if a.S.causal:
        limit -= a.q_len - 1 - seq % a.q_len
    return limit


@gluon.jit
def rows_of(a, seq, position, limit):
    """Offsets of the rows of these keys, in units of 16 bytes, and which of them the query sees."""
    b = seq // a.q_len
    ok = (position >= 0) & (position < limit)
    position = gl.where(ok, position, 0)
    if a.S.paged:
        page = gl.load(a.TABLE + b.to(gl.int64) * a.table_b + position // a.page_size, mask=ok, other=0)
        at = page * a.page_b + position % a.page_size * a.page_l
    else:
        at = b * a.page_b + position * a.page_l
    return at, ok


@gluon.jit
def gather_block(a, sh, u, at, ok, b: gl.constexpr):
    """Copies block b of pair u."""
    WIDTH: gl.constexpr = a.S.width
    SMALL: gl.constexpr = sh.k_rope.layout
    source = a.CACHE + (at.to(gl.int64) * 8)[:, None] + gl.arange(0, 64, gl.SliceLayout(0, THREADS))[None, :]
    there = ok[:, None]
    if b == 0:  # rope columns of pair u - 1 have been multiplied
        mbarrier.wait(sh.scored[0], (u & 1) ^ 1)
    sh.ok[0].index((u & 1) * 2 + b).store(ok.to(gl.float32))
    cp_async(sh.k_rope.index(b), source + 512, mask=there)
    cp_async_arrive(sh.rope_full[b], increment_count=False)
    mbarrier.arrive(sh.rope_full[b], count=1)  # for the flags
    for half in gl.static_range(2):
        mbarrier.wait(sh.free[2 * b + half], (u & 1) ^ 1)
        for i in gl.static_range(4):
            tile = reinterpret(sh.k, sh.k.dtype, [16, 64, 64], SMALL).index((2 * b + half) * 4 + i)
            cp_async(tile, source + (half * 4 + i) * 64, mask=there)
            if (i + 1) * 64 % WIDTH == 0:
                cp_async_arrive(sh.full[((2 * b + half) * 4 + i) * 64 // WIDTH], increment_count=False)


@gluon.jit
def load_chunk(a, at, ok, i: gl.constexpr):
    """Loads 64 columns of a block in float8, four in a word: [64, 16]."""
    column = i * 16 + gl.arange(0, 16, gl.SliceLayout(0, WORDS))
    return gl.load(a.CACHE + (at.to(gl.int64) * 4)[:, None] + column[None, :], mask=ok[:, None], other=0)


@gluon.constexpr_function
def pairs_text(dtype):
    """PTX: four float8 numbers to two pairs of 16 bits."""
    text = "{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; "
    if dtype == gl.float16:
        return text + "mov.b32 $0, x; mov.b32 $1, y; }"
    text += ".reg .b16 p, q; .reg .f32 f, g; "
    for number, word in enumerate("xy"):
        text += f"mov.b32 {{p, q}}, {word}; cvt.f32.f16 f, p; cvt.f32.f16 g, q; cvt.rn.bf16x2.f32 ${number}, g, f; "
    return text + "}"


@gluon.jit
def widened(words, DTYPE: gl.constexpr):
    """Converts [64, 16] words of four float8 numbers to [64, 32] words of two of 16 bits."""
    TEXT: gl.constexpr = pairs_text(DTYPE)
    low, high = gl.inline_asm_elementwise(TEXT, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.join(low, high).reshape([64, 32])


@gluon.jit
def in_words(tiles, N: gl.constexpr):
    """Tiles [64, 64] of 16 bits as [64, 32] of 32: rows of 128 bytes, with the same swizzle."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.int32)
    return reinterpret(tiles, gl.int32, [N, 64, 32], LAYOUT)


@gluon.jit
def prefetch_rows(a, at):
    """Prefetches rows of 656 bytes to L2, by lines of 128 bytes."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    at = gl.convert_layout(at, gl.SliceLayout(1, LINES), assert_trivial=True).to(gl.int64) * 4
    line = gl.minimum(gl.arange(0, 8, gl.SliceLayout(0, LINES)) * 32, 160)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [a.CACHE + at[:, None] + line[None, :]], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_scales(a, at, ok):
    """Loads the four scales of a block's rows."""
    found = ()
    for g in gl.static_range(4):
        found = found + (gl.load(a.SCALES + at.to(gl.int64) * 4 + 128 + g, mask=ok, other=0.0),)
    return found


@gluon.jit
def widen_block(a, sh, u, at, ok, raw, scales, at_next, ok_next, b: gl.constexpr):
    """Converts block b of pair u from float8. Returns the prefetched chunks of the next block.

    `raw` and `scales` are the prefetched chunks and scales of this block. Loads complete in order, so a value is never
    used right after its load is issued.

    Numbers are stored without their scales, which the consumers apply: 16 bits hold them exactly.
    """
    AHEAD: gl.constexpr = len(raw)
    prefetch_rows(a, at_next)
    for i in gl.static_range(8):
        if i + AHEAD < 8:
            later = load_chunk(a, at, ok, i + AHEAD)
        else:
            later = load_chunk(a, at_next, ok_next, i + AHEAD - 8)
        if i % 4 == 0:
            mbarrier.wait(sh.free[2 * b + i // 4], (u & 1) ^ 1)
        if i == 4:  # both halves of block b of pair u - 1 have been added
            rope = a.CACHE + (at.to(gl.int64) * 4)[:, None] + 132 + gl.arange(0, 32, gl.SliceLayout(0, WORDS))[None, :]
            cp_async(in_words(sh.k_rope, 2).index(b), rope, mask=ok[:, None])
            cp_async_arrive(sh.rope_full[b], increment_count=False)
        in_words(sh.k, 16).index(8 * b + i).store(widened(raw[0], a.q.dtype))
        raw = moved_up(raw, later)
        if i == 1:
            sh.ok[0].index((u & 1) * 2 + b).store(ok.to(gl.float32))
            factors = ratios(scales)
            for g in gl.static_range(4):
                sh.scales[g].index((u & 1) * 2 + b).store(factors[g])
                sh.scales[4 + g].index((u & 1) * 2 + b).store(scales[g].to(a.q.dtype))
            mbarrier.arrive(sh.rope_full[b], count=1)
            scales = load_scales(a, at_next, ok_next)
    mbarrier.arrive(sh.full[b], count=1)
    return raw, scales


@gluon.jit
def ratios(scales):
    """Scales of four groups, each divided by the next one's, the last as it is. Those below 2^-60 of the row's largest,
    zeros too, are raised to that: ratios stay finite, and what such groups add to a score is far below its last bit.
    """
    largest = gl.abs(scales[0])
    for g in gl.static_range(1, 4):
        largest = gl.maximum(largest, gl.abs(scales[g]))
    least = gl.maximum(largest * 2.0**-60, 2.0**-100)
    kept = ()
    for g in gl.static_range(4):
        kept = kept + (gl.where(gl.abs(scales[g]) < least, least, scales[g]),)
    return (kept[0] / kept[1], kept[1] / kept[2], kept[2] / kept[3], kept[3])


@gluon.jit
def moved_up(raw, later):
    """Drops the first of a queue, and appends `later`."""
    found = ()
    for i in gl.static_range(1, len(raw)):
        found = found + (raw[i],)
    return found + (later,)


@gluon.jit
def place_of_block(a, n):
    """The sequence of block n, counted over all sequences in order, and the block's number there."""
    blocks = 2 * pairs_of(a.chosen)
    n = gl.minimum(n, a.batch * blocks - 1)
    return n // blocks, n % blocks


@gluon.jit
def widen(a, run, sh):
    """`gather` for float8. Three blocks are in flight: chunks of one, rows of the next, positions of the one after."""
    u = 0
    f = 0
    seq = run.seq
    first = run.first
    left = run.left
    n = 2 * (seq * pairs_of(a.chosen) + first)
    its, block = place_of_block(a, n)
    at, ok = rows_of(a, its, indices_of(a, its, block), limit_of(a, its))
    its, block = place_of_block(a, n + 1)
    at_next, ok_next = rows_of(a, its, indices_of(a, its, block), limit_of(a, its))
    its, block = place_of_block(a, n + 2)
    position = indices_of(a, its, block)
    limit = limit_of(a, its)
    raw = ()
    AHEAD: gl.constexpr = a.S.ahead
    for chunk in gl.static_range(AHEAD):
        raw = raw + (load_chunk(a, at, ok, chunk),)
    scales = load_scales(a, at, ok)
    while left > 0:
        w = fragment(a, seq, first, left, run.tile)
        fill_queries(a, sh, w, f)
        for _ in range(first, w.last):
            for b in gl.static_range(2):
                at_later, ok_later = rows_of(a, its, position, limit)
                its, block = place_of_block(a, n + 3)
                position = indices_of(a, its, block)
                limit = limit_of(a, its)
                raw, scales = widen_block(a, sh, u, at, ok, raw, scales, at_next, ok_next, b)
                at = at_next
                ok = ok_next
                at_next = at_later
                ok_next = ok_later
                n += 1
            u += 1
        left -= w.last - first
        seq += 1
        first = first * 0
        f += 1


@gluon.jit
def gather(a, run, sh):
    u = 0  # pairs so far
    f = 0  # queries so far
    seq = run.seq
    first = run.first
    left = run.left
    begin = gl.minimum(seq, a.batch - 1)
    position0 = indices_of(a, begin, first * 2)
    position1 = indices_of(a, begin, first * 2 + 1)
    while left > 0:
        w = fragment(a, seq, first, left, run.tile)
        after = gl.minimum(seq + 1, a.batch - 1)
        fill_queries(a, sh, w, f)
        for i in range(first, w.last):
            inside = i + 1 < w.last
            its = gl.where(inside, seq, after)
            pair = gl.where(inside, i + 1, 0)
            later0 = indices_of(a, its, pair * 2)
            later1 = indices_of(a, its, pair * 2 + 1)
            at, ok = rows_of(a, seq, position0, limit_of(a, seq))
            gather_block(a, sh, u, at, ok, 0)
            at, ok = rows_of(a, seq, position1, limit_of(a, seq))
            gather_block(a, sh, u, at, ok, 1)
            position0 = later0
            position1 = later1
            u += 1
        left -= w.last - first
        seq += 1
        first = first * 0
        f += 1
