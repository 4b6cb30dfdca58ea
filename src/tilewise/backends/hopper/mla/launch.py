"""Launches of latent decode. Nothing here reads a value on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ....errors import Unsupported
from ...gpu.flags import DTYPE_NAMES
from ...gpu.kernel import OPTIONS, stride_arguments
from ..descriptors import block_descriptor
from .combine import combine
from .kernel import latent_decode
from .spec import LATENT, ROPE, ROWS, Spec

COMBINED = 4096  # numbers that a combining program has at a time


def spec_of(
    q: torch.Tensor, page_size: int, *, paged: bool, causal: bool, lengths: bool, lse: bool, **ways: Any
) -> Spec:
    """`q` is [B, H, Lq, 576]; `page_size` the rows of a page, or of a contiguous cache."""
    heads = q.shape[1]
    if paged and (page_size % 64 if page_size > 64 else 64 % page_size):
        remedy = "use pages of a divisor or a multiple of 64 rows, or another backend"
        raise Unsupported("hopper", f"page_size is {page_size}", remedy)
    page_rows = min(64, page_size) if paged else 64
    head_rows = min(ROWS, 1 << (heads - 1).bit_length())
    s = Spec(DTYPE_NAMES[q.dtype], page_rows, paged, head_rows, causal, lengths, lse, False)
    s = replace(s, **ways)
    return replace(s, width=64) if page_rows < 64 else s


class Latent:
    """Calls of one form: `q` [B, H, Lq, 576], `cache` [pages, page_size, 576] or [B, L, 576], `table` int32 [B, n]."""

    def __init__(self, spec: Spec, batch: int, heads: int, q_len: int, kv_len: int, processors: int = 132) -> None:
        self.spec, self.batch = spec, batch
        self.tiles = -(-heads // spec.head_rows) * -(-q_len // spec.queries)
        self.splits = max(1, processors // self.tiles)
        self.programs = self.splits * self.tiles
        self.at_once = min(
            32, 1 << (self.splits // batch + 1).bit_length()
        )  # about as many fragments as sequences have
        self.columns = min(LATENT, COMBINED // self.at_once)
        self.rows = COMBINED // self.at_once // self.columns
        self.sizes = {
            "batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len, "tiles": self.tiles,
            "splits": self.splits, "head_rows": spec.head_rows,
        }  # fmt: skip
        self.combiners = batch * -(-heads * q_len // self.rows) * (LATENT // self.columns)
        self.combines = True
        self.combine_options = {"num_warps": 4, "launch_pdl": spec.dependent}

    def workspace(self, device: Any) -> tuple[torch.Tensor, ...]:
        rows = 2 * self.splits * self.tiles * ROWS
        fragments = torch.empty(self.batch, dtype=torch.int32, device=device)
        return torch.empty(rows * LATENT, device=device), torch.empty(rows, device=device), fragments

    def arguments(
        self, q: Any, cache: Any, out: Any, lse: Any, lengths: Any, table: Any, scale: float, work: Any
    ) -> dict[str, Any]:
        s = self.spec
        if s.prefetch and cache.stride(1) != LATENT + ROPE:
            raise Unsupported("hopper", f"rows of the cache are {cache.stride(1)} apart", "use prefetch=False")
        rows = q.transpose(1, 2)  # [B, Lq, H, 576]
        q_block, k_block = [1, s.queries, s.head_rows], [1, s.page_rows]
        given: dict[str, Any] = {
            "q": block_descriptor(rows, [*q_block, s.width], s.dtype),
            "q_rope": block_descriptor(rows, [*q_block, ROPE], s.dtype),
            "k": block_descriptor(cache, [*k_block, s.width], s.dtype),
            "k_rope": block_descriptor(cache, [*k_block, ROPE], s.dtype),
            "CACHE": cache, "page_b": cache.stride(0),
            "OUT": out, "LSE": lse, "PARTIAL": work[0], "PARTIAL_LSE": work[1], "FRAGMENTS": work[2],
            "LENGTHS": lengths, "TABLE": table,
            "SINKS": None, "page_size": cache.shape[1], "table_b": 0 if table is None else table.stride(0),
            "factor": scale * math.log2(math.e), "S": s,
        }  # fmt: skip
        return given | self.sizes | stride_arguments("o", "bhl", out) | stride_arguments("lse", "bhl", lse)

    def combining(self, given: dict[str, Any]) -> dict[str, Any]:
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "AT_ONCE": self.at_once, "DEPENDENT": self.spec.dependent}
        given = given | sizes
        return {name: given[name] for name in combine.arg_names}

    def __call__(
        self, q: Any, cache: Any, out: Any, lse: Any, lengths: Any, table: Any, scale: float, work: Any
    ) -> None:
        given = self.arguments(q, cache, out, lse, lengths, table, scale, work)
        taken = {name: given[name] for name in latent_decode.arg_names}
        latent_decode[(self.programs,)](**taken, **OPTIONS)
        if self.splits > 1 and self.combines:
            combine[(self.combiners,)](**self.combining(given), **self.combine_options)
