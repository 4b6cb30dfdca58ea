"""Which kernel, tile and number of splits: plain functions of a `Problem` and the number of GPU cores.

Limits come from Apple's documents: 32 KiB of threadgroup memory, and registers that allow fewer threads the more a
kernel needs. Nothing here has been measured on an Apple GPU yet.
"""

from __future__ import annotations

from ...core.problem import Problem
from .spec import BK, Config, padded

GROUPS_A_CORE = 4  # threadgroups in flight per core
LEAST_TILES = 4  # key tiles of a split: shorter ones cost more to combine than they save
MOST_SPLITS = 64
DECODE_ROWS = 32  # queries times heads of a KV head, up to which heads share a tile and keys are split


def config_of(problem: Problem, cores: int) -> Config:
    """The launch shape of a problem."""
    c = rows_of(problem)
    tiles = -(-problem.kv_len // BK)
    if not is_decode(problem):
        return c
    if problem.split_size:
        split_tiles = -(-problem.split_size // BK)
        return Config(c.kernel, c.rows, c.pack, max(1, -(-tiles // split_tiles)), split_tiles)
    groups = query_tiles(problem, c) * (problem.heads // c.pack)
    return Config(c.kernel, c.rows, c.pack, split_count(groups, tiles, cores))


def is_decode(problem: Problem) -> bool:
    """Whether there are so few rows that keys are worth splitting."""
    return not takes_one_pass(problem) and (problem.group * problem.q_len <= DECODE_ROWS or problem.q_len <= 4)


def takes_one_pass(problem: Problem) -> bool:
    """Whether all rows are processed as in prefill: with `split_size`, one long sequence of a packed batch must not
    change the bits of the others."""
    return problem.packed_q and bool(problem.split_size)


def rows_of(problem: Problem) -> Config:
    """The kernel, its rows and the heads that share them."""
    p = problem
    wide = max(padded(p.head_dim), padded(p.value_dim))
    rows = p.group * max(1, p.q_len)  # empty calls are planned too
    if rows <= vector_rows(wide) and not takes_one_pass(p):
        return Config("vector", ceil_pow2(rows), p.group)
    most = tile_rows(wide)
    if not is_decode(p):
        return Config("tiled", most)
    BM = min(most, max(8, ceil_pow2(rows)))
    return Config("tiled", BM, max(n for n in range(1, BM + 1) if p.group % n == 0))


def vector_rows(wide: int) -> int:
    """Rows that a lane can hold: of each, a 32nd of q and of the output, 64 floats in all."""
    return 8 // -(-wide // 128)


def tile_rows(wide: int) -> int:
    """Rows of a tile: q [BM, D] takes 16 KiB (18 at 576) and a lane holds 32 floats (36) of the output."""
    return 32 if wide <= 128 else 16 if wide <= 256 else 8


def split_count(groups: int, tiles: int, cores: int) -> int:
    """Splits for enough threadgroups for all cores, each with at least LEAST_TILES tiles."""
    wanted = -(-cores * GROUPS_A_CORE // max(1, groups))
    return max(1, min(wanted, tiles // LEAST_TILES, MOST_SPLITS))


def query_tiles(problem: Problem, c: Config) -> int:
    """Tiles of queries in all sequences; an upper bound for packed ones."""
    if problem.packed_q:
        return problem.total_q // c.queries + problem.batch + 1
    return problem.batch * -(-problem.q_len // c.queries)


def reads_once(problem: Problem, c: Config) -> bool:
    """Whether a row with V in K is read once, to registers. A tile of whole rows does not fit threadgroup memory."""
    return problem.v_in_k and c.kernel == "vector"


def uses_states(problem: Problem, c: Config) -> bool:
    """Whether tiles have states (skip, full, mixed), of a map or a mask: not where a tile has rows of several heads."""
    return c.kernel == "tiled" and c.pack == 1


def has_states(problem: Problem, c: Config) -> bool:
    """Whether tiles have states in this launch."""
    return (problem.tile_map is not None and uses_states(problem, c)) or classifies(problem, c)


def classifies(problem: Problem, c: Config) -> bool:
    """Whether the mask's tiles are classified first, so that tiles can be skipped.

    Not for an additive mask that is broadcast over neither batch nor heads, which is usually dense; nor for decode,
    which reads the whole mask once.
    """
    p = problem
    if p.mask is None or p.tile_map is not None or not uses_states(p, c) or is_decode(p):
        return False
    return p.mask.is_bool or p.mask.broadcast[0] or p.mask.broadcast[1]


def ceil_pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
