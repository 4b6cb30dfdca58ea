"""Judges statistics (`return_aux`) by the oracle and relative to torch's own arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.tensors import Statistics, sequences
from ..reference import attend, statistics
from ..validation.calls import Call
from ..validation.statistics import NAMES
from .case import Case, Inputs, make
from .check import Mismatch, Verdict, judge, largest_error

INDICES = 5  # keys of `weights` for each query


def with_indices(inputs: Inputs, by_head: bool = False) -> dict[str, Any]:
    """Options that request everything: keys for each query, some of which are none, and `key_mass` of the last ones."""
    q, p = inputs.args[0], inputs.checked().problem
    rows = (q.shape[0],) if p.packed_q else (p.batch, p.q_len)
    shape = (*rows[:1], p.heads, *rows[1:], INDICES) if by_head else (*rows, INDICES)
    numbers = torch.Generator().manual_seed(7)
    indices = torch.randint(-1, p.kv_len + 2, shape, generator=numbers, dtype=torch.int32).to(q.device)
    return {"return_aux": NAMES, "weight_indices": indices}


def check_statistics(
    case: Case, backend: str | None, device: str = "cpu", queries: int | None = None, names: tuple[str, ...] = NAMES
) -> Verdict:
    """Raises `Mismatch` unless all statistics of a case are right: off by 2 (with softcap 3) times the largest error of
    torch's own arithmetic, or of its scores, and one ulp.
    """
    inputs = make(case, device)
    options = with_indices(inputs, by_head=case.B > 2) | {"key_mass_queries": queries, "return_aux": names}
    call = inputs.checked(**options)
    assert call.requested is not None
    wanted = call.requested
    _, aux = inputs.call(backend, **options)
    for name, memory in wanted.results.items():  # views in the common form of what the call gave
        memory.copy_(getattr(aux, name))
    return judge_statistics(call, wanted.statistics, inputs.common(aux.lse))


def judge_statistics(call: Call, got: Statistics, lse: torch.Tensor) -> Verdict:
    """Likewise of statistics in the common form."""
    p = call.problem
    factor, verdicts = 3.0 if p.softcap else 2.0, [Verdict(0.0, 0.0)]
    exact, errors = [], dict.fromkeys(("lse", *NAMES), 0.0)
    for seq in sequences(p, call.tensors):
        own = got.of(seq)
        sides = [attend(seq, dtype) for dtype in (torch.float64, torch.float32)]
        right, plain = (statistics(x, own.first_query(seq), own.indices) | {"lse": x.lse} for x in sides)
        scores = largest_error(sides[1].scores, sides[0].scores)
        errors = {name: max(errors[name], scores, largest_error(plain[name], right[name])) for name in right}
        exact.append((seq, own, right))
    for seq, own, right in exact:
        at = seq.row, slice(None), slice(seq.q_start, seq.q_start + seq.q_len)
        for name, x in right.items():
            found = lse[at] if name == "lse" else getattr(own, name)
            if found is None:
                continue
            verdicts.append(judge(name, found, x, factor * errors[name], torch.float32))
    _check_the_rest(call, got)
    return max(verdicts, key=lambda v: v.error / max(v.bound, 1e-300))


def _check_the_rest(call: Call, got: Statistics) -> None:
    """Rows in no sequence, and keys that no row sees because they are past a length."""
    rest = replace(got)
    for name in ("max_logits", "entropy", "key_mass", "weights"):
        x = getattr(got, name)
        setattr(rest, name, None if x is None else x.clone())
    for seq in sequences(call.problem, call.tensors):
        for name, nothing in (("max_logits", -torch.inf), ("entropy", 0.0), ("key_mass", 0.0), ("weights", 0.0)):
            if (x := getattr(rest.of(seq), name)) is not None:
                x.fill_(nothing)
    for name in ("entropy", "key_mass", "weights"):
        if (x := getattr(rest, name)) is not None and bool((x != 0).any()):
            raise Mismatch(f"{name}: not 0 in rows of no sequence, or for keys past a length")
    if rest.max_logits is not None and bool((rest.max_logits != -torch.inf).any()):
        raise Mismatch("max_logits: not -inf in rows of no sequence")
