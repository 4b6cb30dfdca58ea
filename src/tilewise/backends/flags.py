"""Which options a GPU kernel is compiled for: what the kernels of all GPU backends have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..problem import Problem


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
        "alibi": p.alibi,
        "sinks": p.sinks,
        "mask": mask,
        "linear": not p.softcap and not p.alibi and mask != "float" and p.scale != 0,
        "tail": p.kv_lengths or p.form != "dense" or p.kv_len % tile_keys != 0,
        "lse": p.return_lse,
    }


def is_ruled(problem: Problem) -> bool:
    """Whether rules of position hide keys."""
    return problem.causal or problem.chunk > 0 or problem.window != (None, None)
