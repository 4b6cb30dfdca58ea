"""The key tiles that a work tile visits, from the last to the first.

Without block indices they are a range. Where every row sees every key, each work tile begins with a different key
tile, so that not all programs read the same memory at once. With block indices they are the list from
`gpu/block_sparsity.py`: entries 2 * tile, in order; RANK tells where the entries of a range begin. A range without
entries still gets its last tile, so that there always is one.
"""

from ...gpu.gluon import gl, gluon
from ..signature import struct


@struct
class Tiles:
    last: gl.tensor
    count: gl.tensor
    shift: object  # tiles from the last at which the range begins
    at: object  # the last entry
    entries: gl.tensor  # how many there are; 0: the one tile has no entry

    @gluon.jit
    def tile(self, i):
        if self.at is None:
            tile = self.last - i
            if self.shift is not None:
                tile -= self.shift
                tile = gl.where(tile < 0, tile + self.count, tile)
        else:
            tile = gl.load(self.at - i, mask=i < self.entries, other=0) >> 1
            tile = gl.where(self.entries == 0, self.last, tile)
        return tile


@gluon.jit
def tile_list(a, w):
    if not a.S.blocks:
        count = w.last - w.first
        shift = None
        if not a.S.masked:
            shift = w.top // a.S.BM % count
        tiles = Tiles(w.last - 1, count, shift, None, count)
    else:
        tile = w.top // a.S.BM
        plane = w.b.to(gl.int64) * a.list_b + w.head.to(gl.int64) * a.list_h + tile.to(gl.int64) * a.list_q
        ranks = a.RANK + plane * (a.list_n + 1)
        begin = gl.load(ranks + gl.minimum(w.first, a.list_n))
        end = gl.load(ranks + gl.minimum(w.last, a.list_n))
        tiles = Tiles(w.last - 1, gl.maximum(end - begin, 1), None, a.LIST + plane * a.list_n + (end - 1), end - begin)
    return tiles


@gluon.jit
def after(a, w, tiles, tile):
    """The number of entries of a list from `tile` on."""
    plane = w.b.to(gl.int64) * a.list_b + w.head.to(gl.int64) * a.list_h + (w.top // a.S.BM).to(gl.int64) * a.list_q
    ranks = a.RANK + plane * (a.list_n + 1)
    end = gl.load(ranks + gl.minimum(w.last, a.list_n))
    return gl.maximum(end - gl.load(ranks + gl.minimum(gl.maximum(tile, w.first), a.list_n)), 0)
