"""A consumer: one warpgroup with 64 query rows, which overlaps its softmax with its own products.

    first tile    S = Q K'; P = softmax S
    each other    start S = Q K'; rescale O, if a running max was replaced; start O += P V of the tile before; wait for
                  S; P' = softmax S; wait for O
    masked ones   rescale O; O += P V of the tile before; S = Q K'; P' = softmax S
    at the end    O += P V; S of the next work tile's first keys; O / l to global memory

So the tensor cores run P V while this warpgroup takes exponentials, and the consumers overlap each other. Where
registers are short (masked tiles; all tiles, if `overlaps` is off) the two products run one after the other, and only
other warpgroups keep the tensor cores busy.

Key tiles are visited from right to left: first those that rules may hide in part, then those that every row sees, then
(with windows) again hidden ones; each kind has its own loop. Key tiles of the work tile that this consumer's rows do
not see are skipped. A list of selected blocks is treated as a range with gaps.
"""

from ...gpu.gluon import gl, gluon, tma_store_wait
from ...gpu.mask_rules import key_span, query_position
from .epilogue import flag_nonfinite, store
from .layouts import out_layout, score_layout
from .mma import first_tile, keep_maxima, last_output, step
from .pipeline import key_use, value_use
from .softmax import Rows, finalise, no_sums
from .tile_scheduler import key_tiles, numbers_of, tile_count, work_tile_at
from .tiles import after, tile_list


@gluon.jit
def rows_of(a, w, C):
    """This consumer's rows of the work tile."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, score_layout(a.S))
    row = w.top + C * 64 + gl.arange(0, 64, LAYOUT)
    numbers = numbers_of(a, w)
    qpos = query_position(w.offset, row, numbers, a.S)
    lo, hi = key_span(qpos, w.n_keys, numbers, a.S)
    if a.S.blocks:
        hi = gl.where(tile_list(a, w).entries > 0, hi, 0)  # else the one tile was not selected
    slope = None
    if a.S.alibi:
        slope = gl.load(a.SLOPES + w.b * a.slopes_b + w.head)
    if not a.S.alibi or a.S.rules.affine != "rows":
        numbers = None
    return Rows(row, row < w.q_len, lo, hi, qpos, slope, numbers)


@gluon.jit
def run_of_tiles(
    a, queries, keys, values, i, tiles, begin, first, end, p, o, m, l, rows, C: gl.constexpr, MASKED: gl.constexpr
):
    """Key tiles first .. end of a work tile, all of one kind."""
    for n in range(first, end):
        tile = tiles.tile(n - begin)
        p, o, m, l = step(
            a, queries, keys, values, i, n, n - 1, tile, p, o, m, l, rows, C, MASKED, False
        )  # fmt: skip
    return p, o, m, l


@gluon.jit
def other_tiles(a, queries, keys, values, i, tiles, own, begin, p, o, m, l, rows, C: gl.constexpr):
    """All key tiles of a work tile but the first."""
    start, right, left, end = own
    if a.S.hides:
        p, o, m, l = run_of_tiles(
            a, queries, keys, values, i, tiles, begin, start + 1, right, p, o, m, l, rows, C, True
        )  # fmt: skip
    if a.S.max_free:
        o, p = keep_maxima(a, o, p)
    p, o, m, l = run_of_tiles(a, queries, keys, values, i, tiles, begin, right, left, p, o, m, l, rows, C, False)
    if a.S.rules.hides_left:
        p, o, m, l = run_of_tiles(a, queries, keys, values, i, tiles, begin, left, end, p, o, m, l, rows, C, True)
    return p, o, m, l


@gluon.jit
def own_tiles(a, w, tiles, begin, C):
    """This consumer's key tiles of the work tile, counted in ring uses: `start, right, left, end`. Every row sees every
    key of tiles `right .. left`. Other consumers' rows may see more tiles than `start .. end`; those are skipped.
    """
    rows = gl.minimum(gl.maximum(w.q_len - w.top - C * 64, 1), 64)
    first, last, inner, outer = key_tiles(a, w.offset, w.top + C * 64, rows, w.n_keys, numbers_of(a, w))
    if not a.S.blocks:
        first = gl.minimum(gl.maximum(first, w.first), w.last - 1)
        last = gl.maximum(gl.minimum(last, w.last), first + 1)
        start = begin + (w.last - last)
        end = begin + (w.last - first)
        right = gl.maximum(begin + (w.last - outer), start + 1)
        left = gl.minimum(gl.maximum(begin + (w.last - inner), right), end)
        if not a.S.rules.hides_left:
            left = end
        right = gl.minimum(right, left)
    else:
        # A list has no mixed tiles: rules hide cells at its ends, as in a range. What only others see is computed too.
        start = begin
        end = begin + tiles.count
        right = gl.minimum(gl.maximum(begin + after(a, w, tiles, outer), start + 1), end)
        left = gl.minimum(gl.maximum(begin + after(a, w, tiles, inner), right), end)
        if not a.S.rules.hides_left:
            left = end
    return start, right, left, end


@gluon.jit
def pass_keys(a, keys, begin, end):
    """Releases key tiles begin .. end unused: no row of this consumer sees them."""
    CHUNKS: gl.constexpr = a.S.chunks
    for n in range(begin, end):
        for i in gl.static_range(CHUNKS):
            keys.wait_full(key_use(a, n, i))
            keys.release(key_use(a, n, i))


@gluon.jit
def pass_values(a, values, begin, end):
    PIECES: gl.constexpr = a.S.pieces
    for n in range(begin, end):
        for j in gl.static_range(PIECES):
            values.wait_full(value_use(a, n, j))
            values.release(value_use(a, n, j))


@gluon.jit
def pass_over(a, keys, values, begin, end):
    for n in range(begin, end):
        pass_keys(a, keys, n, n + 1)
        pass_values(a, values, n, n + 1)


@gluon.jit
def last_tile(a, keys, values, end, next_begin, p, o):
    """P V of a work tile's last keys, not overlapped; then skips key tiles up to those of the next work tile."""
    o = last_output(a, values, end - 1, p, o)
    pass_over(a, keys, values, end, next_begin)
    return o


