"""Pairs of packed documents as calls of `varlen_attention`: many pairs in one call, each a sequence of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..core.mask_rules import MaskRules
from .steps import Pair, Range, Task, rounds


class Pass(NamedTuple):
    """One packed call, over rows `q` of queries and rows `k` of keys; sequences without queries or keys fill gaps."""

    q: Range
    k: Range
    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    pairs: tuple[Pair | None, ...]  # of each sequence; None for a gap
    full: bool

    @property
    def max_q(self) -> int:
        return max(b - a for a, b in itertools.pairwise(self.cu_q))

    @property
    def max_k(self) -> int:
        return max(b - a for a, b in itertools.pairwise(self.cu_k))


def passes(task: Task, pairs: Sequence[Pair]) -> tuple[Pass, ...]:
    """Pairs in as few calls as a first fit finds: in a call queries and keys of its sequences both go down in memory.

    Under a causal rule alone a pair in which every cell is visible keeps the rule too, so that all go together.
    """
    together = task.rules.relative() in (MaskRules(), MaskRules(causal=True))
    found = []
    for full in (False,) if together else (False, True):
        runs: list[list[Pair]] = []
        for p in sorted((p for p in pairs if together or p.full == full), key=lambda p: (p.q, p.k)):
            for run in runs:
                if run[-1].q + run[-1].rows <= p.q and run[-1].k + run[-1].keys <= p.k:
                    run.append(p)
                    break
            else:
                runs.append([p])
        found += [_laid(run, full) for run in runs]
    return tuple(found)


def _laid(run: Sequence[Pair], full: bool) -> Pass:
    q0, k0 = run[0].q, run[0].k
    cu_q, cu_k = [0], [0]
    pairs: list[Pair | None] = []
    for p in run:
        if p.q - q0 > cu_q[-1] or p.k - k0 > cu_k[-1]:
            # Rows of a gap have no keys, keys of a gap no rows: two sequences, for one would see the other.
            cu_q += [p.q - q0, p.q - q0]
            cu_k += [cu_k[-1], p.k - k0]
            pairs += [None, None]
        cu_q.append(cu_q[-1] + p.rows)
        cu_k.append(cu_k[-1] + p.keys)
        pairs.append(p)
    return Pass((q0, q0 + cu_q[-1]), (k0, k0 + cu_k[-1]), tuple(cu_q), tuple(cu_k), tuple(pairs), full)


@lru_cache(maxsize=256)
def packed_rounds(task: Task, rank: int) -> tuple[tuple[Pass, ...], ...]:
    """The calls of each of a rank's rounds."""
    return tuple(passes(task, round.pairs) for round in rounds(task, rank))
