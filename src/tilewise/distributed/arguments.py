"""Checks the arguments of a call over several ranks and makes its `Task` and tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..core import keywords
from ..core.expression.mods import Bound, bind
from ..core.expression.spans import split
from ..core.options import PLACES, Options, RuleOptions, as_rules, is_int, with_rules
from ..core.problem import CAPTURED
from ..errors import InvalidArgument
from .function import EXTRAS
from .layout import (
    ORDERS,
    Ranks,
    as_offsets,
    check_count,
    global_length,
    inner_sizes,
    packed_length,
    pieces,
    total,
    values_of,
)
from .pair_call import Call
from .schedule import Task

PASSED_ON = ("scale", "softcap", "split_size", "allow_tf32", "deterministic", "backend")  # to all parts unchanged
RULES = (*(name for name in RuleOptions.__annotations__ if name not in PLACES), "kv_lengths")
Place = tuple[int, int]  # the position of a sequence's first query, and its keys in use
INSTEAD = {  # the remedy for each option that is not supported
    "block_indices": "key_indices= takes the keys of those blocks one by one",
    "tree_mask": "mask= takes this rank's rows over all keys",
    "k_shared": "k= takes them beside each head's own columns",
    "positions": "mask= takes this rank's rows over all keys",
    "tile_map": "mask= is classified by each call itself",
    "out": "take what is returned",
    "dropout_p": "apply torch's dropout to the output",
    "dropout_seed": "leave it out",
    "k_start": "positions follow from scheme= and q_offset=",
    "k_stride": "positions follow from scheme= and q_offset=",
    "q_stride": "positions follow from scheme= and q_offset=",
}
KNOWN = ("layout", "validate", *PASSED_ON, *RULES, *EXTRAS, "score_mod", "mask_mod")


def with_functions(options: dict[str, Any], q: Any) -> dict[str, Any]:
    """The options with functions traced, so that ranks compare what these compute. If one cannot be, `score_mod` is
    the error, which `functions_of` raises once the other ranks know of it.
    """
    given = options.get("score_mod"), options.get("mask_mod")
    if given == (None, None):
        return options
    try:
        bound: Any = bind(*given, q.device if isinstance(q, torch.Tensor) else torch.device("cpu"))
    except InvalidArgument as error:
        bound = error
    return options | {"score_mod": bound, "mask_mod": None}


def functions_of(options: dict[str, Any], q: Any) -> Bound | None:
    """The traced functions of a call; raises if they have no trace."""
    bound = with_functions(options, q).get("score_mod")
    if isinstance(bound, InvalidArgument):
        raise bound
    return bound


def lengths_of(length: Any, cu_seqlens: tuple[Any, Any]) -> tuple[Any, Any]:
    """The number of tokens of q and k on all ranks: as given, else that of packed sequences, else None."""
    length = tuple(length) if isinstance(length, list) else length
    of_q, of_k = length if isinstance(length, tuple) and len(length) == 2 else (length, length)
    cu_q, cu_k = (packed_length(cu) for cu in cu_seqlens)
    return cu_q if of_q is None else of_q, (cu_q if cu_k is None else cu_k) if of_k is None else of_k


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
    """The checked call, its tensors beside q, k and v, and each batch row's `Place`."""
    cu_seqlens = values_of("cu_seqlens_q", cu_seqlens[0]), values_of("cu_seqlens_k", cu_seqlens[1])
    options = _supported(options)
    o = Options(**options)
    packed = cu_seqlens[0] is not None
    head, seq = _dims(q, k, v, packed, o.layout)
    _check_heads(q, k, v, head, inner, o)
    lengths = lengths_of(length, cu_seqlens)
    if isinstance(lengths[0], tuple):
        raise InvalidArgument("length", repr(lengths[0]), "the tokens of all ranks, or (those of q, those of k)")
    Lq, Lk = (global_length(x.shape[seq], n, ring.size, inner.size) for x, n in zip((q, k), lengths, strict=True))
    cu_q, cu_k = _offsets(cu_seqlens, Lq, Lk)
    order = ORDERS[scheme]
    q_pieces, k_pieces = (
        tuple(pieces(n, ring.size, rank, order, cu) for rank in range(ring.size)) for n, cu in ((Lq, cu_q), (Lk, cu_k))
    )
    for name, x, of_ranks, n in (("q", q, q_pieces, Lq), ("k", k, k_pieces, Lk)):
        sizes = inner_sizes(total(of_ranks[ring.rank]), inner.size)
        check_count(name, x.shape[seq], sizes[inner.rank], n)
    if v.shape[seq] != k.shape[seq]:
        raise InvalidArgument("v", f"{v.shape[seq]} tokens", f"{k.shape[seq]}, as k")

    rows = len(cu_q) - 1 if packed else q.shape[0]
    offsets, used, places = _places(o, rows, Lq, Lk, cu_q, cu_k)
    doc_places = tuple((place,) for place in places) if packed else (tuple(sorted(set(places))) or ((Lk - Lq, Lk),),)
    bound = functions_of(options, q)
    if bound is not None:  # what a mask_mod states as a rule is neither sent nor computed
        found, rest = split(bound.mods)
        if (narrowed := with_rules(o, found)) is not None:
            o, bound = narrowed, None if rest is None else Bound(rest, bound.tensors)
    rules = as_rules(o)
    biases = _checked_biases(o, q, packed, head, seq, Lk)
    indices = _as_indices(o.key_indices, q, packed, k.shape[head], seq, Lk)
    plain = all(x is None for x in (o.mask, o.alibi_slopes, indices, bound, *biases.values()))
    fusible = order != "striped" and plain and all(len(of_document) == 1 for of_document in doc_places)
    task = Task(rules, q_pieces, k_pieces, cu_q or (0, Lq), cu_k or (0, Lk), doc_places, fusible, scheme == "gather")
    passed = {name: options[name] for name in PASSED_ON if name in options}
    if not packed:
        passed["layout"] = o.layout
    mods = None if bound is None else bound.mods
    call = Call(task, ring, passed, packed, head, seq, offsets, used, q.device, mods)
    mask = _as_mask(o.mask, q, packed, head, seq, Lk)
    extras = {"mask": mask, "sinks": o.sinks, "alibi_slopes": o.alibi_slopes, **biases, "key_indices": indices}
    if bound is not None:
        extras |= {f"{CAPTURED}{n}": x for n, x in enumerate(bound.tensors)}
    return call, extras, places


