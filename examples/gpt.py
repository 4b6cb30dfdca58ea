"""A small byte-level GPT, its training text, and its attention by tilewise and by torch; `train.py` trains it."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tilewise

ATTENTION = ("tilewise", "sdpa")
SHORTEST = 16  # tokens; shorter documents are left out


class GPT(nn.Module):
    """A typical decoder: RMS norm, rotary positions, grouped queries, gated MLP."""

    def __init__(self, vocabulary=256, width=128, layers=4, heads=4, kv_heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight
        self.again = "none"  # recomputed in the backward pass: "none", "full" blocks, "selective": all but attention

    def forward(self, batch, attend):
        """The mean loss of a batch; `attend(q, k, v, batch)` takes `[B, L, heads, D]`."""
        x = self.embedding(batch.tokens)  # [B, L, width]
        for block in self.blocks:
            if self.again == "none":
                x = block(x, batch, attend)
            else:
                context = {"context_fn": KEEP_ATTENTION} if self.again == "selective" else {}
                x = checkpoint(block, x, batch, attend, use_reentrant=False, **context)
        return loss_of(self.head(self.norm(x)), batch)


def loss_of(logits, batch):
    """The mean loss over all tokens, in float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.flatten(0, 1).to(wide), batch.targets.flatten())


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, 2 * width), (width, 2 * width), (2 * width, width))
        )

    def forward(self, x, batch, attend):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], -2)  # [B, L, heads, D]
        q, k = (rotary(t, batch.positions) for t in (q, k))
        x = x + self.o(attend(q, k, v, batch).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotary(x, positions):
    """x [B, L, heads, D], rotated by its positions [B, L]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend_tilewise(q, k, v, batch):
    if batch.cu_seqlens is None:
        return tilewise.attention(q, k, v, causal=True, layout="blhd")
    cu = batch.cu_seqlens
    return tilewise.varlen_attention(q[0], k[0], v[0], cu, cu, causal=True)[None]


def attend_sdpa(q, k, v, batch):
    """SDPA takes no packed sequences; they are expressed as a mask."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask, gqa = batch.mask, q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)
    return out.transpose(1, 2)


ATTEND = {"tilewise": attend_tilewise, "sdpa": attend_sdpa}


def keep_attention(ctx, op, *args, **options):
    """Selective checkpointing: attention outputs are kept, by operator name; everything else may be recomputed."""
    kept = (torch.ops.tilewise.attention_lse.default, torch.ops.tilewise.varlen_attention_lse.default)
    is_kept = op in kept or "scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


KEEP_ATTENTION = partial(create_selective_checkpoint_contexts, keep_attention)


@dataclass
class Batch:
    """Tokens and the token after each, `[B, L]`; packed: one row of sequences with bounds `cu_seqlens`."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # [L, L]: the packed sequences for SDPA

    def to(self, device):
        return Batch(*(x if x is None else x.to(device) for x in vars(self).values()))


class Text:
    """Tokenised documents, from which batches are drawn."""

    def __init__(self, documents):
        self.documents = [torch.as_tensor(d, dtype=torch.long) for d in documents if len(d) >= SHORTEST]
        self.stream = torch.cat(self.documents or [torch.empty(0, dtype=torch.long)])

    def batch(self, g, rows, context, is_packed=False):
        """Rows from random places; packed: one row of whole documents, each cut to `context` tokens."""
        if is_packed:
            return self._packed(g, rows * context, context)
        starts = torch.randint(len(self.stream) - context, (rows, 1), generator=g)
        cut = self.stream[starts + torch.arange(context + 1)]
        return Batch(cut[:, :-1], cut[:, 1:], torch.arange(context).expand(rows, -1))

    def _packed(self, g, room, context):
        cuts, ends = [], [0]
        while ends[-1] < room:
            document = self.documents[torch.randint(len(self.documents), (), generator=g)]
            cuts.append(document[: min(context, room - ends[-1], len(document) - 1) + 1])
            ends.append(ends[-1] + len(cuts[-1]) - 1)
        tokens, targets = torch.cat([c[:-1] for c in cuts]), torch.cat([c[1:] for c in cuts])
        positions = torch.cat([torch.arange(len(c) - 1) for c in cuts])
        which = torch.repeat_interleave(torch.arange(len(cuts)), torch.tensor(ends).diff())
        mask = (which[:, None] == which).tril()
        return Batch(tokens[None], targets[None], positions[None], torch.tensor(ends, dtype=torch.int32), mask)


def read_text(path=None):
    """Paragraphs of a file, or of the sources of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [Path(path)] if path else sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no sources of the standard library in {folder}: name a text with --text FILE")
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return [paragraph + "\n\n" for paragraph in text.split("\n\n")]


def byte_text(path=None):
    return Text([list(paragraph.encode()) for paragraph in read_text(path)])
