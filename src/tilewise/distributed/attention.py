"""`attention` of sharded sequences: arguments to a task, heads exchanged where the scheme says so, and the ring."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..core.options import PLACES, Options, RuleOptions, as_rules, is_int
from ..errors import InvalidArgument
from ..kv_cache.eager import left_alone
from ..state import AttentionState
from ..validation import keywords
from ..validation.arrays import with_memory
from .exchange import Heads, ToHeads, ToTokens, connect
from .faults import agree, is_known
from .function import EXTRAS, Attention, forward
from .layout import (
    ORDERS,
    Ranks,
    as_offsets,
    check_count,
    global_length,
    inner_sizes,
    packed_length,
    pieces,
    ranks_of,
    total,
    values_of,
)
from .rows import Call
from .steps import Task

PASSED_ON = ("scale", "softcap", "split_size", "allow_tf32", "deterministic", "backend")  # to every part, as they are
RULES = (*(name for name in RuleOptions.__annotations__ if name not in PLACES), "kv_lengths")
Place = tuple[int, int]  # the position of a sequence's first query, its keys in use
INSTEAD = {  # of options that are not taken
    "block_indices": "key_indices= takes the keys of those blocks one by one",
    "tree_mask": "mask= takes this rank's rows over all keys",
    "k_shared": "k= takes them beside each head's own columns",
    "positions": "mask= takes this rank's rows over all keys",
    "tile_map": "mask= is classified by each call itself",
    "out": "take what is returned",
    "k_start": "positions follow from scheme= and q_offset=",
    "k_stride": "positions follow from scheme= and q_offset=",
    "q_stride": "positions follow from scheme= and q_offset=",
}
KNOWN = ("layout", "validate", *PASSED_ON, *RULES, *EXTRAS)


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
    length = _lengths(length, cu_seqlens)
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


def _lengths(length: Any, cu_seqlens: tuple[Any, Any]) -> tuple[Any, Any]:
    """The tokens of q and of k on all ranks: as given, else all of packed sequences, else None."""
    length = tuple(length) if isinstance(length, list) else length
    of_q, of_k = length if isinstance(length, tuple) and len(length) == 2 else (length, length)
    cu_q, cu_k = (packed_length(cu) for cu in cu_seqlens)
    return cu_q if of_q is None else of_q, (cu_q if cu_k is None else cu_k) if of_k is None else of_k


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


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ranks,
    inner: Ranks,
    scheme: str,
    length: Any,
    cu_seqlens: tuple[Any, Any],
    options: dict[str, Any],
) -> tuple[Call, dict[str, Any], list[Place]]:
    """The arguments, checked: the call, its tensors beside q, k and v, and where each batch row's queries stand."""
    cu_seqlens = values_of("cu_seqlens_q", cu_seqlens[0]), values_of("cu_seqlens_k", cu_seqlens[1])
    for name, remedy in INSTEAD.items():
        if options.get(name) is not None:
            raise InvalidArgument(name, "one over several ranks", "none", remedy)
    if unknown := [name for name in options if name not in KNOWN and name not in INSTEAD]:
        keywords.refuse(unknown, [*keywords.of(attention), *KNOWN])
    options = {name: x for name, x in options.items() if name not in INSTEAD}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(name, f"a {type(x).__name__}", "a torch tensor", "Quantised: hand in x.dequantise()")
    o = Options(**options)
    packed = cu_seqlens[0] is not None
    want = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != want:
            raise InvalidArgument(name, f"{x.ndim} dims", f"{want}", "packed sequences have 3, with cu_seqlens_q")
    if o.layout not in ("bhld", "blhd"):
        raise InvalidArgument("layout", repr(o.layout), "'bhld' or 'blhd'")
    head, seq = (1, 0) if packed else (1, 2) if o.layout == "bhld" else (2, 1)
    H, Hkv = q.shape[head], k.shape[head]
    if H % inner.size:
        expected = f"a multiple of {inner.size}, the ranks of Ulysses"
        raise InvalidArgument("q", f"{H} heads", expected, "take 'zigzag' or 'gather'")
    if (Hkv and H % Hkv) or v.shape[head] != Hkv:
        raise InvalidArgument("k", f"{Hkv} heads, v {v.shape[head]}", f"as many in both, that divide q's {H}")
    for name, ndims in (("sinks", (1,)), ("alibi_slopes", (1, 2))):
        x = getattr(o, name)
        if x is not None and (not isinstance(x, torch.Tensor) or x.ndim not in ndims or x.shape[-1] != H):
            raise InvalidArgument(name, getattr(x, "shape", type(x).__name__), f"a tensor of {H} heads in its last dim")
    lengths = _lengths(length, cu_seqlens)
    if isinstance(lengths[0], tuple):
        raise InvalidArgument("length", repr(lengths[0]), "the tokens of all ranks, or (those of q, those of k)")

    Lq, Lk = (
        global_length("length", x.shape[seq], n, ring.size, inner.size) for x, n in zip((q, k), lengths, strict=True)
    )
    cu_q = as_offsets(cu_seqlens[0], Lq, "cu_seqlens_q")
    cu_k = cu_q if packed and cu_seqlens[1] is None else as_offsets(cu_seqlens[1], Lk, "cu_seqlens_k")
    if len(cu_q) != len(cu_k):
        raise InvalidArgument("cu_seqlens_k", f"{len(cu_k)} offsets", f"{len(cu_q)}, as cu_seqlens_q")
    order = ORDERS[scheme]
    q_pieces, k_pieces = (
        tuple(pieces(n, ring.size, rank, order, cu) for rank in range(ring.size)) for n, cu in ((Lq, cu_q), (Lk, cu_k))
    )
    for name, x, held, n in (("q", q, q_pieces, Lq), ("k", k, k_pieces, Lk)):
        sizes = inner_sizes(total(held[ring.rank]), inner.size)
        check_count(name, x.shape[seq], sizes[inner.rank], n)
    if v.shape[seq] != k.shape[seq]:
        raise InvalidArgument("v", f"{v.shape[seq]} tokens", f"{k.shape[seq]}, as k")

    rows = len(cu_q) - 1 if packed else q.shape[0]
    offsets, used, places = _places(o, rows, Lq, Lk, cu_q, cu_k)
    seen = tuple((place,) for place in places) if packed else (tuple(sorted(set(places))) or ((Lk - Lq, Lk),),)
    rules = as_rules(o)
    biases = {"q_bias": o.q_bias, "k_bias": o.k_bias}
    for (name, x), n in zip(biases.items(), (q.shape[seq], Lk), strict=True):
        if x is not None and (packed or not isinstance(x, torch.Tensor) or x.ndim != 3 or x.shape[-1] != n):
            shape = f"[{q.shape[0]} or 1, {q.shape[head]} or 1, {n}]: this rank's rows, all ranks' keys; not packed"
            raise InvalidArgument(name, getattr(x, "shape", type(x).__name__), shape)
    indices = _as_indices(o.key_indices, q, packed, k.shape[head], seq, Lk)
    plain = all(x is None for x in (o.mask, o.alibi_slopes, indices, *biases.values()))
    fusible = order != "striped" and plain and all(len(each) == 1 for each in seen)
    task = Task(rules, q_pieces, k_pieces, cu_q or (0, Lq), cu_k or (0, Lk), seen, fusible, scheme == "gather")
    passed = {name: options[name] for name in PASSED_ON if name in options}
    if not packed:
        passed["layout"] = o.layout
    call = Call(task, ring, passed, packed, head, seq, offsets, used, q.device)
    mask = _as_mask(o.mask, q, packed, head, seq, Lk)
    extras = {"mask": mask, "sinks": o.sinks, "alibi_slopes": o.alibi_slopes, **biases, "key_indices": indices}
    return call, extras, places


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


