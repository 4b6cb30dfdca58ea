"""flash-attn's `flash_attn_with_kvcache`: appends to a cache in place, then attends over it."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ...api import attention, paged_attention
from ...core.options import Options
from ...core.tracing import is_traced
from ...dispatch import call_cache
from ...errors import InvalidArgument
from ...validation import calls, values
from ..caller_names import caller_names
from .append import check_new_tokens, checked_tables, rotate_tokens, write_tokens
from .inputs import FP8, Rows, descales, inputs, needs_inputs, second_query, stored
from .options import NAMES, CacheLater, WindowSize, one_table, translate

if TYPE_CHECKING:
    from typing_extensions import Unpack

LONGEST = 2**31 - 1
# FlashAttention's names of the arguments that are a cache in tilewise's calls.
OF_CACHE = {
    "k": "k_cache", "v": "v_cache", "k_pages": "k_cache", "v_pages": "v_cache", "kv_lengths": "cache_seqlens",
    "context_lens": "cache_seqlens",
}  # fmt: skip
Pages = tuple[()] | tuple[torch.Tensor, torch.Tensor]  # a block table and lengths, or none


@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *tensors: Any,
    return_softmax_lse: Literal[False] = False, **options: Any,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *tensors: Any,
    return_softmax_lse: Literal[True], **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *tensors: Any,
    return_softmax_lse: bool, **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@caller_names(**NAMES)  # type: ignore[misc]  # the overloads leave all other arguments to this signature
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None, rotary_seqlens: torch.Tensor | None = None,
    **later: Unpack[CacheLater],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of `q` `[B, Lq, H, D]` over a cache; `k` and `v`, if given, are first appended to it.

    Args:
        k_cache: `[B, S, Hkv, D]` or, with `block_table`, pages `[num_pages, page_size, Hkv, D]`; written in place.
        v_cache: likewise.
        k: `[B, n, Hkv, D]`: written to positions from `cache_seqlens[b]` on.
        v: likewise.
        rotary_cos: `[S or more, R / 2]`: rotates the first R elements of each head of `k` and `q` by their positions.
            With causal, a window or a chunk, queries are at positions from `cache_seqlens` on; else all are at
            `cache_seqlens`.
        rotary_sin: likewise.
        cache_seqlens: int32 `[B]` or an int: tokens in the cache before this call. Default: the cache is full.
        cache_batch_idx: int `[B]`: the row of the cache, or of `block_table`, that each row of `q` uses.
        cache_leftpad: int `[B]`: the first slot in use in each row.
        block_table: int32 `[B, pages]`; pages may have any size.
        rotary_interleaved: rotate pairs of neighbours; else pairs of elements `r` and `r + R / 2`.
        num_splits: number of parts that keys are split into; 0 lets tilewise choose.
        return_softmax_lse: return `(out, softmax_lse)`, with `softmax_lse` `[B, H, Lq]` in float32.
        page_table: another name for `block_table`.
        cu_seqlens_q: int32 `[B + 1]`, offsets of packed queries `[T, H, D]`. `softmax_lse` is then `[H, T]`.
        max_seqlen_q: length of the longest sequence of packed queries.
        cu_seqlens_k_new: int32 `[B + 1]`, offsets of packed `k` and `v` `[T, Hkv, D]`.
        rotary_seqlens: int32 `[B]`: the positions from which rotation counts, instead of `cache_seqlens`.

    All arguments are checked before the cache is written. The other options are those of `flash_attn_func`. As in
    flash-attn, there are no gradients: the output does not require grad.
    """
    # Not torch.no_grad: an error inside of a compiled graph would leave it on.
    q, k_cache, v_cache = map(_detached, (q, k_cache, v_cache))
    k, v, rotary_cos, rotary_sin, alibi_slopes = map(_detached, (k, v, rotary_cos, rotary_sin, alibi_slopes))
    if k is None and not (v is rotary_cos is rotary_sin is rotary_seqlens is cu_seqlens_k_new is None):
        raise InvalidArgument("k", None, "new keys", "v, cu_seqlens_k_new and all of rotary_ come with k")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("rotary_cos", "one table of two", "rotary_cos and rotary_sin")
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    table = one_table(block_table, page_table)
    table = _table(table, cache_batch_idx, len(k_cache), batch, cu_seqlens_q is not None, q.device)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = _lengths("cache_seqlens", capacity if cache_seqlens is None else cache_seqlens, batch, q.device)
    rest: Any = {name: _detached(x) for name, x in later.items()} | {"num_splits": num_splits}
    options: dict[str, Any] = translate(capacity, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, rest)
    by_position = causal or options.get("window") is not None or options.get("chunk") is not None

    new: torch.Tensor | int = 0 if k is None else _new_tokens(k, cu_seqlens_k_new, batch, q.device)
    total = lengths if k is None else lengths + new
    # All values are checked here, before anything is written; the call does not check them again.
    values.check_lengths("cache_seqlens", lengths, capacity - new, "tokens that leave room for k", None)
    if table is not None:
        values.check_block_table(table, total, k_cache.shape[1], k_cache.shape[0], None)
    if cache_leftpad is not None:
        leftpad = _lengths("cache_leftpad", cache_leftpad, batch, q.device)
        values.check_lengths("cache_leftpad", leftpad, lengths, "tokens in the row", None)
        options["mask"] = _leftpad_mask(leftpad, total, capacity, options, q, cu_seqlens_q, max_seqlen_q)
    options |= _form_options(total, table, cu_seqlens_q, max_seqlen_q)
    options["return_lse"] = return_softmax_lse
    pages = () if table is None else (table, total)
    converted = needs_inputs(q, k_cache, rest)
    if converted:
        second_query(q, v_cache, rest)
        descales(q, k_cache, v_cache, rest, batch)
    if k is not None:
        if v is None or cache_seqlens is None:
            raise InvalidArgument("k", "new keys alone", "k with v and cache_seqlens")
        check_new_tokens(k, v, k_cache, v_cache, None if cu_seqlens_k_new is not None else batch)
        _check_call(q, k_cache, v_cache, pages, options, converted or cu_seqlens_q is not None)
        rows_k = None if cu_seqlens_k_new is None else Rows.of(cu_seqlens_k_new, k.shape[0])
        if rotary_cos is not None and rotary_sin is not None:
            start = lengths if rotary_seqlens is None else _lengths("rotary_seqlens", rotary_seqlens, batch, q.device)
            rows_q = None if cu_seqlens_q is None else Rows.of(cu_seqlens_q, q.shape[0])
            reach = _larger(new, (q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff()) if by_position else 1)
            angles = checked_tables(rotary_cos, rotary_sin, start, rotary_interleaved, q.shape[-1], capacity, reach)
            k = rotate_tokens(k, angles, rows_k, True)
            q = rotate_tokens(q, angles, rows_q, by_position)
        write_tokens(k_cache, v_cache, k, v, lengths, table, rows_k)
    if converted:
        call = inputs(q, k_cache, v_cache, options, rest, batch, cu_seqlens_q)
        result = call.result(_attend(call.q, call.k, call.v, pages, call.options))
    else:
        result = _attend(q, k_cache, v_cache, pages, options)
    return (result.out, result.lse.transpose(-1, -2).contiguous()) if return_softmax_lse else result


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


