"""Two paged calls over the same queries, merged: keys that sequences share, and each one's own.

A backend that has `run_pair` does both in one launch. A repeated one is checked and planned once (`call_cache.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.options import Options
from ..core.plan import Plan
from ..core.tensors import Shared
from ..state import AttentionState
from ..validation import calls
from . import call_cache, planner
from .call_cache import Again, Tables

_known: dict[call_cache.Key, tuple[Plan, Again] | None] = {}


def attend(
    q: torch.Tensor, k: Any, v: Any, shared: Shared, tables: Tables, max_q: int, options: dict[str, Any]
) -> AttentionState | None:
    """The merged state in the order of `q`, or None where two calls are the way.

    Args:
        q: packed `[T, H, D]`.
        tables: of each sequence's own keys, as in `paged_attention`.
        options: of `paged_attention`; `causal` and `sinks` do not concern the shared keys.
    """
    if not planner.runs_pairs(q.device):
        return None
    planner.check_name(options.get("backend"))
    key = None
    if options.get("sinks") is None:
        of_shared = (shared.q.stride(), shared.block_table.shape, shared.cu_seqlens.shape, shared.max_q)
        key = call_cache.tables_key(q, k, v, tables, max_q, *of_shared, *options.items())
        key = key if call_cache.is_hashable(key) else None
    if key is not None and key in _known:
        if (known := _known[key]) is None:
            return None
        plan, again = known
        out, lse = again.new(q)
        _run(plan, again.plan, again.tensors(q, k, v, tables, out, lse), shared)
        assert lse is not None  # `return_lse` is on
        return AttentionState(out, lse)
    options = {**options, "return_lse": True}
    backend = options.pop("backend", None)
    first = calls.paged(shared.q, k, v, *shared.tables, shared.max_q, Options(**options | NOT_SHARED))
    call = calls.paged(q, k, v, *tables[:3], max_q, Options(**options))
    a, b = (planner.choose(c.problem, backend, torch.get_num_threads()) for c in (first, call))
    possible = a.backend == b.backend and hasattr(planner.load(b.backend), "run_pair")
    possible &= not any(c.problem.is_empty or c.problem.copies for c in (first, call))
    if possible:
        _run(a, b, call.tensors, shared)
    if key is not None:
        if len(_known) >= call_cache.MOST:
            _known.clear()
        _known[key] = (a, Again(call, b, "bhld")) if possible else None
    assert call.lse is not None
    return AttentionState(call.out, call.lse) if possible else None


NOT_SHARED = {"causal": False, "sinks": None}  # every query comes after them; a sink counts once


def _run(shared_plan: Plan, plan: Plan, *tensors: Any) -> None:
    planner.load(plan.backend).run_pair(shared_plan, plan, *tensors)  # type: ignore[attr-defined]
