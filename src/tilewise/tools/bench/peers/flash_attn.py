"""The flash-attn package: version 2 (`flash_attn`) and version 3 (`flash_attn_interface`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ....core.options import as_window
from ...workloads import Inputs, Workload
from .candidate import Candidate, Refused, not_installed, refuse

MODULES = {"FlashAttention 2": "flash_attn", "FlashAttention 3": "flash_attn_interface"}


def missing() -> str | None:
    reasons = [not_installed(module) for module in MODULES.values()]
    return None if None in reasons else reasons[0]


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    for name, module in MODULES.items():
        if not_installed(module):
            continue
        try:
            refuse(name, masks=case.mask, chunks=case.chunk, sinks=case.sinks, float32=x.q.dtype == torch.float32)
            refuse(name, ALiBi=case.alibi and module != "flash_attn")
            yield Candidate(name, _call(importlib.import_module(module), case, x))
        except Refused as error:
            yield Candidate(name, refusal=str(error))


def _call(library: Any, case: Workload, x: Inputs) -> Any:
    options: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal, "softcap": case.softcap or 0.0}
    left, right = as_window(case.window)
    options["window_size"] = tuple(-1 if side is None else side for side in (left, 0 if case.causal else right))
    if case.alibi:
        options["alibi_slopes"] = x.options["alibi_slopes"]
    if x.cu_seqlens is not None:
        cu, most = x.cu_seqlens, x.longest
        return partial(_first, library.flash_attn_varlen_func, x.q, x.k, x.v, cu, cu, most, most, **options)
    q = x.q.transpose(1, 2)  # [B, Lq, H, D]
    if x.block_table is not None:
        pages = {"block_table" if library.__name__ == "flash_attn" else "page_table": x.block_table.clamp_min(0)}
        call = partial(library.flash_attn_with_kvcache, q, x.k, x.v, cache_seqlens=x.lengths, **pages, **options)
    else:
        k, v = x.k.transpose(1, 2), x.v.transpose(1, 2)
        if case.lengths or case.q_len == 1:  # its decode kernel splits keys
            lengths = x.lengths if x.lengths is not None else torch.full((case.batch,), case.kv_len, device=q.device)
            call = partial(library.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths.int(), **options)
        else:
            call = partial(library.flash_attn_func, q, k, v, **options)
    return lambda: _first(call).transpose(1, 2)


def _first(function: Any, *args: Any, **options: Any) -> torch.Tensor:
    """The output alone: some versions return lse too."""
    result = function(*args, **options)
    return result[0] if isinstance(result, tuple) else result