def _new_tokens(k: torch.Tensor, offsets: torch.Tensor | None, batch: int, device: torch.device) -> torch.Tensor | int:
    """How many tokens of `k` each sequence has: one number, or int32 `[B]` if they are packed by `offsets`."""
    if offsets is None:
        return k.shape[1]
    _lengths("cu_seqlens_k_new", offsets, batch + 1, device)
    values.check_cu_seqlens("cu_seqlens_k_new", offsets, k.shape[0], "", None, None)
    return values.as_int32(offsets, 0, k.shape[0]).diff()


def _form_options(
    total: torch.Tensor, table: torch.Tensor | None, offsets: torch.Tensor | None, longest: int | None
) -> dict[str, Any]:
    """The options that depend on the form of the call: rows or pages, queries in rows or packed by `offsets`."""
    options: dict[str, Any] = {
        "validate": False if offsets is None and not is_traced() else None,
        "layout": "blhd" if offsets is None else "bhld",
    }
    if table is None:
        return options | {"kv_lengths": total}
    return options | {"cu_seqlens_q": offsets, "max_q": None if longest is None else index(longest)}


@caller_names(**OF_CACHE)
def _check_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: Pages, options: dict[str, Any], always: bool
) -> None:
    """Checks the arguments of the call, unless it is in the call cache and so has passed (not if `always`)."""
    if is_traced():  # the operator makes these checks when it runs
        return
    name = (paged_attention if pages else attention).__name__
    if always or call_cache.find(call_cache.key_of(name, (q, k, v, *pages), options)) is None:
        check: Any = calls.paged if pages else calls.dense
        check(q.float() if q.dtype == FP8 else q, stored(k), stored(v), *pages, Options(**options))


