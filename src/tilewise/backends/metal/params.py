"""Parameters of a call, as the kernels read them: sizes in int32, strides in int64, floats.

Their order is that of the names below; `text.py` generates the parameter struct from the same names.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...core.problem import Problem
from ...core.tensors import Tensors
from ..gpu.flags import softcap_of
from .options import is_natural
from .spec import BK, Config

INTS = (
    "batch", "heads", "group", "q_len", "kv_len", "total_q", "left", "right", "chunk", "q_offset", "value_dim",
    "splits", "split_tiles", "tile_q", "tile_k", "plane_heads", "plane_rows", "plane_keys",
)  # fmt: skip
STRIDES = (
    "q_b", "q_h", "q_l", "k_b", "k_h", "k_l", "v_b", "v_h", "v_l", "o_b", "o_h", "o_l", "lse_b", "lse_h", "lse_l",
    "ks_b", "ks_h", "ks_l", "vs_b", "vs_h", "vs_l", "mask_b", "mask_h", "mask_q", "mask_k", "states_b", "states_h",
    "states_q", "states_k", "slopes_b", "table_b",
)  # fmt: skip
FLOATS = ("scale", "softcap", "unused_2", "unused_3", "unused_4", "unused_5", "unused_6", "unused_7")  # MLX wants 8
MOST = 2**30 - 1  # largest position: the distance of two stays within 31 bits
MOST_FLOAT = torch.finfo(torch.float32).max


class Numbers(NamedTuple):
    """All parameters, in the order of the names."""

    ints: tuple[int, ...]
    strides: tuple[int, ...]
    floats: tuple[float, ...]


def numbers(problem: Problem, c: Config, t: Tensors, states: torch.Tensor | None) -> Numbers:
    ints, floats = sizes(problem, c)
    return Numbers(ints, strides(t, states), floats)


@lru_cache(maxsize=4096)
def sizes(problem: Problem, c: Config) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The parameters that do not depend on the tensors."""
    p = problem
    mask = (False,) * 4 if p.mask is None else p.mask.broadcast
    values: dict[str, int] = {
        **p.rules.numbers(),
        "batch": p.batch,
        "heads": p.heads,
        "group": p.group,
        "q_len": p.q_len,
        "kv_len": p.kv_len,
        "total_q": p.total_q,
        "value_dim": p.value_dim,
        "splits": c.splits,
        "split_tiles": c.split_tiles,
        "tile_q": c.queries,
        "tile_k": BK,
        "plane_heads": 1 if mask[1] else p.heads,
        "plane_rows": 1 if mask[2] else p.q_len,
        "plane_keys": 1 if mask[3] else p.kv_len,
    }
    floats = {"scale": scale_of(p), "softcap": softcap_of(p)}
    return tuple(int(values[name]) for name in INTS), tuple(float(floats.get(name, 0.0)) for name in FLOATS)


def scale_of(problem: Problem) -> float:
    """The scale in the units of a logit."""
    unit = 1.0 if is_natural(problem) else math.log2(math.e)
    return min(max(problem.scale * unit, -MOST_FLOAT), MOST_FLOAT)


def strides(t: Tensors, states: torch.Tensor | None) -> tuple[int, ...]:
    """Strides in elements; 0 for absent tensors and broadcast dims."""
    values: dict[str, int] = {}
    for name, x in (
        ("q", t.q),
        ("k", t.k),
        ("v", t.v),
        ("o", t.out),
        ("lse", t.lse),
        ("ks", t.k_scales),
        ("vs", t.v_scales),
    ):
        values |= _named(name, "bhl", x)
    values |= _named("mask", "bhqk", t.mask) | _named("states", "bhqk", states)
    values |= _named("slopes", "b", t.alibi_slopes) | _named("table", "b", t.block_table)
    return tuple(values[name] for name in STRIDES)


def _named(name: str, dims: str, x: Any) -> dict[str, int]:
    of = (0,) * len(dims) if x is None else tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    return {f"{name}_{dim}": stride for dim, stride in zip(dims, of, strict=False)}
