"""Which keys a query row sees, on the device.

Causal, window, chunk and length rules leave one interval of keys to each row (see `tilewise/spans.py`), so two vectors
`row_lo`, `row_hi` `[BM]` hold all of them, and a cell is visible when `row_lo <= n < row_hi`.
"""

import triton
import triton.language as tl


@triton.jit
def key_span(
    position, n_keys, left, right, chunk,
    CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`[lo, hi)` of queries at `position`: a scalar or a vector."""
    lo = position * 0
    hi = position * 0 + n_keys
    if CAUSAL:
        hi = tl.minimum(hi, position + 1)
    if LEFT:
        lo = tl.maximum(lo, position - left)
    if RIGHT:
        hi = tl.minimum(hi, position + right + 1)
    if CHUNK:
        rest = position % chunk  # of the sign of `position`
        start = position - tl.where(rest < 0, rest + chunk, rest)
        lo = tl.maximum(lo, start)
        hi = tl.minimum(hi, start + chunk)
    return lo, hi


@triton.jit
def find_sequence(CU, tile, batch, BQ: tl.constexpr):
    """The sequence that packed tile number `tile` belongs to; `batch` for rows past the last one.

    Sequence b is given the tiles from `CU[b] // BQ + b` on. That is never too few, so the grid needs no lengths.
    """
    low, high = 0, batch + 1
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(CU + middle) // BQ + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low
