"""`attention` of sharded sequences: heads exchanged where the scheme says so, and the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.eager import left_alone
from ..errors import InvalidArgument
from ..state import AttentionState
from ..validation.arrays import with_memory
from .arguments import KNOWN, lengths_of, prepare
from .exchange import Heads, ToHeads, ToTokens, connect
from .faults import agree, is_known
from .function import EXTRAS, Attention, forward
from .layout import Ranks, inner_sizes, ranks_of, total, values_of
from .rows import Call


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: Any,
    scheme: str = "zigzag",
    length: int | tuple[int | None, int | None] | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | AttentionState:
    """Attention of sequences whose tokens lie over the ranks of a mesh: `tilewise.attention` of the whole, sharded.

    Every rank calls it, with its own tokens (`shard`) and the same options; the result is for its own queries. Forward
    and backward are deterministic for a given mesh.

    Args:
        q: this rank's queries, `[B, H, n, D]` (or as `layout` says), or packed `[n, H, D]` with `cu_seqlens_q`.
        k: this rank's keys, `[B, Hkv, m, D]` or `[m, Hkv, D]`.
        v: this rank's values, likewise, of `Dv`.
        mesh: a `DeviceMesh` of one dim, or of two for `"2d"`: the ring and, inside, Ulysses. Or a process group.
        scheme: how tokens lie and what is sent.
            `"zigzag"`: a ring over two chunks on each rank, with equal work under a causal rule.
            `"ring"`: a ring over contiguous parts. `"striped"`: one over tokens that are dealt out one by one.
            `"gather"`: the same chunks as `"zigzag"`; all keys that a rank sees are brought at once, a few heads at a
            time, and there is nothing to merge.
            `"ulysses"`: contiguous parts; each rank gets all tokens of some heads. `H` is a multiple of the ranks.
            `"2d"`: Ulysses on dim 1 of the mesh inside of a zigzag on dim 0.
        length: tokens on all ranks, or those of q and of k. None: as many on each, or those of `cu_seqlens`.
        cu_seqlens_q: int `[B + 1]` of the packed sequences on all ranks. On a GPU it is waited for: hand in one that is
            on the CPU.
        cu_seqlens_k: likewise; None is that of the queries.
        return_lse: return an `AttentionState`.
        mask: this rank's rows and all keys in their order, `[..., n, Lk]`, each dim full or 1. With packed sequences
            that of all, as in `varlen_attention`.
        q_bias: of this rank's rows, `[B or 1, H or 1, n]`; `k_bias` of all keys. Not of packed sequences.
        key_indices: of this rank's rows, `[B, n, m]` or `[B, Hkv, n, m]`: positions among all ranks' keys. Not packed.
        kv_lengths: keys in use of the whole sequence, int `[B]`.
        q_offset: the position of the first query of the whole sequence.
        validate: True compares sizes and options between the ranks first, by one exchange; None does so for calls of
            new sizes, dtypes or options, False never.

    All other options as in `tilewise.attention`. `out=` and `tile_map=` are not taken.

    Returns:
        `out` as `q`, with `Dv`; with `return_lse` an `AttentionState`. Gradients of `sinks`, of `alibi_slopes` and of a
        mask whose rows are not sharded are this rank's share: their sum over the mesh is the gradient.
    """
    ring, inner = ranks_of(mesh, scheme)
    cu_seqlens = values_of("cu_seqlens_q", cu_seqlens_q), values_of("cu_seqlens_k", cu_seqlens_k)
    length = lengths_of(length, cu_seqlens)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor) and x.is_meta:
            raise InvalidArgument(name, "a tensor on meta", "one with values", "tilewise.distributed.plan takes them")
    q, k, v = (
        with_memory(name, x) if isinstance(x, torch.Tensor) else x for name, x in zip("qkv", (q, k, v), strict=True)
    )
    seq = 0 if cu_seqlens_q is not None else 1 if options.get("layout") == "blhd" else 2
    if options.get("validate") is not False and all(isinstance(x, torch.Tensor) and x.ndim > seq for x in (q, k, v)):
        sizes = _sizes((q, k, v), seq, length)
        kind = (scheme, length, *sizes.items(), *sorted(options), torch.is_grad_enabled(), cu_seqlens_q is None)
        new = [ranks for ranks in (inner, ring) if options.get("validate") or not is_known(ranks, kind)]
        said = _said(sizes, scheme, length, cu_seqlens, options) if new else {}
        for ranks in new:
            agree(ranks, said, q.device, kind)
    call, extras, _ = prepare(q, k, v, ring, inner, scheme, length, cu_seqlens, options)
    connect(ring, q.device)
    if inner.size == 1:
        state = _over_ring(call, q, k, v, extras)
    else:
        state = _over_heads(call, inner, q, k, v, extras, return_lse)
    return state if return_lse else state.out


left_alone(
    attention, "messages between ranks are no part of a graph: it runs outside of graphs, and not with fullgraph=True"
)


def _sizes(qkv: Any, seq: int, length: tuple[Any, Any]) -> dict[str, Any]:
    """Of q, k and v what is the same on all ranks: not the number of tokens, where `length` says how many there are."""
    of_q, of_k = length
    found = {}
    for name, x, whole in zip("qkv", qkv, (of_q, of_k, of_k), strict=True):
        tokens = x.shape[seq] if whole is None else None
        found[name] = (*x.shape[:seq], tokens, *x.shape[seq + 1 :], x.dtype, x.requires_grad)
    return found


def _said(
    sizes: dict[str, Any], scheme: str, length: Any, cu_seqlens: tuple[Any, Any], options: dict[str, Any]
) -> dict[str, object]:
    """What has to be the same on all ranks, by the names of the arguments."""
    offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
    said: dict[str, object] = {"scheme": scheme, **offsets, "length": length, **sizes}
    for name in KNOWN:
        x: Any = options.get(name)
        own = name in EXTRAS and isinstance(x, torch.Tensor)  # a rank's rows, or a weight
        said[name] = (x.ndim, x.dtype, x.requires_grad) if own else values_of(name, x)
    said["gradients"] = torch.is_grad_enabled()
    return said


def _over_ring(call: Call, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> AttentionState:
    tensors = (q, k, v, *(extras[name] for name in EXTRAS))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return AttentionState(*Attention.apply(call, *tensors))
    return AttentionState(*forward(call, q, k, v, {name: x for name, x in extras.items() if x is not None})[:2])


def _over_heads(
    call: Call, inner: Ranks, q: Any, k: Any, v: Any, extras: dict[str, Any], return_lse: bool
) -> AttentionState:
    """Tokens for heads among the inner ranks, the ring, and back."""
    H, Hkv, n = q.shape[call.head], k.shape[call.head], inner.size
    each = H // n
    mine = range(inner.rank * each, (inner.rank + 1) * each)
    parts = [range(u * each, (u + 1) * each) for u in range(n)]
    q_sizes, k_sizes = (
        inner_sizes(total(held[call.ranks.rank]), n) for held in (call.task.q_pieces, call.task.k_pieces)
    )
    own = Heads(inner, parts, q_sizes, call.head, call.seq)
    theirs = Heads(inner, [kv_heads(part, H // Hkv) for part in parts], k_sizes, call.head, call.seq)
    q = ToHeads.apply(q, own)
    k, v = (ToHeads.apply(x, theirs) for x in (k, v))
    mask, sinks, slopes, q_bias, k_bias, indices = (extras[name] for name in EXTRAS)
    some = {
        "sinks": None if sinks is None else sinks[mine.start : mine.stop],
        "alibi_slopes": None if slopes is None else slopes[..., mine.start : mine.stop],
        "mask": mask,
        "q_bias": q_bias,
        "key_indices": None,
        "k_bias": k_bias if k_bias is None or k_bias.shape[1] == 1 else k_bias[:, mine.start : mine.stop],
    }
    if indices is not None:  # of all rows, for the KV heads that are here
        has = theirs.heads if indices.ndim == 4 else [range(1)] * n
        whole = ToHeads.apply(indices if indices.ndim == 4 else indices[:, None], Heads(inner, has, q_sizes, 1, 2))
        some["key_indices"] = whole if indices.ndim == 4 else whole[:, 0]
    if q_bias is not None:
        has = parts if q_bias.shape[1] > 1 else [range(1)] * n
        some["q_bias"] = ToHeads.apply(q_bias, Heads(inner, has, q_sizes, 1, 2))
    # One row of a mask may be this rank's only one, or stand for all: where a rank has one, all take it for their own.
    if mask is not None and (call.packed or (mask.shape[-2] == 1 and 1 not in q_sizes)):
        some["mask"] = mask[:, mine.start : mine.stop] if mask.shape[1] > 1 else mask
    elif mask is not None:
        has = parts if mask.shape[1] > 1 else [range(1)] * n
        mask = mask.expand(-1, -1, q_sizes[inner.rank], -1)
        some["mask"] = ToHeads.apply(mask, Heads(inner, has, q_sizes, 1, 2))
    out, lse = _over_ring(call, q, k, v, some)
    out = ToTokens.apply(out, own)
    return AttentionState(out, ToTokens.apply(lse[..., None], own)[..., 0] if return_lse else lse)


def kv_heads(part: Sequence[int], group: int) -> list[int]:
    """The KV heads of some query heads; one for each of them, where they share those unevenly.

    >>> kv_heads(range(4, 8), 2), kv_heads(range(0, 2), 8), kv_heads(range(2, 5), 3)
    ([2, 3], [0], [0, 1, 1])
    """
    each = [h // group for h in part]
    heads = sorted(set(each))
    even = len(part) % len(heads) == 0
    size = len(part) // len(heads)
    return heads if even and each == [h for h in heads for _ in range(size)] else each
