"""Calls in the shapes of known models, by name, and inputs for them.

A new case of the demo and the tuner is an entry of `WORKLOADS`; its heads come from `models.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .. import Plan, alibi_slopes, attention, paged_attention, plan, varlen_attention
from .models import MODELS, Layer
from .patterns import PATTERNS, additive

# Peaked logits: with flat ones a kernel that returns the mean of v would pass.
LOGIT_STD = 3.0
# Random numbers that are drawn; larger tensors repeat them. Prime, so that no two rows are equal.
FEW = 4_000_037


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
    lengths: tuple[int, ...] = ()  # keys in use of each batch row; empty: all
    causal: bool = False
    window: int | tuple[int, int] | None = None
    softcap: float | None = None
    page_size: int = 0  # 0: not paged
    value_dim: int = 0  # 0: as head_dim
    latent: bool = False  # V is a view of the first columns of K
    chunk: int | None = None
    scale: float | None = None
    sinks: bool = False
    alibi: bool = False
    mask: str = ""  # one of `patterns.PATTERNS`
    added: bool = False  # the mask is additive
    packed: bool = False  # packed queries and keys, of `lengths`
    rows: int = 1  # batch rows, if `lengths` is empty

    @property
    def batch(self) -> int:
        return len(self.lengths) or self.rows

    def shape(self) -> str:
        """The sizes in one line."""
        words = [f"batch {self.batch}", f"heads {self.heads}/{self.kv_heads}", f"head dim {self.head_dim}"]
        if self.value_dim not in (0, self.head_dim):
            words[-1] += f"/{self.value_dim}"
        words += [f"{self.q_len:,} {'query' if self.q_len == 1 else 'queries'}", f"{self.kv_len:,} keys"]
        if self.lengths:
            words.append(f"lengths {min(self.lengths):,} to {max(self.lengths):,}")
        if self.page_size:
            words.append(f"pages of {self.page_size}")
        return ", ".join(words)

    def shortened(self, by: int) -> Workload:
        """The same case with sequences, window and chunk `by` times as short."""
        window, chunk = self.window, self.chunk
        return replace(
            self,
            q_len=-(-self.q_len // by),
            kv_len=-(-self.kv_len // by),
            lengths=tuple(-(-n // by) for n in self.lengths),
            window=(-(-window[0] // by), -(-window[1] // by))
            if isinstance(window, tuple)
            else window and -(-window // by),
            chunk=chunk and -(-chunk // by),
        )


def of_layer(layer: Layer, name: str, q_len: int, kv_len: int, about: str = "", **sizes: Any) -> Workload:
    """A call of a model's layer."""
    layer_fields = {f.name: getattr(layer, f.name) for f in fields(layer) if f.name != "name"}
    return Workload(name, about, q_len=q_len, kv_len=kv_len, **(layer_fields | sizes))


def _of(model: str, layer: str, name: str, about: str, q_len: int, kv_len: int, **sizes: Any) -> Workload:
    return of_layer(MODELS[model].layer(layer), name, q_len, kv_len, about, **sizes)


