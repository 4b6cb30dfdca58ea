"""Launch heuristics of the backward pass of wide heads. Plain functions of a `Problem`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .....core.problem import Problem
from ....gpu.flags import DTYPE_NAMES, needs_exact_tanh
from .. import config
from .spec import WideSpec

MANY_PLANES = 8
L2_SWIZZLE = 20e6  # bytes of inner rows that an L2 swizzle group may hold


def columns_of(problem: Problem) -> dict[str, int]:
    """Columns of tiles; those past the tensors' columns read as 0."""
    if problem.head_dim <= 192 and problem.value_dim <= 128:
        return {"D": 128, "tail": 64, "DV": 128}
    if max(problem.head_dim, problem.value_dim) <= 256:
        return {"D": 256, "tail": 0, "DV": 256}
    return {"D": 128, "tail": 0, "DV": 128, "chunks": 4}


def specs_of(problem: Problem) -> tuple[WideSpec, ...]:
    """The specs of the launches: dQ, and dK with dV, or one for each of them.

    Shared memory (KiB of 227), and registers per consumer thread for accumulators and a step's S and dP:

        256      dQ     Q 64, dO 64, K 2 x 32, V 32 = 224                          128 + 32 + 32
                 dK, dV K 32, V 32, Q 2 x 32, dO 2 x 32, P 16, statistics 8 = 216  128 + 32 + P 16 (roles)
        192/128  dQ     Q 48, dO 32, K 3 x 24, V 3 x 16 = 200                      96 + 32 + 32
                 dK, dV K 48, V 32, Q 2 x 24, dO 2 x 16, P 16, statistics 8 = 184  160 + 32 + 16
        512      dQ     Q 64, dO 64, K 7 x 8, V 4 x 8, P 4, dS 4 = 224             128 + 16 (split)
                 dK     the same and statistics 2 = 226
                 dV     K 64, Q 4 x 16, dO 4 x 16, P 16, statistics 4 = 212
    """
    p, flags = problem, problem.rules.flags
    columns = columns_of(p)
    same: dict[str, Any] = {
        **columns,
        "dtype": DTYPE_NAMES[p.q_dtype],
        "hides_right": flags.hides_right,
        "hides_left": flags.hides_left,
        "packed": p.packed_q,
        "lengths": flags.lengths,
        "offset": flags.offset,
        "softcap": p.softcap > 0,
        "exact_tanh": needs_exact_tanh(p),
        "guarded": flags.hides_right or flags.hides_left or p.has_lengths,
    }
    LOW, HIGH = config.RIGHT, config.LEFT  # edge flags of `consumer.hide`
    narrow = flags.hides_left and sum(config.sides(p)) < 256  # both edges may be in one block
    if "chunks" in columns:
        of_queries: dict[str, Any] = {"BI": 32, "u_stages": 7, "w_stages": 4}
        of_keys: dict[str, Any] = {"BI": 32, "u_stages": 7, "w_stages": 4, "only": "k"}
    elif columns["tail"]:
        of_queries = {"BI": 64, "u_stages": 3, "w_stages": 3}
        of_keys = {"BI": 64, "u_stages": 2, "w_stages": 2}
    else:
        of_queries = {"BI": 64, "u_stages": 2, "w_stages": 1}
        of_keys = {"BI": 64, "u_stages": 2, "w_stages": 2, "roles": True}
    ends = p.has_lengths or p.kv_len % of_queries["BI"] != 0  # keys may end inside a block
    both = flags.hides_left and (narrow or ends)
    dq = WideSpec(
        **same,
        **of_queries,
        of_queries=True,
        low_edges=LOW * flags.hides_left + HIGH * both,
        high_edges=HIGH * (flags.hides_right or ends or both) + LOW * both,
    )
    dkdv = WideSpec(
        **same,
        **of_keys,
        of_queries=False,
        low_edges=LOW * flags.hides_right + HIGH * (flags.hides_right and narrow),
        high_edges=HIGH * flags.hides_left + LOW * (flags.hides_right and narrow),
    )
    if "chunks" in columns:
        return dq, dkdv, replace(dkdv, only="v", BI=64, u_stages=4, w_stages=4)
    return dq, dkdv


def workspace_bytes(problem: Problem) -> int:
    """64 bytes of statistics for each row, with a softcap 68."""
    p = problem
    blocks = config.query_blocks(p, WideSpec.stats_block)[1] * p.heads * (1 if p.packed_q else p.batch)
    return blocks * (WideSpec.stats_block * (64 + 4 * (p.softcap > 0)) + 4)


def planes_at_once(problem: Problem, s: WideSpec) -> int:
    """Planes (heads of a batch row) of an L2 swizzle group, whose longest programs come first: as many as L2 holds the
    inner rows of.

    Where all programs are equally long, a group is one plane. Where L2 holds few planes in causal calls of 192/128, it
    is MANY_PLANES nevertheless (h200/LOG.md, backward #14).
    """
    p = problem
    if not (s.hides_right or s.hides_left):
        return 1
    planes = (p.heads if s.of_queries else p.kv_heads) * (1 if p.packed_q else p.batch)
    rows = (p.kv_len if s.of_queries else p.q_len * p.group) * (p.batch if p.packed_q else 1)
    held = int(L2_SWIZZLE / (rows * (s.D + s.tail + s.DV) * s.chunks * 2))
    if s.tail and s.hides_right and not s.hides_left and held < MANY_PLANES // 2:
        held = MANY_PLANES
    return max(1, min(planes, held))