def _places(
    o: Options, rows: int, Lq: int, Lk: int, cu_q: Sequence[int], cu_k: Sequence[int]
) -> tuple[torch.Tensor | int, torch.Tensor | None, list[Place]]:
    """Where queries stand and how many keys are in use: as parts are given them, and as numbers for the plan."""
    given = []
    for name in ("q_offset", "kv_lengths"):
        x = getattr(o, name)
        if x is not None and not is_int(x):
            if not isinstance(x, torch.Tensor) or x.shape != (rows,) or x.is_floating_point():
                raise InvalidArgument(name, repr(x), f"an int tensor [{rows}]" + " or an int" * (name == "q_offset"))
        elif x is not None and name == "kv_lengths":
            raise InvalidArgument(name, repr(x), f"an int tensor [{rows}]")
        given.append(values_of(name, x) if isinstance(x, torch.Tensor) else [x] * rows)
    packed = bool(cu_q)
    whole = [b - a for a, b in itertools.pairwise(cu_k)] if packed else [Lk] * rows
    queries = [b - a for a, b in itertools.pairwise(cu_q)] if packed else [Lq] * rows
    used = [n if u is None else u for u, n in zip(given[1], whole, strict=True)]
    for b, (u, n) in enumerate(zip(used, whole, strict=True)):
        if not 0 <= u <= n:
            raise InvalidArgument(f"kv_lengths[{b}]", u, f"0 to {n}, the keys of all ranks")
    starts = [u - n if at is None else int(at) for at, u, n in zip(given[0], used, queries, strict=True)]
    places = list(zip(starts, used, strict=True))
    if packed:
        return 0, None, places
    lengths = None if o.kv_lengths is None else o.kv_lengths.to(torch.int32)
    if len(set(starts)) < 2:
        return starts[0] if starts else 0, lengths, places
    offsets: Any = o.q_offset if isinstance(o.q_offset, torch.Tensor) else o.kv_lengths - Lq
    return offsets.to(torch.int32), lengths, places