def _supported(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a call over several ranks takes; refuses all others that are set."""
    for name, remedy in INSTEAD.items():
        if options.get(name) not in (None, 0.0) if name == "dropout_p" else options.get(name) is not None:
            raise InvalidArgument(name, "an option that does not work over several ranks", "none", remedy)
    if unknown := [name for name in options if name not in KNOWN and name not in INSTEAD]:
        from .attention import attention  # it imports this module

        keywords.refuse(unknown, [*keywords.of(attention), *KNOWN], "tilewise.distributed.attention")
    return {name: x for name, x in options.items() if name not in INSTEAD}


def _dims(q: Any, k: Any, v: Any, packed: bool, layout: Any) -> tuple[int, int]:
    """The dims of heads and of tokens, in tensors whose number of dims is checked."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(name, f"a {type(x).__name__}", "a torch tensor", "Quantised: hand in x.dequantise()")
    if q.dtype == torch.float64:
        raise InvalidArgument("q", q.dtype, "float32, float16 or bfloat16", "tilewise.attention takes float64")
    want = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != want:
            raise InvalidArgument(name, f"{x.ndim} dims", f"{want}", "packed sequences have 3, with cu_seqlens_q")
    if layout not in ("bhld", "blhd"):
        raise InvalidArgument("layout", repr(layout), "'bhld' or 'blhd'")
    return (1, 0) if packed else (1, 2) if layout == "bhld" else (2, 1)


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, inner: Ranks, o: Options) -> None:
    """Numbers of heads: of q, k and v, and of options that have one value for each."""
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


