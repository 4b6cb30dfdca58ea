"""torch's `scaled_dot_product_attention`, by each of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...workloads import Inputs, Workload
from .candidate import Candidate, Refused, dense_mask, limit, refuse

KERNELS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA math": SDPBackend.MATH,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
ON_CPU = ("SDPA flash", "SDPA math")
COPIES = "its copies of K and V for each query head"


def missing() -> str | None:
    return None


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    if case.page_size or case.packed:
        refuse("SDPA", softcap=case.softcap, sinks=case.sinks, ALiBi_here=case.alibi)
        yield _gathered(case, x) if case.page_size else _one_by_one(case, x)
        return
    refuse("SDPA", softcap=case.softcap, sinks=case.sinks)
    cells = case.q_len * case.kv_len
    if needs_mask(case, x):
        limit("SDPA", "its mask", len(case.lengths or "1") * cells, x.q.device)
    call = sdpa(case, x)
    for name in ON_CPU if x.q.device.type == "cpu" else KERNELS:
        try:
            if name == "SDPA math":
                limit(name, "its scores", case.batch * case.heads * cells * x.q.element_size(), x.q.device)
                limit(name, COPIES, _copies(case, x), x.q.device)
            yield Candidate(name, partial(_by, KERNELS[name], call))
        except Refused as error:
            yield Candidate(name, refusal=str(error))


def _copies(case: Workload, x: Inputs) -> int:
    """Bytes of the copies that SDPA's math kernel makes for GQA: K, K times the scale, V."""
    widths = 2 * x.q.shape[-1] + x.v.shape[-1]
    return (case.heads != case.kv_heads) * case.batch * case.heads * case.kv_len * widths * x.q.element_size()


def _gathered(case: Workload, x: Inputs) -> Candidate:
    """Paged attention without a kernel for it: pages are gathered into rows for each call."""
    assert x.block_table is not None
    if x.q.shape[-1] != x.v.shape[-1]:  # only SDPA's math kernel takes it
        limit("SDPA, pages copied", COPIES, _copies(case, x), x.q.device)
    table = x.block_table.clamp_min(0).long()
    flat = replace(case, page_size=0)
    mask = dense_mask(replace(flat, kv_len=table.shape[1] * case.page_size, q_len=case.q_len), x)

    def run() -> torch.Tensor:
        k, v = (pages[table].flatten(1, 2).transpose(1, 2) for pages in (x.k, x.v))
        return scaled_dot_product_attention(
            x.q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=case.heads != case.kv_heads
        )

    return Candidate("SDPA, pages copied", run)


def _one_by_one(case: Workload, x: Inputs) -> Candidate:
    """Packed sequences without a kernel for them: one call for each."""
    assert x.cu_seqlens is not None
    calls = []
    for a, b in pairwise(x.cu_seqlens.tolist()):
        alone = replace(case, packed=False, lengths=(), rows=1, q_len=b - a, kv_len=b - a)
        calls.append(sdpa(alone, x.sequence(a, b)))
    return Candidate("SDPA, one by one", lambda: torch.cat([call()[0].transpose(0, 1) for call in calls]))


def _by(kernel: SDPBackend, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(kernel):
        return call()


def why_not(case: Workload) -> str | None:
    """What of the case `scaled_dot_product_attention` has no way to say."""
    try:
        refuse("SDPA", page_tables=case.page_size, packed_sequences=case.packed, softcap=case.softcap, sinks=case.sinks)
    except Refused as error:
        return str(error)
    return None


def sdpa(case: Workload, x: Inputs) -> Callable[[], torch.Tensor]:
    """The same call by torch, with a dense mask if it needs one."""
    options: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads, "scale": case.scale}
    if needs_mask(case, x):
        options["attn_mask"] = _mask(case, x)
    else:
        options["is_causal"] = case.causal and case.q_len > 1
    return lambda: scaled_dot_product_attention(x.q, x.k, x.v, **options)


def needs_mask(case: Workload, x: Inputs) -> bool:
    # Its causal flag is aligned to the top left: right if Lq = Lk, not needed for a single query.
    plain = x.lengths is None and case.window is None and case.chunk is None and not case.alibi and not case.mask
    return not (plain and (not case.causal or case.q_len in (1, case.kv_len)))


def _mask(case: Workload, x: Inputs) -> torch.Tensor:
    """A bool mask or, if biases are added, a float mask with `-inf`: `[B or 1, H or 1, 1 or Lq, Lk]`."""
    visible, mask = dense_mask(case, x), x.options.get("mask")
    if not case.alibi and (mask is None or mask.dtype == torch.bool):
        return visible
    bias = torch.zeros_like(visible, dtype=x.q.dtype) if mask is None or mask.dtype == torch.bool else mask
    if case.alibi:
        device = x.q.device
        back = torch.arange(case.kv_len - case.q_len, case.kv_len, device=device)[:, None]
        back = (back - torch.arange(case.kv_len, device=device)).abs()
        bias = bias - (x.options["alibi_slopes"][:, None, None] * back).to(bias.dtype)
    return bias.masked_fill(~visible, -torch.inf)
