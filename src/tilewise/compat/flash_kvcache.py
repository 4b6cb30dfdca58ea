"""flash-attn's `flash_attn_with_kvcache`, served by tilewise: append to a cache in place, then attend over it."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from .. import bound, checks, values
from ..api import attention, paged_attention
from ..errors import InvalidArgument
from ..options import Options
from . import rotary
from .flash_options import CacheLater, Later, WindowSize, one_table, translate

if TYPE_CHECKING:
    from typing_extensions import Unpack


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: None = None,
    rotary_seqlens: None = None,
    **later: Unpack[CacheLater],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` `[B, Lq, H, D]` over a cache; `k` and `v`, if given, are first written to its end.

    Args:
        k_cache: `[B, S, Hkv, D]` or, with `block_table`, pages `[num_pages, page_size, Hkv, D]`; written in place.
        v_cache: likewise.
        k: `[B, n, Hkv, D]`: goes to positions `cache_seqlens[b]` and on.
        v: likewise.
        rotary_cos: `[S or more, R / 2]`: turns the first R elements of each head of `k` (and of `q`) by their
            positions. Queries count from `cache_seqlens` on if causal, windowed or chunked, else all are at it.
        rotary_sin: likewise.
        cache_seqlens: int32 `[B]` or an int: tokens in the cache before this call. Default: it is full.
        cache_batch_idx: int `[B]`: the row of the cache that each row of `q` uses. Not with `block_table`.
        cache_leftpad: int `[B]`: the first slot in use of each row.
        block_table: int32 `[B, pages]`; pages may have any size.
        rotary_interleaved: pairs are neighbours; else elements `r` and `r + R / 2`.
        num_splits: keys are split into this many parts; 0 leaves it to tilewise.
        return_softmax_lse: return `(out, softmax_lse)`, the latter `[B, H, Lq]`, float32.
        page_table: another name of `block_table`.
        cu_seqlens_q: int32 `[B + 1]` for packed queries `[T, H, D]`; not with `k`. `softmax_lse` is then `[H, T]`.
        max_seqlen_q: the longest sequence of packed queries.

    Everything is checked before the cache is written. The other options are those of `flash_attn_func`.
    """
    if cu_seqlens_k_new is not None or (cu_seqlens_q is not None and k is not None):
        remedy = "append first, then call with cu_seqlens_q alone"
        raise InvalidArgument("k", "new keys with packed sequences", "queries of one length", remedy)
    if k is None and not (v is rotary_cos is rotary_sin is None):
        raise InvalidArgument("k", None, "new keys", "v, rotary_cos and rotary_sin come with k")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("rotary_cos", "one table of two", "rotary_cos and rotary_sin")
    if rotary_seqlens is not None:
        raise InvalidArgument("rotary_seqlens", "a tensor", "None: positions follow cache_seqlens")
    table = one_table(block_table, page_table)
    if table is not None and cache_batch_idx is not None:
        raise InvalidArgument("cache_batch_idx", "a tensor with block_table", "one of the two")
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if cache_batch_idx is not None:
        table = cache_batch_idx.to(torch.int32)[:, None]  # a row of the cache is a page
    elif table is None and cu_seqlens_q is not None:
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = _lengths(cache_seqlens, batch, capacity, q.device)
    rest: Later = {**later, "num_splits": num_splits}
    options: dict[str, Any] = translate(capacity, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, rest)
    options["return_lse"] = return_softmax_lse
    if cache_leftpad is not None:
        options["mask"] = _after(cache_leftpad, lengths, capacity, options["chunk"])

    new = 0 if k is None else k.shape[1]
    total = lengths + new if new else lengths
    # All values are checked here, before anything is written; the call need not check them again.
    values.check_lengths("cache_seqlens", lengths, capacity - new, "tokens that leave room for k", None)
    if table is not None:
        values.check_block_table(table, total, k_cache.shape[1], k_cache.shape[0], None)
    options["validate"] = False if cu_seqlens_q is None and not is_compiling() else None
    options["layout"] = "blhd" if cu_seqlens_q is None else "bhld"
    longest = None if max_seqlen_q is None else index(max_seqlen_q)
    if k is not None:
        if v is None or cache_seqlens is None:
            raise InvalidArgument("k", "new keys alone", "k with v and cache_seqlens")
        known = _known(q, k_cache, v_cache, k, v, table, total, options)
        if known is None or known not in _checked:
            _check_new(k, v, k_cache, v_cache, batch)
            if not is_compiling():  # else the operator makes the other checks, when it runs
                if table is None:
                    checks.dense(q, k_cache, v_cache, Options(kv_lengths=total, **options))
                else:
                    checks.paged(q, k_cache, v_cache, table, total, None, longest, Options(**options))
            _remember(known)
        most = max(new, q.shape[1])
        where = lengths[:, None]  # [B, n or Lq]
        if most > 1:
            where = where + torch.arange(most, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            rotary.check(rotary_cos, rotary_sin, q.shape[3], capacity + max(0, q.shape[1] - new))
            k = rotary.rotate(k, rotary_cos, rotary_sin, where[:, :new], rotary_interleaved)
            moving = causal or options["window"] is not None or options["chunk"] is not None
            at = where[:, : q.shape[1]] if moving else lengths[:, None].expand(-1, q.shape[1])
            q = rotary.rotate(q, rotary_cos, rotary_sin, at, rotary_interleaved)
        _write(k_cache, v_cache, k, v, where[:, :new], table)
    if table is None:
        result: Any = attention(q, k_cache, v_cache, kv_lengths=total, **options)
    else:
        result = paged_attention(q, k_cache, v_cache, table, total, cu_seqlens_q=cu_seqlens_q, max_q=longest, **options)
    return (result.out, result.lse.transpose(-1, -2).contiguous()) if return_softmax_lse else result


_checked: set[bound.Key] = set()


def _known(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor | None,
    total: torch.Tensor,
    options: dict[str, Any],
) -> bound.Key | None:
    """All that the checks of a step look at but the values in tables, which are checked each time; None with tensors
    among the options, or while torch traces. A step of decoding comes again and again, and its checks take 40 us.
    """
    if is_compiling() or options["alibi_slopes"] is not None or options["sinks"] is not None or "mask" in options:
        return None
    new = (k.shape, k.dtype, k.device, v.shape, v.dtype, v.device)
    key = bound.tables_key(q, k_cache, v_cache, (table, total, None, None, None), *new, *options.values())
    try:
        hash(key)
    except TypeError:  # an option that the checks will refuse
        return None
    return key


def _remember(key: bound.Key | None) -> None:
    if key is not None:
        if len(_checked) >= bound.MOST:
            _checked.clear()
        _checked.add(key)


def _lengths(cache_seqlens: torch.Tensor | int | None, batch: int, capacity: int, device: torch.device) -> torch.Tensor:
    """Tokens in each row before the call, int32 `[B]`."""
    if isinstance(cache_seqlens, torch.Tensor):
        if cache_seqlens.shape != (batch,) or cache_seqlens.dtype not in (torch.int32, torch.int64):
            given = f"{tuple(cache_seqlens.shape)} {cache_seqlens.dtype}"
            raise InvalidArgument("cache_seqlens", given, f"an int or int32 ({batch},)")
        return cache_seqlens.to(torch.int32)
    length = capacity if cache_seqlens is None else index(cache_seqlens)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def _after(leftpad: torch.Tensor, lengths: torch.Tensor, capacity: int, chunk: int | None) -> torch.Tensor:
    """A mask `[B, 1, 1, S]` of the slots that are no padding. Positions may count it: only distances matter."""
    if chunk is not None:
        raise InvalidArgument("cache_leftpad", "padding with attention_chunk", "one of the two")
    if leftpad.shape != lengths.shape or leftpad.dtype not in (torch.int32, torch.int64):
        given = f"{tuple(leftpad.shape)} {leftpad.dtype}"
        raise InvalidArgument("cache_leftpad", given, f"int32 {tuple(lengths.shape)}")
    values.check_lengths("cache_leftpad", leftpad, lengths, "tokens in the row", None)
    return (torch.arange(capacity, device=leftpad.device) >= leftpad[:, None])[:, None, None]


def _check_new(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: int) -> None:
    """New keys and values that fit their caches."""
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = (batch, k.shape[1], *cache.shape[2:])
        if tuple(x.shape) != want or x.dtype != cache.dtype or x.device != cache.device:
            given = f"{tuple(x.shape)} {x.dtype} on {x.device}"
            raise InvalidArgument(name, given, f"{want} {cache.dtype} on {cache.device}, as {name}_cache")


def _write(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: torch.Tensor,
    table: torch.Tensor | None,
) -> None:
    """Rows `[B, n, Hkv, D]` to positions `where` `[B, n]` of their rows or pages."""
    if table is None:
        rows, slots = torch.arange(len(where), device=where.device)[:, None], where
    else:
        size = k_cache.shape[1]
        rows, slots = table.gather(1, where // size), where % size
    k_cache.index_put_((rows, slots), k)
    v_cache.index_put_((rows, slots), v)
