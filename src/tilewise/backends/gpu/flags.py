"""Which options a GPU kernel is compiled for: what the kernels of all GPU backends have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core.problem import Problem

# tanh(x) = x + x^3 (c3 + x^2 (c5 + x^2 c7)) for |x| < 1/4: the best such polynomial, to 3e-9 of tanh(x).
TANH_3, TANH_5, TANH_7 = -0.3333324065, 0.1332426632, -0.0514335043
NEAR_CAP = 64.0  # softcaps up to here turn tanh's absolute error of 1e-7 into a small one of the logits
LEAST_CAP, MOST_CAP = 1e-30, 1e30  # float32 holds s / softcap and its inverse for softcaps between these

MOST_INT = 2**31 - 1
DTYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Flags:
    """Options that are known at compile time; the kernel of a call has code for its own options and no others."""

    packed_q: bool
    lengths: bool
    offset: str  # "int", "rows" or "end"
    causal: bool
    left: bool
    right: bool
    chunk: bool
    softcap: bool
    exact_tanh: bool  # the error of tanh is relative near 0 too, not only absolute
    alibi: bool
    sinks: bool
    mask: str  # "", "bool" or "float"
    linear: bool  # logits are dot products times a scale
    tail: bool  # the keys may end inside a tile
    lse: bool

    @property
    def moves(self) -> bool:
        """Whether rules hide keys to the left of a row."""
        return self.left or self.chunk


def flags_of(problem: Problem, tile_keys: int) -> dict[str, Any]:
    """The fields of `Flags` for a problem whose keys are cut into tiles of so many."""
    p = problem
    left, right = p.window
    mask = "" if p.mask is None else "bool" if p.mask.is_bool else "float"
    return {
        "packed_q": p.packed_q,
        "lengths": p.kv_lengths,
        "offset": p.q_offset if isinstance(p.q_offset, str) else "int",
        "causal": p.causal,
        "left": left is not None,
        "right": right is not None,
        "chunk": p.chunk > 0,
        "softcap": p.softcap > 0,
        "exact_tanh": needs_exact_tanh(p),
        "alibi": p.alibi,
        "sinks": p.sinks,
        "mask": mask,
        "linear": not p.softcap and not p.alibi and mask != "float" and p.scale != 0,
        "tail": p.kv_lengths or p.form != "dense" or p.kv_len % tile_keys != 0,
        "lse": p.return_lse,
    }


def needs_exact_tanh(problem: Problem) -> bool:
    """Whether `softcap * tanh(s / softcap)` must be `s` to the last bits where `s` is far below `softcap`.

    It takes seven more instructions for each cell, which 16-bit kernels of usual softcaps (30 to 50) do without.
    """
    return problem.softcap > NEAR_CAP or (problem.softcap > 0 and problem.q_dtype == torch.float32)


def softcap_of(problem: Problem) -> float:
    """The softcap as float32 can use it: beyond these ends no finite score is told from an unbounded or capped one."""
    return min(max(problem.softcap, LEAST_CAP), MOST_CAP) if problem.softcap else 0.0


def rules_of(problem: Problem) -> dict[str, int]:
    """The sides of the window and the chunk as kernels take them: int32, the largest of which hides nothing."""
    left, right = problem.window
    return {
        "left": min(left or 0, MOST_INT),
        "right": min(right or 0, MOST_INT),
        "chunk": min(problem.chunk, MOST_INT),
    }


def is_ruled(problem: Problem) -> bool:
    """Whether rules of position hide keys."""
    return problem.causal or problem.chunk > 0 or problem.window != (None, None)


def ceil_pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
