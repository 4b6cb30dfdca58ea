"""Key and block indices (sparse attention): lists the selected keys of a work item. Mainloops take entries for keys.

Position rules differ between rows that share a list. It is then sorted, so that each row sees an interval of it. Numba
code.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import types

from ..codegen.load_store import get_i32, get_i64, put_i32, put_i64
from ..codegen.numba_ops import ZERO, jit
from ..kv_access import affine, rows_span, sequence
from ..params import SELECTED_BYTES


@jit
def selected_list(p, t):
    """The address of the list; 0 if the call has no indices."""
    return t.selected if p.indices else ZERO


@jit
def selected_count(p, t, otherwise):
    """Entries of the list; `otherwise` if there is none."""
    return get_i64(t.selected_count) if p.indices else otherwise


@jit
def first_key(p, item):
    """The first key, or entry of the list, of an item."""
    return ZERO if p.indices else item.start


@jit
def selected_key(selected, j):
    """The key of entry j of a list; without a list, j itself."""
    return types.int64(get_i32(selected + SELECTED_BYTES * j)) if selected else j


@jit
def list_selected(p, t, item):
    """Lists the keys of indices `item.start` to `item.end` that any of the item's rows sees.

    An entry: int32 key, int32 row of K and V in its page (or batch row), int64 page (or batch row).
    """
    if p.indices == 0:
        return
    q_start, _, kv_start, kv_len, offset = sequence(p, item.b)
    positions = affine(p, item.b, offset)
    lo, hi = rows_span(p, positions, item.row, item.rows, kv_len)
    b = ZERO if p.cu_q else item.b
    indices = p.indices + b * p.indices_b + item.head * p.indices_h + (q_start + item.row) // p.block * p.indices_l
    at, skip = item.start // p.block, item.start % p.block
    if item.rows > 1:  # whole blocks: see `config.py`
        sort(t.selected_order, indices + 4 * at, (item.end + p.block - 1) // p.block - at)
        indices, at = t.selected_order, ZERO
    # In local variables: the compiler must assume that stores alias the struct.
    table, page_size, block, last = p.table + item.b * p.table_b, p.page, p.block, item.end
    to, here, batch_row = t.selected, item.start, ZERO if p.cu_k else item.b
    if p.table == 0:
        table = ZERO
    while here < last:
        n, index = min(block - skip, last - here), types.int64(get_i32(indices + 4 * at))
        first = index * block + skip
        start, end = max(first, lo), min(first + n, hi)
        if index < 0:
            end = start
        for key in range(start, end):
            page, row = batch_row, kv_start + key
            if table:
                number = types.int64(types.uint32(key) // types.uint32(page_size))  # faster than with 64 bits
                page, row = types.int64(get_i32(table + 4 * number)), key - number * page_size
            put_i32(to, types.int32(key))
            put_i32(to + 4, types.int32(row))
            put_i64(to + 8, page)
            to += SELECTED_BYTES
        here, at, skip = here + n, at + 1, ZERO
    put_i64(t.selected_count, (to - t.selected) // SELECTED_BYTES)


@jit
def sort(to, source, count):
    """Sorts `count` int32 numbers: Shell sort."""
    for i in range(count):
        put_i32(to + 4 * i, get_i32(source + 4 * i))
    gap = count // 2
    while gap:
        for i in range(gap, count):
            x, j = get_i32(to + 4 * i), i
            while j >= gap and get_i32(to + 4 * (j - gap)) > x:
                put_i32(to + 4 * j, get_i32(to + 4 * (j - gap)))
                j -= gap
            put_i32(to + 4 * j, x)
        gap //= 2


@jit
def selected_span(t, item, lo, hi):
    """The entries of a list whose keys are in [lo, hi); all of them if the item has one row."""
    count = get_i64(t.selected_count)
    if item.rows == 1:
        return ZERO, count
    return first_entry(t, count, lo), first_entry(t, count, hi)


@jit
def first_entry(t, count, key):
    """The first entry of a sorted list with this key or a later one."""
    low, high = ZERO, count
    while low < high:
        middle = (low + high) // 2
        if get_i32(t.selected + SELECTED_BYTES * middle) < key:
            low = middle + 1
        else:
            high = middle
    return low
