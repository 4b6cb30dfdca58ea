"""`attention` of sharded sequences: the ring, and the exchange of heads for tokens in schemes that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.arrays import with_memory
from ..core.eager import eager_function
from ..core.options import is_int
from ..errors import InvalidArgument
from ..state import AttentionState
from .agreement import Kind, agreed, described
from .arguments import KNOWN, lengths_of, prepare, with_functions
from .exchange import Heads, ToHeads, ToTokens, connect
from .function import EXTRAS, Attention, forward
from .layout import Ranks, inner_sizes, is_meta, ranks_of, total, values_of
from .pair_call import Call

OWN_DIMS = {"mask": (-2,), "q_bias": (-1,), "key_indices": (-2, -1)}  # whose sizes are a rank's own
REASON = "messages between ranks cannot be traced: torch.compile breaks the graph there, and fails with fullgraph=True"


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
    """`tilewise.attention` of sequences whose tokens are sharded over the ranks of a mesh.

    Every rank calls it with its own tokens (see `shard`) and the same options, and gets the output of its own queries.
    Forward and backward are deterministic for a given mesh.

    Args:
        q: this rank's queries, `[B, H, n, D]` (or as `layout` says), or packed `[n, H, D]` with `cu_seqlens_q`.
        k: this rank's keys, `[B, Hkv, m, D]` or `[m, Hkv, D]`.
        v: this rank's values, `[B, Hkv, m, Dv]` or `[m, Hkv, Dv]`.
        mesh: a `DeviceMesh` of one dim, or of two for `"2d"` (the ring, then Ulysses), or a process group.
        scheme: how tokens are distributed and what is sent.
            `"zigzag"`: a ring over two chunks on each rank, with equal work for causal attention.
            `"ring"`: a ring over contiguous parts. `"striped"`: a ring over interleaved tokens.
            `"gather"`: the chunks of `"zigzag"`; a rank receives all keys that it sees at once, a few heads at a time,
            and merges nothing.
            `"ulysses"`: contiguous parts; each rank gets all tokens of some heads. `H` is a multiple of the ranks.
            `"2d"`: Ulysses on dim 1 of the mesh inside a zigzag on dim 0.
        length: number of tokens on all ranks together, or a pair for q and k. None: equally many on each rank, or as
            `cu_seqlens` say.
        cu_seqlens_q: int `[B + 1]`: offsets of the packed sequences of all ranks. Pass a CPU tensor: one on a GPU has
            to be waited for.
        cu_seqlens_k: likewise for keys. Default: `cu_seqlens_q`.
        return_lse: return an `AttentionState`.
        mask: `[..., n, Lk]`: this rank's rows, and all keys in sequence order; each dim full or 1. For packed
            sequences, the mask of all ranks, as in `varlen_attention`.
        q_bias: `[B or 1, H or 1, n]`, of this rank's rows; `k_bias` is of all keys. Not for packed sequences.
        key_indices: `[B, n, m]` or `[B, Hkv, n, m]`, of this rank's rows: positions among the keys of all ranks. Not
            for packed sequences.
        kv_lengths: int `[B]`: number of keys in use in the whole sequence.
        q_offset: position of the first query of the whole sequence.
        validate: True: compare arguments between the ranks first, with one exchange. None: on GPUs only for new sizes,
            dtypes or values of options. False: never.

    All other options are those of `tilewise.attention`, except `out=` and `tile_map=`. `score_mod` and `mask_mod` are
    given positions in the whole sequence and heads of the whole model; all ranks capture the same tensors.

    Returns:
        `out` in the shape of `q`, with `Dv`; with `return_lse` an `AttentionState`. Gradients of `sinks`,
        `alibi_slopes`, what `score_mod` captures and a mask whose rows are not sharded are this rank's share: sum them
        over the mesh.
    """
    return checked_attention(
        q, k, v, mesh, scheme, length, (cu_seqlens_q, cu_seqlens_k), return_lse, options, lambda: None
    )


def checked_attention(
    q: Any,
    k: Any,
    v: Any,
    mesh: Any,
    scheme: str,
    length: Any,
    cu_seqlens: tuple[Any, Any],
    return_lse: bool,
    options: dict[str, Any],
    refuse: Callable[[], None],
) -> torch.Tensor | AttentionState:
    """`attention` with a check of its caller, `refuse`: what it raises is told to all ranks, as any wrong argument."""
    ring, inner = ranks_of(mesh, scheme)
    options = with_functions(options, q)
    groups, validate = (inner, ring), options.get("validate")
    cu_q, cu_k = (x if is_meta(x) else values_of("", x) for x in cu_seqlens)
    lengths = lengths_of(length, (cu_q, cu_k))
    seq = 0 if cu_q is not None else 1 if options.get("layout") == "blhd" else 2
    kind: Kind = ()
    if validate is not False and inner.size * ring.size > 1:
        kind = _kind((q, k, v), seq, scheme, lengths, return_lse, (ring, inner), options)

    def check() -> Any:
        refuse()
        qkv = _with_values("q", q), _with_values("k", k), _with_values("v", v)
        return *qkv, *prepare(*qkv, ring, inner, scheme, lengths, (cu_q, cu_k), options)[:2]

    def arguments() -> dict[str, object]:
        return _arguments(kind, (cu_q, cu_k), options)

    device = next((x.device for x in (q, k, v) if isinstance(x, torch.Tensor) and not x.is_meta), None)
    q, k, v, call, extras = agreed(groups, kind, validate, check, arguments, device)
    connect(ring, q.device)
    if inner.size == 1:
        state = _over_ring(call, q, k, v, extras)
    else:
        state = _over_heads(call, inner, q, k, v, extras, return_lse)
    return state if return_lse else state.out


eager_function(attention, REASON)
eager_function(checked_attention, REASON)


def _with_values(name: str, x: Any) -> Any:
    if is_meta(x):
        raise InvalidArgument(name, "a tensor on meta", "one with values", "tilewise.distributed.plan takes them")
    return with_memory(name, x) if isinstance(x, torch.Tensor) else x


def _kind(
    qkv: Any,
    seq: int,
    scheme: str,
    lengths: tuple[Any, Any],
    return_lse: bool,
    mesh: tuple[Ranks, Ranks],
    options: dict[str, Any],
) -> Kind:
    """A hashable description of the call that must match on every rank.

    It leaves out the rows of each rank, and numbers of tokens where `lengths` gives them.
    """
    sizes: list[tuple[str, Any]] = []
    for name, x, tokens_of_all in zip("qkv", qkv, (*lengths, lengths[1]), strict=True):
        if isinstance(x, torch.Tensor):
            shape = tuple(None if dim == seq and tokens_of_all is not None else n for dim, n in enumerate(x.shape))
            sizes.append((name, (*shape, x.dtype, x.requires_grad)))
        else:
            sizes.append((name, type(x).__name__))
    ring, inner = mesh
    sent: dict[str, Any] = {}
    if inner.size > 1:  # then these are sent, and their sizes must match
        mask, indices = (options.get(name) for name in ("mask", "key_indices"))
        few = is_int(lengths[0]) and lengths[0] < 4 * ring.size * inner.size  # a rank's only row looks like a broadcast
        sent["mask"] = not few and isinstance(mask, torch.Tensor) and mask.ndim > 1 and mask.shape[-2] == 1
        sent["key_indices"] = getattr(indices, "shape", ())[-1:]
    others: list[tuple[str, Any]] = []
    for name, x in options.items():
        if name == "q_offset" and is_int(x):
            others.append((name, "an int"))  # values of offsets are no part of a kind
        elif x is not None:
            description = described(x, *OWN_DIMS.get(name, ()))
            others.append((name, (description, sent[name]) if name in sent else description))
    call = ("scheme", scheme), ("packed", seq == 0), ("length", repr(lengths))
    lse_sent = "return_lse", bool(return_lse) and inner.size > 1
    return *call, lse_sent, ("gradients", torch.is_grad_enabled()), *sizes, *sorted(others)


def _arguments(kind: Kind, cu_seqlens: tuple[Any, Any], options: dict[str, Any]) -> dict[str, object]:
    """What must be equal on all ranks, by argument name: the kind, and values of offsets and lengths."""
    given = dict(kind)
    names = ("scheme", "packed", "length", *"qkv", *KNOWN, "gradients", "return_lse")
    values: dict[str, object] = {name: given.pop(name, None) for name in names}
    values |= {name: values_of(name, options[name]) for name in ("q_offset", "kv_lengths") if name in options}
    cu_q, cu_k = (values_of(name, x) for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
    function = {"function": "attention", "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    return function | values | {"options": sorted(given)}


def _over_ring(call: Call, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> AttentionState:
    tensors = (q, k, v, *(extras[name] for name in (*EXTRAS, *call.captured)))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return AttentionState(*Attention.apply(call, *tensors))
    return AttentionState(*forward(call, q, k, v, {name: x for name, x in extras.items() if x is not None})[:2])


def _over_heads(
    call: Call, inner: Ranks, q: Any, k: Any, v: Any, extras: dict[str, Any], return_lse: bool
) -> AttentionState:
    """Exchanges tokens for heads among the inner ranks, runs the ring, and exchanges back."""
    H, Hkv, n = q.shape[call.head], k.shape[call.head], inner.size
    share = H // n
    own_heads = range(inner.rank * share, (inner.rank + 1) * share)
    parts = [range(u * share, (u + 1) * share) for u in range(n)]
    q_sizes, k_sizes = (
        inner_sizes(total(rank_pieces[call.ranks.rank]), n) for rank_pieces in (call.task.q_pieces, call.task.k_pieces)
    )
    own = Heads(inner, parts, q_sizes, call.head, call.seq)
    theirs = Heads(inner, [kv_heads(part, H // Hkv) for part in parts], k_sizes, call.head, call.seq)
    q = ToHeads.apply(q, own)
    k, v = (ToHeads.apply(x, theirs) for x in (k, v))
    mask, sinks, slopes, q_bias, k_bias, indices = (extras[name] for name in EXTRAS)
    head_extras = {
        "sinks": None if sinks is None else sinks[own_heads.start : own_heads.stop],
        "alibi_slopes": None if slopes is None else slopes[..., own_heads.start : own_heads.stop],
        "mask": mask,
        "q_bias": q_bias,
        "key_indices": None,
        "k_bias": k_bias if k_bias is None or k_bias.shape[1] == 1 else k_bias[:, own_heads.start : own_heads.stop],
    }
    if indices is not None:  # all rows, for this rank's KV heads
        heads_of = theirs.heads if indices.ndim == 4 else [range(1)] * n
        whole = ToHeads.apply(indices if indices.ndim == 4 else indices[:, None], Heads(inner, heads_of, q_sizes, 1, 2))
        head_extras["key_indices"] = whole if indices.ndim == 4 else whole[:, 0]
    if q_bias is not None:
        heads_of = parts if q_bias.shape[1] > 1 else [range(1)] * n
        head_extras["q_bias"] = ToHeads.apply(q_bias, Heads(inner, heads_of, q_sizes, 1, 2))
    # A mask with one row may be broadcast, or its rank may hold one token. If any rank holds one, rows are sharded.
    if mask is not None and (call.packed or (mask.shape[-2] == 1 and 1 not in q_sizes)):
        head_extras["mask"] = mask[:, own_heads.start : own_heads.stop] if mask.shape[1] > 1 else mask
    elif mask is not None:
        heads_of = parts if mask.shape[1] > 1 else [range(1)] * n
        mask = mask.expand(-1, -1, q_sizes[inner.rank], -1)
        head_extras["mask"] = ToHeads.apply(mask, Heads(inner, heads_of, q_sizes, 1, 2))
    head_extras |= {name: extras[name] for name in call.captured}
    call = replace(call, first_head=own_heads.start)
    out, lse = _over_ring(call, q, k, v, head_extras)
    out = ToTokens.apply(out, own)
    return AttentionState(out, ToTokens.apply(lse[..., None], own)[..., 0] if return_lse else lse)


def kv_heads(part: Sequence[int], group: int) -> list[int]:
    """The KV heads of some query heads; one for each query head, if they share KV heads unevenly.

    >>> kv_heads(range(4, 8), 2), kv_heads(range(0, 2), 8), kv_heads(range(2, 5), 3)
    ([2, 3], [0], [0, 1, 1])
    """
    kv_of_query = [h // group for h in part]
    heads = sorted(set(kv_of_query))
    even = len(part) % len(heads) == 0
    size = len(part) // len(heads)
    return heads if even and kv_of_query == [h for h in heads for _ in range(size)] else kv_of_query