@gluon.jit
def consume(a, scheduler, queries, keys, values, outs, C: gl.constexpr):
    DV: gl.constexpr = a.S.DV
    OUT: gl.constexpr = out_layout(a.S)
    MASKED: gl.constexpr = a.S.masked
    total = tile_count(a)
    i = 0  # work tiles so far
    begin = 0  # tiles of keys so far
    coord = scheduler.receive(a, 0)
    w = work_tile_at(a, coord)
    rows = rows_of(a, w, C)
    tiles = tile_list(a, w)
    own = own_tiles(a, w, tiles, begin, C)
    pass_over(a, keys, values, begin, own[0])
    p, m, l = first_tile(a, queries, keys, 0, own[0], tiles.tile(own[0]), rows, C)
    more = True
    while more:
        o = gl.zeros([64, DV], gl.float32, OUT)
        p, o, m, l = other_tiles(a, queries, keys, values, i, tiles, own, begin, p, o, m, l, rows, C)
        queries.release(i, C, 0)

        # The first scores of the next work tile are computed before this one's epilogue.
        next_coord = scheduler.receive(a, i + 1)
        more = next_coord.index < total
        next_begin = begin + tiles.count
        next_w = work_tile_at(a, next_coord)
        next_rows = rows_of(a, next_w, C)
        next_tiles = tile_list(a, next_w)
        next_own = own_tiles(a, next_w, next_tiles, next_begin, C)
        start = next_own[0]
        end = own[3]
        tile = next_tiles.tile(start - next_begin)
        last_m = m
        last_l = l
        m, l = no_sums(a)
        apart = more  # the first scores of the next work tile are still to be computed
        if a.S.out_aliases_q_chunks > 0:
            o = last_tile(a, keys, values, end, next_begin, p, o)
        else:
            # Only few tiles can be skipped before P V: for more, the producer needs the stage that P V reads.
            joined = more & (start - end < a.S.v_stages)
            apart = more & (joined == 0)
            if joined:
                pass_keys(a, keys, end, start)
                queries.wait_full(i + 1, C, 0)
                p, o, m, l = step(
                    a, queries, keys, values, i + 1, start, end - 1, tile, p, o, m, l, next_rows, C, MASKED, True,
                )  # fmt: skip
                pass_values(a, values, end, start)
            else:
                o = last_tile(a, keys, values, end, next_begin, p, o)

        lse, share = finalise(a, last_m, last_l, w.head, w.owned)
        o = o * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
        if a.S.guard:
            flag_nonfinite(a, o, rows, coord.index, C)
        store(a, w, o, lse, rows, outs, C)
        if a.S.out_aliases_q_chunks > 0:
            tma_store_wait(0)
            queries.release(i, C, 1)
        if apart:
            pass_over(a, keys, values, next_begin, start)
            p, m, l = first_tile(a, queries, keys, i + 1, start, tile, next_rows, C)
        i += 1
        coord = next_coord
        begin = next_begin
        w = next_w
        rows = next_rows
        tiles = next_tiles
        own = next_own
    tma_store_wait(0)
