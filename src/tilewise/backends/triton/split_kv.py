"""Split-KV: the number of splits of a decode call, and who combines them."""

from __future__ import annotations

from ...core.problem import Problem
from .spec import Config

SHORT_CALL = 64 << 20  # bytes of K and V that are read while a call is being launched
MOST_SPLITS = 128
COMBINE_BYTES = 256 << 10  # most bytes of partials that a last-arriver combines


def split_count(programs: int, tiles: int, places: int, limit: int = MOST_SPLITS) -> int:
    """Number of splits: the fewest whose waves of programs are 95% full. `places`: programs that run at once.

    No split is shorter than four tiles.
    """
    if programs == 0:
        return 1
    most = max(1, min(tiles // 4, limit, 8 * places // programs))
    best, filled = 1, 0.0
    for splits in range(1, most + 1):
        rounds = -(-programs * splits // places)
        share = programs * splits / (rounds * places)
        if share > filled + 1e-9:
            best, filled = splits, share
        if filled >= 0.95:
            break
    return best


def combines_inside(problem: Problem, c: Config) -> bool:
    """Whether the last-arriver combines the splits of a row: that saves a launch, which matters for short calls. Else a
    separate launch does; in a CUDA graph, where launches are cheap, always. The results are the same to the bit.
    """
    p = problem
    rows = min(c.BM, c.pack * p.sharing_queries)
    cache = p.batch * p.kv_heads * p.kv_len * (p.head_dim * p.k_dtype.itemsize + p.value_dim * p.v_dtype.itemsize)
    return c.splits > 1 and cache <= SHORT_CALL and 4 * c.splits * rows * p.value_dim <= COMBINE_BYTES
