"""xFormers: `memory_efficient_attention_forward`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from ....core.options import as_window
from ...workloads import Inputs, Workload
from .candidate import Candidate, not_installed, refuse

NAME = "xFormers"


def missing() -> str | None:
    return not_installed("xformers")


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    library: Any = importlib.import_module("xformers.ops")
    refuse(NAME, softcap=case.softcap, sinks=case.sinks, page_tables=case.page_size, chunks=case.chunk)
    refuse(NAME, ALiBi=case.alibi, masks_of_this_form=case.mask or (case.lengths and not case.packed))
    refuse(NAME, window_with_packed_sequences=case.packed and case.window is not None)
    bias: Any = None
    forms = library.fmha.attn_bias
    if case.packed:
        kind = forms.BlockDiagonalCausalMask if case.causal else forms.BlockDiagonalMask
        bias = kind.from_seqlens(list(case.lengths))
        q, k, v = (t[None] for t in (x.q, x.k, x.v))  # [1, T, H, D]
    else:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))  # [B, L, H, D]
        if case.window is not None:
            left, right = as_window(case.window)
            right = 0 if case.causal else case.q_len if right is None else right
            bias = forms.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)
        elif case.causal and case.q_len > 1:
            bias = forms.LowerTriangularFromBottomRightMask()
    group = case.heads // case.kv_heads
    if group > 1:  # it has groups as a dim of their own: [B, L, Hkv, group, D]
        q = q.unflatten(2, (case.kv_heads, group))
        k, v = (t[:, :, :, None].expand(-1, -1, -1, group, -1) for t in (k, v))
    call = partial(library.memory_efficient_attention_forward, q, k, v, attn_bias=bias, scale=case.scale)

    def run() -> Any:
        out = call()
        out = out.flatten(2, 3) if group > 1 else out
        return out[0] if case.packed else out.transpose(1, 2)

    yield Candidate(NAME, run)
