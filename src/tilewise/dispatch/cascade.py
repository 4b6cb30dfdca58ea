"""Cascade attention in one launch: paged attention over a shared prefix and over each sequence's own keys, merged.

Needs a backend with `run_cascade`. Repeated cascades are in the call cache (`call_cache.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..core.options import Options
from ..core.tensors import SharedPrefix
from ..state import AttentionState
from ..validation import calls
from . import activity, call_cache, planner

NOT_SHARED = {"causal": False, "sinks": None}  # every query is after the prefix; a sink counts once
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # block_table, context_lens, cu_seqlens_q


def attend(
    q: torch.Tensor, k: Any, v: Any, shared: SharedPrefix, tables: Tables, max_q: int, options: dict[str, Any]
) -> AttentionState | None:
    """The merged state in the order of `q`; None if the caller has to make two calls and merge them.

    Args:
        q: packed `[T, H, D]`.
        tables: of each sequence's own keys, as in `paged_attention`.
        options: of `paged_attention`; `causal` and `sinks` do not apply to the shared keys.
    """
    if not planner.runs_cascades(q.device):
        return None
    backend = options.get("backend")
    planner.check_name(backend)
    args = (q, k, v, *tables, shared.q, *shared.tables)
    options = {**options, "max_q": max_q, "return_lse": True}
    key = call_cache.key_of("cascade", args, {**options, "max_q of the prefix": shared.max_q})
    if (cached := call_cache.find(key)) is not None:
        return cached(args, options, shared)
    own, first = ({**options, "cu_seqlens_q": cu} for cu in (tables[2], shared.cu_seqlens))
    first |= {"max_q": shared.max_q} | NOT_SHARED
    a = calls.paged(shared.q, k, v, *shared.tables[:2], Options(**first))
    b = calls.paged(q, k, v, *tables[:2], Options(**own))
    shared_plan, plan = (planner.choose(c.problem, backend, torch.get_num_threads()) for c in (a, b))
    run_cascade = planner.optional(plan.backend, "run_cascade")
    empty = any(c.problem.is_empty or c.problem.copies for c in (a, b))
    if shared_plan.backend != plan.backend or run_cascade is None or empty:
        return None
    run_cascade(shared_plan, plan, b.tensors, shared)
    activity.ran(plan)
    call_cache.remember(key, args, options, b, plan, partial(run_cascade, shared_plan))
    assert b.lse is not None  # `return_lse` is on
    return AttentionState(b.out, b.lse)
