"""FlashInfer: single prompts, packed prompts, and decoding from pages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ....core.options import as_window
from ...workloads import Inputs, Workload
from .candidate import Candidate, Refused, not_installed, refuse

NAME = "FlashInfer"
WORKSPACE = 128 * 2**20  # bytes, as its documentation recommends


def missing() -> str | None:
    return not_installed("flashinfer")


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    library: Any = importlib.import_module("flashinfer")
    refuse(NAME, masks=case.mask, chunks=case.chunk, sinks=case.sinks, ALiBi=case.alibi)
    refuse(NAME, float32=x.q.dtype == torch.float32, windows_to_the_right=isinstance(case.window, tuple))
    left, _ = as_window(case.window)
    options = {
        "sm_scale": case.scale,
        "window_left": -1 if left is None else left,
        "logits_soft_cap": case.softcap or 0.0,
    }
    if case.page_size and case.q_len == 1:
        yield Candidate(NAME, _paged_decode(library, case, x, options))
    elif case.packed:
        yield Candidate(NAME, _packed(library, case, x, options))
    elif case.batch == 1 and not case.lengths:
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (x.q, x.k, x.v))  # [L, H, D]
        if case.q_len == 1:
            call = partial(library.single_decode_with_kv_cache, q[0], k, v, **options)
            yield Candidate(NAME, lambda: call()[None, :, None])
        else:
            call = partial(library.single_prefill_with_kv_cache, q, k, v, causal=case.causal, **options)
            yield Candidate(NAME, lambda: call().transpose(0, 1)[None])
    else:
        raise Refused(NAME, "its batches are packed or paged")


def _paged_decode(library: Any, case: Workload, x: Inputs, options: dict[str, Any]) -> Any:
    assert x.block_table is not None
    device, size = x.q.device, case.page_size
    counts = [-(-n // size) for n in case.lengths]
    indices = torch.cat([row[:n] for row, n in zip(x.block_table, counts, strict=True)])
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(device)
    last = torch.tensor([(n - 1) % size + 1 for n in case.lengths], dtype=torch.int32, device=device)
    room = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=case.heads > case.kv_heads)
    wrapper.plan(
        ends, indices, last, case.heads, case.kv_heads, case.head_dim, size,
        q_data_type=x.q.dtype, kv_data_type=x.k.dtype, **options,
    )  # fmt: skip
    q = x.q[:, :, 0]
    return lambda: wrapper.run(q, (x.k, x.v))[:, :, None]


def _packed(library: Any, case: Workload, x: Inputs, options: dict[str, Any]) -> Any:
    room = torch.zeros(WORKSPACE, dtype=torch.uint8, device=x.q.device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(room, "NHD")
    wrapper.plan(
        x.cu_seqlens, x.cu_seqlens, case.heads, case.kv_heads, case.head_dim,
        causal=case.causal, q_data_type=x.q.dtype, **options,
    )  # fmt: skip
    return partial(wrapper.run, x.q, x.k, x.v)
