"""torch's FlexAttention, compiled: rules as functions of positions, scores through a function."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ....core.options import as_window
from ....core.private.torch import dynamo
from ...workloads import Inputs, Workload
from .candidate import Candidate, limit, not_installed, refuse

NAME = "FlexAttention"


def missing() -> str | None:
    return not_installed("torch.nn.attention.flex_attention")


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    refuse(NAME, page_tables=case.page_size, packed_sequences=case.packed)
    limit(NAME, "its block mask, as it is made,", case.q_len * case.kv_len, x.q.device)
    dynamo.config.recompile_limit = 256  # each case is another function; the default is 8
    block_mask = None
    mask_mod = _mask_mod(case, x)
    if mask_mod is not None:
        rows = None if x.lengths is None else case.batch
        block_mask = create_block_mask(mask_mod, rows, None, case.q_len, case.kv_len, device=x.q.device)
    options = {
        "score_mod": _score_mod(case, x),
        "block_mask": block_mask,
        "scale": case.scale,
        "enable_gqa": case.heads != case.kv_heads,
    }
    compiled = torch.compile(flex_attention, dynamic=False)
    call = partial(compiled, x.q, x.k, x.v, **options)
    yield Candidate(NAME, partial(_with_sinks, call, x.options["sinks"]) if case.sinks else call)


def _with_sinks(call: Any, sinks: torch.Tensor) -> torch.Tensor:
    """Scales the output for sinks: by the old sum of weights over the new one."""
    out, lse = call(return_lse=True)
    return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(out.dtype)


def _mask_mod(case: Workload, x: Inputs) -> Any:
    offset = case.kv_len - case.q_len
    lengths, mask = x.lengths, x.options.get("mask")
    causal = case.causal and case.q_len > 1
    if not causal and all(rule is None for rule in (lengths, mask, case.window, case.chunk)):
        return None
    left, right = as_window(case.window)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        qpos = i + offset if lengths is None else i + lengths[b] - case.q_len
        visible = j >= 0 if lengths is None else j < lengths[b]
        if case.causal:
            visible = visible & (j <= qpos)
        if left is not None:
            visible = visible & (qpos - j <= left)
        if right is not None:
            visible = visible & (j - qpos <= right)
        if case.chunk is not None:
            visible = visible & (j // case.chunk == qpos // case.chunk)
        if mask is not None:
            visible = visible & (mask[i, j] if mask.dtype == torch.bool else mask[i, j] > -torch.inf)
        return visible

    return mask_mod


def _score_mod(case: Workload, x: Inputs) -> Any:
    slopes, mask, offset = x.options.get("alibi_slopes"), x.options.get("mask"), case.kv_len - case.q_len
    added = mask if mask is not None and mask.dtype != torch.bool else None
    if not case.softcap and slopes is None and added is None:
        return None

    def change(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if case.softcap:
            score = case.softcap * torch.tanh(score / case.softcap)
        if slopes is not None:
            score = score - slopes[h] * (i + offset - j).abs()
        return score if added is None else score + added[i, j]

    return change