def _as_indices(indices: Any, q: torch.Tensor, packed: bool, kv_heads: int, seq: int, Lk: int) -> Any:
    """Indices of keys, checked against this rank's rows and all keys."""
    if indices is None:
        return None
    shapes = ([q.shape[0], q.shape[seq]], [q.shape[0], kv_heads, q.shape[seq]])
    given = list(getattr(indices, "shape", ()))[:-1]
    if packed or not isinstance(indices, torch.Tensor) or given not in shapes or indices.dtype.is_floating_point:
        want = f"ints [{q.shape[0]}, {q.shape[seq]}, n] or [{q.shape[0]}, {kv_heads}, {q.shape[seq]}, n]; not packed"
        remedy = "this rank's rows (tilewise.distributed.shard(key_indices, mesh, -2)), positions of all ranks' keys"
        raise InvalidArgument("key_indices", getattr(indices, "shape", type(indices).__name__), want, remedy)
    if indices.device.type == "cpu" and indices.numel():
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= Lk:
            raise InvalidArgument("key_indices", f"{least} to {most}", f"-1 to {Lk - 1}, the keys of all ranks")
    return indices


def _as_mask(mask: Any, q: torch.Tensor, packed: bool, head: int, seq: int, Lk: int) -> Any:
    """A mask of four dims, checked against this rank's rows and all keys."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or not 2 <= mask.ndim <= 4:
        raise InvalidArgument("mask", getattr(mask, "shape", type(mask).__name__), "a tensor of 2 to 4 dims")
    mask = mask.view((1,) * (4 - mask.ndim) + tuple(mask.shape))
    want = (q.shape[0], q.shape[head], q.shape[seq], Lk)
    if not packed and any(size not in (1, n) for size, n in zip(mask.shape, want, strict=True)):
        remedy = "this rank's rows (tilewise.distributed.shard(mask, mesh, -2)) and all ranks' keys"
        raise InvalidArgument("mask", tuple(mask.shape), f"{want}, each size or 1", remedy)
    return mask