def _offsets(cu_seqlens: tuple[Any, Any], Lq: int, Lk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets of packed sequences in q and k, those of q for both if k has none; empty without packed sequences."""
    cu_q = as_offsets(cu_seqlens[0], Lq, "cu_seqlens_q")
    same = cu_seqlens[0] is not None and cu_seqlens[1] is None
    cu_k = cu_q if same else as_offsets(cu_seqlens[1], Lk, "cu_seqlens_k")
    if len(cu_q) != len(cu_k):
        raise InvalidArgument("cu_seqlens_k", f"{len(cu_k)} offsets", f"{len(cu_q)}, as cu_seqlens_q")
    return cu_q, cu_k


def _checked_biases(o: Options, q: torch.Tensor, packed: bool, head: int, seq: int, Lk: int) -> dict[str, Any]:
    """`q_bias` and `k_bias`, checked against this rank's rows and all keys."""
    biases = {"q_bias": o.q_bias, "k_bias": o.k_bias}
    for (name, x), n in zip(biases.items(), (q.shape[seq], Lk), strict=True):
        if x is not None and (packed or not isinstance(x, torch.Tensor) or x.ndim != 3 or x.shape[-1] != n):
            shape = f"[{q.shape[0]} or 1, {q.shape[head]} or 1, {n}]: this rank's rows, all ranks' keys; not packed"
            raise InvalidArgument(name, getattr(x, "shape", type(x).__name__), shape)
    return biases


def _places(
    o: Options, rows: int, Lq: int, Lk: int, cu_q: Sequence[int], cu_k: Sequence[int]
) -> tuple[torch.Tensor | int, torch.Tensor | None, list[Place]]:
    """Positions of first queries and keys in use: as arguments of the parts, and as numbers for the plan."""
    values = []
    for name in ("q_offset", "kv_lengths"):
        x = getattr(o, name)
        if x is not None and not is_int(x):
            if not isinstance(x, torch.Tensor) or x.shape != (rows,) or x.is_floating_point():
                raise InvalidArgument(name, repr(x), f"an int tensor [{rows}]" + " or an int" * (name == "q_offset"))
        elif x is not None and name == "kv_lengths":
            raise InvalidArgument(name, repr(x), f"an int tensor [{rows}]")
        values.append(values_of(name, x) if isinstance(x, torch.Tensor) else [x] * rows)
    packed = bool(cu_q)
    keys = [b - a for a, b in itertools.pairwise(cu_k)] if packed else [Lk] * rows
    queries = [b - a for a, b in itertools.pairwise(cu_q)] if packed else [Lq] * rows
    used = [n if u is None else u for u, n in zip(values[1], keys, strict=True)]
    for b, (u, n) in enumerate(zip(used, keys, strict=True)):
        if not 0 <= u <= n:
            raise InvalidArgument(f"kv_lengths[{b}]", u, f"0 to {n}, the keys of all ranks")
    starts = [u - n if at is None else int(at) for at, u, n in zip(values[0], used, queries, strict=True)]
    places = list(zip(starts, used, strict=True))
    if packed:
        return 0, None, places
    lengths = None if o.kv_lengths is None else o.kv_lengths.to(torch.int32)
    if len(set(starts)) < 2:
        return starts[0] if starts else 0, lengths, places
    offsets: Any = o.q_offset if isinstance(o.q_offset, torch.Tensor) else o.kv_lengths - Lq
    return offsets.to(torch.int32), lengths, places


def _as_indices(indices: Any, q: torch.Tensor, packed: bool, kv_heads: int, seq: int, Lk: int) -> Any:
    """Checks key indices against this rank's rows and all keys."""
    if indices is None:
        return None
    shapes = ([q.shape[0], q.shape[seq]], [q.shape[0], kv_heads, q.shape[seq]])
    shape = list(getattr(indices, "shape", ()))[:-1]
    if packed or not isinstance(indices, torch.Tensor) or shape not in shapes or indices.dtype.is_floating_point:
        B, Lq = q.shape[0], q.shape[seq]
        expected = f"ints [{B}, {Lq}, n] or [{B}, {kv_heads}, {Lq}, n]; not packed"
        remedy = "this rank's rows (tilewise.distributed.shard(key_indices, mesh, -2)), positions of all ranks' keys"
        raise InvalidArgument("key_indices", getattr(indices, "shape", type(indices).__name__), expected, remedy)
    if indices.device.type == "cpu" and indices.numel():
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= Lk:
            raise InvalidArgument("key_indices", f"{least} to {most}", f"-1 to {Lk - 1}, the keys of all ranks")
    return indices


def _as_mask(mask: Any, q: torch.Tensor, packed: bool, head: int, seq: int, Lk: int) -> Any:
    """A mask as four dims, checked against this rank's rows and all keys."""
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
