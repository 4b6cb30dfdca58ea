"""Queries of which sequences have different numbers, packed: a tree covers as many of a sequence's last keys as it has
queries, and only of packed queries a call knows that number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.arrays import converter_back, to_tensor
from ..errors import InvalidArgument
from ..state import map_result
from .attend_call import copy_to_out, is_seq_major


def attend_packed(q: Any, cu_seqlens: torch.Tensor, call: Callable[..., Any], options: dict[str, Any]) -> Any:
    """`call` of `q` `[B, H, Lq, D]` (or as `layout` says) in packed form; row `b` uses its first `cu_seqlens[b + 1] -
    cu_seqlens[b]` queries, and the output for the others is 0.

    The host reads no lengths, so that a graph can replay this for others.
    """
    back, q, seq_major = converter_back(q), to_tensor("q", q), is_seq_major(options)
    batch = len(cu_seqlens) - 1
    if q.ndim != 4 or q.shape[0] != batch:
        raise InvalidArgument("q", f"shape {tuple(q.shape)}", f"rank 4 with {batch} rows, one for each sequence")
    if options.get("block_indices") is not None:
        remedy = "key_indices, or as many queries of each sequence"
        raise InvalidArgument("block_indices", "blocks of queries that not all sequences have", "none", remedy)
    out = options.pop("out", None)
    q = q if seq_major else q.transpose(1, 2)  # [B, Lq, H, D]
    if seq_major:
        del options["layout"]
    rows = q.shape[1]
    used = torch.arange(rows, device=q.device) < cu_seqlens.diff()[:, None]
    order = (~used).flatten().argsort(stable=True)  # of each packed row, unused ones last
    for name, dim, ranks in (("q_bias", -1, (3,)), ("key_indices", -2, (3, 4)), ("weight_indices", -2, (3, 4))):
        if options.get(name) is not None:
            x = to_tensor(name, options[name])
            if x.ndim not in ranks or x.shape[0] not in (1, batch) or x.shape[dim] != rows:
                raise InvalidArgument(name, f"shape {tuple(x.shape)}", f"{rows} rows of {batch} sequences, as q")
            options[name] = x.movedim(dim, 1).expand(batch, *[-1] * (x.ndim - 1)).flatten(0, 1)[order]
    state = call(q.flatten(0, 1)[order], cu_seqlens_q=cu_seqlens, max_q=rows, **options)
    place = order.argsort()

    def unpacked(x: torch.Tensor) -> torch.Tensor:
        x = x[place].unflatten(0, (batch, rows))
        return x if seq_major else x.transpose(1, 2)

    def written(x: torch.Tensor) -> Any:
        return back(unpacked(x) if out is None else copy_to_out(out, unpacked(x)))

    def of_keys(x: torch.Tensor) -> Any:  # of pages: [B, H, Lk]
        return back(x.transpose(1, 2) if seq_major else x)

    return map_result(state, written, lambda x: back(unpacked(x)), of_keys)
