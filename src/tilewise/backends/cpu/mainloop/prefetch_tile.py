"""Prefetch of the next tile's K and V rows during prefill: a few lines with each block of keys.

All at once they would stall each other and the products. Gain: cpu/prefetch-tile in benchmarks/cpu/LOG.md.
"""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen.load_store import put_i64
from ..codegen.numba_ops import jit
from ..codegen.prefetch import prefetch_row_spans
from ..gemm.fp32 import KEYS
from ..kv_access import list_rows
from ..params import CACHE_LINE
from ..scratch import PAD

LEAST = 1 << 20  # bytes of a head's K and V: fewer stay in L2
MOST_ROW = 2048  # bytes of a row of K and one of V: longer ones would evict queries and sums


@jit
def list_next_tile(p, t, k, v, at, first, count):
    """Lists the rows of the next tile, `count` from `first` on; `next_count` holds how many are to be prefetched."""
    row = p.k_row + p.v_row
    if count <= 0 or (p.table == 0 and (row > MOST_ROW or p.kv_len * row < LEAST)):
        put_i64(t.next_count, 0)
        return
    list_rows(p, k, at, t.k_next, first, count, PAD)
    list_rows(p, v, at, t.v_next, first, count, PAD)
    put_i64(t.next_count, count)


@jit
def share_of(size, part, parts):
    """One of `parts` shares of a row of `size` bytes, in whole lines: its first byte, and how many."""
    lines = (size + CACHE_LINE - 1) // CACHE_LINE
    start, end = lines * part // parts, lines * (part + 1) // parts
    return start * CACHE_LINE, (end - start) * CACHE_LINE


@jit
def prefetch_share(p, t, key, count, part, parts):
    """Prefetches a share of KEYS of the next tile's `count` rows, from `key` on."""
    if key < count:
        start, size = share_of(p.k_row, part, parts)
        prefetch_row_spans(t.k_next + 8 * key, KEYS, start, size)
        start, size = share_of(p.v_row, part, parts)
        prefetch_row_spans(t.v_next + 8 * key, KEYS, start, size)
