"""The producer: one warp that keeps the rings full by TMA."""

from ...gpu.gluon import gl, gluon
from .pipeline import key_use, value_use
from .tile_scheduler import tile_count, work_tile_at
from .tiles import tile_list


@gluon.jit
def fill_keys(a, w, keys, n, tile, BEGIN: gl.constexpr, END: gl.constexpr):
    """Loads chunks of a key tile, in the order in which they are multiplied."""
    for i in gl.static_range(BEGIN, END):
        column = (i + a.S.out_aliases_q_chunks) % a.S.chunks * a.S.chunk_d
        keys.fill(key_use(a, n, i), a.k, [w.kv_b, w.head // a.group, w.kv_start + tile * a.S.BN, column])


@gluon.jit
def fill_values(a, w, values, n, tile):
    PIECES: gl.constexpr = a.S.pieces
    for j in gl.static_range(PIECES):
        row = w.kv_start + tile * a.S.BN + j * (a.S.BN // PIECES)
        values.fill(value_use(a, n, j), a.v, [w.kv_b, w.head // a.group, row, w.value_tile * a.S.DV])


@gluon.jit
def fill_queries(a, w, queries, n, part: gl.constexpr):
    CONSUMERS: gl.constexpr = a.S.consumers
    for c in gl.static_range(CONSUMERS):
        queries.fill_part(n, c, part, a.q, w.row_b, w.head, w.q_start + w.top + c * 64)


@gluon.jit
def fill_first(a, w, queries, keys, i, n, tile):
    """Loads query rows and the first key tile.

    As many key chunks as have room come first: queries wait for a free stage, and the part that is lent to the output
    until that is stored. In a ring shared with V, room is what the last tile's V leaves.
    """
    CHUNKS: gl.constexpr = a.S.chunks
    ROOM: gl.constexpr = min(CHUNKS, a.S.k_stages)
    if a.S.out_aliases_q_chunks == 0:
        fill_keys(a, w, keys, n, tile, 0, CHUNKS)
        fill_queries(a, w, queries, i, 0)
    else:
        EARLY: gl.constexpr = max(1, min(ROOM, a.S.k_stages - a.S.pieces))
        fill_keys(a, w, keys, n, tile, 0, EARLY)
        fill_queries(a, w, queries, i, 0)
        fill_keys(a, w, keys, n, tile, EARLY, ROOM)
        fill_queries(a, w, queries, i, 1)
        fill_keys(a, w, keys, n, tile, ROOM, CHUNKS)


@gluon.jit
def produce(a, scheduler, queries, keys, values):
    CHUNKS: gl.constexpr = a.S.chunks
    total = tile_count(a)
    n = 0  # tiles of keys so far
    i = 0  # work tiles so far
    coord = scheduler.fetch(a, 0)
    more = True
    while more:
        w = work_tile_at(a, coord)
        if a.S.prefetch_tile:
            coord = scheduler.fetch(a, i + 1)
        tiles = tile_list(a, w)
        last = tiles.tile(0)
        fill_first(a, w, queries, keys, i, n, last)
        fill_values(a, w, values, n, last)
        for j in range(1, tiles.count):
            tile = tiles.tile(j)
            fill_keys(a, w, keys, n + j, tile, 0, CHUNKS)
            fill_values(a, w, values, n + j, tile)
        if not a.S.prefetch_tile:
            coord = scheduler.fetch(a, i + 1)
        more = coord.index < total
        n += tiles.count
        i += 1
