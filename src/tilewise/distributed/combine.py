"""Exchanges of a cache whose tokens are on several ranks: queries are gathered, and partial results merged."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..state import AttentionState, merge
from .exchange import all_to_all
from .faults import report_lost_ranks
from .layout import Ranks


def gathered(x: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
    """All-gathers tensors of one shape along a dim."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
    with report_lost_ranks(ranks):
        dist.all_gather(parts, x.contiguous(), group=ranks.group)
    return torch.cat(parts, dim)


def combine(
    state: AttentionState, ranks: Ranks, heads: int, dim: int = 1, sinks: torch.Tensor | None = None
) -> AttentionState:
    """Merges the partial results of all ranks over their own keys, in rank order.

    Args:
        state: `out` and `lse` over this rank's keys, with the heads of all ranks along `dim`.
        ranks: the ranks.
        heads: heads of each rank, which gets the result of its own; 0: every rank gets all heads.
        dim: the dim of heads.
        sinks: one for each head that this rank gets; not part of any state.
    """
    out, lse = state
    cuts = out.split(heads, dim) if heads else [out] * ranks.size
    lses = lse.split(heads, dim) if heads else [lse] * ranks.size
    # One message to each rank, as bytes: lse and out in their dtypes, and padding that aligns the next message.
    shape = cuts[ranks.rank].shape
    at = shape[:-1].numel() * lse.element_size()
    end = at + shape.numel() * out.element_size()
    slack = out.new_zeros(-end % lse.element_size(), dtype=torch.uint8)
    parts = [torch.cat([_bytes(b), _bytes(a), slack]) for a, b in zip(cuts, lses, strict=True)]
    received = all_to_all(parts, [parts[ranks.rank].shape] * ranks.size, ranks)
    states = [
        AttentionState(x[at:end].view(out.dtype).view(shape), x[:at].view(lse.dtype).view(shape[:-1])) for x in received
    ]
    if sinks is not None:
        by_head = sinks.to(lse.dtype).view([-1 if i == dim else 1 for i in range(len(shape) - 1)])
        states.append(AttentionState(torch.zeros_like(states[0].out), by_head.expand(shape[:-1])))
    return merge(states)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
