"""Pairs of packed documents as calls of `varlen_attention`: many pairs in one call, each as one sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..core.mask_rules import MaskRules
from .schedule import Pair, Range, Task, rounds


class Pass(NamedTuple):
    """One packed call, over rows `q` of queries and rows `k` of keys; sequences without queries or keys fill gaps."""

    q: Range
    k: Range
    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    pairs: tuple[Pair | None, ...]  # the pair of each sequence; None for a gap
    full: bool

    @property
    def max_q(self) -> int:
        return max(b - a for a, b in itertools.pairwise(self.cu_q))

    @property
    def max_k(self) -> int:
        return max(b - a for a, b in itertools.pairwise(self.cu_k))


def passes(task: Task, pairs: Sequence[Pair]) -> tuple[Pass, ...]:
    """Pairs in few calls, by first fit: within a call, both queries and keys of its sequences are in memory order.

    With causal as the only rule, fully visible pairs keep it too, so that all pairs can share a call.
    """
    together = task.rules.relative() in (MaskRules(), MaskRules(causal=True))
    calls = []
    for full in (False,) if together else (False, True):
        runs: list[list[Pair]] = []
        for p in sorted((p for p in pairs if together or p.full == full), key=lambda p: (p.q, p.k)):
            for run in runs:
                if run[-1].q + run[-1].rows <= p.q and run[-1].k + run[-1].keys <= p.k:
                    run.append(p)
                    break
            else:
                runs.append([p])
        calls += [_packed_call(run, full) for run in runs]
    return tuple(calls)


def _packed_call(run: Sequence[Pair], full: bool) -> Pass:
    q0, k0 = run[0].q, run[0].k
    cu_q, cu_k = [0], [0]
    pairs: list[Pair | None] = []
    for p in run:
        if p.q - q0 > cu_q[-1] or p.k - k0 > cu_k[-1]:
            # Query rows of a gap and keys of a gap are two sequences: in one, the rows would see the keys.
            cu_q += [p.q - q0, p.q - q0]
            cu_k += [cu_k[-1], p.k - k0]
            pairs += [None, None]
        cu_q.append(cu_q[-1] + p.rows)
        cu_k.append(cu_k[-1] + p.keys)
        pairs.append(p)
    return Pass((q0, q0 + cu_q[-1]), (k0, k0 + cu_k[-1]), tuple(cu_q), tuple(cu_k), tuple(pairs), full)


@lru_cache(maxsize=256)
def packed_rounds(task: Task, rank: int) -> tuple[tuple[Pass, ...], ...]:
    """The packed calls of each round of a rank."""
    return tuple(passes(task, round.pairs) for round in rounds(task, rank))
