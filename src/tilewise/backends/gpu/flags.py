"""Compile-time options that the kernels of all GPU backends share, and constants of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core.dropout import kept_scale, threshold
from ...core.mask_rules import RULE_NUMBERS, RuleFlags
from ...core.problem import Problem

# tanh(x) = x + x^3 (c3 + x^2 (c5 + x^2 c7)) for |x| < 1/4: the best such polynomial, to 3e-9 of tanh(x).
TANH_3, TANH_5, TANH_7 = -0.3333324065, 0.1332426632, -0.0514335043
NEAR_CAP = 64.0  # softcaps up to here turn tanh's absolute error of 1e-7 into a small one of the logits
LEAST_CAP, MOST_CAP = 1e-30, 1e30  # float32 holds s / softcap and its inverse for softcaps between these

DTYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Flags:
    """Options that are known at compile time; the kernel of a call has code for its own options and no others."""

    packed_q: bool
    rules: RuleFlags
    softcap: bool
    exact_tanh: bool  # the error of tanh is relative near 0 too, not only absolute
    alibi: bool
    q_bias: bool
    k_bias: bool
    mods: Any  # the functions of the user as the backend compiles them; None: there are none
    sinks: bool
    dropout: bool
    dropout_least: int  # cells with this number or a larger one are kept
    dropout_scale: float  # their weights are multiplied by it
    dropout_by_block: bool  # eight keys at consecutive positions share a counter
    mask: str  # "", "bool" or "float"
    tree: bool
    positions: bool  # the nodes of the tree have positions
    linear: bool  # logits are dot products times a scale
    tail: bool  # the keys may end inside a tile
    lse: bool

    @property
    def biased(self) -> bool:
        return self.q_bias or self.k_bias


def flags_of(problem: Problem, tile_keys: int) -> dict[str, Any]:
    """The fields of `Flags` for a problem with tiles of `tile_keys` keys."""
    p = problem
    mask = "" if p.mask is None else "bool" if p.mask.is_bool else "float"
    return {
        "packed_q": p.packed_q,
        "rules": p.rules.flags,
        "softcap": p.softcap > 0,
        "exact_tanh": needs_exact_tanh(p),
        "alibi": p.alibi,
        "q_bias": p.q_bias,
        "k_bias": p.k_bias,
        "mods": None,
        "sinks": p.sinks,
        "dropout": p.dropout_p > 0,
        "dropout_least": threshold(p.dropout_p),
        "dropout_scale": kept_scale(p.dropout_p),
        "dropout_by_block": p.rules.flags.affine == "" and p.selection is None and tile_keys % 8 == 0,
        "mask": mask,
        "tree": p.tree,
        "positions": p.positions,
        "linear": not p.softcap and not p.alibi and not p.biased and mask != "float" and p.scale != 0,
        "tail": p.has_lengths or p.kv_len % tile_keys != 0,
        "lse": p.return_lse,
    }


def needs_exact_tanh(problem: Problem) -> bool:
    """Whether `softcap * tanh(s / softcap)` must be `s` to the last bits where `s` is far below `softcap`.

    It takes seven more instructions for each cell, which 16-bit kernels of usual softcaps (30 to 50) do without.
    """
    return problem.softcap > NEAR_CAP or (problem.softcap > 0 and problem.q_dtype == torch.float32)


def softcap_of(problem: Problem) -> float:
    """The softcap clamped for float32: beyond these limits no finite score is told from an uncapped or capped one."""
    return min(max(problem.softcap, LEAST_CAP), MOST_CAP) if problem.softcap else 0.0


def rules_of(problem: Problem) -> dict[str, int]:
    """The numbers of the rules, as kernels take them."""
    numbers = problem.rules.numbers()
    return {name: numbers[name] for name in ("q_offset", *RULE_NUMBERS)}


def ceil_pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def classifies(problem: Problem) -> bool:
    """Whether the mask's tiles are classified first, so that tiles can be skipped.

    Not for an additive mask that is broadcast over neither batch nor heads: it is usually dense, and reading it twice
    costs more than skipping tiles would save.
    """
    p = problem
    return p.mask is not None and (p.mask.is_bool or p.mask.broadcast[0] or p.mask.broadcast[1])
