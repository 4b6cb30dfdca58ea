"""`context_parallel`: unchanged models, with attention by torch's SDPA or transformers, over a mesh."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..compat import sdpa
from ..core.forks import new_lock
from ..errors import InvalidArgument
from .attention import checked_attention
from .layout import ORDERS, check_dim, inner_sizes, pieces, ranks_of, shard, total

_alone = new_lock(sys.modules[__name__], "_alone")  # functions are replaced for the whole process


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
    scheme: str = "zigzag",
) -> Iterator[None]:
    """A context in which `buffers` hold this rank's part, and attention is over the whole sequence.

    The signature is that of `torch.distributed.tensor.experimental.context_parallel`. It covers
    `torch.nn.functional.scaled_dot_product_attention` and transformers models with `attn_implementation="tilewise"`:
    causal or not, windows, softcap, sinks, GQA, on any device. Run the backward pass inside the context too, since it
    reads buffers that the forward pass has read. Outside, these must be in `no_restore_buffers`, else autograd raises.

    Args:
        mesh: as in `attention`.
        buffers: tensors with a token dim, the same on every rank: inputs, position ids, labels (already shifted). They
            are changed in place and restored at the end.
        buffer_seq_dims: the token dim of each buffer.
        no_restore_buffers: those buffers that need not be restored.
        scheme: as in `attention`.
    """
    tensors = list(buffers or ())
    dims = list(buffer_seq_dims or ())
    if len(tensors) != len(dims):
        raise InvalidArgument("buffer_seq_dims", f"{len(dims)} dims", f"{len(tensors)}, one for each of buffers")
    for i, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
        check_dim(f"buffers[{i}]", x, f"buffer_seq_dims[{i}]", dim)
    if len({id(x) for x in tensors}) < len(tensors):
        raise InvalidArgument("buffers", "a tensor twice", "each once")
    kept_sharded = {id(x) for x in no_restore_buffers or ()}
    if not kept_sharded <= {id(x) for x in tensors}:
        raise InvalidArgument("no_restore_buffers", "a tensor that is not in buffers", "some of buffers")
    whole = _whole_lengths({x.shape[dim] for x, dim in zip(tensors, dims, strict=True)}, mesh, scheme)
    if not _alone.acquire(blocking=False):
        remedy = "one call covers all models and both dims of a mesh (scheme='2d')"
        raise InvalidArgument(
            "context_parallel", "one inside of another, or in another thread", "one at a time", remedy
        )
    with ExitStack() as undo:
        undo.callback(_alone.release)
        for x, dim in zip(tensors, dims, strict=True):
            old = x.detach().clone()
            with torch.no_grad():
                x.set_(shard(old, mesh, dim, scheme))  # type: ignore[call-overload]
            if id(x) not in kept_sharded:
                undo.callback(_restore, x, old)
        for module, name, new in _replacements(mesh, scheme, whole):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, new)
        undo.enter_context(sdpa.installed())
        yield


def _whole_lengths(lengths: set[int], mesh: Any, scheme: str) -> dict[int, int]:
    """The full lengths of buffers, by this rank's number of their tokens: shards may be uneven."""
    ring, inner = ranks_of(mesh, scheme)
    rank_sizes = {
        n: [inner_sizes(total(pieces(n, ring.size, r, ORDERS[scheme])), inner.size) for r in range(ring.size)]
        for n in lengths
    }
    for r, u in itertools.product(range(ring.size), range(inner.size)):
        if len({sizes[r][u] for sizes in rank_sizes.values()}) < len(rank_sizes):
            want = "lengths that every rank can tell apart by its number of tokens"
            raise InvalidArgument("buffers", f"lengths {sorted(lengths)}", want, "pad them to one length")
    return {sizes[ring.rank][inner.rank]: n for n, sizes in rank_sizes.items()}


def _restore(x: torch.Tensor, old: torch.Tensor) -> None:
    with torch.no_grad():
        x.set_(old)  # type: ignore[call-overload]


def _replacements(mesh: Any, scheme: str, whole: dict[int, int]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The functions to replace, by module, and their replacements inside the context."""

    def sharded(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False, refused: Any = None, **options: Any
    ) -> Any:
        at = 1 if options.get("layout") == "blhd" else 2

        def refuse() -> None:
            if refused is not None:
                raise refused
            for name, fine in (("q_offset", (None, 0)), ("kv_lengths", (None,))):
                if options.get(name) not in fine:
                    remedy = "no cache and no padding under context_parallel: tilewise.distributed.attention takes both"
                    raise InvalidArgument(name, "a part's own", "that of the whole sequence", remedy)
            if options.get("mask") is not None and options["mask"].shape[-1] == k.shape[at] > 1:
                remedy = "tilewise.distributed.attention takes masks over all keys; causal and windows need none"
                raise InvalidArgument("mask", "one of this rank's keys alone", "all ranks' keys", remedy)

        options.pop("validate", None)  # it is about one call's values; ranks compare new kinds of calls anyway
        lengths = whole.get(q.shape[at]), whole.get(k.shape[at])
        return checked_attention(q, k, v, mesh, scheme, lengths, (None, None), return_lse, options, refuse)

    def packed(*_: Any, **__: Any) -> Any:
        remedy = "tilewise.distributed.attention(cu_seqlens_q=...) takes them"
        raise InvalidArgument("cu_seqlens_q", "packed sequences", "none under context_parallel", remedy)

    plain = sdpa.scaled_dot_product_attention

    def of_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        if reason := sdpa.why_torch(query, key, value):
            raise InvalidArgument(
                "query", reason, "a call that tilewise supports: torch's own SDPA would see this rank's keys alone"
            )
        return plain(query, key, value, *args, **options)

    yield sdpa, "attention", sharded
    yield sdpa, "scaled_dot_product_attention", of_torch
    if (ours := sys.modules.get("tilewise.compat.transformers")) is not None:
        yield ours, "attention", sharded
        yield ours, "varlen_attention", packed
        patterns = sys.modules["tilewise.compat.mask_patterns"]
        yield patterns, "_pattern", _whole_pattern
        # Position ids of a zigzag jump, which transformers would take for the start of another document.
        yield patterns.hf, "find_packed_sequence_indices", lambda position_ids: None


def _whole_pattern(rows: int, keys: int, rules: Any, q_offset: Any, kv_offset: int, is_token: Any, unpad: bool) -> Any:
    """The rules of a transformers mask for the whole sequence: a window may be longer than this rank's shard."""
    from ..compat.lazy_mask import Pattern

    options: dict[str, Any] = {"causal": rules.causal, "validate": False, "chunk": rules.chunk}
    remedy = "no padding, packing or cache under context_parallel: tilewise.distributed.attention takes lengths"
    wrong = InvalidArgument("attention_mask", "more than rules of positions", "causal, windows or chunks", remedy)
    if rules.segments is not None or int(q_offset) or kv_offset or rows != keys:
        raise wrong
    if is_token is not None and not bool(is_token.all()):
        options["refused"] = wrong  # by the call, which tells the other ranks: they may have no padding
    if rules.left is not None or rules.right is not None:
        options["window"] = (rules.left, rules.right)
    return Pattern({**options, "q_offset": 0})