@caller_names(**OF_CACHE)
def _attend(q: torch.Tensor, k: Any, v: Any, pages: Pages, options: dict[str, Any]) -> Any:
    """Attention over the rows or, with a table and lengths, the `pages` of a cache."""
    attend: Any = paged_attention if pages else attention
    return attend(q, k, v, *pages, **options)


def _table(
    table: torch.Tensor | None, rows: torch.Tensor | None, cached: int, batch: int, packed: bool, device: torch.device
) -> torch.Tensor | None:
    """The block table of each sequence: as given, by `cache_batch_idx`, or with the `cached` rows as pages."""
    if rows is not None:
        rows = _lengths("cache_batch_idx", rows, batch, device)
        last, what = (cached - 1, "k_cache") if table is None else (len(table) - 1, "block_table")
        values.check_lengths("cache_batch_idx", rows, last, f"last row of {what}", None)
        return rows[:, None] if table is None else table[rows.long()]
    if table is None and packed:
        return torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    return table


def _larger(a: torch.Tensor | int, b: torch.Tensor | int) -> torch.Tensor | int:
    """The larger of two lengths, element by element."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if isinstance(a, int):
        a, b = b, a
    assert isinstance(a, torch.Tensor)
    return a.clamp_min(b) if isinstance(b, int) else torch.maximum(a, b)


def _lengths(name: str, lengths: torch.Tensor | int, batch: int, device: torch.device) -> torch.Tensor:
    """An int for all rows or a tensor of ints, as int32 `[B]`."""
    if isinstance(lengths, torch.Tensor):
        if lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64) or lengths.device != device:
            given = f"{tuple(lengths.shape)} {lengths.dtype} on {lengths.device}"
            raise InvalidArgument(name, given, f"an int or int32 ({batch},) on {device}")
        return values.as_int32(lengths, -LONGEST, LONGEST)  # values that are too long stay so, to be refused
    return torch.full((batch,), max(-LONGEST, min(index(lengths), LONGEST)), dtype=torch.int32, device=device)


def _leftpad_mask(
    leftpad: torch.Tensor,
    total: torch.Tensor,
    capacity: int,
    options: dict[str, Any],
    q: torch.Tensor,
    offsets: torch.Tensor | None,
    longest: int | None,
) -> torch.Tensor:
    """A mask `[B, 1, 1, S]` that hides left padding. Positions still count it, since only distances matter.

    Chunks count from the end of the padding, so with them the mask is `[B, 1, Lq, S]`.
    """
    pad = leftpad[:, None].long()
    slots = torch.arange(capacity, device=leftpad.device) - pad  # [B, S], from the first one in use
    visible = slots >= 0
    size = options.get("chunk")
    if size is None:
        return visible[:, None, None]
    options["chunk"] = None
    rows, used = q.shape[1], torch.full_like(total, q.shape[1])
    if offsets is not None:
        used = offsets.diff()
        rows = int(used.max()) if longest is None else index(longest)
    first = (total - used)[:, None].long() - pad  # [B, 1]: the position of the first query
    positions = first + torch.arange(rows, device=q.device)  # [B, Lq]
    same = positions.div(size, rounding_mode="floor")[:, :, None] == slots.div(size, rounding_mode="floor")[:, None]
    return (same & visible[:, None])[:, None]
