"""Row groups: each scale group has its own row of q, so that rows of K and V are read whole.

Split at its scale groups, a row of K or V is read in pieces: twice as many requests to L2 of half the bytes (h200 24,
row_groups). Flipped products have 8 columns or 16, and a KV head often has only 4 queries. So row `r` of a tile stands
for query `r // G` and group `r % G`: it holds that group of q and zeros elsewhere, so that one product over whole rows
gives the dot products of all groups. These are multiplied by their scales and summed over G neighbouring rows, which
one thread holds. The softmax is then the same in all G rows. In P V each row's weights carry its own group's scales,
and only that group's columns of its output count.
"""

import triton.language as tl

import triton

from .kv_load import row_groups_of, start_of, unit_of, width_of


@triton.jit
def own_group(BM: tl.constexpr, i: tl.constexpr, part: tl.constexpr, OP: tl.constexpr):
    """Which elements of a chunk are in each row's own scale group: [BM, W]."""
    column = start_of(OP, i, part) + tl.arange(0, width_of(OP, i)) * unit_of(OP)
    return column[None, :] // OP.group == (tl.arange(0, BM) % OP.row_groups)[:, None]


@triton.jit
def group_scales(base, rows, ok, BM: tl.constexpr, OP: tl.constexpr, MASKED: tl.constexpr):
    """The scale of each key in each row's own group: float32 [BM, BK]."""
    G: tl.constexpr = row_groups_of(OP)
    first, each = rows
    at = (base + first) + (each[None, :] + tl.arange(0, G)[:, None])  # [G, BK]
    if MASKED:
        x = tl.load(at, mask=ok[None, :], other=0.0)
    else:
        x = tl.load(at)
    BK: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x.to(tl.float32)[None, :, :], [BM // G, G, BK]), [BM, BK])


@triton.jit
def group_sums(x, BM: tl.constexpr, BK: tl.constexpr, G: tl.constexpr):
    """Sums over the G rows of each query, broadcast back to them: [BM, BK]."""
    total = tl.sum(tl.reshape(x, [BM // G, G, BK]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [BM // G, G, BK]), [BM, BK])