WORKLOADS = (
    _of(
        "minilm",
        "full",
        "minilm-encoder",
        "a padded batch through an encoder, as in MiniLM and BERT",
        256,
        256,
        lengths=(256, 31, 190, 97, 223, 12, 140, 64),
    ),
    _of("llama-3-8b", "full", "llama-prefill", "the prompt of a Llama 3 8B layer", 1024, 1024),
    _of("llama-3-8b", "full", "llama-decode", "the next token of a Llama 3 8B layer over a long cache", 1, 8192),
    _of("gemma-2", "local", "gemma-window", "a local layer of Gemma 2: window and softcap", 1536, 1536, window=512),
    _of("gemma-4", "global", "wide-head", "a global layer of Gemma 4: heads of 512", 768, 768),
    _of("gpt-oss", "local", "gpt-oss-sinks", "a local layer of gpt-oss: sinks and a short window", 1024, 1024),
    _of(
        "llama-3-8b",
        "full",
        "paged-decode",
        "a serving batch: the next token of each sequence over shuffled pages",
        1,
        3072,
        lengths=(1740, 33, 3072, 256, 911, 2111),
        page_size=16,
    ),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors and options of one call."""

    q: torch.Tensor  # [B, H, Lq, D], or packed [T, H, D]
    k: torch.Tensor  # [B, Hkv, Lk, D], packed [T, Hkv, D], or pages [P, page_size, Hkv, D]
    v: torch.Tensor
    options: Mapping[str, Any]
    lengths: torch.Tensor | None = None  # int32 [B]
    block_table: torch.Tensor | None = None  # int32 [B, max_pages]
    cu_seqlens: torch.Tensor | None = None  # int32 [B + 1]: packed sequences
    longest: int = 0  # packed sequence

    def attend(self, backend: str | None = None) -> torch.Tensor:
        """Attention of these inputs: `[B, H, Lq, Dv]`, or packed `[T, H, Dv]`."""
        q, k, v, lengths = self.q, self.k, self.v, self.lengths
        if self.block_table is not None:
            return paged_attention(q, k, v, self.block_table, lengths, backend=backend, **self.options)
        if self.cu_seqlens is not None:
            cu, most = self.cu_seqlens, self.longest
            return varlen_attention(q, k, v, cu, cu, max_q=most, max_k=most, backend=backend, **self.options)
        return attention(q, k, v, kv_lengths=lengths, backend=backend, **self.options)

    def plan(self) -> Plan:
        """What `attend` will run."""
        q, k, v, lengths = self.q, self.k, self.v, self.lengths
        if self.block_table is not None:
            return plan(q, k, v, block_table=self.block_table, context_lens=lengths, **self.options)
        if self.cu_seqlens is not None:
            cu, most = self.cu_seqlens, self.longest
            return plan(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_q=most, max_k=most, **self.options)
        return plan(q, k, v, kv_lengths=lengths, **self.options)

    def on_host(self) -> Inputs:
        """The same inputs on the CPU."""

        def moved(x: Any) -> Any:
            return x.cpu() if isinstance(x, torch.Tensor) else x

        tensors = {f.name: moved(getattr(self, f.name)) for f in fields(self) if f.name != "options"}
        return Inputs(**tensors, options={name: moved(x) for name, x in self.options.items()})

    def sequence(self, first: int, last: int) -> Inputs:
        """One packed sequence, rows `first` to `last`, as a dense call."""
        q, k, v = (x[first:last].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, self.options)

    def part(self, heads: slice, rows: slice) -> Inputs:
        """The call of query rows `rows` of `heads`, which share a KV head: a part of the same output."""
        kv_head = heads.start // (self.q.shape[1] // self.kv_heads)
        one = slice(kv_head, kv_head + 1)
        k, v = (x[:, one] if self.block_table is None else x[:, :, one] for x in (self.k, self.v))
        lengths = self.k.shape[2] if self.lengths is None else self.lengths
        options = {**self.options, "q_offset": lengths - self.q.shape[2] + rows.start}
        for name in ("sinks", "alibi_slopes"):
            if options.get(name) is not None:
                options[name] = options[name][heads]
        mask = options.get("mask")
        if mask is not None and mask.shape[-2] > 1:  # [Lq, Lk], or [B, 1, 1, Lk] for padding
            options["mask"] = mask[..., rows, :]
        return replace(self, q=self.q[:, heads, rows], k=k, v=v, options=options)

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1 if self.block_table is None else 2]


def make_inputs(case: Workload, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs with peaked logits; the same numbers, up to rounding, on every device and in every dtype."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return normal(shape, dtype, std, numbers, device)

    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    peak = LOGIT_STD / (scale * case.head_dim**0.5)
    value_dim = case.value_dim or case.head_dim

    def both(*rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = draw(*rows, case.head_dim)
        return k, k[..., :value_dim] if case.latent else draw(*rows, value_dim)

    options = _options(case, device, dtype, numbers)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device) if case.lengths else None
    if case.packed:
        total = sum(case.lengths)
        k, v = both(total, case.kv_heads)
        ends = torch.tensor([0, *case.lengths], device=device).cumsum(0).to(torch.int32)
        q = draw(total, case.heads, case.head_dim, std=peak)
        return Inputs(q, k, v, options, cu_seqlens=ends, longest=max(case.lengths))
    q = draw(case.batch, case.heads, case.q_len, case.head_dim, std=peak)
    if not case.page_size:
        k, v = both(case.batch, case.kv_heads, case.kv_len)
        return Inputs(q, k, v, options, lengths)
    table = _shuffled_pages(case, numbers)
    pages = int(table.max()) + 1
    k, v = both(pages, case.page_size, case.kv_heads)
    _poison_slack(case, table, k, v)
    return Inputs(q, k, v, options, lengths, table.to(device))


def normal(
    shape: Sequence[int],
    dtype: torch.dtype,
    std: float = 1.0,
    numbers: torch.Generator | int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Normal numbers, four million of them repeated: drawing more would take longer than measuring."""
    if isinstance(numbers, int):
        numbers = torch.Generator().manual_seed(numbers)
    count = torch.Size(shape).numel()
    some = torch.randn(min(count, FEW), generator=numbers, dtype=torch.float32, device="cpu")
    some = some.mul_(std).to(device, dtype)
    full = torch.empty(count, dtype=dtype, device=device)
    for part in full.split(max(1, len(some))):
        part.copy_(some[: len(part)])
    return full.view(*shape)


def _options(case: Workload, device: torch.device, dtype: torch.dtype, numbers: torch.Generator) -> dict[str, Any]:
    """The options of the call, as a user would write them."""
    options: dict[str, Any] = {"causal": case.causal} if case.causal else {}
    for name in ("window", "chunk", "softcap", "scale"):
        if getattr(case, name) is not None:
            options[name] = getattr(case, name)
    if case.sinks:
        options["sinks"] = torch.randn(case.heads, generator=numbers, dtype=torch.float32, device="cpu").to(device)
    if case.alibi:
        options["alibi_slopes"] = alibi_slopes(case.heads, device)
    if case.mask:
        visible = PATTERNS[case.mask](case.q_len, case.kv_len).to(device)
        options["mask"] = additive(visible, dtype) if case.added else visible
    return options


def _shuffled_pages(case: Workload, numbers: torch.Generator) -> torch.Tensor:
    """A block table of random pages; -1 past a sequence's last one, which is never read."""
    counts = [-(-n // case.page_size) for n in case.lengths]
    order = torch.randperm(sum(counts), generator=numbers, dtype=torch.int32, device="cpu").split(counts)
    return torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True, padding_value=-1)


def _poison_slack(case: Workload, table: torch.Tensor, *pages: torch.Tensor) -> None:
    """Writes NaN to every slot past a sequence's length, so that reading one shows."""
    for row, length in zip(table.tolist(), case.lengths, strict=True):
        used = length % case.page_size
        if used:
            for x in pages:
                x[row[length // case.page_size], used:] = torch.nan
