"""The producer: one warp that keeps the rings full by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .schedule import slots_of, work_at
from .tiles import tile_list


@gluon.jit
def fill_keys(a, w, keys, n, tile):
    """A tile of keys, chunk by chunk."""
    CHUNKS: gl.constexpr = a.S.chunks
    for i in gl.static_range(CHUNKS):
        at = [w.kv_b, w.head // a.group, w.kv_start + tile * a.S.BN, i * a.S.chunk_d]
        keys.fill(n * a.S.chunks + i, a.k, at)


@gluon.jit
def fill_values(a, w, values, n, tile):
    values.fill(n, a.v, [w.kv_b, w.head // a.group, w.kv_start + tile * a.S.BN, w.part * a.S.DV])


@gluon.jit
def fill_queries(a, w, queries, n):
    CONSUMERS: gl.constexpr = a.S.consumers
    CHUNKS: gl.constexpr = a.S.chunks
    for c in gl.static_range(CONSUMERS):
        for i in gl.static_range(CHUNKS):
            at = [w.row_b, w.head, w.q_start + w.top + c * 64, i * a.S.chunk_d]
            queries.fill_part(n, c, i, a.q, at)


@gluon.jit
def produce(a, slots, queries, keys, values):
    total = slots_of(a)
    n = 0  # tiles of keys so far
    i = 0  # works so far
    place = slots.hand_out(a, 0)
    more = True
    while more:
        w = work_at(a, place)
        if a.S.ahead:
            place = slots.hand_out(a, i + 1)
        tiles = tile_list(a, w)
        # The first keys come before the queries, which wait until a place of theirs is free.
        last = tiles.tile(0)
        fill_keys(a, w, keys, n, last)
        fill_queries(a, w, queries, i)
        fill_values(a, w, values, n, last)
        for j in range(1, tiles.count):
            tile = tiles.tile(j)
            fill_keys(a, w, keys, n + j, tile)
            fill_values(a, w, values, n + j, tile)
        if not a.S.ahead:
            place = slots.hand_out(a, i + 1)
        more = place.slot < total
        n += tiles.count
        i += 1
