"""Attention in the shapes of known models, by name, and inputs for it.

A new case is one more entry in `WORKLOADS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import Plan, attention, paged_attention, plan

# Flat inputs would let a kernel pass that returns the mean of v.
LOGIT_STD = 3.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One call: its sizes and options, without tensors or dtypes."""

    name: str
    about: str
    heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    lengths: tuple[int, ...] = ()  # the keys in use of each batch row; none: one row that uses all
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    page_size: int = 0  # 0: not paged

    @property
    def batch(self) -> int:
        return len(self.lengths) or 1

    def shape(self) -> str:
        """The sizes in a line."""
        words = [f"batch {self.batch}", f"heads {self.heads}/{self.kv_heads}", f"head dim {self.head_dim}"]
        words += [f"{self.q_len:,} {'query' if self.q_len == 1 else 'queries'}", f"{self.kv_len:,} keys"]
        if self.lengths:
            words.append(f"lengths {min(self.lengths):,} to {max(self.lengths):,}")
        if self.page_size:
            words.append(f"pages of {self.page_size}")
        return ", ".join(words)

    def shortened(self, by: int) -> Workload:
        """The same case with sequences and window `by` times as short."""
        return replace(
            self,
            q_len=-(-self.q_len // by),
            kv_len=-(-self.kv_len // by),
            lengths=tuple(-(-n // by) for n in self.lengths),
            window=None if self.window is None else -(-self.window // by),
        )


WORKLOADS = (
    Workload(
        "minilm-encoder",
        "a padded batch through an encoder, as in MiniLM and BERT",
        heads=12,
        kv_heads=12,
        head_dim=32,
        q_len=256,
        kv_len=256,
        lengths=(256, 31, 190, 97, 223, 12, 140, 64),
    ),
    Workload(
        "llama-prefill",
        "the prompt of a Llama 3 8B layer",
        heads=32,
        kv_heads=8,
        head_dim=128,
        q_len=1024,
        kv_len=1024,
        causal=True,
    ),
    Workload(
        "llama-decode",
        "the next token of a Llama 3 8B layer over a long cache",
        heads=32,
        kv_heads=8,
        head_dim=128,
        q_len=1,
        kv_len=8192,
        causal=True,
    ),
    Workload(
        "gemma-window",
        "a local layer in the way of Gemma: sliding window and softcap",
        heads=16,
        kv_heads=8,
        head_dim=256,
        q_len=1536,
        kv_len=1536,
        causal=True,
        window=512,
        softcap=50.0,
    ),
    Workload(
        "wide-head",
        "a head of 512, wider than most kernels take",
        heads=8,
        kv_heads=2,
        head_dim=512,
        q_len=768,
        kv_len=768,
        causal=True,
    ),
    Workload(
        "paged-decode",
        "a serving batch: the next token of each sequence over shuffled pages",
        heads=32,
        kv_heads=8,
        head_dim=128,
        q_len=1,
        kv_len=3072,
        lengths=(1740, 33, 3072, 256, 911, 2111),
        causal=True,
        page_size=16,
    ),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors and options of one call."""

    q: torch.Tensor  # [B, H, Lq, D]
    k: torch.Tensor  # [B, Hkv, Lk, D], or pages [P, page_size, Hkv, D]
    v: torch.Tensor
    options: Mapping[str, Any]
    lengths: torch.Tensor | None = None  # int32 [B]
    block_table: torch.Tensor | None = None  # int32 [B, max_pages]

    def attend(self, backend: str | None = None) -> torch.Tensor:
        """Attention of these inputs: `[B, H, Lq, Dv]`."""
        q, k, v, lengths = self.q, self.k, self.v, self.lengths
        if self.block_table is not None:
            return paged_attention(q, k, v, self.block_table, lengths, backend=backend, **self.options)
        return attention(q, k, v, kv_lengths=lengths, backend=backend, **self.options)

    def plan(self) -> Plan:
        """What `attend` will run."""
        q, k, v, lengths = self.q, self.k, self.v, self.lengths
        if self.block_table is not None:
            return plan(q, k, v, block_table=self.block_table, context_lens=lengths, **self.options)
        return plan(q, k, v, kv_lengths=lengths, **self.options)

    def part(self, kv_head: int, rows: slice) -> Inputs:
        """The query rows `rows` of the heads that share `kv_head`, over the same keys: a part of the same output."""
        group = self.q.shape[1] // self.kv_heads
        heads = slice(kv_head * group, (kv_head + 1) * group)
        one = slice(kv_head, kv_head + 1)
        k, v = (x[:, one] if self.block_table is None else x[:, :, one] for x in (self.k, self.v))
        lengths = self.k.shape[2] if self.lengths is None else self.lengths
        offset = lengths - self.q.shape[2] + rows.start
        return replace(self, q=self.q[:, heads, rows], k=k, v=v, options={**self.options, "q_offset": offset})

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1 if self.block_table is None else 2]


def make_inputs(case: Workload, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs with peaked logits; the same numbers, up to rounding, on every device and in every dtype."""
    numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers)

    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    q = normal(case.batch, case.heads, case.q_len, case.head_dim) * LOGIT_STD
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device) if case.lengths else None
    if not case.page_size:
        shape = (case.batch, case.kv_heads, case.kv_len, case.head_dim)
        k, v, table = normal(*shape), normal(*shape), None
    else:
        table = _shuffled_pages(case, numbers)
        pages = int(table.max()) + 1
        k, v = (normal(pages, case.page_size, case.kv_heads, case.head_dim) for _ in "kv")
        _poison_slack(case, table, k, v)
        table = table.to(device)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return Inputs(q, k, v, options, lengths, table)


def _shuffled_pages(case: Workload, numbers: torch.Generator) -> torch.Tensor:
    """A block table whose sequences lie in random pages; -1 past a sequence's last one: it is never read."""
    counts = [-(-n // case.page_size) for n in case.lengths]
    order = torch.randperm(sum(counts), generator=numbers, dtype=torch.int32).split(counts)
    return torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True, padding_value=-1)


def _poison_slack(case: Workload, table: torch.Tensor, *pages: torch.Tensor) -> None:
    """NaN in every slot past a sequence's length, so that a kernel that reads one shows it."""
    for row, length in zip(table.tolist(), case.lengths, strict=True):
        used = length % case.page_size
        if used:
            for x in pages:
                x[row[length // case.page_size], used:] = torch.nan
